"""One result whichever engine runs, whether built anew or timed again, once or many times."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PenstockError, ScheduleError
from penstock.ir.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.simulator.timeline import Timeline
from simulator.draws import contentions, copied, costs, real_costs, some_eighths, spread, tables, timed, zoo
from simulator.runs import run

pytestmark = pytest.mark.slow

COLUMNS = ("start", "end", "depart", "arrive", "collective_start", "collective_end", "held_by")


def same(one: Timeline, other: Timeline) -> None:
    for name in COLUMNS:
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name


@given(timed())
def test_plain_and_compiled_are_equal_to_the_last_bit(case: tuple[Table, Costs]) -> None:
    run(case)
    same(ps.simulate(*case, engine="plain"), ps.simulate(*case, engine="compiled"))


@given(copied())
def test_copies_to_the_host_too(case: tuple[Table, Costs]) -> None:
    run(case)
    same(ps.simulate(*case, engine="plain"), ps.simulate(*case, engine="compiled"))


@given(spread())
def test_collectives_of_all_ranks_too(case: tuple[Table, Costs]) -> None:
    same(ps.simulate(*case, engine="plain"), ps.simulate(*case, engine="compiled"))


@given(tables, st.integers(0, 2**32), contentions)
def test_also_with_numbers_that_do_not_add_up_exactly(table: Table, seed: int, contention: str) -> None:
    case = table, real_costs(table, Random(seed), contention)
    run(case)
    same(ps.simulate(*case, engine="plain"), ps.simulate(*case, engine="compiled"))


def test_an_engine_that_is_none_is_refused() -> None:
    with pytest.raises(ScheduleError, match="auto, plain or compiled, got 'fast'"):
        ps.simulate(ps.schedule("1f1b", ranks=2, microbatches=2), engine="fast")


@given(timed(), st.data())
def test_retiming_is_simulating_anew(case: tuple[Table, Costs], data: st.DataObject) -> None:
    table, before = case
    now = data.draw(costs(table, some_eighths, data.draw(contentions)))
    timeline = ps.retime(run((table, before)), now)
    same(timeline, ps.simulate(table, now))
    assert timeline.table is table
    assert timeline.costs is now
    same(ps.retime(timeline, before), ps.simulate(table, before))


@given(timed(zoo()), st.integers(1, 4), st.integers(0, 9))
def test_without_jitter_every_scenario_is_the_simulation(case: tuple[Schedule, Costs], count: int, seed: int) -> None:
    many, once = ps.simulate_many(*case, scenarios=count, jitter=0, seed=seed), ps.simulate(*case)
    assert len(many) == count
    assert many.makespans.tolist() == [once.makespan] * count
    assert many.bubbles.tolist() == [once.bubble] * count
    assert many.mean == pytest.approx(once.makespan)
    assert many.p95 == once.makespan


def test_the_same_seed_gives_the_same_scenarios() -> None:
    table = ps.lower(ps.schedule("zbv", ranks=3, microbatches=6), fsdp=True)
    case = table, Costs(latency=0.1, output=1, bandwidth=4, contention="pair", unshard=0.5, reduce=0.5)
    one, again, other = (ps.simulate_many(*case, scenarios=20, jitter=0.2, seed=seed) for seed in (1, 1, 2))
    assert one.makespans.tobytes() == again.makespans.tobytes()
    assert one.bubbles.tobytes() == again.bubbles.tobytes()
    assert not set(one.makespans) & set(other.makespans)
    more = ps.simulate_many(*case, scenarios=30, jitter=0.2, seed=1)
    assert more.makespans[:20].tobytes() == one.makespans.tobytes()


def test_jitter_is_the_standard_deviation_around_the_cost() -> None:
    """On one rank the makespan is a sum, of known mean and variance: 100 forwards of 1 and 100 backwards of 2."""
    jitter, count = 0.3, 2000
    many = ps.simulate_many(ps.schedule("1f1b", ranks=1, microbatches=100), scenarios=count, jitter=jitter)
    deviation = jitter * (100 * 1 + 100 * 4) ** 0.5
    assert abs(many.mean - 300) < 5 * deviation / count**0.5
    assert many.makespans.std() == pytest.approx(deviation, rel=0.1)
    assert many.p95 == pytest.approx(300 + 1.645 * deviation, abs=deviation / 4)
    assert np.count_nonzero(many.makespans <= many.p95) / count == pytest.approx(0.95, abs=0.002)
    assert not many.bubbles.any()


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_a_pipeline_loses_to_jitter(name: str) -> None:
    """Who waits for the latest of several waits longer on the mean; and more so the larger the jitter."""
    table = ps.schedule(name, ranks=4, microbatches=12)
    means = [ps.simulate_many(table, scenarios=60, jitter=jitter).mean for jitter in (0, 0.1, 0.3)]
    assert means == sorted(means)
    assert means[0] == ps.simulate(table).makespan < means[1] < means[2]


@pytest.mark.parametrize("wrong", [{"scenarios": 0}, {"scenarios": -1}, {"jitter": -0.1}, {"jitter": 1.0}, {"jitter": float("nan")}])
def test_scenarios_that_cannot_be_drawn_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(PenstockError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        ps.simulate_many(ps.schedule("1f1b", ranks=2, microbatches=2), **wrong)  # type: ignore[arg-type]
