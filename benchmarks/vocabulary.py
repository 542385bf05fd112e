"""A vocabulary of 256k spread over the ranks: the predicted time of a step against the best uneven cut of the layers.

Transformers of about 4, 10 and 21 billion parameters with 2048 tokens per sequence on 8 and 16 GPUs, estimated at 400e12 operations per
second, 50 GB/s and 10 us between ranks, with 4 microbatches per rank. The cut is the planner's: layers are shared among stages so that the
schedule is fastest, and the head stays whole. The same models, and one of 2 billion, on two fast devices and four of 0.4 times their speed.
Alone: `python benchmarks/run.py vocabulary`; the tables of docs/vocabulary.md: `python -m benchmarks.vocabulary`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

from benchmarks.rows import Case, Row

import penstock as ps

MODELS = {"4B": (32, 3072, 24), "10B": (32, 4096, 32), "21B": (40, 5120, 40)}
"""Layers, hidden size and heads."""
SMALL = {"2B": (16, 2048, 16)}
"""More than half of its work is the head; it has too few layers for 16 ranks."""
RANKS = (8, 16)
CLUSTER = ps.Cluster([ps.Device("fast")] * 2 + [ps.Device("slow", speed=0.4)] * 4, 1e-5, 50e9)
"""Two fast devices and four slow ones."""
VOCABULARY = 262144
PER_RANK = 4
"""Microbatches per rank."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "1F1B": ("1f1b",),
    "any of 1F1B, interleaved 1F1B, ZB-H1, ZBV": ("1f1b", "interleaved-1f1b", "zb-h1", "zbv"),
}


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    pairs = [("4B", 2)] if short else list(_list_pairs())
    yield [
        Case(f"{model} {_name(where)} {setting}", partial(_rows, model, where, setting)) for model, where in pairs for setting in SETTINGS
    ]


def _list_pairs() -> Iterator[tuple[str, int | ps.Cluster]]:
    """The models, and the ranks or devices to plan them for."""
    yield from ((model, ranks) for model in MODELS for ranks in RANKS)
    yield from ((model, CLUSTER) for model in SMALL | MODELS)


def _name(where: int | ps.Cluster) -> str:
    return f"p={where}" if isinstance(where, int) else "2 fast, 4 slow"


@cache
def estimate(model: str) -> ps.Profile:
    layers, hidden, heads = (SMALL | MODELS)[model]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "sequence": 2048, "vocabulary": VOCABULARY}
    return ps.Profile.transformer(**sizes, flops=400e12, latency=1e-5, bandwidth="50GB")


@dataclass(frozen=True)
class Outcome:
    """The best plan with the head on the last stage, and the best with the vocabulary on all ranks."""

    cut: ps.Plan
    spread: ps.Plan

    @property
    def gain(self) -> float:
        return self.cut.objective / self.spread.objective - 1


def compare(model: str, where: int | ps.Cluster, setting: str) -> Outcome:
    """On so many equal ranks, or on a cluster."""
    ranks = {"ranks": where} if isinstance(where, int) else {"cluster": where}
    count = where if isinstance(where, int) else len(where)
    options = {**ranks, "microbatches": PER_RANK * count, "schedules": SETTINGS[setting], "seconds": 0, "slices": 1, "jitter": 0.0}
    cut, spread = (ps.plan(estimate(model), **options, vocabulary=may) for may in (False, True))
    return Outcome(cut, spread)


def _rows(model: str, where: int | ps.Cluster, setting: str) -> list[Row]:
    outcome = compare(model, where, setting)
    note = f"{outcome.gain:.1%} faster; most memory {_memory(outcome.cut)} with the best cut, {_memory(outcome.spread)} with the plan"
    times = [outcome.spread.objective], [outcome.cut.objective]
    return [Row(f"step of {model}, {_name(where)}, {setting}", *times, "the best uneven cut", limit=1.0, unit="s", note=note)]


def _memory(plan: ps.Plan) -> str:
    return plan.units.size(max(plan.predicted.peak_memory))


def main() -> None:
    """Print the tables of the documentation."""
    print("| model | ranks | schedules | best uneven cut | planned | gain | most memory of a rank: cut, planned | rows per device |")
    print("|---|---|---|---|---|---|---|---|")
    for model, where in _list_pairs():
        for setting in SETTINGS:
            outcome = compare(model, where, setting)
            plans = [f"{plan.units.time(plan.objective)} ({plan.name})" for plan in (outcome.cut, outcome.spread)]
            spread = "" if outcome.spread.vocabulary else ", not spread"
            memory = f"{_memory(outcome.cut)}, {_memory(outcome.spread)}"
            cells = model, _name(where), setting, plans[0], f"{plans[1]}{spread}", f"{outcome.gain:.1%}", memory, _rows_of(outcome.spread)
            print(f"| {' | '.join(cells)} |", flush=True)


def _rows_of(plan: ps.Plan) -> str:
    """The least and the largest part of the rows of each kind of device."""
    if plan.cluster is None or not plan.row_shares:
        return "equal"
    parts: dict[str, list[float]] = {}
    for device, part in zip(plan.devices, plan.row_shares, strict=True):
        parts.setdefault(plan.cluster.name_of(device), []).append(part)
    return "; ".join(f"{name} {min(own):.1%} to {max(own):.1%}" for name, own in sorted(parts.items()))


if __name__ == "__main__":
    main()
