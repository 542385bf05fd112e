"""What stages pass to each other between processes: as on virtual ranks, equal or refused with the same message."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from penstock.runtime import Pipeline
from penstock.runtime.launch.workers import Workers
from runtime import boundaries
from runtime.boundaries import CASES, assert_case, step
from runtime.distributed import Stage

pytestmark = pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning")


@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case in CASES for name in ("1f1b", "zb-h1") if name == "1f1b" or CASES[case].refused is None]
)
def test_case_on_processes(workers: Workers, case: str, name: str) -> None:
    cloudpickle.register_pickle_by_value(boundaries)
    found = workers.run(lambda: step(CASES[case], name), ranks=len(CASES[case].bodies))
    assert_case(CASES[case], found)


@pytest.mark.parametrize("case", CASES)
def test_case_on_channels_of_tensors(workers: Workers, case: str) -> None:
    """As over NCCL, with gloo in its place; tests/gpu/nccl_boundaries.py runs the same over NCCL itself."""

    def run() -> Any:
        import torch.distributed as dist

        return step(CASES[case], "1f1b", group=dist.group.WORLD, transport="direct")

    cloudpickle.register_pickle_by_value(boundaries)
    assert_case(CASES[case], workers.run(run, ranks=len(CASES[case].bodies)))


def test_plain_values_that_change_on_channels_of_tensors(workers: Workers) -> None:
    """Numbers, texts and objects that are others in every forward."""

    def run() -> list[float]:
        import torch.distributed as dist

        calls = {"forwards": 0}

        def start(linear: nn.Linear, x: Tensor) -> Any:
            calls["forwards"] += 1
            return linear(x), calls["forwards"], {"set": {calls["forwards"]}, "none": None}

        stages = [Stage(start), Stage(lambda linear, x, number, more: linear(x) * 0 + number + 100 * next(iter(more["set"])))]
        pipe = Pipeline(stages, schedule="1f1b", microbatches=2, group=dist.group.WORLD, transport="direct", loss_fn=lambda y: y.mean())
        return [float(loss) for _ in range(3) for loss in pipe.step(torch.ones(4, 6)).losses]

    for losses in workers.run(run, ranks=2):
        assert losses == [101.0 * number for number in range(1, 7)]
