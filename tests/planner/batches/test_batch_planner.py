"""Orders of one batch: against every order of few microbatches, against sorting, the bound, and under memory limits."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from itertools import permutations

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CostsError, PlanError, ScheduleError
from penstock.planner.batches.batch_planner import WORK, BatchOrder, BatchPlanner
from penstock.planner.order_search.evaluator import get_loops

NAMES = ("1f1b", "eager-1f1b", "gpipe", "zb-h1", "zb-h2")
COSTS = ps.Costs(f=1.0, i=1.2, w=0.8, latency=0.05, activation=1.0, weight_stash=0.5, output=0.1)


def long_tailed(seed: int, count: int, most: int = 8192) -> list[int]:
    """Log-normal lengths around 1024 tokens."""
    return np.clip(np.random.default_rng(seed).lognormal(0, 0.8, count) * 1024, 64, most).astype(int).tolist()


def planner(ranks: int, count: int, name: str = "1f1b", **options: object) -> BatchPlanner:
    return BatchPlanner(ps.schedule(name, ranks, count), COSTS, sequence=1024, quadratic=0.2, **options)


def simulate_order(plan: BatchPlanner, order: BatchOrder, lengths: list[int]) -> ps.Timeline:
    """The order timed from scratch: costs by length, columns exchanged, schedule lowered."""
    costs = plan.costs([lengths[k] for k in order.microbatches])
    return ps.simulate(ps.lower(order.schedule), costs)


@pytest.fixture(scope="module")
def eight() -> BatchPlanner:
    return planner(8, 32)


@pytest.mark.parametrize("seed", range(6))
def test_never_worse_than_the_fixed_order_and_sorting(eight: BatchPlanner, seed: int) -> None:
    lengths = long_tailed(seed, 32)
    order = eight.order(lengths)
    assert sorted(order.microbatches) == list(range(32))
    assert simulate_order(eight, order, lengths).makespan == pytest.approx(order.makespan, rel=1e-12)
    assert set(NAMES) <= {tried.schedule for tried in order.tried}
    for name in NAMES:  # each of these is timed here once more, in another way
        schedule = ps.schedule(name, 8, 32)
        for sample in (lengths, sorted(lengths), sorted(lengths, reverse=True)):
            assert order.makespan <= ps.simulate(ps.lower(schedule), eight.costs(sample)).makespan * (1 + 1e-9)
    assert order.makespan < 0.9 * order.best_of("fixed")
    assert order.unplanned == ps.simulate(ps.lower(ps.schedule("1f1b", 8, 32)), eight.costs(lengths)).makespan
    assert order.bound <= order.makespan


@pytest.mark.parametrize(("ranks", "count", "limit"), [(2, 5, None), (3, 5, None), (4, 5, None), (4, 6, None), (4, 5, 6.0)])
def test_few_microbatches_against_every_order(ranks: int, count: int, limit: float | None) -> None:
    """Within 0.1 % of the best of all orders under all schedules."""
    plan = planner(ranks, count, memory_limit=limit, schedules=NAMES)
    timelines = [ps.simulate(ps.lower(ps.schedule(name, ranks, count)), COSTS) for name in NAMES]
    for seed in range(3 if count < 6 else 1):
        lengths = long_tailed(seed, count, 4096)
        best = math.inf
        for chosen in permutations(lengths):
            costs = plan.costs(chosen)
            for timeline in timelines:
                timed = ps.retime(timeline, costs)
                if timed.makespan < best and (limit is None or max(timed.peak_memory) <= limit):
                    best = timed.makespan
        assert best < math.inf
        assert plan.order(lengths).makespan <= best * 1.001


def test_the_memory_limit_holds() -> None:
    lengths = long_tailed(0, 16)
    loose, tight = planner(4, 16), planner(4, 16, memory_limit=11.0)
    free, order = loose.order(lengths), tight.order(lengths)
    assert max(free.predicted.peak_memory) > 11.0 >= max(simulate_order(tight, order, lengths).peak_memory)
    assert order.bound >= free.bound
    ps.verify(ps.lower(order.schedule), memory_limit=11.0, costs=order.predicted.costs)
    assert any(not tried.fits for tried in order.tried)


def test_a_limit_that_nothing_fits_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"no order of these 8 microbatches fits .* rank \d holds 8\S* of at most 5, 3"):
        planner(4, 8, memory_limit=5.0).order([8192, *long_tailed(1, 7)])


def test_a_limit_below_what_the_costs_are_for() -> None:
    """Microbatches of 1024 tokens would not fit at all, shorter ones do."""
    order = planner(4, 8, memory_limit=0.9).order([256] * 8)
    assert max(order.predicted.peak_memory) <= 0.9


def test_only_one_microbatch_at_a_time_fits() -> None:
    lengths = [4096] * 8
    order = planner(4, 8, memory_limit=4.9).order(lengths)
    assert order.schedule.name == "one-at-a-time"
    assert max(order.predicted.peak_memory) <= 4.9


def test_zero_durations() -> None:
    """Microbatches that skip the first two stages: they take nothing there, and the simulator, the search and the bound agree on it."""
    plan, lengths = planner(4, 12), long_tailed(2, 12)
    skips = dict.fromkeys(range(0, 12, 2), (0, 1))
    costs = plan.costs(lengths, skips)
    for name in ("f", "i", "w", "activation", "weight_stash"):
        table = costs.table(name, 4, 12)
        assert (table[:2, ::2] == 0).all()
        assert (table[:2, 1::2] > 0).all()
        assert (table[2:] > 0).all()
    messages = costs.table("output", 4, 12)
    assert (messages[0, ::2] == 0).all()  # both ends skip
    assert (messages[1:] > 0).all()
    assert (messages[:, 1::2] > 0).all()
    order = plan.order(lengths, skips=skips)
    assert order.bound <= order.makespan <= order.best_of("fixed")
    assert order.makespan < plan.order(lengths).makespan
    for rank, skipped in ((0, True), (3, False)):
        compute = (span for span in order.predicted.spans(rank) if span.action.kind in (ps.Kind.F, ps.Kind.B, ps.Kind.I, ps.Kind.W))
        work = sum(span.end - span.start for span in compute)
        ran = [length for k, length in enumerate(lengths) if k % 2 or not skipped]
        assert work == pytest.approx(sum(3.0 * plan.lengths[rank].of([length]) for length in ran))


def test_every_duration_zero() -> None:
    """Only the messages take time: forward and back once, all microbatches on the link one after the other."""
    order = planner(2, 4).order([100] * 4, skips=dict.fromkeys(range(4), (0, 1)))
    assert order.makespan == pytest.approx(5 * 0.05)
    assert order.bound <= order.makespan


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_against_the_simulator(seed: int) -> None:
    """Every order that was tried and the result: times, memory and limits, on any placement, with shared links, skips and reductions."""
    chance = np.random.default_rng(seed)
    names = ("1f1b", "zbv", "dualpipe", "interleaved-1f1b", "dualpipe-v", "zb-h2")
    schedule, count = ps.schedule(names[seed], 3 if seed % 2 else 4, 6), 6
    times = {
        name: chance.random(schedule.stages).tolist() for name in ("f", "i", "w", "activation", "weight_stash", "output", "kept", "reduce")
    }
    contention = ("independent", "rank", "duplex")[seed % 3]
    costs = ps.Costs(**times, latency=0.1, bandwidth=2.0, contention=contention, parameters=0.5, optimizer=0.2, overlap=0.9)
    lengths, skips = chance.integers(1, 3000, count).tolist(), {1: (0,), 4: tuple(range(schedule.stages))}
    options = {"sequence": 1000, "quadratic": 0.3, "tries": 60}
    peak = max(BatchPlanner(schedule, costs, **options).order(lengths, skips=skips).predicted.peak_memory)
    plan = BatchPlanner(schedule, costs, memory_limit=0.8 * peak, **options)
    order, base = plan.order(lengths, skips=skips), plan.costs(lengths, skips)
    for tried in order.tried:
        timeline = ps.simulate(tried.flat.program, base.permuted(tried.microbatches))
        assert tried.objective == pytest.approx(timeline.makespan, rel=1e-14)
        assert tried.fits == (max(timeline.peak_memory) <= 0.8 * peak)
        assert not tried.fits or order.makespan <= tried.objective
    timeline = ps.simulate(ps.lower(order.schedule), base.permuted(order.microbatches))
    assert order.makespan == pytest.approx(timeline.makespan, rel=1e-14)
    assert max(timeline.peak_memory) <= 0.8 * peak
    assert order.bound <= order.makespan


@pytest.mark.parametrize("limit", [None, 7.0])
def test_without_numba_the_orders_are_the_same(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = long_tailed(9, 8, 3000)
    first = planner(4, 8, memory_limit=limit, tries=100).order(lengths)
    monkeypatch.setattr("penstock.planner.batches.batch_planner.get_loops", lambda: get_loops(plain=True))
    other = planner(4, 8, memory_limit=limit, tries=100).order(lengths)
    assert not other.tried[0].search.loops.compiled
    assert (first.microbatches, first.schedule.name, first.makespan) == (other.microbatches, other.schedule.name, other.makespan)


@pytest.mark.parametrize("limited", [False, True])
def test_the_work_per_batch_does_not_grow_with_its_size(limited: bool) -> None:
    """What is timed, which decides how long planning takes, counted without a clock."""
    for ranks, count in ((2, 4), (8, 64), (16, 128)):
        lengths = long_tailed(1, count)
        plan = planner(ranks, count, "zb-h1", schedules=())
        if limited:
            peaks = ps.simulate(ps.lower(plan.schedule), plan.costs(lengths)).peak_memory
            plan = planner(ranks, count, "zb-h1", schedules=(), memory_limit=max(peaks))
        order = plan.order(lengths)
        assert order.tried[0].search.count_work() <= 1.05 * WORK


def test_other_counts_and_known_costs() -> None:
    plan = planner(4, 8)
    assert len(plan.order(long_tailed(0, 11)).microbatches) == 11
    f = [[1.0, 5.0, 1.0, 1.0]] * 4
    order = plan.order_by_costs(ps.Costs(f=f, i=f, w=f), 4)
    assert order.predicted.makespan <= ps.simulate(ps.lower(ps.schedule("zb-h1", 4, 4)), ps.Costs(f=f, i=f, w=f)).makespan
    with pytest.raises(CostsError, match=r"f\[0\] has 4 values for 5 microbatches"):
        plan.order_by_costs(ps.Costs(f=f, i=f, w=f), 5)


def test_from_a_plan() -> None:
    layer = ps.Layer(f=1.0, i=1.0, w=1.0, activation=1.0, weight_stash=0.5, output=0.1, parameters=2.0)
    made = ps.plan(ps.Profile([layer] * 8, microbatch=2), ranks=4, microbatches=8, memory_limit=40.0, seconds=0)
    plan = BatchPlanner(made, sequence=512)
    assert plan.problem.memory_limit == made.memory_limit
    same = plan.order([[512, 512]] * 8)  # the plan's own microbatches
    assert same.makespan <= made.predicted.makespan * (1 + 1e-9)
    assert same.problem.costs.table("f", *(made.placement.stages, 8)) == pytest.approx(made.costs.table("f", made.placement.stages, 8))
    packing = plan.pack(long_tailed(3, 40), capacity=12000)
    assert len(packing.groups) == 8
    assert plan.order(packing.lengths).makespan >= packing.bound


def test_schedules_to_choose_from() -> None:
    lengths = long_tailed(4, 8)
    assert {tried.schedule for tried in planner(4, 8, schedules=()).order(lengths).tried} == {"1f1b"}
    assert {tried.schedule for tried in planner(4, 8, schedules=["zb-h1"]).order(lengths).tried} == {"1f1b", "zb-h1"}
    assert not planner(4, 8, split=False).order(lengths).schedule.rows.is_kind(ps.Kind.W).any()
    with pytest.raises(ScheduleError, match=r"'zb-h3' is not available on a placement of linear.*did you mean"):
        planner(4, 8, schedules=["zb-h3"])
    fixed = ps.Schedule.from_rows(ps.schedule("zb-h1", 4, 8).rows, ps.Placement.linear(4), 8, name="mine")
    assert len(BatchPlanner(fixed, COSTS, sequence=10).order(lengths[:5]).microbatches) == 5


def test_a_bidirectional_placement() -> None:
    plan, lengths = planner(4, 8, "dualpipe"), long_tailed(5, 8)
    order = plan.order(lengths)
    assert simulate_order(plan, order, lengths).makespan == pytest.approx(order.makespan, rel=1e-12)
    assert order.bound <= order.makespan <= order.best_of("fixed")


def test_the_same_in_another_process_and_in_any_thread(eight: BatchPlanner) -> None:
    """Ranks agree without asking each other: no clock, no hash seed, no order of calls takes part."""
    lengths = long_tailed(7, 32)
    first = eight.order(lengths)
    eight.order(long_tailed(8, 32))
    results: list[BatchOrder] = []
    threads = [threading.Thread(target=lambda: results.append(eight.order(lengths))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(order.microbatches, order.schedule.name) for order in results} == {(first.microbatches, first.schedule.name)}
    code = (
        "import penstock as ps; costs = ps.Costs(f=1.0, i=1.2, w=0.8, latency=0.05, activation=1.0, weight_stash=0.5, output=0.1); "
        "plan = ps.BatchPlanner(ps.schedule('1f1b', 8, 32), costs, sequence=1024, quadratic=0.2); "
        f"order = plan.order({lengths}); print(order.schedule.name, list(order.microbatches))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == f"{first.schedule.name} {list(first.microbatches)}"


def test_batches_are_planned_ahead_in_order() -> None:
    plan = planner(2, 4)
    batches = [long_tailed(seed, 4) for seed in range(4)]
    read: list[int] = []

    def load() -> object:
        for number, batch in enumerate(batches):
            read.append(number)
            yield batch

    for number, (batch, order) in enumerate(plan.ahead(load(), lambda batch: batch)):
        assert batch == batches[number]
        assert order.microbatches == plan.order(batch).microbatches
        assert len(read) == min(number + 2, 4)  # the next one is being planned
    assert list(plan.ahead([], len)) == []


def test_stages_that_batches_skip_are_planned_ahead_too() -> None:
    plan, lengths = planner(2, 4), long_tailed(1, 4)
    batches = [(lengths, {0: (0,)}), (lengths, None)]
    orders = [order for _, order in plan.ahead(batches, lambda batch: batch[0], skips=lambda batch: batch[1])]
    wanted = [plan.order(lengths, skips=skips) for _, skips in batches]
    assert [(order.microbatches, order.makespan) for order in orders] == [(order.microbatches, order.makespan) for order in wanted]
    assert orders[0].makespan < orders[1].makespan


def test_an_error_of_a_batch_comes_with_that_batch() -> None:
    plan = planner(2, 4)
    orders = plan.ahead([[5] * 4, [5, 0, 5, 5]], lambda batch: batch)
    assert next(orders)[0] == [5] * 4
    with pytest.raises(CostsError, match=r"lengths\[1\] must be a whole number of tokens"):
        next(orders)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quadratic": [0.1, 0.2]}, "quadratic has 2 values for 4 stages"),
        ({"quadratic": "20%"}, "quadratic must be a number, got '20%'"),
        ({"schedules": 3}, "schedules must be a list of names, got 3$"),
        ({"samples": 0}, "samples must be a whole number of at least 1"),
        ({"tries": -1}, "tries must be a whole number of at least 0"),
        ({"memory_limit": [1.0, 2.0]}, "memory_limit has 2 values for 4 ranks"),
    ],
)
def test_options_that_are_refused(options: dict, message: str) -> None:
    with pytest.raises((CostsError, ScheduleError), match=message):
        BatchPlanner(ps.schedule("1f1b", 4, 8), COSTS, **{"sequence": 100, **options})


@pytest.mark.parametrize(
    ("skips", "message"),
    [
        ([(0,)], r"skips must be a dictionary .* got \[\(0,\)\]"),
        ({0: 1}, r"skips\[0\] must be a list of stages, like \(0, 1\), got 1"),
        ({0: "01"}, r"skips\[0\] must be a list of stages, like \(0, 1\), got '01'"),
        ({8: (0,)}, "microbatch 8 skips stage 0, but there are 8 microbatches and 4 stages"),
        ({0: (-1,)}, "microbatch 0 skips stage -1, but there are 8 microbatches and 4 stages"),
        ({0: (1.5,)}, "microbatch 0 skips stage 1.5, but"),
    ],
)
def test_skips_that_are_refused(skips: object, message: str) -> None:
    with pytest.raises(CostsError, match=message):
        planner(4, 8, schedules=()).order([5] * 8, skips=skips)


def test_arguments_that_are_refused() -> None:
    plan, schedule = planner(4, 8, schedules=()), ps.schedule("1f1b", 4, 8)
    for count in (0, -1, 1.5, "8", None, True, 1 << 40):
        with pytest.raises(CostsError, match="microbatches must be a whole number of at least 1"):
            plan.order_by_costs(COSTS, count)
    with pytest.raises(CostsError, match=r"costs must be a penstock\.Costs, got dict"):
        plan.order_by_costs({"f": 1.0}, 8)
    with pytest.raises(CostsError, match="f of the longest microbatch is more than a number can be"):
        BatchPlanner(schedule, ps.Costs(f=1e300), sequence=1, quadratic=1.0, schedules=()).order([1 << 39] * 8)
    for arguments, message in (
        (([[5] * 8], 5), r"lengths must be a function, which is called as lengths\(batch\), got 5"),
        (([[5] * 8], None), r"lengths must be a function, .* got None"),
        (([[5] * 8], len, 5), r"skips must be a function, which is called as skips\(batch\), got 5"),
        ((None, len), "batches must be something to iterate over, such as a list or a data loader, got NoneType"),
    ):
        with pytest.raises(CostsError, match=message):
            plan.ahead(*arguments)  # at once, not when the first batch is asked for
    with pytest.raises(ScheduleError, match="split must be True or False, got 'no'"):
        planner(4, 8, split="no")
    with pytest.raises(ScheduleError, match=r"schedules must be a list of names, got '1f1b': give \['1f1b'\]"):
        planner(4, 8, schedules="1f1b")
    with pytest.raises(ScheduleError, match="schedules must be a list of names, with 5 in it"):
        planner(4, 8, schedules=[5])


def test_sources_that_are_refused() -> None:
    schedule = ps.schedule("1f1b", 4, 8)
    with pytest.raises(ScheduleError, match="1f1b spreads the vocabulary over the ranks, for which no batches are planned"):
        BatchPlanner(ps.spread_vocabulary(schedule), COSTS, sequence=100)
    with pytest.raises(CostsError, match="give costs=, or a plan"):
        BatchPlanner(schedule, sequence=100)
    with pytest.raises(CostsError, match="got Profile"):
        BatchPlanner(ps.Profile([ps.Layer(f=1, i=1, w=1)]), sequence=100)
    with pytest.raises(CostsError, match="f has one value per microbatch"):
        BatchPlanner(schedule, ps.Costs(f=[[1.0] * 8] * 4), sequence=100)
    with pytest.raises(ScheduleError, match="has no backward"):
        BatchPlanner(ps.schedule("inference", 4, 8), COSTS, sequence=100)
    with pytest.raises(ScheduleError, match="cuts sequences into slices"):
        BatchPlanner(ps.schedule("seq1f1b", 4, 8, slices=2), COSTS, sequence=100)
