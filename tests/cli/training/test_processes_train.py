"""`penstock train`: compared with training the plain model, on the pool of processes and under torchrun; and what it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.cli.main import main
from penstock.cli.training.options import TrainOptions
from penstock.cli.training.session import ROUND_STEPS, ROUNDS, WARM_UP, count_cores
from penstock.runtime import DataOrder
from penstock.runtime.train import ranks as rank_processes

ROOT = Path(__file__).parents[3]
SMALL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

WIDE = 12

def build():
    layers = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(4)]
    return layers, torch.randn(4, WIDE), nn.functional.mse_loss, torch.randn(4, WIDE)

def data():
    source = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(48, WIDE, generator=source), torch.randn(48, WIDE, generator=source))

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.5)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


@pytest.fixture
def pool(workers, monkeypatch):
    """Let the command use the test session's processes instead of starting its own."""
    monkeypatch.setattr(rank_processes, "Workers", lambda ranks: contextlib.nullcontext(workers))
    return workers


def unpipelined(file: Path, steps: int, batch: int, microbatches: int, seed: int = 0) -> list[float]:
    """The losses of a plain loop over the same microbatches."""
    names: dict[str, object] = {}
    exec(file.read_text(), names)
    torch.manual_seed(seed)
    layers, _, loss_fn, _ = names["build"]()
    model, data = nn.Sequential(*layers), names["data"]()
    optimizer = names["optimizer"](model.parameters())
    order, losses = DataOrder(len(data), batch, seed=seed), []
    for _ in range(steps):
        x, y = data[next(order)]
        total = torch.zeros(())
        for mx, my in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            loss = loss_fn(model(mx), my) * (len(mx) / batch)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def train(run, file: object, *more: object) -> dict:
    result = run("train", file, "--ranks", 4, "--batch", 16, "--device", "cpu", "--json", *more)
    assert result.code == 0, result.err
    return json.loads(result.out)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_losses_equal_the_plain_model_s(run, pool, file, schedule):
    found = train(run, file, "--schedule", schedule, "-m", 4, "--steps", 5, "--check")
    assert found["losses"] == pytest.approx(unpipelined(file, 5, 16, 4), rel=1e-6)
    assert found["equal"] is True
    assert set(found["parity"]) == {"1", "5"}
    assert found["measured"] > 0


@pytest.mark.slow
def test_auto_measures_plans_and_saves_everything(run, pool, file, tmp_path):
    plan, record, report = tmp_path / "plan.json", tmp_path / "step.json", tmp_path / "new" / "report.html"
    options = ("--steps", 3, "--seconds", 0, "--check", "--memory-limit", "1MiB")
    found = train(run, file, *options, "--save-plan", plan, "--record", record, "--report", report)
    made = ps.Plan.load(plan)
    assert sum(made.partition) == 4
    assert found["microbatches"] == made.microbatches
    assert found["predicted"] == made.predicted.makespan
    assert found["losses"] == pytest.approx(unpipelined(file, 3, 16, made.microbatches), rel=1e-6)
    measured = ps.Timeline.load(record)
    assert measured.source == "measured"
    assert measured.makespan == found["measured"]
    page = report.read_text()
    for title in ("The candidates of the plan, predicted", "Proved before it ran", "The predicted step", "Measured over predicted"):
        assert f"<h2>{title}</h2>" in page
    assert not re.search(r'(src|href)="(?!#)', page)  # one file, offline
    again = train(run, file, "--schedule", plan, "--steps", 3)
    assert again["losses"] == found["losses"]


@pytest.mark.slow
def test_a_plan_is_measured_in_turns_with_another_schedule(run, pool, file, tmp_path):
    report = tmp_path / "report.html"
    options = ("--steps", 2, "--seconds", 0, "--memory-limit", "1MiB", "--against", "1f1b", "--report", report)
    found = train(run, file, *options)
    against = found["against"]
    assert against["schedule"] == "1f1b"
    assert len(against["measured"]) == len(against["own_measured"]) == ROUNDS * (ROUND_STEPS - WARM_UP)
    speedup = statistics.median(against["measured"]) / statistics.median(against["own_measured"])
    assert against["speedup"] == pytest.approx(speedup)
    assert found["cores"] == (count_cores() if count_cores() < 4 else None)
    page = report.read_text()
    assert "<h2>The plan against 1f1b</h2>" in page
    assert "step, measured" in page
    assert "Within the same 1MiB per rank, the plan t" in page
    assert page.count("processes share") == (count_cores() < 4)
    own = run("train", file, "--ranks", 4, "--batch", 16, "--device", "cpu", *options)
    phases = [
        "starting 4 processes",
        "measuring ...",
        "planning every schedule",
        "planning 1f1b,",
        "step 2 of 2: loss",
        "measuring 36 steps",
    ]
    places = [own.err.find(phase) for phase in phases]
    assert -1 not in places
    assert places == sorted(places)
    assert own.out.rstrip().splitlines()[-1].startswith("Within the same 1MiB per rank, the plan t")


def test_a_schedule_to_compare_with_must_exist_and_needs_a_plan(refused, file):
    assert "did you mean '1f1b'" in refused(2, "train", file, "-p", 4, "--against", "1f1")
    assert "--against is for planning" in refused(2, "train", file, "-p", 4, "--schedule", "zbv", "--against", "1f1b")


def test_a_limit_without_a_unit_is_not_taken_for_bytes(refused, file):
    assert "write the unit, like 40GiB" in refused(2, "train", file, "-p", 4, "--memory-limit", 40)


def test_a_run_resumes_from_its_checkpoint(run, pool, file, tmp_path):
    options = ("--schedule", "1f1b", "-m", 4, "--checkpoints", tmp_path / "run", "--every", 2)
    first = train(run, file, *options, "--steps", 3)
    assert (first["begun"], first["loaded"]) == (0, None)
    second = train(run, file, *options, "--steps", 6)
    assert second["begun"] == 3
    assert first["losses"] + second["losses"] == pytest.approx(unpipelined(file, 6, 16, 4), rel=1e-6)
    done = run("train", file, "-p", 4, "--batch", 16, "--device", "cpu", *options, "--steps", 6)
    assert "nothing to do: the checkpoint is at step" in done.out


def test_a_schedule_from_a_file_sets_the_number_of_ranks(run, pool, file, tmp_path):
    ps.schedule("gpipe", 4, 4).to_csv(tmp_path / "own.csv")
    result = run("train", file, "--schedule", tmp_path / "own.csv", "--steps", 2, "--batch", 16, "--device", "cpu")
    assert result.code == 0
    assert "Prove it before it runs" in result.out
    assert "step 2 of 2: loss" in result.err


def test_a_failing_model_is_reported_with_its_rank(run, pool, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(SMALL.replace("nn.functional.mse_loss", "lambda output, target: output.no_such_thing"))
    result = run("train", path, "--schedule", "1f1b", "-p", 4, "-m", 4, "--batch", 16, "--steps", 2, "--device", "cpu")
    assert result.code == 1
    assert "no_such_thing" in result.err
    assert "rank 3" in result.err
    assert not result.out.endswith("loss")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layers = [", "layers = 1 / 0, [", r"build\(\) of .* failed: ZeroDivisionError: division by zero \(.*wrong.py, line \d+\)"),
        ("return layers, torch", "return layers; torch", r"build\(\) of .* returned a list: return \(layers, sample, loss_fn, target\)"),
        ("return TensorDataset", "return 3; TensorDataset", r"data\(\) of .* returned int"),
        ("torch.randn(48, WIDE, generator=source))", ")", r"data\(\)\[numbers\] of .* gave 1 parts: give \(inputs, target\)"),
        ("lr=0.2", "lr=-1", r"optimizer\(parameters\) of .* failed: ValueError: Invalid learning rate"),
    ],
)
def test_functions_that_fail_are_named(run, pool, tmp_path, old, new, said):
    path = tmp_path / "wrong.py"
    path.write_text(SMALL.replace(old, new, 1))
    result = run("train", path, "--schedule", "1f1b", "-p", 4, "-m", 4, "--batch", 16, "--steps", 2, "--device", "cpu")
    assert result.code == 2, result
    assert re.search(said, result.err), result.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--schedule", "zbw"), "there is no schedule 'zbw': did you mean 'zbv'"),
        (("--schedule", "nothing.json"), "there is no file nothing.json"),
        (("--steps", "0"), "--steps 0: give a whole number of at least 1"),
        (("--batch", "-3"), "--batch -3"),
        (("-m", "64"), "--microbatches 64 of a --batch of 32"),
        (("--memory-limit", "12MBB"), "--memory-limit: "),
        (("--every", "5"), "with --checkpoints FOLDER"),
        (("--device", "gpu"), "device 'gpu': "),
        (("--save-plan", "plan.toml"), "the suffix is not one of .json"),
        (("--schedule", "1f1b", "--save-plan", "plan.json"), "--save-plan needs a plan"),
        (("--schedule", "1f1b", "--recompute"), "--recompute is for planning"),
        (("--schedule", "1f1b", "--seconds", "3"), "--seconds is for planning"),
        (("-m", "3"), "--batch 32 cannot be cut into 3 equal microbatches"),
        (("--report", "report.pdf"), "the suffix is not one of .html"),
        (("--seconds", "nan"), "--seconds nan"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(refused, file, options, said, monkeypatch):
    monkeypatch.setattr(rank_processes, "Workers", None)
    assert said in refused(2, "train", file, "-p", 4, *options)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    profile = ps.Profile([ps.Layer(f=1.0, i=1.0, w=1.0)] * 4, microbatch=4)
    ps.plan(profile, ranks=2, microbatches=4, seconds=0).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch", 256), "--batch 256: .*plan.json is for 16: leave it out"),
        (("-m", 2), "--microbatches 2: .*plan.json is for 4: leave it out"),
        (("-p", 3), "--ranks 3: .*plan.json is for 2: leave it out"),
        (("--recompute",), "--recompute is for planning"),
    ],
)
def test_a_plan_is_used_only_as_it_was_proved(refused, file, plan_file, options, said, monkeypatch):
    monkeypatch.setattr(rank_processes, "Workers", None)
    assert re.search(said, refused(2, "train", file, "--schedule", plan_file, *options))


def test_a_plan_sets_the_batch(file, plan_file):
    assert TrainOptions(str(file), schedule=str(plan_file)).batch == 16
    assert TrainOptions(str(file)).batch == 32


@pytest.mark.slow
def test_a_plan_in_unknown_units_is_compared_at_the_scale_that_fits(run, pool, file, tmp_path):
    profile = ps.Profile([ps.Layer(f=1.0, i=1.0, w=1.0)] * 4, microbatch=4)
    ps.plan(profile, ranks=4, microbatches=4, seconds=0).save(tmp_path / "plan.json")
    found = train(run, file, "--schedule", tmp_path / "plan.json", "--steps", 2)
    assert 0 < found["scale"] < 0.1  # seconds per unit: every layer of the plan takes 1 forward


def test_a_report_in_a_folder_that_cannot_be_created(refused, file, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_processes, "Workers", None)
    (tmp_path / "taken").touch()
    assert "cannot be written" in refused(2, "train", file, "-p", 4, "--report", tmp_path / "taken" / "deep" / "report.html")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "has no function 'build': a training file has build() and data()"),
        (SMALL.replace("def data", "def date"), "has no function 'data': a training file has build() and data(); did you mean 'date'"),
        (SMALL + "\noptimizer = 3", "is not callable: a training file has build() and data()"),
        (SMALL + "\nsplit = 3", "'split' of"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 +", "SyntaxError"),
    ],
)
def test_files_that_are_not_training_files_are_refused(refused, tmp_path, text, said):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    assert said in refused(2, "train", path, "-p", 4)


def test_trains_a_module_by_name(run, pool, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    found = train(run, "small:build", "--schedule", "gpipe", "-m", 4, "--steps", 2)
    assert found["losses"] == pytest.approx(unpipelined(file, 2, 16, 4), rel=1e-6)
    assert main(["train", "smaller:build", "-p", "4"]) == 2


def test_the_training_file_in_the_documentation(run, pool, tmp_path):
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "train.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    path = tmp_path / "whole.py"
    path.write_text(block)
    found = train(run, path, "--schedule", "zbv", "-m", 8, "--steps", 4, "--check")
    assert found["equal"] is True
    assert len(found["losses"]) == 4


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_under_torchrun_the_same_command_joins_the_processes(file, tmp_path):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "penstock", "train", str(file)]
    options = ["--batch", "16", "--steps", "4", "--seconds", "0", "--json", "--check", "--save-plan", str(tmp_path / "plan.json")]
    done = subprocess.run([*start, *options], capture_output=True, text=True, check=False, env=environment(), timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert found["losses"] == pytest.approx(unpipelined(file, 4, 16, found["microbatches"]), rel=1e-6)


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(file):
    """The command ends the processes that it started, and says so."""
    command = [
        sys.executable,
        "-m",
        "penstock",
        "train",
        str(file),
        "-p",
        "2",
        "--schedule",
        "1f1b",
        "--steps",
        "1000000",
        "--device",
        "cpu",
    ]
    begun = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert begun.stderr is not None
        assert any("step 1 of" in line for line in begun.stderr)
        started = [int(pid) for pid in Path(f"/proc/{begun.pid}/task/{begun.pid}/children").read_text().split()]
        assert len(started) >= 2
        begun.send_signal(signal.SIGINT)
        _, said = begun.communicate(timeout=120)
    finally:
        begun.kill()
    assert begun.returncode == 130
    assert re.search(r"interrupted after step \d+ of 1000000: all processes have ended", said)
    assert "Traceback" not in said
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
