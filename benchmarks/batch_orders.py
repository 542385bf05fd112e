"""Orders of batches with long-tailed lengths: the predicted makespan against the fixed order, sorting and the bound; the time of planning.

Lengths are log-normal around 1024 tokens, from 64 to 16384, and a fifth of the time at 1024 tokens is quadratic attention. Makespans are
simulated, in the units of the costs, not seconds. Alone: `python benchmarks/run.py batch_orders`; the tables of docs/batches.md:
`python -m benchmarks.batch_orders`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from benchmarks.measure import seconds_of
from benchmarks.rows import Case, Row, within

import penstock as ps

COSTS = ps.Costs(f=1.0, i=1.0, w=1.0, latency=0.02, activation=1.0, weight_stash=0.5, output=0.05)
SEQUENCE, QUADRATIC, LONGEST = 1024, 0.2, 16384
SIGMAS = (0.4, 0.8, 1.2)
SHAPES = ((4, 16), (8, 32))
SEEDS = 20
LARGER = ((8, 64), (16, 64), (16, 128), (32, 128), (32, 256))
LARGER_SEEDS = 5
SORTED = ("ascending", "descending")
LIMITED = "within the memory of 1F1B"
SETTINGS: dict[str, tuple[str, ...] | None] = {"1F1B only": (), LIMITED: None, "any schedule": None}
"""The schedules to choose from besides 1F1B; one setting has the memory limit that 1F1B needs in the fixed order."""
MOST = 0.02
"""Seconds that planning a batch may take up to the last of `LARGER`, and packing one up to the first."""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    shapes, seeds = ((2, 4),) if short else SHAPES, 2 if short else SEEDS
    yield [
        *(
            Case(f"p={shape[0]} m={shape[1]} sigma={sigma} {schedules}", partial(_rows, shape, sigma, schedules, seeds))
            for shape in shapes
            for sigma in SIGMAS
            for schedules in SETTINGS
        ),
        *(Case(f"planning, {schedules}", partial(_speed, shapes[-1], schedules, 2 if short else 20)) for schedules in SETTINGS),
        *(
            Case(f"planning, p={shape[0]} m={shape[1]}, {schedules}", partial(_speed, shape, schedules, 2 if short else 20))
            for shape in (() if short else LARGER)
            for schedules in ("any schedule", LIMITED)
        ),
        Case("packing, time", partial(_pack_speed, shapes[-1] if short else LARGER[0], 2 if short else 20)),
        Case("packing", partial(_pack_rows, shapes[-1], seeds)),
    ]


def draw_lengths(seed: int, count: int, sigma: float) -> list[int]:
    """Log-normal lengths of samples."""
    drawn = np.random.default_rng(seed).lognormal(0, sigma, count) * SEQUENCE
    return np.clip(drawn, 64, LONGEST).astype(int).tolist()


def make_planner(shape: tuple[int, int], setting: str, lengths: list[int]) -> ps.BatchPlanner:
    """The planner of a setting; its memory limit depends on the lengths, if it has one."""
    if setting != LIMITED:
        return _build_planner(shape, setting)
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", *shape)), _build_planner(shape, "1F1B only").costs(lengths))
    return _build_planner(shape, setting, max(timeline.peak_memory))


@cache
def _build_planner(shape: tuple[int, int], setting: str, limit: float | None = None) -> ps.BatchPlanner:
    options = {"sequence": SEQUENCE, "quadratic": QUADRATIC, "memory_limit": limit}
    return ps.BatchPlanner(ps.schedule("1f1b", *shape), COSTS, schedules=SETTINGS[setting], **options)


@dataclass(frozen=True)
class Outcome:
    """Makespans of one batch, divided by its bound."""

    first: float
    """1F1B in the fixed order."""
    fixed: float
    """The best schedule that fits, in the fixed order."""
    ascending: float
    descending: float
    planned: float
    schedule: str


def run_batch(shape: tuple[int, int], sigma: float, setting: str, seed: int) -> Outcome:
    lengths = draw_lengths(seed, shape[1], sigma)
    order = make_planner(shape, setting, lengths).order(lengths)
    first = next(tried.objective for tried in order.tried if tried.schedule == "1f1b" and tried.order == "fixed")
    times = [first, *(order.best_of(name) for name in ("fixed", *SORTED)), order.makespan]
    return Outcome(*(time / order.bound for time in times), order.schedule.name)


def _rows(shape: tuple[int, int], sigma: float, setting: str, seeds: int) -> list[Row]:
    outcomes = [run_batch(shape, sigma, setting, seed) for seed in range(seeds)]
    planned = [outcome.planned for outcome in outcomes]
    case = f"makespan, p={shape[0]} m={shape[1]}, sigma {sigma}, {setting}"
    note = f"{statistics.mean(planned) - 1:.1%} above the bound on average"
    fits = [outcome for outcome in outcomes if min(outcome.ascending, outcome.descending) < math.inf]
    rows = [
        Row(case, planned, [outcome.first for outcome in outcomes], "1F1B in the fixed order", limit=1.0, unit="of the bound", note=note),
        Row(case, planned, [outcome.fixed for outcome in outcomes], "the fixed order", limit=1.0, unit="of the bound"),
    ]
    if fits:  # a sorted order has the largest microbatches next to each other, which may exceed the memory
        least = [min(outcome.ascending, outcome.descending) for outcome in fits]
        note = f"{len(fits)} of {len(outcomes)} batches fit the memory when sorted"
        rows.append(Row(case, [outcome.planned for outcome in fits], least, "sorting", limit=1.0, unit="of the bound", note=note))
    return rows


def _speed(shape: tuple[int, int], setting: str, rounds: int) -> list[Row]:
    lengths = draw_lengths(0, shape[1], 0.8)
    planner = make_planner(shape, setting, lengths)
    (times,) = seconds_of(rounds, lambda: planner.order(lengths))
    return [within(f"planning a batch, p={shape[0]} m={shape[1]}, {setting}", times, MOST)]


def _pack_speed(shape: tuple[int, int], rounds: int) -> list[Row]:
    lengths, planner = draw_lengths(0, 8 * shape[1], 0.8), _build_planner(shape, "1F1B only")
    (times,) = seconds_of(rounds, lambda: planner.pack(lengths))
    return [within(f"packing 8 samples per microbatch, m={shape[1]}", times, MOST)]


@dataclass(frozen=True)
class Grouped:
    """Samples in microbatches."""

    largest: float
    """The largest cost of a microbatch."""
    first: float
    """The makespan of 1F1B in the order of the microbatches."""
    planned: float
    """The makespan of the planned order."""
    gap: float = 0.0
    """How far the largest cost is above the bound, if they are packed."""


def group_samples(shape: tuple[int, int], samples: int, sigma: float, seed: int) -> tuple[Grouped, Grouped]:
    """`samples` per microbatch: as they come, and as many on average packed by cost."""
    lengths = draw_lengths(seed, samples * shape[1], sigma)
    planner = make_planner(shape, "any schedule", [])
    packing = planner.pack(lengths)
    in_turn = [lengths[first : first + samples] for first in range(0, len(lengths), samples)]
    groups = []
    for microbatches, gap in ((in_turn, 0.0), (packing.lengths, packing.gap)):
        order = planner.order(microbatches)
        first = next(tried.objective for tried in order.tried if tried.schedule == "1f1b" and tried.order == "fixed")
        groups.append(Grouped(max(map(planner.lengths[0].of, microbatches)), first, order.makespan, gap))
    return groups[0], groups[1]


def _pack_rows(shape: tuple[int, int], seeds: int) -> list[Row]:
    pairs = [group_samples(shape, 8, 0.8, seed) for seed in range(seeds)]
    case = f"8 samples per microbatch, p={shape[0]} m={shape[1]}, sigma 0.8, packed"
    note = f"at most {max(packed.gap for _, packed in pairs):.2%} above the bound"
    named = (
        ("largest", "largest cost of a microbatch", 1.0, note),
        ("first", "makespan of 1F1B", 1.0, ""),
        ("planned", "makespan of the planned order", None, "cheap microbatches fill and drain the pipeline in less time, if there are any"),
    )
    return [
        Row(
            f"{words}, {case}",
            [getattr(packed, name) for _, packed in pairs],
            [getattr(in_turn, name) for in_turn, _ in pairs],
            "samples as they come",
            limit=limit,
            unit="",
            note=remark,
        )
        for name, words, limit, remark in named
    ]


def write_tables() -> Iterator[str]:
    """The tables of docs/batches.md, in Markdown."""
    yield from _write_orders(SHAPES, SIGMAS, SEEDS)
    yield ""
    yield from _write_orders(LARGER, SIGMAS[1:2], LARGER_SEEDS)
    yield ""
    yield "| samples | sigma | largest cost | packed | above its bound | 1F1B | packed | planned | packed |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for samples in (2, 4, 8):
        for sigma in SIGMAS:
            pairs = [group_samples((8, 32), samples, sigma, seed) for seed in range(SEEDS)]
            means = [
                [f"{statistics.mean(getattr(pair[k], name) for pair in pairs):.1f}" for k in range(2)]
                for name in ("largest", "first", "planned")
            ]
            gap = max(packed.gap for _, packed in pairs)
            yield f"| {samples} | {sigma} | {' | '.join([*means[0], f'{gap:.2%}', *means[1], *means[2]])} |"


def _write_orders(shapes: tuple[tuple[int, int], ...], sigmas: tuple[float, ...], seeds: int) -> Iterator[str]:
    yield "| ranks, microbatches | sigma | schedules | 1F1B, fixed order | fixed order | ascending | descending | planned |"
    yield "|---|---|---|---|---|---|---|---|"
    for shape in shapes:
        for sigma in sigmas:
            for setting in SETTINGS:
                outcomes = [run_batch(shape, sigma, setting, seed) for seed in range(seeds)]
                cells = [_average([getattr(each, name) for each in outcomes]) for name in ("first", "fixed", *SORTED, "planned")]
                yield f"| {shape[0]}, {shape[1]} | {sigma} | {setting} | {' | '.join(cells)} |"


def _average(values: list[float]) -> str:
    """The mean of those that fit the memory, and how many do if not all."""
    fitting = [value for value in values if value < math.inf]
    if not fitting:
        return "none fit"
    return f"{statistics.mean(fitting):.2f}" + (f" ({len(fitting)} of {len(values)} fit)" if len(fitting) < len(values) else "")


if __name__ == "__main__":
    print("\n".join(write_tables()))
