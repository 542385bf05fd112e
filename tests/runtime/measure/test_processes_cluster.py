"""Measuring a cluster: the tournament of pairs, the tests for shared links, what becomes of measurements, and all of it on processes."""

from __future__ import annotations

import time
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.errors import ScheduleError
from penstock.runtime import launch, rank
from penstock.runtime.launch.workers import Workers
from penstock.runtime.measure.cluster import RankFacts, build_cluster, list_rounds, list_sharing_tests, measure_cluster
from penstock.runtime.measure.links import Link


@pytest.mark.parametrize("ranks", range(1, 12))
def test_each_pair_meets_once_and_the_pairs_of_a_round_are_disjoint(ranks: int) -> None:
    rounds = list_rounds(ranks)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(ranks), 2))
    for pairs in rounds:
        met = [place for pair in pairs for place in pair]
        assert len(set(met)) == len(met)
    assert len(rounds) == (0 if ranks == 1 else ranks - 1 + ranks % 2)


def test_shared_links_are_looked_for_where_they_can_be() -> None:
    assert list_sharing_tests(["a", "b", "c"]) == []
    tests = {(test.host, test.way): test.pairs for test in list_sharing_tests(["a", "a", "b", "c", "c", "c", "c"])}
    assert set(tests) == {("a", "out"), ("a", "in"), ("c", "out"), ("c", "in"), ("c", "within")}
    assert tests["a", "out"] == ((0, 2), (1, 3))  # to two other machines
    assert tests["a", "in"] == ((2, 0), (3, 1))
    assert tests["c", "within"] == ((3, 4), (5, 6))
    for pairs in tests.values():
        assert len({place for pair in pairs for place in pair}) == 4


def make_profile(f: float, w: float) -> ps.Profile:
    return ps.Profile([ps.Layer(f=f, i=1.0, w=w), ps.Layer(f=2 * f, i=1.0, w=w)], time_unit="s", size_unit="B")


GPU, OTHER = "H200", "A100"
FACTS = [RankFacts("a", GPU, 8.0), RankFacts("a", GPU, 8.0), RankFacts("b", OTHER, 4.0), RankFacts("b", OTHER, 4.0)]


def make_links(within: float, between: float) -> dict[tuple[int, int], Link]:
    """Latencies that vary by a few hundredths from pair to pair."""
    pairs = [(one, other) for one in range(4) for other in range(4) if one != other]
    return {
        (one, other): Link((within if one // 2 == other // 2 else between) * (1 + 0.01 * (one + other)), 100.0 if other else None)
        for one, other in pairs
    }


def test_measurements_that_are_alike_become_equal() -> None:
    """Devices of one name within a twentieth, links within machines and between them within three tenths."""
    profiles = [make_profile(1.0, 1.0), make_profile(1.02, 0.99), make_profile(2.0, 4.0), make_profile(2.06, 4.04)]
    cluster = build_cluster(FACTS, profiles, make_links(1.0, 10.0), [])
    speeds = [device.speeds for device in cluster.devices]
    assert speeds[0] == speeds[1] == ps.Device().speeds
    assert speeds[2] == speeds[3]
    assert (speeds[2].f, speeds[2].i, speeds[2].w) == pytest.approx((1 / 2.03, 1.0, 1 / 4.02), rel=1e-3)
    assert cluster.memory_limit == (8.0, 8.0, 4.0, 4.0)
    assert cluster.nodes == ("a", "b")
    assert len({cluster.latency[a][b] for a in (0, 1) for b in (2, 3)}) == 1  # type: ignore[index]
    assert cluster.latency[0][1] == cluster.latency[2][3] == pytest.approx(1.03, rel=0.02)  # type: ignore[index]
    assert cluster.lanes is None
    assert [len(group) for group in cluster.list_groups()] != [1, 1, 1, 1]


def test_measurements_that_differ_stay() -> None:
    profiles = [make_profile(f, 1.0) for f in (1.0, 1.5, 2.0, 2.5)]
    links = make_links(1.0, 10.0)
    links[0, 3] = Link(50.0, 7.0)
    cluster = build_cluster(FACTS, profiles, links, [])
    assert [device.speeds.f for device in cluster.devices] == pytest.approx([1.0, 1 / 1.5, 0.5, 0.4])
    assert cluster.latency[0][3] == 50.0  # type: ignore[index]
    assert cluster.bandwidth[0][3] == 7.0  # type: ignore[index]
    assert cluster.latency[2][1] == cluster.latency[3][0]  # type: ignore[index]
    layers = build_cluster(FACTS, [profiles[0], make_profile(1.0, 2.0), *profiles[2:]], links, [], per_layer=True)
    assert layers.devices[1].speeds.w == (0.5, 0.5)
    assert layers.devices[1].speeds.f == (1.0, 1.0)


def test_shared_ways_become_lanes() -> None:
    cluster = build_cluster(FACTS, [make_profile(1.0, 1.0)] * 4, make_links(1.0, 10.0), [("a", "out"), ("b", "within")])
    assert cluster.lanes is not None

    def shares(one: tuple[int, int], other: tuple[int, int]) -> bool:
        assert cluster.lanes is not None
        return bool(set(cluster.lanes[one[0]][one[1]]) & set(cluster.lanes[other[0]][other[1]]))

    assert shares((0, 2), (1, 3))
    assert not shares((2, 0), (3, 1))
    assert not shares((2, 0), (3, 0))  # into a
    assert shares((2, 3), (3, 2))  # within b
    assert not shares((0, 1), (1, 0))


def test_processors_of_one_machine_share_its_memory() -> None:
    facts = [RankFacts("a", "cpu", 12.0)] * 3
    links = {(a, b): Link(1.0, None) for a in range(3) for b in range(3) if a != b}
    cluster = build_cluster(facts, [make_profile(1.0, 1.0)] * 3, links, [])
    assert cluster.memory_limit == (4.0, 4.0, 4.0)
    assert (cluster.latency, cluster.bandwidth) == (1.0, None)
    assert build_cluster(facts[:1], [make_profile(1.0, 1.0)], {}, []) == ps.Cluster(
        [ps.Device("cpu", memory=12.0, node="a")], time_unit="s", size_unit="B"
    )


def measure(per_layer: bool) -> tuple[ps.Profile, ps.Cluster, tuple[float, float]]:
    """Rank r pretends to take r + 1 times as long; when it measured is told too."""
    times: list[float] = []

    def profile_layers() -> ps.Profile:
        times.append(time.time())
        time.sleep(0.05)
        times.append(time.time())
        return make_profile(rank() + 1.0, 1.0)

    profile, cluster = measure_cluster(profile_layers, torch.device("cpu"), per_layer=per_layer)
    return profile, cluster, (times[0], times[1])


def test_ranks_of_one_machine_measure_in_turn(workers: Workers) -> None:
    found: list[Any] = workers.run(measure, (False,), ranks=3)
    profiles, clusters, times = zip(*found, strict=True)
    assert len({str(cluster.to_json()) for cluster in clusters}) == 1
    assert {profile.layers[0].f for profile in profiles} == {1.0}
    assert [device.speeds.f for device in clusters[0].devices] == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert all(before[1] <= after[0] for before, after in pairwise(times))
    for one in range(3):
        for other in {0, 1, 2} - {one}:
            latency = clusters[0].latency
            assert 0 < (latency[one][other] if isinstance(latency, tuple) else latency) < 10.0


def test_virtual_ranks_have_no_links_to_measure() -> None:
    with pytest.raises(ScheduleError, match="measured between processes: start them with"):
        launch(measure, ranks=2, args=(False,))
