"""torchtitan's own Trainer on two processes: with our pipelining function, and with our files in its own schedule loading.

These tests need torchtitan, which needs a torch of its own: `make titan` installs both apart.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import penstock as ps

if find_spec("torchtitan") is None or find_spec("torchtitan.trainer") is None:
    pytest.skip("torchtitan is not installed: `make titan` installs it into an environment of its own", allow_module_level=True)

ROOT = Path(__file__).parents[2]
MODULES = [["tok_embeddings", "layers.0", "layers.1"], ["layers.2"], ["layers.3", "layers.4"], ["layers.5", "norm", "lm_head"]]


def start(script: Path, *arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """Run a script on two processes, as torchrun starts them."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "LOG_RANK": "0,1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT)


def run_cases(folder: Path, cases: dict[str, Any]) -> dict[str, Any]:
    (folder / "cases.json").write_text(json.dumps(cases))
    done = start(ROOT / "tests" / "models" / "titan_worker.py", str(folder / "cases.json"), str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in cases}


def write_whole_backwards(folder: Path, name: str) -> str:
    """Write a schedule's order with every I as B, and without the Ws."""
    schedule = ps.schedule(name, ranks=2, microbatches=8)
    rows = [[str(action).replace("I", "B") for action in schedule[rank] if "W" not in str(action)] for rank in range(2)]
    path = folder / f"whole-{name}.csv"
    ps.Schedule.from_actions(rows, schedule.placement).to_csv(path)
    return str(path)


def test_twenty_steps_by_plan_have_the_losses_of_torch_s_runtime(tmp_path):
    """The plan splits the backward and the model recomputes selectively. Torch runs the same order with whole backwards, since its split
    backward refuses selective recompute; so gradients are summed in the same order, and equal to the last bit."""
    file = write_whole_backwards(tmp_path, "zbv")
    theirs = {"pipeline_parallel_schedule": "ZBVZeroBubble", "pipeline_parallel_schedule_csv": file, "module_fqns_per_model_part": MODULES}
    cases = {"ours": {"steps": 20, "plan": {"schedules": ["zbv"]}}, "theirs": {"steps": 20, "settings": theirs}}
    results = run_cases(tmp_path, cases)
    assert results["ours"]["modules"] == MODULES  # an uneven cut
    assert len(results["ours"]["losses"]) == 20
    assert results["ours"]["losses"] == results["theirs"]["losses"]
    assert results["ours"]["norms"] == results["theirs"]["norms"]


def test_plans_have_the_losses_of_torch_s_own_schedules(tmp_path):
    """Torch's classes on the plan's cut: the same orders, hence the same bits."""
    cases: dict[str, Any] = {}
    for name, torch_name in (("1f1b", "1F1B"), ("interleaved-1f1b", "Interleaved1F1B")):
        cases[name] = {"steps": 20, "plan": {"schedules": [name]}}
        cases[torch_name] = {"steps": 20, "cut": name, "settings": {"pipeline_parallel_schedule": torch_name}}
    results = run_cases(tmp_path, cases)
    assert results["1f1b"]["losses"] == results["1F1B"]["losses"]
    assert results["1f1b"]["norms"] == results["1F1B"]["norms"]
    assert results["interleaved-1f1b"]["losses"] == results["Interleaved1F1B"]["losses"]
    assert results["interleaved-1f1b"]["norms"] == results["Interleaved1F1B"]["norms"]


FILES = {
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
    "v-half": "ZBVZeroBubble",
    "1f1b-v": "ZBVZeroBubble",
    "grouped-interleaved": "PipelineScheduleMulti",
}
"""Schedules by the setting that tells torchtitan where their stages are: in a V, or in a loop."""


def test_torchtitan_trains_with_our_files(tmp_path):
    """`penstock convert` writes the files. Split backwards need the plain loss and no recompute in torch. Stages are in the same places
    in all V-shaped files, hence the same weights; weights' gradients may be summed in other orders, so losses agree to 1e-6."""
    plain: dict[str, Any] = {"steps": 2, "loss": "plain", "recompute": "none"}
    cases, parts = {}, {"module_fqns_per_model_part": MODULES}
    for name, style in FILES.items():
        file = str(tmp_path / f"{name}.csv")
        more = ["--chunks", "2"] if name == "grouped-interleaved" else []
        command = [sys.executable, "-m", "penstock", "convert", name, file, "--ranks", "2", "--microbatches", "8", *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        cases[name] = {**plain, "settings": {**parts, "pipeline_parallel_schedule": style, "pipeline_parallel_schedule_csv": file}}
    cases["looped"] = {**plain, "settings": {**parts, "pipeline_parallel_schedule": "Interleaved1F1B"}}
    whole = write_whole_backwards(tmp_path, "zbv")
    v = {**parts, "pipeline_parallel_schedule": "ZBVZeroBubble", "pipeline_parallel_schedule_csv": whole}
    cases["whole"] = {**plain, "settings": v}
    results = run_cases(tmp_path, cases)
    for name in FILES:
        reference = results["looped" if name == "grouped-interleaved" else "whole"]
        assert results[name]["losses"] == pytest.approx(reference["losses"], rel=1e-6), name
        assert results[name]["norms"] == pytest.approx(reference["norms"], rel=1e-5), name


def test_a_split_backward_with_the_chunked_loss_trains_every_parameter(tmp_path):
    """The chunked loss runs the head, so that the last norm is the end of the last stage's graph. Torch's split backward loses its
    gradient; ours must not."""
    file = str(tmp_path / "zbv.csv")
    ps.schedule("zbv", ranks=2, microbatches=8).to_csv(file)
    settings = {
        "pipeline_parallel_schedule": "ZBVZeroBubble",
        "pipeline_parallel_schedule_csv": file,
        "module_fqns_per_model_part": MODULES,
    }
    whole = {**settings, "pipeline_parallel_schedule_csv": write_whole_backwards(tmp_path, "zbv")}
    case: dict[str, Any] = {"steps": 1, "recompute": "none"}
    ours = {**case, "plan": {"schedules": ["zbv"]}}
    results = run_cases(tmp_path, {"ours": ours, "torch": {**case, "settings": settings}, "whole": {**case, "settings": whole}})
    assert results["ours"]["missing"] == results["whole"]["missing"] == []
    assert results["ours"]["norms"] == results["whole"]["norms"]
    assert results["torch"]["missing"] == ["norm.weight"], "docs/torchtitan.md says that torch loses this gradient"


def test_the_example_trains_and_torchtitan_finds_its_configuration(tmp_path):
    done = start(ROOT / "examples" / "torchtitan" / "train_debugmodel.py", "--training.steps", "2", "--dump_folder", str(tmp_path))
    assert done.returncode == 0, done.stderr[-6000:]
    assert "Penstock runs zbv" in done.stdout
    assert "step:  2" in done.stdout


def report_of(folder: Path, **stopped: int) -> str:
    """Return the report in torchtitan's log after a forward of rank 1 was stopped."""
    (folder / "cases.json").write_text(json.dumps({"stopped": {"steps": 3, "plan": {"schedules": ["zbv"]}, **stopped}}))
    done = start(ROOT / "tests" / "models" / "titan_worker.py", str(folder / "cases.json"), str(folder))
    assert done.returncode != 0
    assert "Penstock: a step failed" in done.stdout, done.stderr[-6000:]
    return done.stdout[done.stdout.index("Penstock: a step failed") :]


def test_a_failure_is_reported_in_torchtitan_s_log(tmp_path):
    """The twelfth forward of rank 1's first stage is that of the fourth microbatch in the second step."""
    report = report_of(tmp_path, fail=11)
    assert "this layer is broken" in report
    assert "in action 1F3" in report
    assert "rank 0 was running" in report or "rank 0 failed" in report


def test_a_hang_is_reported_with_the_place_where_it_hangs(tmp_path):
    report = report_of(tmp_path, hang=11)
    assert re.search(r"rank 0 failed: .*in action", report, flags=re.DOTALL)
    assert re.search(r"rank 1 was running\n.*in stop_forward\n *time.sleep", report, flags=re.DOTALL)


def test_the_example_is_short():
    files = [ROOT / "examples" / "torchtitan" / name for name in ("pipelining.py", "train_debugmodel.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 150
