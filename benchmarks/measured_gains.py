"""What plans for uneven devices and for large vocabularies gain on two real processes, and how well that was predicted.

Two processes over gloo, each on a core of its own. In the first case another program keeps the second core busy, so that its rank runs at
about half speed: the cluster is measured as `penstock profile --cluster` does, and the plan for it runs in turn with the plan that takes
both ranks for equal. In the second case the head of a model, with a vocabulary of 262,144, takes longer than everything else: the plan with
the vocabulary on both ranks runs in turn with the best uneven cut. Alone, on a quiet machine: `python benchmarks/run.py measured_gains`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.rows import Case, Row
from benchmarks.runtime import in_rounds
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline, TokenCrossEntropy
from penstock.runtime.launch.workers import Workers
from penstock.runtime.measure.cluster import measure_cluster
from penstock.runtime.measure.profile import profile

SCHEDULES = ("1f1b", "zb-h1", "zbv", "interleaved-1f1b")
MICROBATCHES = 12
WITHIN = 0.05
"""How far a measured step may be from its prediction."""


@dataclass(frozen=True)
class Size:
    """Of a model and its microbatches."""

    blocks: int
    hidden: int
    inner: int
    rows: int
    vocabulary: int = 0
    rounds: int = 9


UNEVEN = Size(blocks=18, hidden=512, inner=2048, rows=96)
VOCABULARY = Size(blocks=8, hidden=128, inner=6144, rows=96, vocabulary=262144, rounds=5)
SMALL = Size(blocks=6, hidden=16, inner=32, rows=4, vocabulary=64, rounds=2)


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    with Workers(2) as workers:
        yield [
            Case("uneven", partial(_uneven_rows, workers, SMALL if short else UNEVEN)),
            Case("vocabulary", partial(_vocabulary_rows, workers, SMALL if short else VOCABULARY)),
        ]


def _uneven_rows(workers: Workers, size: Size) -> list[Row]:
    with _keep_busy(_own_core(1)):
        outcomes = workers.run(measure_uneven, (size,))
    speed = outcomes[0].speed
    what = f"{size.blocks} blocks of {size.hidden}, the second of two processes at {speed:.2f} of the speed"
    return _rows(what, outcomes, "the plan for equal ranks")


def _vocabulary_rows(workers: Workers, size: Size) -> list[Row]:
    outcomes = workers.run(measure_vocabulary, (size,))
    what = f"a vocabulary of {size.vocabulary:,}, {size.blocks} blocks of {size.hidden}, 2 processes"
    return _rows(what, outcomes, "the best uneven cut")


def _own_core(rank: int) -> int:
    """The core of a rank."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)]


@contextmanager
def _keep_busy(core: int) -> Iterator[None]:
    """Another program that wants all of a core."""
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


# On each rank ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step, one per round, and what was predicted, under the plan and under what it is compared with."""

    planned: list[float]
    other: list[float]
    predicted: float
    predicted_other: float
    note: str
    speed: float = 1.0
    """Of the second rank."""


def measure_uneven(size: Size) -> Outcome:
    _settle()
    model, x = _build_blocks(size), torch.randn(size.rows, size.hidden)
    options: dict[str, Any] = {"loss_fn": functional.mse_loss, "target": x, "optimizer": "none"}
    measured, cluster = measure_cluster(lambda: profile(model, x, **options), torch.device("cpu"))
    equal = replace(cluster, devices=[ps.Device()] * 2)
    plan, even = (ps.plan(measured, cluster=each, microbatches=MICROBATCHES, schedules=SCHEDULES, seconds=0) for each in (cluster, equal))
    batch = torch.randn(size.rows * MICROBATCHES, size.hidden)
    steps = [_prepare_step(model, each, functional.mse_loss, batch, batch) for each in (plan, even)]
    (planned, _), (other, _) = in_rounds(size.rounds, steps)
    on_cluster = ps.simulate(even.program, cluster.apply(even.costs, even.placement)).makespan
    note = f"{plan.name} with {_count_layers(plan)} layers per rank, {even.name} with {_count_layers(even)}"
    return Outcome(planned, other, plan.predicted.makespan, on_cluster, note, cluster.devices[1].speeds.rate)


def measure_vocabulary(size: Size) -> Outcome:
    _settle()
    torch.manual_seed(0)
    ends = nn.Embedding(size.vocabulary, size.hidden), nn.Linear(size.hidden, size.vocabulary, bias=False)
    model = nn.Sequential(ends[0], *_build_blocks(size), ends[1])
    tokens, targets = torch.randint(size.vocabulary, (2, MICROBATCHES * size.rows))
    options: dict[str, Any] = {"loss_fn": TokenCrossEntropy(), "target": targets[: size.rows], "optimizer": "none"}
    measured, cluster = measure_cluster(lambda: profile(model, tokens[: size.rows], **options), torch.device("cpu"))
    linked = replace(measured, latency=_take_first(cluster.latency), bandwidth=_take_first(cluster.bandwidth))
    options = {"ranks": 2, "microbatches": MICROBATCHES, "schedules": SCHEDULES, "seconds": 0, "slices": 1}
    spread, cut = (ps.plan(linked, **options, vocabulary=may) for may in (True, False))
    steps = [_prepare_step(model, plan, TokenCrossEntropy(), tokens, targets) for plan in (spread, cut)]
    (planned, _), (other, _) = in_rounds(size.rounds, steps)
    note = f"{spread.name}{'' if spread.vocabulary else ', not spread'} against {cut.name} with {_count_layers(cut)} layers per rank"
    return Outcome(planned, other, spread.predicted.makespan, cut.predicted.makespan, note)


def _take_first(rates: Any) -> Any:
    """The rate from rank 0 to rank 1, of a table or of all links."""
    return rates[0][1] if isinstance(rates, tuple) else rates


def _settle() -> None:
    """One thread, on a core that the other rank does not use."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {_own_core(dist.get_rank())})


def _build_blocks(size: Size) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(size.hidden, size.inner) for _ in range(size.blocks)))


class Block(nn.Module):
    """The feed-forward part of a transformer."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(hidden), nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(functional.gelu(self.wide(self.norm(x))))


def _prepare_step(model: nn.Sequential, plan: ps.Plan, loss_fn: Callable[..., Tensor], x: Tensor, target: Tensor) -> Callable[[], None]:
    pipe = Pipeline(model, plan, loss_fn=loss_fn)

    def step() -> None:
        pipe.step(x, target=target)
        for parameter in pipe.parameters():
            parameter.grad = None

    return step


def _count_layers(plan: ps.Plan) -> str:
    return " and ".join(str(sum(plan.partition[stage] for stage in plan.placement.stages_of(rank))) for rank in range(plan.placement.ranks))


# Rows -----------------------------------------------------------------------------------------------------------------


def _rows(what: str, outcomes: list[Outcome], against: str) -> list[Row]:
    """The gain, and each prediction. A step lasts from the common start until the last rank is done."""
    first = outcomes[0]
    planned, other = (
        [max(times) for times in zip(*ranks, strict=True)] for ranks in zip(*((o.planned, o.other) for o in outcomes), strict=True)
    )
    predicted, measured = first.predicted_other / first.predicted, statistics.median(other) / statistics.median(planned)
    note = f"{first.note}; {measured:.2f} times as fast, predicted {predicted:.2f} times"
    return [
        Row(f"step, {what}", planned, other, against, limit=1.0, note=note),
        _compare_prediction(f"step, {what}", planned, first.predicted),
        _compare_prediction(f"step, {what}, {against}", other, first.predicted_other),
    ]


def _compare_prediction(case: str, measured: list[float], predicted: float) -> Row:
    """How far apart the two are, whichever is longer."""
    times = [statistics.median(measured)], [predicted]
    if times[0] >= times[1]:
        return Row(f"{case}: measured", *times, "predicted", limit=1 + WITHIN)
    return Row(f"{case}: predicted", times[1], times[0], "measured", limit=1 + WITHIN)
