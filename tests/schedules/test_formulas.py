"""Bubble and memory are the published formulas, by a longest path of this file's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

import penstock as ps
from penstock.ir.action import Action
from penstock.ir.kind import Kind

Spans = list[list[tuple[int, int]]]
TO_INPUT, TO_WEIGHTS = (Kind.B, Kind.I), (Kind.B, Kind.W)
EQUAL = (1, 1, 1)
TIMES = [EQUAL, (2, 2, 1), (4, 4, 3), (3, 2, 1), (1, 2, 1), (2, 3, 2)]
"""F, I and W of one stage, none with W > F."""


def run(schedule: ps.Schedule, f: int, i: int, w: int, latency: int = 0) -> Spans:
    """Start and end of every action, each rank's in order; an overlapped action takes as long as its parts one by one."""
    times = {Kind.F: f, Kind.B: i + w, Kind.I: i, Kind.W: w}
    rows, spans = list(schedule), [[] for _ in range(schedule.ranks)]
    made: dict[tuple[str, int, int], tuple[int, int]] = {}  # when, and on which rank

    def start(rank: int, action: Action) -> int | None:
        begin = spans[rank][-1][1] if spans[rank] else 0
        for part in action.parts:
            for need in wanted(part, schedule.stages):
                if need not in made:
                    return None
                end, home = made[need]
                begin = max(begin, end + latency * (home != rank))
        return begin

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while len(spans[rank]) < len(row) and (begin := start(rank, row[len(spans[rank])])) is not None:
                parts = row[len(spans[rank])].parts
                end = begin + sum(times[part.kind] for part in parts)
                made |= {(result(part.kind), part.stage, part.microbatch): (end, rank) for part in parts}
                spans[rank].append((begin, end))
                moved = True
    assert [len(row) for row in rows] == [len(row) for row in spans], "deadlock"
    return spans


def result(kind: Kind) -> str:
    return "gradient" if kind in (Kind.B, Kind.I) else kind.name


def wanted(part: Action, stages: int) -> list[tuple[str, int, int]]:
    stage, microbatch = part.stage, part.microbatch or 0
    if part.kind is Kind.F:
        return [("F", stage - 1, microbatch)] if stage else []
    if part.kind is Kind.W:
        return [("gradient", stage, microbatch)]
    return [("F", stage, microbatch)] + ([("gradient", stage + 1, microbatch)] if stage + 1 < stages else [])


def makespan(spans: Spans) -> int:
    return max(row[-1][1] for row in spans)


def longest_span(spans: Spans) -> int:
    return max(row[-1][1] - row[0][0] for row in spans)


def bubble(
    name: str, ranks: int, microbatches: int, times: tuple[int, int, int], whole: Callable[[Spans], int] = makespan, **options: int
) -> int:
    """What is left of the makespan or span after a rank's work."""
    schedule = ps.schedule(name, ranks=ranks, microbatches=microbatches, **options)
    work = len(schedule.placement.stages_of(0)) * microbatches // len(schedule.placement.copies)
    return whole(run(schedule, *times)) - work * sum(times)


def peak(schedule: ps.Schedule, rank: int, ends: tuple[Kind, ...]) -> int:
    """The most microbatches of any stage held at once, from their forward to the end of an action of one of the kinds."""
    held = most = 0
    for action in schedule[rank]:
        held += sum(part.kind is Kind.F for part in action.parts)
        most = max(most, held)
        held -= sum(part.kind in ends for part in action.parts)
    assert held == 0
    return most


# Bubbles --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", range(1, 6))
def test_bubble_of_linear_schedules(ranks: int, times: tuple[int, int, int]) -> None:
    f, i, w = times
    for microbatches in range(1, 3 * ranks + 1):
        for name in ("gpipe", "1f1b", "eager-1f1b"):
            assert bubble(name, ranks, microbatches, times) == (ranks - 1) * (f + i + w)
    for microbatches in range(ranks, 3 * ranks + 1):
        assert bubble("zb-h1", ranks, microbatches, times) == (ranks - 1) * (f + i - w)
    for microbatches in range(2 * ranks - 1, 4 * ranks):
        assert bubble("zb-h2", ranks, microbatches, times, longest_span) == (ranks - 1) * (f + i - 2 * w)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", range(1, 6))
def test_fewer_microbatches_than_ranks(ranks: int, times: tuple[int, int, int]) -> None:
    f, i, w = times
    for microbatches in range(1, ranks + 1):
        turns = microbatches + ranks - 1
        assert makespan(run(ps.schedule("1f1b", ranks=ranks, microbatches=microbatches), *times)) == turns * (f + i + w)
        assert makespan(run(ps.schedule("zb-h1", ranks=ranks, microbatches=microbatches), *times)) == turns * (f + i) + w


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("ranks", range(1, 5))
def test_bubble_of_looped_schedules(ranks: int, chunks: int, times: tuple[int, int, int]) -> None:
    """In times of one stage, a rank's share over the number of chunks."""
    f, i, w = times
    for microbatches in range(ranks, 3 * ranks + 1):
        assert bubble("looped-bfs", ranks, microbatches, times, chunks=chunks) == (ranks - 1) * (f + i + w)
    for microbatches in range(ranks, 4 * ranks, ranks):
        assert bubble("interleaved-1f1b", ranks, microbatches, times, chunks=chunks) == (ranks - 1) * (f + i + w)
        assert bubble("interleaved-zb", ranks, microbatches, times, chunks=chunks) == (ranks - 1) * (f + i - w)


@pytest.mark.parametrize("ranks", range(1, 7))
def test_zbv_has_no_gap_with_equal_times(ranks: int) -> None:
    for microbatches in range(2 * ranks - 1, 4 * ranks):
        assert bubble("zbv", ranks, microbatches, EQUAL, longest_span) == 0
        # (p-1)F/2 with F of both stages of a rank
        assert bubble("zbv", ranks, microbatches, EQUAL) == ranks - 1


@pytest.mark.parametrize("times", [EQUAL, (2, 2, 1), (4, 4, 3)])
@pytest.mark.parametrize("ranks", range(1, 6))
def test_bubble_of_dualpipe(ranks: int, times: tuple[int, int, int]) -> None:
    f, i, w = times
    a_hop = (f + i + w) + (i + w) - 3 * w
    for microbatches in range(2 * ranks, 4 * ranks):
        assert bubble("dualpipe-v", ranks, microbatches, times) == (ranks - 1) * a_hop
    for pairs in range(2 * ranks, 4 * ranks):
        assert bubble("dualpipe", 2 * ranks, 2 * pairs, times) == (ranks - 1) * a_hop


def test_dualpipe_of_8_ranks_and_20_microbatches() -> None:
    spans = run(ps.schedule("dualpipe", ranks=8, microbatches=20), *EQUAL)
    assert makespan(spans) == 66
    assert [66 - sum(end - begin for begin, end in row) for row in spans] == [6] * 8


def test_inference_bubble() -> None:
    for ranks in range(1, 6):
        for microbatches in range(1, 8):
            assert makespan(run(ps.schedule("inference", ranks=ranks, microbatches=microbatches), 3, 1, 1)) == 3 * (
                microbatches + ranks - 1
            )


def test_eager_hides_latency() -> None:
    """With hops of half a forward 1f1b waits in every round; eager pays each hop once down and once up."""
    for ranks in range(2, 6):
        plain, eager = (run(ps.schedule(name, ranks=ranks, microbatches=8 * ranks), 2, 2, 2, latency=1) for name in ("1f1b", "eager-1f1b"))
        assert makespan(eager) == (8 * ranks + ranks - 1) * 6 + 2 * (ranks - 1)
        assert makespan(plain) > makespan(eager)


def test_dropping_is_never_slower_than_the_count_it_was_built_for() -> None:
    for name in ("interleaved-1f1b", "interleaved-zb", "zbv", "dualpipe-v"):
        for ranks in range(1, 5):
            walls = [makespan(run(ps.schedule(name, ranks=ranks, microbatches=m), *EQUAL)) for m in range(1, 3 * ranks + 1)]
            assert all(a <= b for a, b in pairwise(walls)), (name, ranks, walls)


# Memory ---------------------------------------------------------------------------------------------------------------

PEAKS: dict[str, tuple[tuple[Kind, ...], Callable[[int, int, int], int]]] = {
    "gpipe": (TO_INPUT, lambda p, r, m: m),
    "1f1b": (TO_INPUT, lambda p, r, m: min(p - r, m)),
    "eager-1f1b": (TO_INPUT, lambda p, r, m: min(2 * (p - r) - 1, m)),
    "zb-h1": (TO_WEIGHTS, lambda p, r, m: min(p, m)),
    "zb-h2": (TO_WEIGHTS, lambda p, r, m: min(2 * p - 1, m)),
}


@pytest.mark.parametrize("name", PEAKS)
def test_peak_of_linear_schedules(name: str) -> None:
    ends, formula = PEAKS[name]
    for ranks in range(1, 8):
        for microbatches in range(1, 4 * ranks):
            schedule = ps.schedule(name, ranks=ranks, microbatches=microbatches)
            assert [peak(schedule, r, ends) for r in range(ranks)] == [formula(ranks, r, microbatches) for r in range(ranks)]


def test_zero_bubble_holds_inputs_no_longer_than_the_warm_up() -> None:
    for ranks in range(1, 8):
        for name, depth in (("zb-h1", 1), ("zb-h2", 2)):
            schedule = ps.schedule(name, ranks=ranks, microbatches=3 * ranks)
            assert [peak(schedule, r, TO_INPUT) for r in range(ranks)] == [depth * (ranks - r - 1) + 1 for r in range(ranks)]


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", range(1, 6))
def test_peak_of_looped_schedules(ranks: int, chunks: int) -> None:
    """In stages, with whole groups of one microbatch a rank."""
    p, v = ranks, chunks
    for m in range(p, 5 * p, p):
        held = {n: ps.schedule(n, ranks=p, microbatches=m, chunks=v) for n in ("looped-bfs", "interleaved-1f1b", "interleaved-zb")}
        for r in range(p):
            assert peak(held["looped-bfs"], r, TO_INPUT) == m * v
            assert peak(held["interleaved-1f1b"], r, TO_INPUT) == min(2 * (p - r - 1) + (v - 1) * p + 1, m * v)
            assert peak(held["interleaved-zb"], r, TO_WEIGHTS) == (v - 1) * p + p
        assert peak(held["interleaved-1f1b"], 0, TO_INPUT) == min(p * v + p - 1, m * v)


@pytest.mark.parametrize("ranks", range(1, 8))
def test_peak_of_v_and_bidirectional_schedules(ranks: int) -> None:
    for microbatches in range(2 * ranks + 1, 4 * ranks + 1):
        assert {peak(ps.schedule("zbv", ranks=ranks, microbatches=microbatches), r, TO_INPUT) for r in range(ranks)} == {2 * ranks}
        folded = ps.schedule("dualpipe-v", ranks=ranks, microbatches=microbatches)
        assert {peak(folded, r, TO_INPUT) for r in range(ranks)} == {2 * ranks + 1}
        both = ps.schedule("dualpipe", ranks=2 * ranks, microbatches=2 * microbatches)
        assert {peak(both, r, TO_INPUT) for r in range(2 * ranks)} == {2 * ranks + 1}


def test_data_parallel_holds_one() -> None:
    assert peak(ps.schedule("data-parallel", ranks=1, microbatches=9), 0, TO_INPUT) == 1
