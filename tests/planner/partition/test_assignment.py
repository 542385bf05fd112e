"""Orders of unequal devices, against every order and every way to cut."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

import penstock as ps
from penstock.planner.partition import assignment
from penstock.planner.partition.assignment import Orders, OrderScores, assign_chain, find_orders
from penstock.planner.partition.cut import cut_layers


def draw_model(chance: random.Random, layers: int) -> ps.Profile:
    return ps.Profile(
        [
            ps.Layer(f=chance.randint(1, 4), i=chance.randint(1, 4), w=chance.randint(0, 4), activation=chance.randint(0, 3), output=1.0)
            for _ in range(layers)
        ]
    )


def draw_cluster(chance: random.Random, devices: int) -> ps.Cluster:
    """Some devices of two or three kinds, in one or two nodes."""
    speeds = (1.0, 2.0, {"f": 0.5, "i": 1.0, "w": 0.25})
    kinds = [ps.Device(speed=chance.choice(speeds), memory=chance.choice((6, 12))) for _ in range(3)]
    drawn = [chance.choice(kinds) for _ in range(devices)]
    if chance.random() < 0.5:
        return ps.Cluster(drawn, latency=0.5)
    nodes = [ps.Device(speed=device.speed, memory=device.memory, node=chance.choice("ab")) for device in drawn]
    return ps.Cluster.from_nodes(nodes, latency=2.0, node_latency=0.25)


PLACEMENTS = [
    ps.Placement.linear(5),
    ps.Placement.bidirectional(4),
    ps.Placement.bidirectional(5),
    ps.Placement.custom([0, 1, 2, 3, 4], [1, 2, 0, 4, 3]),
]
"""Each rank alone, two pairs, two pairs and a rank alone, and a group of three with a pair."""


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("seed", range(12))
def test_every_order_that_differs_is_listed_once(seed: int, placement: ps.Placement) -> None:
    cluster = draw_cluster(random.Random(seed), placement.ranks)
    orders = Orders(cluster, placement)
    listed, every = list(orders.list_all()), list(permutations(range(placement.ranks)))
    assert len(listed) == len(set(listed))
    assert len(listed) == orders.count
    assert set(map(orders.rename, every)) == set(listed)
    for order in every:
        one, other = cluster.assign(order), cluster.assign(orders.rename(order))  # renaming changes nothing but names
        assert [device.kind for device in one.devices] == [device.kind for device in other.devices]
        assert (one.latency, one.lanes) == (other.latency, other.lanes)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("seed", range(6))
def test_exchanges_and_reversals_lead_to_every_order(seed: int, placement: ps.Placement) -> None:
    orders = Orders(draw_cluster(random.Random(seed), placement.ranks), placement)
    listed = set(orders.list_all())
    reached, left = set(list(listed)[:1]), list(listed)[:1]
    while left:
        order = left.pop()
        near = {*orders.list_exchanges(order), *orders.list_reversals(order)}
        assert near <= listed - {order}
        left += near - reached
        reached |= near
    assert reached == listed


def least_load(profile: ps.Profile, devices: list[ps.Device], limit: bool) -> float:
    """The least largest time of a rank over all cuts, or infinite."""
    best = float("inf")
    for inner in combinations(range(1, len(profile)), len(devices) - 1):
        loads = []
        for device, (first, last) in zip(devices, pairwise((0, *inner, len(profile))), strict=True):
            layers, speeds = profile.layers[first:last], device.speeds
            fits = not limit or sum(layer.activation for layer in layers) <= (device.size or 0.0)
            time = sum(layer.f / speeds.f + layer.i / speeds.i + layer.w / speeds.w for layer in layers)
            loads.append(time if fits else float("inf"))
        best = min(best, max(loads))
    return best


@pytest.mark.parametrize("limit", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_no_order_has_a_smaller_load_than_the_one_of_the_chain(seed: int, limit: bool) -> None:
    chance = random.Random(seed)
    profile, cluster = draw_model(chance, 7), draw_cluster(chance, 4)
    scores = OrderScores(profile, ps.Placement.linear(4), cluster, 8, cluster.memory_limit if limit else None)
    every = {order: least_load(profile, [cluster.devices[k] for k in order], limit) for order in permutations(range(4))}
    chain = assign_chain(scores.tables, [len(kind) for kind in scores.kinds])
    if min(every.values()) == float("inf"):
        assert chain is None
        return
    assert chain is not None
    load, kinds = chain
    assert load == pytest.approx(min(every.values()))
    left = [list(kind) for kind in scores.kinds]
    assert every[tuple(left[kind].pop(0) for kind in kinds)] == pytest.approx(load)
    assert scores.find_loads(np.array(list(every))).tolist() == pytest.approx(list(every.values()))


@pytest.mark.parametrize("seed", range(10))
def test_the_best_order_comes_first(seed: int) -> None:
    """The score of a chain is its load for all microbatches but one, and its messages there and back."""
    chance = random.Random(seed)
    profile, cluster = draw_model(chance, 8), draw_cluster(chance, 4)
    scores = OrderScores(profile, ps.Placement.linear(4), cluster, 6)
    orders = find_orders(scores, 3)

    def estimate(order: tuple[int, ...]) -> float:
        assigned = cluster.assign(order)
        links = ps.Costs(**assigned.link_fields)
        hops = sum(float(links.travel(1.0, a, a + 1) + links.travel(1.0, a + 1, a)) for a in range(3))
        return hops + 5 * cut_layers(profile, ps.Placement.linear(4), cluster=assigned).load

    assert estimate(orders[0]) <= min(map(estimate, permutations(range(4)))) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_exchanges_lead_to_a_good_order_of_many_devices(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too many orders to list, the search ends no worse than any order it starts from, and mostly with the best."""
    chance = random.Random(seed)
    profile, cluster = draw_model(chance, 9), draw_cluster(chance, 6)
    scores = OrderScores(profile, ps.Placement.linear(6), cluster, 6)
    best = scores.score(np.array(find_orders(scores, 1)))[0]
    monkeypatch.setattr(assignment, "MOST_ORDERS", 1)
    found = find_orders(scores, 4)
    assert len(set(found)) == len(found)
    assert scores.score(np.array(found))[0] <= best * 1.05
    assert scores.score(np.array(found))[0] <= scores.score(np.array([range(6)]))[0]


def test_many_devices_of_two_nodes_stay_together() -> None:
    """Sixteen devices whose nodes alternate: the order of least messages crosses between the nodes once."""
    devices = [ps.Device(node="ab"[place % 2], speed=1.0 + (place % 4 == 1)) for place in range(16)]
    cluster = ps.Cluster.from_nodes(devices, latency=5.0, node_latency=0.1)
    profile = ps.Profile([ps.Layer(f=1, i=1, w=1, output=1.0)] * 40)
    order = find_orders(OrderScores(profile, ps.Placement.linear(16), cluster, 32), 1)[0]
    assert sorted(order) == list(range(16))
    nodes = [devices[device].node for device in order]
    assert sum(one != other for one, other in pairwise(nodes)) == 1


def test_copies_of_a_stage_are_in_one_node() -> None:
    """Fast and slow devices in four nodes, too many orders to list: all gradients stay within nodes, and few activations leave them."""
    speeds = (2.0, 1.0, 1.0, 2.0)
    devices = [ps.Device(node="abcd"[k // 4], speed=speeds[k % 4]) for k in range(16)]
    cluster = ps.Cluster.from_nodes(devices, latency=1.0, bandwidth=1.0, node_latency=0.1)
    profile, placement = ps.Profile([ps.Layer(f=1, i=1, w=1, output=1.0, gradients=20.0)] * 40), ps.Placement.bidirectional(16)
    scores = OrderScores(profile, placement, cluster, 32)
    assert scores.orders.count > assignment.MOST_ORDERS
    order = find_orders(scores, 1)[0]
    speed_of = [cluster.devices[device].speeds for device in order]
    assert all(speed_of[one] == speed_of[other] for one, other in placement.partners)
    nodes = [cluster.devices[device].node for device in order]
    assert all(nodes[one] == nodes[other] for one, other in placement.partners)
    assert sum(one != other for one, other in pairwise(nodes)) == 6


def test_the_largest_memory_is_among_the_orders() -> None:
    devices = [ps.Device(memory=size) for size in (4, 16, 8)]
    scores = OrderScores(draw_model(random.Random(0), 6), ps.Placement.v(3), ps.Cluster(devices), 4, (4, 16, 8))
    assert list(assignment.list_memory_orders(scores)) == [(1, 2, 0)]
