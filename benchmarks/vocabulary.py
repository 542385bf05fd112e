"""A vocabulary of 256k spread over the ranks: the predicted time of a step against the best uneven cut of the layers.

Transformers of about 4, 10 and 21 billion parameters with 2048 tokens per sequence on 8 and 16 GPUs, estimated at 400e12 operations per
second, 50 GB/s and 10 us between ranks, with 4 microbatches per rank. The cut is the planner's: layers are shared among stages so that the
schedule is fastest, and the head stays whole. Alone: `python benchmarks/run.py vocabulary`; the table of docs/vocabulary.md:
`python -m benchmarks.vocabulary`.
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
RANKS = (8, 16)
VOCABULARY = 262144
PER_RANK = 4
"""Microbatches per rank."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "1F1B": ("1f1b",),
    "any of 1F1B, interleaved 1F1B, ZB-H1, ZBV": ("1f1b", "interleaved-1f1b", "zb-h1", "zbv"),
}


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    models, ranks = (["4B"], (2,)) if short else (list(MODELS), RANKS)
    yield [
        Case(f"{model} p={count} {setting}", partial(_rows, model, count, setting))
        for model in models
        for count in ranks
        for setting in SETTINGS
    ]


@cache
def estimate(model: str) -> ps.Profile:
    layers, hidden, heads = MODELS[model]
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


def compare(model: str, ranks: int, setting: str) -> Outcome:
    options = {"ranks": ranks, "microbatches": PER_RANK * ranks, "schedules": SETTINGS[setting], "seconds": 0, "slices": 1, "jitter": 0.0}
    cut, spread = (ps.plan(estimate(model), **options, vocabulary=may) for may in (False, True))
    return Outcome(cut, spread)


def _rows(model: str, ranks: int, setting: str) -> list[Row]:
    outcome = compare(model, ranks, setting)
    note = f"{outcome.gain:.1%} faster; most memory {_memory(outcome.cut)} with the best cut, {_memory(outcome.spread)} with the plan"
    times = [outcome.spread.objective], [outcome.cut.objective]
    return [Row(f"step of {model}, p={ranks}, {setting}", *times, "the best uneven cut", limit=1.0, unit="s", note=note)]


def _memory(plan: ps.Plan) -> str:
    return plan.units.size(max(plan.predicted.peak_memory))


def main() -> None:
    """Print the table of the documentation."""
    print("| model | ranks | schedules | best uneven cut | planned | gain | most memory of a rank: cut, planned |")
    print("|---|---|---|---|---|---|---|")
    for model in MODELS:
        for ranks in RANKS:
            for setting in SETTINGS:
                outcome = compare(model, ranks, setting)
                plans = [f"{plan.units.time(plan.objective)} ({plan.name})" for plan in (outcome.cut, outcome.spread)]
                spread = "" if outcome.spread.vocabulary else ", not spread"
                memory = f"{_memory(outcome.cut)}, {_memory(outcome.spread)}"
                print(f"| {model} | {ranks} | {setting} | {plans[0]} | {plans[1]}{spread} | {outcome.gain:.1%} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
