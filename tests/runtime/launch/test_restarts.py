"""Training under torchrun: killed processes are restarted, and the run continues from the last complete checkpoint."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime import Checkpoints

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_resume.py"
EVERY = 3

# What torchrun starts: the example, with a rank that is killed. In the attempt and on the rank of a kill, `step N` ends the process
# within the backward of that step, and `save N` while it writes the checkpoint of that step to the disk. Before a `step` kill all
# ranks wait for the checkpoint that is being written, so that the test knows which one is the last.
KILLS = """
import os, runpy, signal, sys
from penstock.runtime import Checkpoints, Pipeline

attempt, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ.get("RANK")
kills = {tuple(each.split(":")[:2]): each.split(":")[2:] for each in sys.argv.pop(1).split(",")}
where, at = kills.get((attempt, rank), ("never", "0"))
waits = [int(step) for (when, _), (how, step) in kills.items() if when == attempt and how == "step"]
used = []

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

step, save = Pipeline.step, Checkpoints.save_async

def step_or_die(pipe, *args, **kwargs):
    if pipe.steps + 1 in waits:
        used[-1].wait()
    if where == "step" and pipe.steps + 1 == int(at):
        calls = []
        def count(_):
            calls.append(0)
            if len(calls) == 2:
                die()
        next(pipe.parameters()).register_post_accumulate_grad_hook(count)
    return step(pipe, *args, **kwargs)

def save_or_die(checkpoints, *args, **kwargs):
    used.append(checkpoints)
    if where == "save" and kwargs["step"] == int(at):
        os.fsync = die
    return save(checkpoints, *args, **kwargs)

Pipeline.step, Checkpoints.save_async = step_or_die, save_or_die
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def torchrun(folder: Path, ranks: int, steps: int, *options: str, restarts: int = 0, kills: str = "-:-:never:0") -> list[tuple[int, float]]:
    """The steps and losses that were printed, in order, over all attempts."""
    script = folder / "kills.py"
    script.write_text(KILLS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command += [str(script), kills, str(EXAMPLE), str(folder / "run"), f"--steps={steps}", f"--every={EVERY}", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ, OMP_NUM_THREADS="1"), timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("exitcode: -9") == restarts, done.stderr
    return printed(done.stdout)


def printed(output: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)]


def attempts(found: list[tuple[int, float]]) -> list[list[int]]:
    """The steps of each attempt."""
    made: list[list[int]] = []
    for step, _ in found:
        if not made or step <= made[-1][-1]:
            made.append([])
        made[-1].append(step)
    return made


def test_killed_in_a_step_and_in_a_save_and_with_fewer_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    main([str(tmp_path / "whole"), "--steps", "12"])
    wanted = dict(printed(capsys.readouterr().out))

    found = torchrun(tmp_path, 2, 10, "--schedule=auto", restarts=2, kills="0:1:step:5,1:1:save:6")
    first, second, third = attempts(found)
    assert first == [1, 2, 3, 4]  # killed in step 5, the last checkpoint being that of step 3
    assert second[:3] == [4, 5, 6]  # killed while that of step 6 is written, which may take until the next steps
    assert len(second) <= EVERY + 2
    assert third == [4, 5, 6, 7, 8, 9, 10]
    assert [each.step for each in Checkpoints(tmp_path / "run").whole()] == [9, 6]
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == []

    main([str(tmp_path / "run"), "--steps", "12", "--every", str(EVERY), "--schedule", "auto"])  # on one rank
    rest = printed(capsys.readouterr().out)
    assert attempts(rest) == [[10, 11, 12]]
    planned = runpy.run_path(str(EXAMPLE))["planned"]
    last, before = Checkpoints(tmp_path / "run").whole()
    assert (last.step, last.ranks, last.about["schedule"]) == (12, 1, planned(1).schedule.name)
    assert (before.step, before.ranks, before.about["schedule"]) == (9, 2, planned(2).schedule.name)
    assert planned(1).partition != planned(2).partition  # made again for the new size
    for step, loss in found + rest:
        assert loss == wanted[step], step


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100
