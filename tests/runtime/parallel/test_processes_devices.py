"""A plan for a cluster: which process or thread becomes which rank of the pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError
from penstock.runtime import Pipeline, launch, rank
from penstock.runtime.launch.workers import Workers
from runtime.distributed import Grads, local_grads, numbers
from runtime.models import assert_close, blocks, by_batch

DEVICES = (2, 0, 1)


@pytest.fixture(scope="module")
def plan() -> ps.Plan:
    """Three devices in nodes, and six equal layers; the order of the devices is chosen below."""
    cluster = ps.Cluster([ps.Device(speed=speed) for speed in (1.0, 2.0, 3.0)], latency=0.1)
    model = ps.Profile([ps.Layer(f=1, i=1, w=1)] * 6)
    planned = ps.plan(model, cluster=cluster, microbatches=4, schedules=["zb-h1"], seconds=0)
    return replace(planned, devices=DEVICES, partition=(1, 2, 3), bounds={"none": 0.0}, overall_bound=0.0)


Outcome = tuple[Any, Grads, int, int, list[int], list[float]]


def train(plan: ps.Plan, model: Any, x: Any, y: Any) -> Outcome:
    pipe = Pipeline(model, plan, loss_fn=functional.mse_loss)
    result = pipe.step(x, target=y)
    return result, local_grads(pipe), rank(), pipe.rank, sorted(pipe.stages), pipe.gather("ranks", float(rank()))


def check(found: list[Outcome], model: Any, x: Any, y: Any) -> None:
    assert_close(numbers(model, [(result, grads) for result, grads, *_ in found]), by_batch(model, x, y), 1e-12)
    for _, _, own, place, stages, gathered in found:
        assert place == DEVICES.index(own)
        assert stages == [place]
        assert gathered == list(map(float, DEVICES))


@pytest.mark.parametrize("parallel", [False, True])
def test_threads_take_their_places(plan: ps.Plan, parallel: bool) -> None:
    model, x, y = blocks(6).double(), torch.randn(8, 6).double(), torch.randn(8, 6).double()
    copies = [blocks(6).double() for _ in range(3)]
    for copy in copies:
        copy.load_state_dict(model.state_dict())
    check(launch(lambda: train(plan, copies[rank()], x, y), ranks=3, parallel=parallel), model, x, y)


def test_processes_take_their_places(workers: Workers, plan: ps.Plan) -> None:
    model, x, y = blocks(6).double(), torch.randn(8, 6).double(), torch.randn(8, 6).double()
    check(workers.run(lambda: train(plan, model, x, y), ranks=3), model, x, y)


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_both_copies_of_a_model_take_their_places(name: str) -> None:
    """Two fast and two slow devices, listed in turn: the plan puts pairs of equal speed on the ranks that hold the same stages."""
    cluster = ps.Cluster([ps.Device(speed=speed) for speed in (1.0, 3.0, 1.0, 3.0)], latency=0.1)
    asked: dict[str, Any] = {"microbatches": 8, "schedules": [name], "seconds": 0}
    planned = ps.plan(ps.Profile([ps.Layer(f=1, i=1, w=1)] * 8), cluster=cluster, **asked)
    assert planned.devices != (0, 1, 2, 3)
    model, x, y = blocks(8).double(), torch.randn(8, 6).double(), torch.randn(8, 6).double()
    copies = [blocks(8).double() for _ in range(4)]
    for copy in copies:
        copy.load_state_dict(model.state_dict())
    found = launch(lambda: train(planned, copies[rank()], x, y), ranks=4)
    assert_close(numbers(model, [(result, grads) for result, grads, *_ in found]), by_batch(model, x, y), 1e-12)
    for _, _, own, place, stages, gathered in found:
        assert planned.devices[place] == own
        assert stages == sorted((place, 3 - place))
        assert gathered == list(map(float, planned.devices))


def test_other_ranks_than_devices_are_refused(plan: ps.Plan) -> None:
    with pytest.raises(ScheduleError, match=r"for the devices \[2, 0, 1\] of a cluster, but there are 2 ranks: start one per device"):
        launch(lambda: Pipeline(blocks(6), plan, loss_fn=functional.mse_loss), ranks=2)
