"""Schedules over slices of the sequence: bubble and memory are the formulas, by a longest path of this file's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, product

import pytest

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.codes import MAX_MICROBATCHES
from penstock.ir.kind import Kind
from penstock.schedules.registry import algorithms
from penstock.testing import check_schedule

EQUAL = (1, 1, 1)
TIMES = (EQUAL, (2, 2, 1), (3, 2, 1))
"""F, I and W of one slice of a stage."""
RANKS, SLICES = range(2, 17), range(1, 17)
SOME_RANKS, SOME_SLICES = (2, 3, 4, 5, 8, 16), (1, 2, 3, 4, 7, 16)
SLICED = sorted(name for name, known in algorithms().items() if known.slices is not None)


def combine(p: int, *values: Iterable[int]) -> Iterable[tuple[int, ...]]:
    """All combinations; on many ranks, where each takes long, each of the first values with one of the others."""
    first, *others = values
    return product(*values) if p <= 5 else zip(first, *map(cycle, others), strict=False)


Unit = tuple[str, int, int, int]
"""What is made: F, I or W, of a stage, a microbatch and a slice."""


class Run:
    """One schedule, action by action: when each ends, and how many slices' activations each rank holds."""

    def __init__(self, schedule: ps.Schedule, f: int, i: int, w: int) -> None:
        self.schedule = schedule
        self.takes = {Kind.F: f, Kind.B: i + w, Kind.I: i, Kind.W: w}
        self.ends: dict[Unit, int] = {}
        self.clock = [0] * schedule.ranks
        self.held, self.most = [0] * schedule.ranks, [0] * schedule.ranks
        rows = [list(row) for row in schedule]
        at = [0] * schedule.ranks
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while at[rank] < len(row) and self._step(rank, row[at[rank]]):
                    at[rank] += 1
                    moved = True
        assert at == [len(row) for row in rows], "deadlock"

    def _step(self, rank: int, action: ps.Action) -> bool:
        needed = list(self._needs(action))
        if any(unit not in self.ends for unit in needed):
            return False
        end = max([self.clock[rank], *(self.ends[unit] for unit in needed)]) + self.takes[action.kind]
        place = action.stage, action.microbatch or 0, action.slice or 0
        self.clock[rank] = end
        for made in {Kind.B: "IW"}.get(action.kind, action.kind.name):
            self.ends[made, *place] = end
        self.held[rank] += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
        self.most[rank] = max(self.most[rank], self.held[rank])
        return True

    def _needs(self, action: ps.Action) -> Iterator[Unit]:
        stage, microbatch, part = action.stage, action.microbatch or 0, action.slice or 0
        if action.kind is Kind.W:
            yield "I", stage, microbatch, part
        elif action.kind is Kind.F:
            if stage:
                yield "F", stage - 1, microbatch, part
            yield from (("F", stage, microbatch, earlier) for earlier in range(part))
        else:
            yield "F", stage, microbatch, part
            if stage + 1 < self.schedule.stages:
                yield "I", stage + 1, microbatch, part
            yield from (("I", stage, microbatch, later) for later in range(part + 1, self.schedule.slices))

    @property
    def idle(self) -> int:
        """The makespan less the work of a rank."""
        work = self.schedule.chunks * self.schedule.microbatches * self.schedule.slices * (self.takes[Kind.F] + self.takes[Kind.B])
        return max(self.clock) - work


def check(
    schedule: ps.Schedule,
    idle: Callable[[int, int, int], int] | None,
    most: list[int],
    times: tuple[tuple[int, int, int], ...] = TIMES,
) -> None:
    """Idle time of a rank in a slice's times, and what each rank holds in slices of a stage, counted to W."""
    for f, i, w in times:
        run = Run(schedule, f, i, w)
        timeline = ps.simulate(schedule, ps.Costs(f=f, i=i, w=w, activation=1.0, weight_stash=1.0), engine="plain")
        assert timeline.makespan == max(run.clock)
        assert timeline.peak_memory == run.most == most
        assert idle is None or run.idle == idle(f, i, w)


# The formulas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", SOME_RANKS)
def test_seq1f1b(p: int) -> None:
    """Seq1F1B's warm-up, (p-1)(F+B) of a slice idle, and min(p-s-1+q, mq) slices on rank s."""
    for q, m in combine(p, SOME_SLICES, (1, 2, 3)):
        schedule = ps.schedule("seq1f1b", ranks=p, microbatches=m, slices=q)
        for rank, row in enumerate(schedule):
            first = next(place for place, action in enumerate(row) if action.kind is Kind.B)
            assert first == min(p - rank - 2 + q, m * q - 1) + 1  # the warm-up, and the forward before the first backward
        check(schedule, lambda f, i, w: (p - 1) * (f + i + w), [min(p - s - 1 + q, m * q) for s in range(p)], TIMES[:2])


@pytest.mark.parametrize("p", SOME_RANKS)
def test_seq_zb_h1(p: int) -> None:
    """(p-1)(F+I-W) of a slice idle once there are p+q-1 slices; as many slices held on every rank."""
    for q in SOME_SLICES:
        for m in (-(-(p - 1) // q) + 1, -(-(p - 1) // q) + 2):
            schedule = ps.schedule("seq-zb-h1", ranks=p, microbatches=m, slices=q)
            check(schedule, lambda f, i, w: (p - 1) * (f + i - w), [p - 1 + q] * p, TIMES[:2])
        alone = ps.schedule("seq-zb-h1", ranks=p, microbatches=1, slices=q)
        assert max(Run(alone, *EQUAL).most) <= q


@pytest.mark.parametrize("p", SOME_RANKS)
def test_slimpipe_holds_one_microbatch_and_two_slices_per_hop(p: int) -> None:
    for q, v, m in combine(p, SOME_SLICES, (1, 2, 3), (1, 2)):
        hop, group = 1 if v == 1 else 2, -(-p // q)
        schedule = ps.schedule("slimpipe", ranks=p, microbatches=m * group, chunks=v, slices=q)
        most = [min((v - 1) * group * q + q + hop * (p - r - 1), m * group * q * v) for r in range(p)]
        check(schedule, lambda f, i, w: (p - 1) * (f + i + w), most, TIMES[:1])
        if q >= p:
            assert most == [min(v * q + hop * (p - r - 1), m * v * q) for r in range(p)]


@pytest.mark.parametrize("p", SOME_RANKS)
def test_interleaved_1f1b(p: int) -> None:
    for q, v in combine(p, SOME_SLICES, (1, 2, 3)):
        group = -(-p // q)
        schedule = ps.schedule("interleaved-1f1b", ranks=p, microbatches=2 * group, chunks=v, slices=q)
        most = [min(2 * (p - r - 1) + (v - 1) * group * q + q, 2 * group * q * v) for r in range(p)]
        check(schedule, lambda f, i, w: (p - 1) * (f + i + w), most, TIMES[:2])


@pytest.mark.parametrize("p", SOME_RANKS)
def test_interleaved_zb(p: int) -> None:
    for q, v in combine(p, SOME_SLICES, (1, 2, 3)):
        group = -(-p // q)
        schedule = ps.schedule("interleaved-zb", ranks=p, microbatches=2 * group, chunks=v, slices=q)
        check(schedule, lambda f, i, w: (p - 1) * (f + i - w), [(v - 1) * group * q + p - 1 + q] * p, TIMES[:2])


@pytest.mark.parametrize("p", SOME_RANKS)
def test_zbv(p: int) -> None:
    """No rank waits between its first and its last action, with 2(p+q-1) slices of a stage."""
    for q in SOME_SLICES:
        schedule = ps.schedule("zbv", ranks=p, microbatches=-(-(2 * p + q - 2) // q), slices=q)
        check(schedule, lambda f, i, w: (p - 1) * f, [2 * (p + q - 1)] * p, (EQUAL,))


@pytest.mark.parametrize("name", ["v-half", "v-min", "1f1b-v", "eager-1f1b", "zb-h2"])
@pytest.mark.parametrize("p", [2, 3, 4, 6, 8])
def test_a_slice_more_is_one_unit_of_each_chunk_more(name: str, p: int) -> None:
    """The fullest rank holds q-1 slices of each stage more than the unsliced order holds microbatches; no more slots are idle."""
    plain = Run(ps.schedule(name, ranks=p, microbatches=3 * p), *EQUAL)
    for q in (2, 3, 4, 7):
        sliced = ps.schedule(name, ranks=p, microbatches=3 * p, slices=q)
        run = Run(sliced, *EQUAL)
        assert max(run.most) == max(plain.most) + sliced.chunks * (q - 1)
        assert run.idle <= plain.idle
        assert ps.simulate(sliced, engine="plain").makespan == max(run.clock)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("looped-bfs", 2)])
@pytest.mark.parametrize("p", [2, 3, 5])
def test_all_forwards_first_holds_everything(name: str, chunks: int, p: int) -> None:
    for q, m in product((1, 2, 4), (1, 5)):
        group = -(-p // q)  # as many microbatches as keep every rank busy
        schedule = ps.schedule(name, ranks=p, microbatches=m * group, slices=q)
        check(schedule, lambda f, i, w: (p - 1) * (f + i + w), [chunks * m * group * q] * p, TIMES[:2])


# The whole grid, by the simulator alone -----------------------------------------------------------------------------------


def measure_idle_and_held(schedule: ps.Schedule) -> tuple[float, list[float]]:
    """Idle time of a rank, and what each holds in slices of a stage, if F, I and W take 1 each."""
    timeline = ps.simulate(schedule, ps.Costs(activation=1.0, weight_stash=1.0))
    return timeline.makespan - 3 * schedule.chunks * schedule.microbatches * schedule.slices, timeline.peak_memory


@pytest.mark.parametrize("p", RANKS)
def test_formulas_on_the_whole_grid(p: int) -> None:
    """The formulas above, for each number of slices up to 16 with a fourth of the ranks."""
    for q in SLICES:
        if (p + q) % 4:
            continue
        group, v = -(-p // q), 2
        schedule = ps.schedule("seq1f1b", ranks=p, microbatches=2, slices=q)
        assert measure_idle_and_held(schedule) == ((p - 1) * 3, [min(p - r - 1 + q, 2 * q) for r in range(p)])
        schedule = ps.schedule("seq-zb-h1", ranks=p, microbatches=-(-(p - 1) // q) + 1, slices=q)
        assert measure_idle_and_held(schedule) == (p - 1, [p - 1 + q] * p)
        schedule = ps.schedule("slimpipe", ranks=p, microbatches=2 * group, chunks=v, slices=q)
        most = [min((v - 1) * group * q + q + 2 * (p - r - 1), 2 * group * q * v) for r in range(p)]
        assert measure_idle_and_held(schedule) == ((p - 1) * 3, most)
        schedule = ps.schedule("interleaved-1f1b", ranks=p, microbatches=2 * group, chunks=v, slices=q)
        most = [min(2 * (p - r - 1) + (v - 1) * group * q + q, 2 * group * q * v) for r in range(p)]
        assert measure_idle_and_held(schedule) == ((p - 1) * 3, most)
        schedule = ps.schedule("interleaved-zb", ranks=p, microbatches=2 * group, chunks=v, slices=q)
        assert measure_idle_and_held(schedule) == (p - 1, [(v - 1) * group * q + p - 1 + q] * p)
        schedule = ps.schedule("zbv", ranks=p, microbatches=-(-(2 * p + q - 2) // q), slices=q)
        assert measure_idle_and_held(schedule) == (p - 1, [2 * (p + q - 1)] * p)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v-half", "v-min", "1f1b-v"])
def test_schedules_on_a_v_on_a_grid(name: str) -> None:
    """Of each stage q-1 slices more than the unsliced order holds microbatches, and one more idle slot at most (v-half, 12 or 16 ranks)."""
    for p in (*range(2, 9), 12, 16):
        plain_idle, plain_held = measure_idle_and_held(ps.schedule(name, ranks=p, microbatches=3 * p))
        for q in (*range(1, 6), 8, 11, 16):
            schedule = ps.schedule(name, ranks=p, microbatches=max(-(-3 * p // q), 2), slices=q)
            idle, held = measure_idle_and_held(schedule)
            assert max(held) == max(plain_held) + 2 * (q - 1)
            assert idle <= plain_idle + (name == "v-half")


# Every schedule that takes slices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SLICED)
def test_any_microbatches_and_slices_conform(name: str) -> None:
    """Every pair of two of the three counts, each once."""
    for (row, p), (column, q) in product(enumerate((1, 2, 3, 5)), enumerate((2, 3, 4, 7))):
        check_schedule(ps.schedule(name, ranks=p, microbatches=(1, 2, 3, 7)[(row + column) % 4], slices=q))


@pytest.mark.parametrize("name", SLICED)
def test_forwards_ascend_and_backwards_descend(name: str) -> None:
    for row in ps.schedule(name, ranks=3, microbatches=4, slices=3):
        for kinds, falling in (((Kind.F,), False), ((Kind.B, Kind.I), True)):
            for stage, microbatch in {(action.stage, action.microbatch) for action in row}:
                order = [a.slice for a in row if a.kind in kinds and (a.stage, a.microbatch) == (stage, microbatch)]
                assert order == sorted(order, reverse=falling)


@pytest.mark.parametrize(("name", "plain"), [("seq1f1b", "1f1b"), ("seq-zb-h1", "zb-h1"), ("slimpipe", "1f1b")])
def test_one_slice_is_the_schedule_of_microbatches(name: str, plain: str) -> None:
    for p, m in product((1, 2, 4, 7), (1, 3, 8)):
        chunks = {"chunks": 1} if name == "slimpipe" else {}
        assert ps.schedule(name, ranks=p, microbatches=m, slices=1, **chunks) == ps.schedule(plain, ranks=p, microbatches=m)


def test_slimpipe_with_one_slice_is_interleaved_1f1b() -> None:
    for p, v, groups in product((2, 3, 4), (2, 3), (1, 2, 3)):
        one = ps.schedule("slimpipe", ranks=p, microbatches=p * groups, chunks=v, slices=1)
        assert one == ps.schedule("interleaved-1f1b", ranks=p, microbatches=p * groups, chunks=v, group_size=p)


def test_another_count_of_microbatches_keeps_the_slices() -> None:
    schedule = ps.schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=3, slices=3)
    assert schedule.remake is not None
    assert schedule.remake(6) == ps.schedule("interleaved-1f1b", ranks=2, microbatches=6, chunks=3, slices=3)
    assert schedule.options == {"slices": 3}


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(algorithms()) - set(SLICED)))
def test_others_are_refused_with_those_that_take_slices(name: str) -> None:
    with pytest.raises(ScheduleError, match=f"{name} has no option 'slices': its order is not made for them; .* seq1f1b, slimpipe"):
        ps.schedule(name, ranks=1 if name == "data-parallel" else 2, microbatches=4, slices=2)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4", True])
def test_wrong_counts_are_refused(wrong: object) -> None:
    with pytest.raises(ScheduleError, match=f"slices must be .*{wrong!r}"):
        ps.schedule("seq1f1b", ranks=2, microbatches=4, slices=wrong)


def test_too_many_slices_are_refused() -> None:
    with pytest.raises(ScheduleError, match="4096 microbatches of 8192 slices: at most"):
        ps.schedule("seq1f1b", ranks=2, microbatches=4096, slices=8192)
    with pytest.raises(ScheduleError, match=r"8192 slices of 4096 microbatches: .* at most"):
        ps.Schedule(ps.Placement.linear(2), 4096, lambda rank: ps.schedule("1f1b", 2, 1).row(rank), slices=8192)
    assert ps.schedule("seq1f1b", ranks=2, microbatches=4096, slices=MAX_MICROBATCHES // 4096).units == MAX_MICROBATCHES


def test_two_copies_of_the_model_are_refused() -> None:
    both = ps.schedule("dualpipe", ranks=2, microbatches=4)
    with pytest.raises(ScheduleError, match=r"slices=2 on a bidirectional placement: .* must stay on one rank"):
        ps.Schedule.from_rows(both.rows, both.placement, 2, slices=2)
