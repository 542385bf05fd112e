"""The refusal of a plan: by how much nothing fits, on which rank, and what would fit."""

from __future__ import annotations

import re

import pytest

import penstock as ps
from penstock.errors import PlanError
from penstock.planner.candidate import Candidate
from penstock.planner.named_schedules import one_at_a_time

LAYER = ps.Layer(f=1, i=1, w=1, activation=8, output=1, parameters=2)
MODEL = ps.Profile([LAYER] * 8, input=1, microbatch=4)
"""On 4 ranks each keeps 4 and holds 16 per microbatch; recomputed, it holds a microbatch's input, and 15 more for a moment."""


def refused(**given) -> str:
    with pytest.raises(PlanError) as error:
        ps.plan(MODEL, **{"ranks": 4, "microbatches": 8, "seconds": 0, **given})
    return str(error.value)


def remedies(said: str) -> dict[str, str]:
    what = r"^  (recompute=True|microbatches of \d+|\d+ ranks|a memory limit of [\d.]+\w*)[^:]*: (.*)$"
    return dict(re.findall(what, said, flags=re.MULTILINE))


def test_the_refusal_says_by_how_much_and_on_which_rank():
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


def test_what_would_fit_is_tried_also_if_the_parameters_alone_do_not():
    said = refused(memory_limit=3.0)  # 4 ranks with 3 each, for parameters of 16
    assert "keep 16 for parameters, gradients and optimizer, but 4 ranks with a memory limit of 3 each have 12 in all" in said
    [(what, _)] = remedies(said).items()  # on 8 ranks there is room for the parameters, and none for an activation of 8
    limit = float(what.removeprefix("a memory limit of "))
    assert ps.plan(MODEL, ranks=4, microbatches=8, memory_limit=limit, seconds=0)
    with pytest.raises(PlanError):
        ps.plan(MODEL, ranks=4, microbatches=8, memory_limit=0.98 * limit, seconds=0)
    light = ps.Profile([ps.Layer(f=1, i=1, w=1, activation=0.1, output=0.01, parameters=2)] * 8)
    with pytest.raises(PlanError) as error:
        ps.plan(light, ranks=4, microbatches=8, memory_limit=3.0, seconds=0)
    ranks = next(int(name.split()[0]) for name in remedies(str(error.value)) if name.endswith("ranks"))
    assert ps.plan(light, ranks=ranks, microbatches=8, memory_limit=3.0, seconds=0)


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


def test_recompute_is_advised_if_it_helps_and_was_not_allowed():
    assert "recompute=True" in remedies(refused(memory_limit=60.0, schedules="gpipe"))
    assert "recompute=True" not in remedies(refused(memory_limit=10.0))  # one microbatch at a time is too much even so
    assert ps.plan(MODEL, ranks=4, microbatches=8, memory_limit=60.0, schedules="gpipe", recompute=True, seconds=0)


def test_only_the_requested_schedule_is_advised():
    said = refused(memory_limit=60.0, schedules="gpipe")
    assert all("gpipe" in remedy for remedy in remedies(said).values())


def test_candidates_too_large_for_one_microbatch_are_named():
    said = refused(memory_limit=10.0)
    # Two layers per rank hold 16 per microbatch besides the 4 that they keep.
    assert re.search(
        r"too large for one microbatch: .*1f1b.* \(rank \d is 10 over; it keeps 4 for parameters, gradients and optimizer alone\)", said
    )
    assert "data-parallel: " in said


def test_limits_that_differ_are_listed():
    said = refused(memory_limit=[1.0, 2.0, 3.0, 4.0])
    assert "4 ranks with limits of 1, 2, 3, 4" in said.splitlines()[0]
    assert not any(name.endswith("ranks") for name in remedies(said))  # the memory of further ranks is not known


def test_sizes_in_bytes_have_their_unit():
    layer = ps.Layer(f=1, i=1, w=1, activation="1GiB", parameters="2GiB")
    with pytest.raises(PlanError, match="memory limit of 5GiB each") as error:
        ps.plan(ps.Profile([layer] * 4), ranks=2, microbatches=4, memory_limit="5GiB", seconds=0)
    assert "a memory limit of 6GiB: " in str(error.value)  # 4 for parameters, 2 for a microbatch


# How much work advice takes -------------------------------------------------------------------------------------------

LARGE = ps.Profile([LAYER] * 128, input=1, microbatch=4)


def count_cells(monkeypatch: pytest.MonkeyPatch, **given) -> tuple[str, int, int]:
    """The refusal of a large pipeline, the cells of all schedules that were timed for it, and how many there were."""
    timed: list[int] = []
    original = Candidate.of_timeline.__func__

    def of_timeline(cls, name, problem, schedule, timeline):
        timed.append(problem.cells)
        return original(cls, name, problem, schedule, timeline)

    monkeypatch.setattr(Candidate, "of_timeline", classmethod(of_timeline))
    with pytest.raises(PlanError) as error:
        ps.plan(LARGE, ranks=64, microbatches=512, **given)
    return str(error.value), sum(timed), len(timed)


def test_a_large_pipeline_is_advised_without_planning_it_again(monkeypatch):
    """64 ranks and 512 microbatches have 32,768 cells per chunk: the whole advice times a few orders of that size at most."""
    said, cells, _ = count_cells(monkeypatch, memory_limit=18.5, seconds=7)
    assert cells <= 8 * 64 * 512
    found = remedies(said)
    assert "128 ranks" in found
    limit = float(next(name for name in found if name.startswith("a memory limit")).split()[-1])
    # Two layers per rank keep 4 and hold 16 per microbatch; a message of 1 is received.
    assert 20 <= limit <= 22


def test_the_limit_of_a_named_schedule_is_advised_from_one_order(monkeypatch):
    """The partition is bisected for the moments at which the order peaks, and the order is timed again only if its partition fits."""
    _, cells, count = count_cells(monkeypatch, memory_limit=60.0, schedules="1f1b", seconds=7)
    assert count <= 40
    assert cells <= 40 * 64 * 512


@pytest.mark.parametrize("placement", [ps.Placement.linear(4), ps.Placement.v(3), ps.Placement.looped(2, 3), ps.Placement.bidirectional(4)])
def test_two_microbatches_show_what_one_at_a_time_holds(placement):
    costs = ps.Costs(activation=3.0, weight_stash=1.0, output=0.5, parameters=2.0)
    few, many = (ps.simulate(ps.lower(one_at_a_time(placement, count * len(placement.copies))), costs).peak_memory for count in (2, 40))
    assert few == many
