"""The step after one to three losses in a mesh of pipelines, simulated, against what is left of the ranks and against dropping replicas.

The lost ranks' microbatches run on their peers (`penstock.take_over`). With f of N ranks lost, (N - f) / N of the throughput would be left
if the work could be shared evenly by all ranks; but only the ranks with the same stages can take it over, so a pipeline without bubbles
keeps (D - 1) / D of it at most after one loss among D replicas. The work of the busiest rank is what ReCycle (arXiv 2405.14009) approaches
if ranks begin their next step without waiting for each other. Alone: `python benchmarks/run.py losses`; the table of docs/losses.md:
`python -m benchmarks.losses`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations

from benchmarks.measure import seconds_of
from benchmarks.rows import Case, Row, within

import penstock as ps
from penstock.ir.kind import Kind

COSTS = ps.Costs(f=1.0, i=1.0, w=1.0, latency=0.02, activation=1.0, weight_stash=0.5, output=0.05)
MESHES = ((4, 4, 16), (8, 4, 32), (8, 8, 32))
"""Ranks per pipeline, replicas, and microbatches per replica."""
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")
LIMITED = "split, no more memory"
SETTINGS = {"as before": {"split": False}, "split": {"split": True}, LIMITED: {"split": True}}
"""Whether backwards are split; one setting has the memory limit that the rank with the most activations needed before the loss."""
SAMPLES = 12
"""Sets of lost ranks per number of losses in the table; all of them if there are fewer."""
SMALL = (4, 3, 6)
"""A mesh whose steps after a loss are compared with a bound, each action taking one unit of time and messages none."""
MOST = 5.0
"""Seconds that the new schedule of 128 ranks may take."""


@dataclass(frozen=True)
class Outcome:
    """Throughputs after a loss, as shares of the one before."""

    kept: float
    ideal: float
    """The ranks that are left, as a share of all."""
    busiest: float
    """What the work of the busiest rank allows."""
    dropped: float
    """What is left if replicas with a lost rank are dropped, and the others run all microbatches."""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    meshes, samples = ((2, 2, 4),) if short else MESHES, 2 if short else 4
    shape = (4, 4, 16) if short else (16, 8, 64)
    yield [
        *(
            Case(f"{name}, {mesh[0]} x {mesh[1]}, {setting}", partial(_rows, name, mesh, setting, samples))
            for mesh in meshes
            for name in SCHEDULES
            for setting in SETTINGS
        ),
        Case("bound of one step", _bound_rows),
        Case("time of a new schedule", partial(_speed, shape, 1 if short else 3)),
    ]


def draw_losses(mesh: tuple[int, int, int], count: int, samples: int) -> list[list[tuple[int, int]]]:
    """Sets of lost ranks that leave one of each column."""
    ranks, data, _ = mesh
    places = [(rank, replica) for rank in range(ranks) for replica in range(data)]
    sets = [list(lost) for lost in combinations(places, count) if all(sum(r == rank for r, _ in lost) < data for rank in range(ranks))]
    return sets if len(sets) <= samples else random.Random(count).sample(sets, samples)


@cache
def _time_alone(name: str, ranks: int, microbatches: int) -> ps.Timeline:
    return ps.simulate(ps.lower(ps.schedule(name, ranks, microbatches)), COSTS)


def lose(name: str, mesh: tuple[int, int, int], lost: list[tuple[int, int]], setting: str) -> Outcome:
    ranks, data, microbatches = mesh
    before = _time_alone(name, ranks, microbatches)
    limit = max(before.peak_memory) if setting == LIMITED else None
    after = ps.take_over(
        ps.schedule(name, ranks, microbatches), ps.Survivors.after(ranks, data, lost), costs=COSTS, memory_limit=limit, **SETTINGS[setting]
    )
    hit = len({replica for _, replica in lost})
    alone = _time_alone(name, ranks, -(-microbatches * data // (data - hit))).makespan if hit < data else float("inf")
    forwards = after.schedule.rows.is_kind(Kind.F)
    assert forwards.sum() == microbatches * data * after.schedule.stages
    return Outcome(
        kept=after.throughput,
        ideal=(ranks * data - len(lost)) / (ranks * data),
        busiest=before.makespan / max(after.timeline.busy),
        dropped=before.makespan / alone,
    )


def _rows(name: str, mesh: tuple[int, int, int], setting: str, samples: int) -> list[Row]:
    rows = []
    for count in (1, 2, 3):
        outcomes = [lose(name, mesh, lost, setting) for lost in draw_losses(mesh, count, samples)]
        if not outcomes:
            continue
        most = 1.0 if setting == "split" and count > 1 else None  # after one loss among many replicas, dropping one costs as little
        case = f"step after {count} of {mesh[0] * mesh[1]} ranks, {name}, pp {mesh[0]} x dp {mesh[1]}, {setting}"
        kept = [outcome.kept for outcome in outcomes]
        dropped = statistics.mean(outcome.dropped for outcome in outcomes)
        note = f"throughput {statistics.mean(kept):.3f} of before on average, at least {min(kept):.3f}; replicas dropped: {dropped:.3f}"
        comparisons: list[tuple[str, Callable[[Outcome], float], float | None]] = [
            ("work shared by all ranks that are left", lambda outcome: outcome.ideal, None),
            ("the work of the busiest rank", lambda outcome: outcome.busiest, None),
            ("replicas dropped", lambda outcome: outcome.dropped, most),
        ]
        for against, read, limit in comparisons:
            pairs = [(1 / outcome.kept, 1 / read(outcome)) for outcome in outcomes if read(outcome)]
            if pairs:
                rows.append(Row(case, *zip(*pairs, strict=True), against, limit=limit, unit="of before", note=note))
    return rows


def _bound_rows() -> list[Row]:
    """Steps after losses on a small mesh: a rank cannot begin before the first forward reaches it, and then has all its work to do."""
    ranks, data, microbatches = SMALL
    costs, rows = ps.Costs(f=1.0, i=1.0, w=1.0, latency=0.0), []
    for count in (1, 2, 3):
        steps, bounds, before = [], [], 0.0
        for lost in draw_losses(SMALL, count, SAMPLES):
            survivors = ps.Survivors.after(ranks, data, lost)
            after = ps.take_over(ps.schedule("1f1b", ranks, microbatches), survivors, costs=costs)
            steps.append(after.timeline.makespan)
            bounds.append(max(rank + float(busy) for (rank, _), busy in zip(survivors.places, after.timeline.busy, strict=True)))
            before = after.before.makespan
        case = f"step after {count} of {ranks * data} ranks, 1f1b, pp {ranks} x dp {data}, {microbatches} microbatches, split"
        note = f"{min(steps):g} to {max(steps):g} units of time, {before:g} before"
        rows.append(Row(case, steps, bounds, "the bound of one step", limit=1.1, unit="actions", note=note))
    return rows


def _speed(shape: tuple[int, int, int], rounds: int) -> list[Row]:
    ranks, data, microbatches = shape
    schedule, survivors = ps.schedule("1f1b", ranks, microbatches), ps.Survivors.after(ranks, data, [(1, 1)])
    (times,) = seconds_of(rounds, lambda: ps.take_over(schedule, survivors, costs=COSTS))
    return [within(f"a new schedule, proved, pp {ranks} x dp {data}, {microbatches} microbatches each", times, MOST)]


def write_table() -> Iterator[str]:
    """The table of docs/losses.md, in Markdown: mean and least throughput over the sets of lost ranks."""
    yield "| pp x dp, microbatches | schedule | backwards | after 1 loss | after 2 | after 3 |"
    yield "|---|---|---|---|---|---|"
    for mesh in MESHES:
        for name in SCHEDULES:
            for setting in SETTINGS:
                cells = []
                for count in (1, 2, 3):
                    kept = [lose(name, mesh, lost, setting).kept for lost in draw_losses(mesh, count, SAMPLES)]
                    cells.append(f"{statistics.mean(kept):.3f} ({min(kept):.3f})")
                yield f"| {mesh[0]} x {mesh[1]}, {mesh[2]} | {name} | {setting} | {' | '.join(cells)} |"
        ideal = [f"{1 - count / (mesh[0] * mesh[1]):.3f}" for count in (1, 2, 3)]
        yield f"| {mesh[0]} x {mesh[1]}, {mesh[2]} | | the ranks that are left | {' | '.join(ideal)} |"
        drops = []
        for count in (1, 2, 3):
            sets = draw_losses(mesh, count, SAMPLES)
            hits = [len({replica for _, replica in lost}) for lost in sets]
            times = [_time_alone("1f1b", mesh[0], -(-mesh[2] * mesh[1] // (mesh[1] - hit))).makespan for hit in hits]
            drops.append(f"{statistics.mean(_time_alone('1f1b', mesh[0], mesh[2]).makespan / time for time in times):.3f}")
        yield f"| {mesh[0]} x {mesh[1]}, {mesh[2]} | 1f1b | replicas dropped | {' | '.join(drops)} |"


if __name__ == "__main__":
    print("\n".join(write_table()))
