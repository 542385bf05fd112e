"""Which group sizes work, by brute force over the order with a short last group."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.ir.steps import walk
from penstock.schedules._interleaved import deadlocks
from penstock.schedules.registry import Shape

pytestmark = pytest.mark.slow


def short_last_group(shape: Shape, group: int, hop: int) -> Schedule:
    """The interleaved order that takes the rest of the microbatches as a group like the others, for a warm-up of `hop` a rank."""
    p, v, m = shape.ranks, shape.chunks, shape.microbatches
    units = [(c, i) for first in range(0, m, group) for c in range(v) for i in range(first, min(first + group, m))]
    rows = []
    for rank in range(p):
        warm_up = min(hop * (p - rank - 1) + (v - 1) * group, m * v)
        forwards = [f"{c * p + rank}F{i}" for c, i in units]
        backwards = [f"{(v - 1 - c) * p + rank}B{i}" for c, i in units]
        steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
        rows.append(forwards[:warm_up] + steady + backwards[m * v - warm_up :])
    return Schedule.from_actions(rows, Placement.looped(p, v))


def hangs(schedule: Schedule) -> bool:
    return not walk(schedule.rows, schedule.links.data).complete


def test_the_criterion_is_exact() -> None:
    found = 0
    for p, v in product(range(1, 7), range(1, 5)):
        for group, rest, groups in product(range(p, 2 * p + 1), range(p + 1), (1, 2)):
            shape = Shape(p, v, groups * group + min(rest, group - 1))
            found += deadlocks(shape, group)
            assert hangs(short_last_group(shape, group, hop=2)) == deadlocks(shape, group), (shape, group)
    assert found > 20


def test_the_shorter_warm_up_of_zero_bubble_never_hangs() -> None:
    for p, v in product(range(1, 6), range(1, 4)):
        for group, rest in product(range(p, 2 * p + 1), range(p)):
            assert not hangs(short_last_group(Shape(p, v, group + rest), group, hop=1))


def steps(schedule: Schedule) -> int:
    """How many steps the order takes when every action takes one."""
    done = walk(schedule.rows, schedule.links.data)
    assert done.complete
    return int(done.step.max()) + 1


def test_building_for_the_next_multiple_is_never_slower() -> None:
    """And it has the bubble of whole groups, (p-1) forwards and backwards, if the last group is not shorter than the pipeline."""
    for p, v in product(range(2, 6), range(2, 4)):
        for group, rest in product(range(p, 2 * p + 1), range(2 * p)):
            shape = Shape(p, v, group + rest)
            if rest >= group or deadlocks(shape, group):
                continue
            ours = steps(ps.schedule("interleaved-1f1b", ranks=p, microbatches=group + rest, chunks=v, group_size=group))
            assert ours <= steps(short_last_group(shape, group, hop=2))
            least = 2 * (group + rest) * v + 2 * (p - 1)
            assert ours > least if 0 < rest < p else ours == least


def test_a_size_that_hangs_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ScheduleError, match=r"group_size=10 leaves a last group of 2 of the 32 microbatches.*at least 8, such as 11,"):
        ps.schedule("interleaved-1f1b", ranks=8, microbatches=32, chunks=4, group_size=10)
    ps.schedule("interleaved-1f1b", ranks=8, microbatches=32, chunks=4, group_size=11)


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zb"])
@pytest.mark.parametrize("wrong", [3, 9, 0, -4, True, 4.0, "4"])
def test_a_size_out_of_range_is_refused(name: str, wrong: object) -> None:
    with pytest.raises(ScheduleError, match=rf"from 4 to 8 for 4 ranks and 8 microbatches, got {wrong!r}"):
        ps.schedule(name, ranks=4, microbatches=8, group_size=wrong)


def test_fewer_microbatches_than_ranks_are_one_group() -> None:
    assert ps.schedule("interleaved-1f1b", ranks=4, microbatches=3, group_size=3) == ps.schedule(
        "interleaved-1f1b", ranks=4, microbatches=3
    )
    with pytest.raises(ScheduleError, match="from 3 to 3"):
        ps.schedule("interleaved-1f1b", ranks=4, microbatches=3, group_size=4)


@given(st.data())
def test_the_order_is_the_formula(data: st.DataObject) -> None:
    """Forward k is chunk (k mod Nv)//N of microbatch (k//Nv)N + k mod N; backwards take the chunks in reverse."""
    p, v = data.draw(st.integers(1, 6), "ranks"), data.draw(st.integers(1, 4), "chunks")
    m = data.draw(st.integers(p, 4 * p), "microbatches")
    n = data.draw(st.integers(p, m).filter(lambda n: not deadlocks(Shape(p, v, m), n)), "group_size")
    r = data.draw(st.integers(0, p - 1), "rank")
    name = data.draw(st.sampled_from(["interleaved-1f1b", "interleaved-zb"]))
    row = [str(a) for a in ps.schedule(name, ranks=p, microbatches=m, chunks=v, group_size=n)[r]]
    units = [((k % (n * v)) // n, k // (n * v) * n + k % n) for k in range(-(-m // n) * n * v)]
    backward = "B" if name == "interleaved-1f1b" else "I"
    assert [a for a in row if "F" in a] == [f"{c * p + r}F{i}" for c, i in units if i < m]
    assert [a for a in row if backward in a] == [f"{(v - 1 - c) * p + r}{backward}{i}" for c, i in units if i < m]
    if m % n == 0:
        hop = 2 if name == "interleaved-1f1b" else 1
        assert next(k for k, a in enumerate(row) if "F" not in a) == min(hop * (p - r - 1) + (v - 1) * n + 1, m * v)


def test_default_is_pytorchs() -> None:
    for p, m in product(range(1, 9), range(1, 25)):
        n = m // max(1, m // p)
        if m % n == 0:
            plain, grouped = (ps.schedule("interleaved-1f1b", ranks=p, microbatches=m, chunks=3, **o) for o in ({}, {"group_size": n}))
            assert plain == grouped
