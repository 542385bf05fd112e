"""Failures on a mesh: every process raises the same report soon, on any pipeline and data rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from composition.parallel import WIDTH, Outcome, batch, check, mesh_of, schedule, split_over
from penstock.errors import LostRankError, PipelineError
from penstock.runtime import Pipeline, rank
from penstock.runtime.launch.workers import Workers
from runtime.models import by_batch

SOON, LATE = 100.0, 300.0
"""Failures must be known long before the deadline, which no wait here may reach."""
DEADLINE = 6.0
"""The deadline of tests in which a rank is late."""


class Trap(nn.Module):
    """A layer that fails in a later forward, if it is set to."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH).double()
        self.trap: Callable[[], None] | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.trap is not None:
            self.calls += 1
            if self.calls == 2:
                self.trap()
        return torch.tanh(self.map(x))


def make(name: str, shard: bool, **options: Any) -> tuple[Pipeline, list[Trap], Tensor, Tensor]:
    torch.manual_seed(0)
    mesh = mesh_of(pp=2, dp=2)
    model = [Trap() for _ in range(schedule(name, 2).stages)]
    x, y = split_over(mesh, *batch(13), (6, 7))
    made = {"loss_fn": functional.mse_loss, "deadline": LATE} | options
    return Pipeline(model, schedule(name, 2), mesh=mesh, shard=shard, **made), model, x, y


def caught(act: Callable[[], Any]) -> tuple[str, float]:
    began = time.monotonic()
    try:
        act()
    except PipelineError as error:
        return str(error), time.monotonic() - began
    return "nothing was raised", 0.0


def raise_it() -> None:
    raise ValueError("no such token")


@pytest.mark.parametrize(("name", "victim", "shard"), [("1f1b", 1, False), ("zbv", 2, False), ("zbv", 1, True), ("1f1b", 2, True)])
def test_exception_on_one_process(workers: Workers, name: str, victim: int, shard: bool) -> None:
    """Nothing of the step is left. Copies go on; shards cannot, because torch's process groups may be out of step."""

    def train() -> Any:
        pipe, model, x, y = make(name, shard)
        pipe.step(x, target=y)
        before = [parameter.grad.clone() for parameter in pipe.parameters()]
        held = list(pipe.stages)
        if rank() == victim:
            model[held[0]].trap = raise_it
        report, took = caught(lambda: pipe.step(x, target=y))
        same = all(torch.equal(p.grad, grad) for p, grad in zip(pipe.parameters(), before, strict=True))
        in_shards = all(isinstance(parameter, DTensor) for parameter in pipe.parameters())
        model[held[0]].trap = None
        for parameter in pipe.parameters():
            parameter.grad = None
        if shard:
            return report, took, same and in_shards, caught(lambda: pipe.step(x, target=y))[0]
        return report, took, same, Outcome.of(pipe, pipe.step(x, target=y))

    found = workers.run(train)
    coordinate = f"rank {victim} (pp {victim // 2}, dp {victim % 2})"
    assert len({report for report, _, _, _ in found}) == 1
    report = found[0][0]
    assert f"failed on {coordinate}: ValueError: no such token" in report
    assert [line.split()[:2] for line in report.splitlines()[1:]] == [["rank", str(each)] for each in range(4)]
    for _, took, same, _ in found:
        assert took < SOON
        assert same
    if shard:
        assert all("an earlier step failed with sharded parameters" in again for _, _, _, again in found)
        return
    torch.manual_seed(0)
    model = nn.Sequential(*(Trap() for _ in range(schedule(name, 2).stages)))
    check([outcome for _, _, _, outcome in found], by_batch(model, *batch(13)))


def wait_for_the_report(pipe: Pipeline) -> None:
    """Sleep until another process gives up."""
    until = time.monotonic() + LATE
    while pipe.group.parent.connection is not None and time.monotonic() < until:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "options", "victim", "waited"),
    [
        ("1f1b", {"shard": False}, 3, r"waited \d+\.\d s for"),
        (
            "interleaved-1f1b",
            {"shard": True, "residency": 1, "lookahead": 0},
            1,
            r"rank [02] waited \d+\.\d s for the parameters of stage [23] from the other data ranks",
        ),
    ],
    ids=["copies", "parameters that do not come"],
)
def test_stall_past_the_deadline(workers: Workers, name: str, options: dict[str, Any], victim: int, waited: str) -> None:
    """A late process: the processes that wait for it name it, whether for its own part or for that of a rank that waits for it."""
    stage = victim // 2

    def train() -> Any:
        pipe, model, x, y = make(name, deadline=DEADLINE, **options)
        pipe.step(x, target=y)
        if rank() == victim:
            model[stage].trap = lambda: wait_for_the_report(pipe)
        return caught(lambda: pipe.step(x, target=y))

    found = workers.run(train)
    assert len({report for report, _ in found}) == 1
    assert re.search(waited, found[0][0])
    assert f"  rank {victim} runs {stage}F1" in found[0][0]


def test_killed_process(tmp_path: Path) -> None:
    def train() -> None:
        pipe, model, x, y = make("1f1b", shard=True)
        pipe.step(x, target=y)
        if rank() == 2:
            model[1].trap = lambda: os.kill(os.getpid(), signal.SIGKILL)
        report, took = caught(lambda: pipe.step(x, target=y))
        (tmp_path / str(rank())).write_text(f"{took}\n{report}")
        raise PipelineError(report)

    import sys

    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.raises(LostRankError, match="the process of rank 2 was killed by SIGKILL"), Workers(4) as own:
        own.run(train)
    told = {int(path.name): path.read_text().split("\n", 1) for path in tmp_path.iterdir()}
    assert sorted(told) == [0, 1, 3]
    assert len({report for _, report in told.values()}) == 1
    assert all(float(took) < SOON and "  rank 2 does not answer" in report for took, report in told.values())
