"""Plans for clusters of unequal devices and links, against everything else that could be planned."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import CostsError, FileFormatError
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.bounds.overall import OverallBound
from penstock.planner.partition.assignment import Assignment
from penstock.planner.problem import Problem
from penstock.verifier.rules.offload import peak_host_memory
from planner.every_order import EveryOrder
from planner.small_clusters import Case, draw_case, draw_copied_case, draw_named_case

LAYER = ps.Layer(f=1, i=1, w=1, activation=1, output=0.2, parameters=1)
MODEL = ps.Profile([LAYER] * 24)
FAST, SLOW = ps.Device("fast", speed=2.5), ps.Device("slow")


# Against every order of devices, every partition and every order of actions -------------------------------------------


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(5, 100, 5))])
def test_plans_of_small_clusters_are_the_best_or_their_gap_is_true(first: int) -> None:
    """Five clusters of two to four devices each, a hundred in all: at most one of the five is not proved to be the best."""
    proved = 0
    for seed in range(first, first + 5):
        case = draw_case(random.Random(seed))
        plan = ps.plan(case.profile, **case.asked, seconds=60, rounds=300)
        best, least = case.find_better(plan.objective)
        assert plan.overall_bound <= least * (1 + 1e-9)  # so the stated gap is not too small
        assert plan.objective <= best * 1.03
        proved += least >= plan.objective * (1 - 1e-9)
    assert proved >= 4


NAMED = ("1f1b", "zb-h1", "zb-h2")


def draw_nodes(chance: random.Random) -> Case:
    """Three or four devices in two nodes, whose network cards they share, without a memory limit."""
    case = draw_case(chance)
    devices = [ps.Device(speed=chance.choice((1.0, 2.0)), node=chance.choice("ab")) for _ in range(chance.choice((3, 4)))]
    layers = [ps.Layer(f=chance.randint(1, 4), i=chance.randint(1, 4), w=1, output=chance.choice((1.0, 2.0))) for _ in range(5)]
    cluster = ps.Cluster.from_nodes(devices, latency=chance.choice((0.5, 2.0)), bandwidth=1.0, card=chance.choice(("node", "device")))
    return replace(case, profile=ps.Profile(layers), cluster=cluster, microbatches=4, limits=None, split=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_named_schedule_is_faster_than_the_plan_if_links_are_shared(seed: int) -> None:
    """The schedules on every order of the devices with every partition, simulated."""
    case = draw_nodes(random.Random(seed))
    plan = ps.plan(case.profile, **case.asked, seconds=60, rounds=300, near=0.0)
    programs = [ps.lower(ps.schedule(name, len(case.cluster), case.microbatches)) for name in NAMED]
    least = min(problem.objective(ps.simulate(program, problem.costs)) for problem in case.list_problems() for program in programs)
    assert plan.overall_bound <= plan.objective <= least * (1 + 1e-9)


NOT_THE_LEAST_LOAD = (0, 7, 13, 40)
"""Cases in which the fastest plan, or the only one that fits, does not have the partition or the devices of the least load."""


@pytest.mark.parametrize("seed", [*NOT_THE_LEAST_LOAD, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(50, 80))])
def test_without_a_search_no_order_of_the_devices_and_no_partition_is_missed(seed: int) -> None:
    """The schedules on every order of three devices with every partition, over links of every kind."""
    case = draw_named_case(random.Random(seed))
    check_nothing_is_missed(case, [*NAMED, "v-half"] if len(case.profile) >= 6 else [*NAMED])


TWO_COPIES = ("chimera", "dualpipe", "1f1b")


@pytest.mark.parametrize("seed", [2, 5, 11, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 120))])
def test_with_two_copies_of_the_model_no_order_of_the_devices_is_missed(seed: int) -> None:
    """Two or four devices, which may differ in everything or are in pairs of equal speed."""
    case = draw_copied_case(random.Random(seed), paired=seed % 2 == 1)
    check_nothing_is_missed(case, TWO_COPIES[: 1 + seed % 3])


def check_nothing_is_missed(case: Case, names: Sequence[str]) -> None:
    """The plan is the fastest of the schedules on every order of the devices with every partition."""
    least = min((time for time, _ in case.list_timed(names)), default=None)
    if least is None:
        with pytest.raises(ps.PlanError, match="no plan fits"):
            ps.plan(case.profile, **case.asked, schedules=names, seconds=0)
        return
    plan = ps.plan(case.profile, **case.asked, schedules=names, seconds=0, near=0.0)
    assert plan.overall_bound <= plan.objective == pytest.approx(least, rel=1e-9)
    if case.limits is not None:
        peaks = zip(plan.predicted.peak_memory, plan.devices, strict=True)
        assert all(peak <= case.limits[device] * (1 + 1e-9) for peak, device in peaks)


@pytest.mark.parametrize("seed", [*range(4, 8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 40, 5))])
def test_no_order_of_two_copies_is_below_its_bounds(seed: int) -> None:
    """Every order of the actions of two microbatches, on every order of the devices with every partition."""
    case = draw_copied_case(random.Random(seed), paired=seed % 4 > 1)
    case = replace(case, microbatches=2, limits=None if seed % 2 else case.limits, split=seed % 3 == 0)
    shape = case.profile, case.microbatches, len(case.cluster)
    overall = OverallBound(*shape, copies=2, limits=case.limits, split=case.split, cluster=case.cluster).value()
    for problem in case.list_problems(ps.Placement.bidirectional(len(case.cluster))):
        bound = max(overall, lower_bound(problem).value)
        best, _ = EveryOrder(problem, most_nodes=20_000).beat(bound)
        assert best >= bound * (1 - 1e-6)


def test_activations_on_the_host_stay_within_the_limit_of_each_device() -> None:
    """Devices of different speed and host memory: exchanging them must not forget what each may have on the host."""
    chance = random.Random(11)
    sizes = chance.randint(4, 8), chance.choice((2, 3, 4))
    layers = [
        ps.Layer(f=chance.randint(1, 4), i=chance.randint(1, 4), w=chance.randint(1, 3), activation=1, output=0.2) for _ in range(sizes[0])
    ]
    devices = [ps.Device(speed=chance.choice((1, 2, 0.5)), memory=chance.choice((3.5, 5, 8))) for _ in range(sizes[1])]
    cluster = ps.Cluster(devices, latency=[[chance.choice((0, 1, 3)) for _ in devices] for _ in devices])
    host = [float(chance.choice((1, 2, 4))) for _ in devices]
    asked: dict[str, Any] = {"microbatches": 6, "schedules": ["1f1b", "zb-h1", "zb-h2"], "seconds": 0, "offload": True}
    plan = ps.plan(ps.Profile(layers), cluster=cluster, **asked, host_memory=host, host_bandwidth=5.0)
    held = peak_host_memory(plan.program, plan.costs)
    assert any(held)
    assert all(peak <= host[device] * (1 + 1e-9) for peak, device in zip(held, plan.devices, strict=True))


# A large enough cluster -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed() -> ps.Plan:
    """Two fast devices and four slow ones."""
    cluster = ps.Cluster([SLOW, FAST, SLOW, SLOW, FAST, SLOW], latency=0.1)
    return ps.plan(MODEL, cluster=cluster, microbatches=12, schedules=["1f1b", "zbv", "interleaved-zb"], seconds=0)


def time_on(plan: ps.Plan, cluster: ps.Cluster, devices: tuple[int, ...]) -> float:
    """How long a plan for equal devices takes on these."""
    shape = plan.profile, plan.placement, plan.microbatches, plan.partition, plan.recompute
    problem = Problem.cut(*shape, assignment=Assignment(cluster, devices))
    return problem.objective(problem.evaluate(plan.schedule))


def test_two_fast_and_four_slow_devices_gain_over_the_even_plan(mixed: ps.Plan) -> None:
    """The even plan, whatever the order of the devices, takes at least 1.3 times as long."""
    even = ps.plan(MODEL, ranks=6, microbatches=12, schedules=["1f1b", "zbv", "interleaved-zb"], seconds=0)
    assert mixed.cluster is not None
    orders = {tuple(mixed.cluster.devices[k].name for k in order): order for order in permutations(range(6))}
    assert min(time_on(even, mixed.cluster, order) for order in orders.values()) >= 1.3 * mixed.objective


def test_a_plan_says_which_device_is_which_rank(mixed: ps.Plan) -> None:
    assert sorted(mixed.devices) == list(range(6))
    fast = [rank for rank, device in enumerate(mixed.devices) if device in (1, 4)]
    layers = [sum(mixed.partition[stage] for stage in mixed.placement.stages_of(rank)) for rank in range(6)]
    assert min(layers[rank] for rank in fast) > max(layers[rank] for rank in range(6) if rank not in fast)
    assert mixed.overall_bound <= mixed.bound * (1 + 1e-9)
    refused = {candidate.name: candidate.reason for candidate in mixed.alternatives if not candidate.placement}
    assert not refused
    assert all(sorted(candidate.devices) == list(range(6)) for candidate in mixed.alternatives)


def test_the_prediction_is_that_of_its_stages_on_their_devices(mixed: ps.Plan) -> None:
    """Sums of layers, put on the devices by `Cluster.apply` alone, without the planner."""
    sizes, cluster = mixed.partition, mixed.cluster
    held = {name: [getattr(LAYER, name) * size for size in sizes] for name in ("f", "i", "w", "activation")}
    costs = cluster.assign(mixed.devices).apply(ps.Costs(**held, output=LAYER.output), mixed.placement)
    timeline = ps.simulate(ps.lower(mixed.schedule), costs)
    assert timeline.makespan == pytest.approx(mixed.predicted.makespan, rel=1e-12)
    layers = [sum(sizes[stage] for stage in mixed.placement.stages_of(rank)) for rank in range(len(cluster))]
    assert [peak + count * LAYER.parameters for peak, count in zip(timeline.peak_memory, layers, strict=True)] == pytest.approx(
        mixed.predicted.peak_memory
    )


def test_what_is_saved_is_loaded(mixed: ps.Plan, tmp_path: Path) -> None:
    mixed.save(tmp_path / "plan.json")
    loaded = ps.Plan.load(tmp_path / "plan.json")
    assert loaded.cluster == mixed.cluster
    assert loaded.devices == mixed.devices
    assert loaded.objective == mixed.objective
    assert loaded.alternatives == mixed.alternatives
    assert loaded.costs == mixed.costs
    text = (tmp_path / "plan.json").read_text()
    for wrong in ('"devices": [\n  0,\n  0,', '"devices": [\n  "a",\n  0,'):
        (tmp_path / "wrong.json").write_text(text.replace(f'"devices": [\n  {mixed.devices[0]},\n  {mixed.devices[1]},', wrong))
        with pytest.raises(FileFormatError, match="does not name the device of each of the 6 ranks once"):
            ps.Plan.load(tmp_path / "wrong.json")


def test_the_order_of_the_devices_does_not_matter() -> None:
    speeds: list[Any] = [1.0, 0.5, 2.0]
    model, asked = ps.Profile([LAYER] * 7), {"microbatches": 4, "schedules": ["1f1b"], "seconds": 0}
    times = {
        ps.plan(model, cluster=ps.Cluster([ps.Device(speed=speed) for speed in order]), **asked).objective for order in permutations(speeds)
    }
    assert len(times) == 1


def test_equal_devices_are_planned_as_ranks() -> None:
    asked: dict[str, Any] = {"microbatches": 8, "schedules": ["1f1b", "zbv", "chimera"], "seconds": 0}
    plain = ps.plan(replace(MODEL, latency=0.2, bandwidth=5.0), ranks=4, **asked, memory_limit=60)
    even = ps.plan(MODEL, cluster=ps.Cluster([ps.Device(memory=60)] * 4, latency=0.2, bandwidth=5.0), **asked)
    assert (even.name, even.partition, even.objective, even.bound) == (plain.name, plain.partition, plain.objective, plain.bound)
    assert even.overall_bound == pytest.approx(plain.overall_bound)
    assert even.memory_limit == plain.memory_limit


def test_the_largest_memory_goes_where_most_is_held() -> None:
    """Nothing fits but 1F1B with the large device first: it holds three activations there, of 4 layers each, and one at the end."""
    model = ps.Profile([ps.Layer(f=1, i=1, w=1, activation=1)] * 12)
    cluster = ps.Cluster([ps.Device(memory=5), ps.Device(memory=12), ps.Device(memory=9)])
    plan = ps.plan(model, cluster=cluster, microbatches=6, schedules=["1f1b"], seconds=0)
    assert plan.devices == (1, 2, 0)
    assert plan.memory_limit == (12, 9, 5)
    assert plan.proof.peak_memory == (12, 8, 4)
    with pytest.raises(ps.PlanError, match=r"limits of 5, 12, 9"):
        ps.plan(replace(model, layers=[replace(layer, activation=3) for layer in model.layers]), cluster=cluster, microbatches=6, seconds=0)


def test_links_decide_the_order_of_equal_devices() -> None:
    """Devices of two nodes that alternate: a plan that crosses between them once is the fastest."""
    devices = [ps.Device(node="ab"[k % 2]) for k in range(4)]
    cluster = ps.Cluster.from_nodes(devices, latency=4.0, node_latency=0.0)
    plan = ps.plan(ps.Profile([LAYER] * 4), cluster=cluster, microbatches=4, schedules=["1f1b"], seconds=0)
    nodes = "".join(devices[device].node for device in plan.devices)
    assert nodes in ("aabb", "bbaa")
    problems = [replace(plan, devices=order, bounds={"none": 0.0}, overall_bound=0.0) for order in permutations(range(4))]
    assert plan.objective == min(other.objective for other in problems)


def test_a_shared_network_card_that_is_busy_is_in_the_report() -> None:
    devices = [ps.Device(f"gpu {k}", node="aabb"[k]) for k in range(4)]
    cluster = ps.Cluster.from_nodes(devices, latency=1.5, node_latency=0.01)
    said = ps.plan(ps.Profile([LAYER] * 8), cluster=cluster, microbatches=4, schedules=["interleaved-1f1b"], seconds=0).report()
    assert "devices: 4 devices (1 gpu 0, 1 gpu 1, 1 gpu 2, 1 gpu 3) in 2 nodes" in said
    assert re.search(r"the link shared by messages from rank 0 to 3, 1 to 2 is busy \d+% of the time", said)


def test_a_plan_with_copies_on_unequal_devices_is_shown_saved_and_not_used_for_batches(tmp_path: Path) -> None:
    """One fast device: stages on it have two times, one for each copy of the model."""
    cluster = ps.Cluster([FAST, SLOW, SLOW, SLOW], latency=0.05)
    plan = ps.plan(ps.Profile([LAYER] * 8), cluster=cluster, microbatches=4, schedules=["chimera"], seconds=0)
    fast = plan.devices.index(0)
    for stage, ranks in enumerate(zip(*plan.placement.copies, strict=True)):
        times = [plan.partition[stage] / (2.5 if rank == fast else 1.0) for rank in ranks]
        assert [plan.costs.of_stage("f", stage, microbatch) for microbatch in range(4)] == pytest.approx(times * 2)
        if fast in ranks:
            assert f"{times[0]:g}/{times[1]:g}" in plan.report()
    plan.save(tmp_path / "plan.json")
    assert ps.Plan.load(tmp_path / "plan.json").predicted.makespan == plan.predicted.makespan
    with pytest.raises(ps.PenstockError, match="copies of the model on devices of different speeds, for which no batches are planned"):
        ps.BatchPlanner(plan, sequence=128)


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_note_says_that_links_within_nodes_may_have_been_forgotten() -> None:
    devices = [replace(FAST, node="a"), replace(FAST, node="a"), replace(FAST, node="b")]
    asked: dict[str, Any] = {"microbatches": 2, "schedules": ["1f1b"], "seconds": 0}
    forgotten = ps.plan(ps.Profile([LAYER] * 3), cluster=ps.Cluster(devices, latency=0.5), **asked)
    assert "the devices are in 2 nodes, and links are the same within a node as between nodes" in forgotten.report()
    described = ps.plan(ps.Profile([LAYER] * 3), cluster=ps.Cluster.from_nodes(devices, latency=0.5, node_latency=0.1), **asked)
    assert not described.notes


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"ranks": 4, "cluster": ps.Cluster([FAST, SLOW])}, "4 ranks on a cluster of 2 devices"),
        ({"cluster": [FAST, SLOW]}, "cluster must be a penstock.Cluster, got list"),
        ({"cluster": ps.Cluster([FAST] * 30)}, "24 layers are too few for 30 ranks"),
        ({"cluster": ps.Cluster([FAST, ps.Device(speed=[1.0] * 3)])}, "a device has speeds for 3 layers, but the model has 24"),
        ({"cluster": ps.Cluster([FAST, SLOW]), "memory_limit": [1, 2, 3]}, "memory_limit has 3 values for 2 ranks"),
        ({"cluster": ps.Cluster([FAST, SLOW], time_unit="ms")}, "the profile's times are in s, the cluster's in ms"),
        ({}, "ranks must be a whole number"),
    ],
)
def test_a_cluster_that_does_not_fit_the_model_is_refused(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises((CostsError, ps.PenstockError), match=reason):
        ps.plan(replace(MODEL, time_unit="s"), microbatches=4, **asked)
