# `make` alone lists the targets. Everything is installed into .venv, and with TORCH= into .venv-torch-VERSION; nothing outside this
# folder is touched.
PYTHON ?= python3
DEFAULT_TORCH := 2.13.0
TORCH ?= $(DEFAULT_TORCH)
# The newest patch release of each minor version that penstock works with; `make matrix` tests all of them.
TORCH_VERSIONS := 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
VENV := $(if $(filter $(DEFAULT_TORCH),$(TORCH)),.venv,.venv-torch-$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

# Two stages of installation, each marked by a stamp that is older than pyproject.toml when it has to run again.
BASE := $(VENV)/.base
DEV := $(VENV)/.dev
PAGE := web/node_modules/.installed
DEEPSPEED := .venv-deepspeed
TITAN := .venv-titan
SKY := .venv-sky
TITAN_TESTS := tests/models/test_processes_torchtitan.py tests/integrations/test_torchtitan_modules.py tests/docs/test_torchtitan_settings.py

# Processes that the tests start share compiled modules, also if the caller's environment says that none are written.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test quick matrix fuzz page bench cases paper docs pictures deepspeed titan sky lint

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "make %-9s %s\n", $$1, $$2 }'

setup: $(DEV)  ## create .venv and install everything that the tests need

demo: $(BASE)  ## measure, plan, prove and train a small GPT, one process per core up to 4, against 1F1B, and write demo/report.html
	@$(BIN)/python examples/demo.py

test: $(DEV) $(PAGE)  ## check style, types and the page and run every test; TORCH=2.15.0 chooses the version of torch, for other targets too
	$(MAKE) --no-print-directory -j 2 --output-sync=target lint page
	$(BIN)/python -m pytest -q -n 2

quick: $(DEV) lint  ## check style and types and run the tests that are not slow
	$(BIN)/python -m pytest -q -n 2 -m 'not slow' --hypothesis-profile=quick

matrix: $(TORCH_VERSIONS:%=matrix-%)  ## run the tests that are not slow, and all of the PyTorch drop-in, with each supported version of torch

matrix-%:
	@echo "torch $*"
	$(MAKE) --no-print-directory TORCH=$* matrix-tests

matrix-tests: $(DEV)
	$(BIN)/python -m pytest -q -n 2 -m 'not slow' --hypothesis-profile=quick
	$(BIN)/python -m pytest -q -n 2 tests/compat/torch --hypothesis-profile=quick

fuzz: $(DEV)  ## compare random models, batches and schedules with the plain loop; FUZZ="--cases 5000 --seed 7 --transport both" chooses
	PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ) $(if $(CASE),'$(CASE)')

page: $(DEV) $(PAGE)  ## check the studio's page: types, unit tests, that it is what its source makes, browser tests
	cd web && npm run --silent typecheck && npm run --silent test && npm run --silent check && npm run --silent browser

bench: $(DEV)  ## measure the speed as ratios to the installed torch and write bench/report.md; BENCH="lowering --short" chooses
	$(BIN)/python benchmarks/run.py $(BENCH)

cases: $(DEV)  ## run cases that torch's own pipelining got wrong on the installed torch and on Penstock; CASES="4 9" chooses
	$(BIN)/python benchmarks/peer_cases.py $(CASES)

paper: $(DEV)  ## plan a trillion parameters on 4,096 GPUs, on paper
	$(BIN)/python benchmarks/paper.py

docs: $(DEV)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

pictures: $(DEV) $(PAGE)  ## draw docs/architecture.svg and take docs/studio*.png from the live studio
	$(BIN)/python docs/maker/rooms.py
	PENSTOCK_PYTHON=$(abspath $(BIN))/python node docs/maker/studio.mjs

deepspeed: $(DEEPSPEED)/.installed  ## train with GPipe's and eager 1F1B's order in DeepSpeed's own engine, installed apart
	@$(DEEPSPEED)/bin/python examples/deepspeed_orders.py

titan: $(TITAN)/.installed  ## train torchtitan's debug model for 20 steps by our plan, in its own Trainer, and run the tests that need torchtitan
	@OMP_NUM_THREADS=1 LOG_RANK=0,1 $(TITAN)/bin/torchrun --standalone --nproc-per-node 2 examples/torchtitan/train_debugmodel.py --training.steps 20 --dump_folder .cache/titan
	OMP_NUM_THREADS=1 $(TITAN)/bin/python -m pytest -q $(TITAN_TESTS)

sky: $(SKY)/.installed  ## have SkyPilot itself check the task in examples/launchers/, installed apart; it needs no account
	@HOME=$(CURDIR)/$(SKY)/home $(SKY)/bin/python -c 'import sky; print(sky.Task.from_yaml("examples/launchers/skypilot.yaml"))'

lint: $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# What the demo needs. torch comes first, so that it is the version that everything was tested with.
$(BASE): pyproject.toml | $(BIN)/python
	$(PIP) install torch==$(TORCH)
	$(PIP) install -e '.[torch,fast,solve,plot]'
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(PIP) install torch==$(TORCH)
	$(PIP) install -e '.[dev,release]'
	@touch $(BASE) $@

$(PAGE): web/package-lock.json
	cd web && npm ci --silent
	@touch $@

# DeepSpeed is built from source, so it gets an environment of its own on top of the tests', which stays as it is.
$(DEEPSPEED)/.installed: $(DEV)
	$(BIN)/python -m venv $(DEEPSPEED)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$($(DEEPSPEED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(DEEPSPEED)/bin/python -m pip --disable-pip-version-check -q install setuptools wheel
	DS_BUILD_OPS=0 $(DEEPSPEED)/bin/python -m pip --disable-pip-version-check -q install --no-build-isolation deepspeed==0.19.8
	@touch $@

# torchtitan needs a newer torch than the tests' one, so it shares nothing with their environment.
$(TITAN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip --disable-pip-version-check -q install torch==2.15.0 torchtitan==0.3.0 cloudpickle pytest hypothesis -e .
	@touch $@

# SkyPilot has many dependencies, and none of them are Penstock's.
$(SKY)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SKY)
	$(SKY)/bin/python -m pip --disable-pip-version-check -q install skypilot==0.14.1
	@touch $@
