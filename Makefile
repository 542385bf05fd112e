# `make` alone lists the targets. Everything is installed into .venv; nothing outside this folder is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

# Two stages of installation, each marked by a stamp that is older than pyproject.toml when it has to run again.
BASE := $(VENV)/.base
DEV := $(VENV)/.dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test quick bench lint

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "make %-7s %s\n", $$1, $$2 }'

setup: $(DEV)  ## create .venv and install everything that the tests need

demo: $(BASE)  ## build, lower, prove and draw a zero-bubble schedule, and refuse a broken one
	@$(BIN)/python examples/demo.py

test: $(DEV) lint  ## check style and types and run every test
	$(BIN)/python -m pytest -q -n 2

quick: $(DEV) lint  ## check style and types and run the tests that are not slow
	$(BIN)/python -m pytest -q -n 2 -m 'not slow'

bench: $(DEV)  ## measure the speed as ratios to the installed torch
	$(BIN)/python benchmarks/run.py

lint: $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# The demo needs no torch, so that it starts in seconds.
$(BASE): pyproject.toml | $(BIN)/python
	$(PIP) install -e .
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(PIP) install torch==2.13.0
	$(PIP) install -e '.[dev]'
	@touch $(BASE) $@
