"""Where nothing fits: by how much, on which rank, and what would."""

from __future__ import annotations

import re

import pytest

import penstock as ps
from penstock.errors import PlanError

LAYER = ps.Layer(f=1, i=1, w=1, activation=8, output=1, parameters=2)
MODEL = ps.Profile([LAYER] * 8, input=1, microbatch=4)
"""On 4 ranks each keeps 4 and holds 16 a microbatch; recomputed, it holds a microbatch's input, and 15 more for a moment."""


def refused(**given) -> str:
    with pytest.raises(PlanError) as error:
        ps.plan(MODEL, **{"ranks": 4, "microbatches": 8, "seconds": 0, **given})
    return str(error.value)


def remedies(said: str) -> dict[str, str]:
    what = r"^  (recompute=True|microbatches of \d+|\d+ ranks|a memory limit of [\d.]+\w*)[^:]*: (.*)$"
    return dict(re.findall(what, said, flags=re.MULTILINE))


def test_it_says_by_how_much_and_where():
    said = refused(memory_limit=60.0, schedules="gpipe")
    # All 8 microbatches at once: 4 + 8 x 16, and the messages that have come in.
    match = re.search(r"nearest is gpipe \(linear, 8 microbatches of 4\): rank (\d) holds ([\d.]+), ([\d.]+) over its limit of 60", said)
    assert match is not None, said
    assert float(match[2]) == pytest.approx(60 + float(match[3]))
    assert float(match[2]) >= 4 + 8 * 16


def test_each_remedy_fits_when_it_is_taken():
    said = refused(memory_limit=18.5)
    found = remedies(said)
    assert set(found) >= {"microbatches of 2", "8 ranks"}
    limit = next(name for name in found if name.startswith("a memory limit"))
    assert ps.plan(MODEL, ranks=4, microbatches=8, memory_limit=float(limit.split()[-1]), seconds=0)
    assert ps.plan(MODEL, ranks=4, batch=32, microbatch_sizes=[2], memory_limit=18.5, seconds=0)
    assert ps.plan(MODEL, ranks=8, microbatches=8, memory_limit=18.5, seconds=0)
    with pytest.raises(PlanError):
        ps.plan(MODEL, ranks=4, microbatches=8, memory_limit=18.5, seconds=0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zbv"])
def test_the_limit_that_is_advised_is_the_least(schedule):
    """The cut for a limit holds less than the most even one."""
    layers = [ps.Layer(f=1, i=1, w=1, activation=8 - 0.5 * place, output=0.1, parameters=2) for place in range(12)]
    given = {"ranks": 4, "microbatches": 8, "schedules": schedule, "seconds": 0}
    with pytest.raises(PlanError) as error:
        ps.plan(ps.Profile(layers), memory_limit=20.0, **given)
    limit = float(next(name for name in remedies(str(error.value)) if name.startswith("a memory limit")).split()[-1])
    assert ps.plan(ps.Profile(layers), memory_limit=limit, **given)
    with pytest.raises(PlanError):
        ps.plan(ps.Profile(layers), memory_limit=limit * 0.98, **given)


def test_recompute_is_offered_where_it_helps_and_was_not_allowed():
    assert "recompute=True" in remedies(refused(memory_limit=60.0, schedules="gpipe"))
    assert "recompute=True" not in remedies(refused(memory_limit=10.0))  # one microbatch at a time is too much even so
    assert ps.plan(MODEL, ranks=4, microbatches=8, memory_limit=60.0, schedules="gpipe", recompute=True, seconds=0)


def test_with_nothing_but_one_schedule_only_that_one_is_advised():
    said = refused(memory_limit=60.0, schedules="gpipe")
    assert all("gpipe" in remedy for remedy in remedies(said).values())


def test_what_is_too_large_with_a_single_microbatch_is_said():
    said = refused(memory_limit=10.0)
    # Two layers a rank hold 16 a microbatch besides the 4 that they keep.
    assert re.search(
        r"too large for one microbatch: .*1f1b.* \(rank \d is 10 over; it keeps 4 for parameters, gradients and optimizer alone\)", said
    )
    assert "data-parallel: " in said


def test_limits_that_differ_are_listed():
    said = refused(memory_limit=[1.0, 2.0, 3.0, 4.0])
    assert "4 ranks with limits of 1, 2, 3, 4" in said.splitlines()[0]
    assert not any(name.endswith("ranks") for name in remedies(said))  # nobody knows what further ranks would have


def test_bytes_are_written_as_such():
    layer = ps.Layer(f=1, i=1, w=1, activation="1GiB", parameters="2GiB")
    with pytest.raises(PlanError, match="memory limit of 5GiB each") as error:
        ps.plan(ps.Profile([layer] * 4), ranks=2, microbatches=4, memory_limit="5GiB", seconds=0)
    assert "a memory limit of 6GiB: " in str(error.value)  # 4 for parameters, 2 for a microbatch
