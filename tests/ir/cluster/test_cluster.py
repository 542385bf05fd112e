"""Clusters: devices of unequal speed and memory, links by pair; refused in one sentence; the same through every file."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import CostsError, FileFormatError, PlacementError
from penstock.ir.cluster import Cluster, Device, Speeds, share_rows
from penstock.ir.placement import Placement

FAST, SLOW = Device("fast", memory=8), Device("slow", speed=0.5, memory=4)


# Devices --------------------------------------------------------------------------------------------------------------


def test_one_speed_is_that_of_every_kind() -> None:
    assert Device(speed=2).speeds == Speeds(2.0, 2.0, 2.0, 2.0)
    assert Device(speed={"f": 1, "i": 2, "w": 4}).speeds == Speeds(1.0, 2.0, 4.0, 4.0)
    assert Device(speed={"f": 1, "i": 2, "w": 4, "optimizer": 3}).speeds.optimizer == 3.0
    assert Device(memory="1.5KiB").memory == 1536.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"speed": 0}, r"speed must be more than 0"),
        ({"speed": -1}, r"speed must be more than 0, got -1"),
        ({"speed": float("nan")}, r"speed must be more than 0, got nan"),
        ({"speed": float("inf")}, r"speed must be a finite number of at least 0, got inf"),
        ({"speed": 1e-320}, r"speed must be from 1e-100 to 1e\+100"),
        ({"speed": True}, r"speed must be a number, got True"),
        ({"speed": "2"}, r"speed must be a number, 1 for a device that is as fast as the profile, got '2'"),
        ({"speed": {"f": 1, "w": 1}}, r"a table with f, i and w: i missing"),
        ({"speed": {"f": 1, "i": 1, "w": 1, "b": 1}}, r"no speed of 'b'"),
        ({"speed": {"f": 1, "i": [1, 0], "w": 1}}, r"speed.i\[1\] must be more than 0"),
        ({"speed": {"f": [1, 2, 3], "i": [1, 2], "w": 1}}, r"different lengths: 3 for f, 2 for i"),
        ({"speed": []}, r"speed is empty"),
        ({"memory": "8 apples"}, r"memory: '8 apples' is not a size"),
        ({"memory": 0}, r"memory must be more than 0"),
        ({"memory": "9" * 400 + "GB"}, r"memory: a size must be a finite number of at least 0, got inf"),
        ({"speed": 10**5000}, r"speed must be a finite number of at least 0, got a number of more than 100 digits"),
        ({"speed": "x" * 1000}, r"got 'x{99}\.\.\.$"),
        ({"node": 1}, r"a device's node is text, got 1"),
        ({"name": "a\nb"}, r"a device's name is one line of at most 200 printable characters, got 'a\\nb'"),
        ({"node": "n" * 201}, r"a device's node is one line of at most 200 printable characters"),
    ],
)
def test_a_wrong_device_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CostsError, match=reason):
        Device(**fields)


# Clusters -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"devices": []}, r"a list of at least one penstock.Device, got \[\]"),
        ({"devices": [1]}, r"a list of at least one penstock.Device, got \[1\]"),
        ({"devices": [FAST] * 4097}, r"4,097 devices: a cluster has at most 4,096"),
        ({"devices": [FAST, SLOW], "latency": "2us"}, r"latency: '2us' has a unit, but the other times have none: .* as time_unit"),
        ({"devices": [FAST, SLOW], "latency": "2GB", "time_unit": "s"}, r"latency: '2GB' is not a time: write a number and one of s, ms"),
        ({"devices": [FAST, SLOW], "latency": [[0, "-1us"], [0, 0]], "time_unit": "s"}, r"latency\[0\]\[1\]: '-1us' is not a time"),
        ({"devices": [FAST, SLOW], "size_unit": []}, r"size_unit must be B for bytes, or left out, got \[\]"),
        ({"devices": [FAST, SLOW], "latency": [[0, float("nan")], [0, 0]]}, r"latency\[0\]\[1\] must be a finite number"),
        ({"devices": [FAST, SLOW], "bandwidth": "12.5GB/s"}, r"'12.5GB/s' is not a bandwidth: write how many bytes pass per unit of time"),
        ({"devices": [FAST, SLOW], "latency": [[0] * 3] * 3}, r"latency is a table for 3 devices, but the cluster has 2"),
        ({"devices": [FAST, SLOW], "bandwidth": [[1, 1], [1]]}, r"bandwidth has 2 rows, but row 1 has 1 value:"),
        ({"devices": [FAST, SLOW], "bandwidth": 0}, r"bandwidth must be more than 0, got 0: a link without bandwidth"),
        ({"devices": [FAST, SLOW], "bandwidth": [[0, 1], [0, 0]]}, r"bandwidth\[1\]\[0\] must be more than 0"),
        ({"devices": [FAST, SLOW], "bandwidth": "fast"}, r"bandwidth: 'fast' is not a bandwidth"),
        ({"devices": [FAST, Device()]}, r"device 1 has no memory, but 1 of 2 devices have"),
        ({"devices": [FAST, SLOW], "time_unit": "minutes"}, r"time_unit must be one of s, ms, us, ns, got 'minutes'"),
        ({"devices": [Device(speed=[1, 2]), Device(speed=[1, 2, 3])]}, r"speeds for 2 and 3 layers"),
    ],
)
def test_an_inconsistent_cluster_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CostsError, match=reason):
        Cluster(**fields)


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda two: two.assign(1), "devices must be a list of numbers of devices, like \\[1, 0\\], got 1"),
        (lambda two: two.apply(3, Placement.linear(2)), r"costs must be a penstock\.Costs, got int"),
        (
            lambda two: two.apply(ps.Costs(), ps.schedule("1f1b", 2, 2)),
            r"placement must be a penstock\.Placement, got Schedule: take its .placement",
        ),
        (lambda two: two.apply(ps.Costs(), ps.Placement.bidirectional(2), 0), "microbatches must be a whole number of at least 1, got 0"),
        (lambda two: two.name_of(2), "device 2: the cluster has devices 0 to 1"),
        (lambda two: Cluster.from_nodes([3]), r"a list of at least one penstock\.Device, got \[3\]"),
        (lambda two: Cluster.from_nodes(3), r"a list of at least one penstock\.Device, got 3"),
    ],
)
def test_arguments_of_another_type_are_refused(use: Callable[[Cluster], object], reason: str) -> None:
    with pytest.raises(CostsError, match=reason):
        use(Cluster([FAST, SLOW]))


def draw_cluster(chance: random.Random, devices: int) -> Cluster:
    """Any cluster, with equal devices and links now and then."""
    kinds = [
        Device(f"kind {k}", speed={"f": chance.randint(1, 3), "i": chance.randint(1, 3), "w": 1}, memory=chance.randint(1, 2))
        for k in range(2)
    ]
    table = [[chance.choice((0.5, 1.0)) for _ in range(devices)] for _ in range(devices)]
    rates = [[chance.choice((None, 4.0)) for _ in range(devices)] for _ in range(devices)]
    lanes = [[(chance.randint(0, 3), chance.randint(0, 3)) for _ in range(devices)] for _ in range(devices)]
    return Cluster(
        [chance.choice(kinds) for _ in range(devices)],
        latency=chance.choice((0.25, table)),
        bandwidth=chance.choice((None, 2.0, rates)),
        lanes=chance.choice((None, lanes)),
    )


def see(cluster: Cluster, one: int, other: int) -> tuple[object, ...]:
    """What a message from one device to another meets: times by size, without its lanes."""
    costs = ps.Costs(**{name: value for name, value in cluster.link_fields.items() if name in {"latency", "bandwidth"}})
    return tuple(float(costs.travel(size, one, other)) for size in (0.0, 1.0, 8.0))


@pytest.mark.parametrize("seed", range(20))
def test_assigning_moves_devices_with_their_links(seed: int) -> None:
    chance = random.Random(seed)
    cluster = draw_cluster(chance, 4)
    for order in chance.sample(list(permutations(range(4))), 6):
        assigned = cluster.assign(order)
        assert [device.name for device in assigned.devices] == [cluster.devices[device].name for device in order]
        pairs = list(permutations(range(4), 2))
        for one, other in pairs:
            assert see(assigned, one, other) == see(cluster, order[one], order[other])
        if cluster.lanes is not None and assigned.lanes is not None:  # lanes are numbered anew: who shares with whom is the same
            for one, other in permutations(pairs, 2):
                own = set(assigned.lanes[one[0]][one[1]]) & set(assigned.lanes[other[0]][other[1]])
                there = [cluster.lanes[order[a]][order[b]] for a, b in (one, other)]
                assert len(own) == len(set(there[0]) & set(there[1]))
        assert assigned.assign([order.index(device) for device in range(4)]) == cluster
    assert len(cluster.assign([2, 0])) == 2


@pytest.mark.parametrize("order", [[0, 0, 1], [3], [], [0, -1], [0.0]])
def test_devices_that_are_not_there_cannot_be_assigned(order: list[Any]) -> None:
    with pytest.raises(CostsError, match=r"name devices of 0\.\.2, each at most once"):
        Cluster([FAST, SLOW, SLOW]).assign(order)


@pytest.mark.parametrize("seed", range(30))
def test_devices_of_a_group_can_change_places(seed: int) -> None:
    """Two devices are in one group exactly if the cluster with the two exchanged is the same."""
    cluster = draw_cluster(random.Random(seed), 4)
    group_of = {device: number for number, group in enumerate(cluster.list_groups()) for device in group}
    assert sorted(group_of) == [0, 1, 2, 3]
    for one, other in permutations(range(4), 2):
        order = list(range(4))
        order[one], order[other] = other, one
        exchanged = cluster.assign(order)
        same = exchanged == cluster and [device.kind for device in exchanged.devices] == [device.kind for device in cluster.devices]
        named = Cluster(
            [Device(speed=d.speed, memory=d.memory) for d in cluster.devices], cluster.latency, cluster.bandwidth, cluster.lanes
        )
        assert (group_of[one] == group_of[other]) == (same or named.assign(order) == named)


def test_times_with_a_unit_of_their_own_are_those_of_plain_numbers() -> None:
    devices = [Device(node="a"), Device(node="a"), Device(node="b")]
    assert Cluster.from_nodes(devices, latency="20us", node_latency="5us", time_unit="s") == Cluster.from_nodes(
        devices, latency=2e-5, node_latency=5e-6, time_unit="s"
    )
    table = [[0, "20us", 1.5], ["1ms", 0, "2.5e3ns"], ["0", "0s", 0]]
    assert Cluster(devices, latency=table, time_unit="us").latency == ((0.0, 20.0, 1.5), (1000.0, 0.0, 2.5), (0.0, 0.0, 0.0))


def test_nodes_share_a_network_card_and_have_links_of_their_own() -> None:
    devices = [Device(node="a"), Device(node="a"), Device(node="b"), Device(node="b"), Device()]
    cluster = Cluster.from_nodes(devices, latency=2, bandwidth="1KB", node_latency=0.5, node_bandwidth=None)
    assert cluster.nodes == ("a", "b", "")
    assert see(cluster, 0, 1) == (0.5, 0.5, 0.5)
    assert see(cluster, 1, 2) == see(cluster, 0, 4) == (2.0, 2.001, 2.008)
    assert cluster.lanes is not None

    def shares(one: tuple[int, int], other: tuple[int, int]) -> bool:
        assert cluster.lanes is not None
        return bool(set(cluster.lanes[one[0]][one[1]]) & set(cluster.lanes[other[0]][other[1]]))

    assert shares((0, 2), (1, 4))  # out of node a
    assert shares((0, 2), (4, 3))  # into node b
    assert not shares((0, 2), (2, 0))  # the card is full duplex
    assert not shares((0, 1), (0, 2))  # within the node
    assert not shares((0, 1), (1, 0))
    assert [sorted(group) for group in cluster.list_groups()] == [[0, 1], [2, 3], [4]]
    own = Cluster.from_nodes(devices, latency=2, card="device")
    assert own.lanes is not None
    assert not set(own.lanes[0][2]) & set(own.lanes[1][3])
    for wrong, reason in (
        ({"card": "rank"}, "card must be one of node, device, got 'rank'"),
        ({"node_bandwidth": 0}, "node_bandwidth must be more than 0, got 0"),
        ({"node_latency": -1}, "node_latency must be a finite number of at least 0, got -1"),
        ({"node_latency": "5us"}, "node_latency: '5us' has a unit, but the other times have none"),
    ):
        with pytest.raises(CostsError, match=reason):
            Cluster.from_nodes(devices, **wrong)  # type: ignore[arg-type]
    with pytest.raises(CostsError, match="node_latency and node_bandwidth: no device has a node"):
        Cluster.from_nodes([FAST, SLOW], node_latency=1.0, node_bandwidth="1GB")


def test_limits_that_are_given_tell_devices_apart() -> None:
    """A limit for the plan stands instead of the memory of the devices, so that it decides which of them are alike."""
    cluster = Cluster([Device(memory=4), Device(memory=8), Device(memory=4)])
    assert cluster.list_groups() == [(0, 2), (1,)]
    assert cluster.list_groups(limits=[5.0, 5.0, 5.0]) == [(0, 1, 2)]
    assert cluster.list_groups(limits=[5.0, 6.0, 7.0]) == [(0,), (1,), (2,)]


def test_applied_costs_are_those_of_the_devices_and_links() -> None:
    cluster = Cluster([Device(), Device(speed={"f": 0.5, "i": 2, "w": 4, "optimizer": 8})], latency=[[0, 1], [2, 0]])
    costs = ps.Costs(f=[1.0, [1.0, 2.0], 3.0, 4.0], i=8.0, w=4.0, optimizer=[1, 2, 3, 4])
    made = cluster.apply(costs, ps.Placement.looped(2, 2))
    assert made.f == (1.0, (2.0, 4.0), 3.0, 8.0)
    assert (made.i, made.w) == ((8.0, 4.0, 8.0, 4.0), (4.0, 1.0, 4.0, 1.0))
    assert made.optimizer == (1.0, 0.25, 3.0, 0.5)
    assert made.latency == ((0.0, 1.0), (2.0, 0.0))
    assert Cluster([Device()] * 2, latency=3.0).apply(ps.Costs(f=2.0), ps.Placement.linear(2)) == ps.Costs(f=2.0, latency=3.0)


def test_copies_on_equal_devices_have_one_time_per_stage() -> None:
    """The outer ranks are slow, the inner ones fast; memory and links of the partners differ."""
    slower = Device(speed=0.5, memory=9)
    cluster = Cluster([SLOW, FAST, FAST, slower], latency=[[0, 1, 2, 3]] * 4)
    made = cluster.apply(ps.Costs(f=1.0, optimizer=3.0), ps.Placement.bidirectional(4))
    assert made.f == (2.0, 1.0, 1.0, 2.0)
    assert made.optimizer == (6.0, 3.0, 3.0, 6.0)
    assert made.latency == cluster.latency


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_copies_on_unequal_devices_take_as_long_as_on_the_device_of_each_microbatch(name: str) -> None:
    """Every action takes its time over the speed of its rank, for values per stage and per microbatch."""
    speeds = [{"f": 1.0, "i": 0.5, "w": 0.25, "optimizer": 2.0}, 0.5, 2.0, 4.0]
    cluster = Cluster([Device(speed=speed) for speed in speeds])
    schedule = ps.schedule(name, ranks=4, microbatches=6)
    costs = ps.Costs(f=[1.0, 2.0, [3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 9.0], i=[2.0, 3.0, 4.0, 5.0], w=0.5, optimizer=[1.0, 2.0, 3.0, 4.0])
    applied = cluster.apply(costs, schedule.placement, schedule.microbatches)
    timeline = ps.simulate(schedule, applied)
    seen = 0
    for rank, device in enumerate(cluster.devices):
        for span in timeline.spans(rank):
            parts = span.action.sub_actions or (span.action,)
            took = 0.0
            for part in parts:
                kinds = {"F": "f", "I": "i", "W": "w", "B": "iw"}.get(part.kind.name, "")
                took += sum(costs.of_stage(kind, part.stage, part.microbatch) / getattr(device.speeds, kind) for kind in kinds)
                seen += bool(kinds)
            assert span.end - span.start == pytest.approx(took)
    assert seen >= 2 * 4 * 6
    assert applied.optimizer == (0.5, 4.0, 6.0, 2.0)  # on the slower device of each pair


@pytest.mark.parametrize(
    ("devices", "costs", "placement", "reason"),
    [
        ([FAST, SLOW], {}, ps.Placement.linear(3), r"3 ranks on a cluster of 2 devices"),
        (
            [FAST, SLOW],
            {},
            ps.Placement.bidirectional(2),
            r"stage 0 is on ranks 0 and 1, .* speeds 1 and 0\.5: give the number of microbatches",
        ),
        (
            [Device(), Device(), Device(speed=2.0)],
            {},
            ps.Placement.custom([0, 1, 2], [1, 2, 0]),
            r"stage 1 is on ranks 1 and 2, .* speeds 1 and 2: give",
        ),
        (
            [Device(speed=[1.0, 2.0]), Device(speed=[2.0, 1.0])],
            {},
            ps.Placement.bidirectional(2),
            r"speeds that differ on single layers or in the optimizer",
        ),
        ([Device(), Device(speed=[1, 2])], {}, ps.Placement.linear(2), r"per layer, and costs know only stages"),
        ([Device(), Device(speed={"f": 1, "i": 1, "w": 2})], {"b": 3}, ps.Placement.linear(2), r"give i and w instead of b"),
        ([FAST, SLOW], {"f": [1, 2, 3]}, ps.Placement.linear(2), r"3 values for 2 stages"),
        ([FAST, SLOW], {"s": 0.5, "rank_s": 2.0}, ps.Placement.linear(2), r"rank_s, rank_t and rank_logits follow from the devices"),
        ([FAST, SLOW], {"s": [0.5, 1, 2]}, ps.Placement.linear(2), r"3 values for 2 stages"),
    ],
)
def test_costs_that_do_not_fit_the_cluster_are_refused(
    devices: list[Device], costs: dict[str, Any], placement: ps.Placement, reason: str
) -> None:
    with pytest.raises((CostsError, PlacementError), match=reason):
        Cluster(devices).apply(ps.Costs(**costs), placement)


def test_the_least_hop_is_over_the_fastest_link() -> None:
    cluster = Cluster([FAST] * 3, latency=[[0, 5, 4], [5, 0, 3], [9, 9, 0]], bandwidth=[[1, 4, 1], [1, 1, 1], [1, 1, 1]])
    assert cluster.find_least_hop(0.0) == 3.0
    assert cluster.find_least_hop(4.0) == 6.0
    assert Cluster([FAST], latency=7).find_least_hop(1.0) == 0.0


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".toml"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_saved_is_loaded(suffix: str, seed: int, tmp_path: Path) -> None:
    cluster = draw_cluster(random.Random(seed), 3)
    cluster.save(tmp_path / f"cluster{suffix}")
    assert Cluster.load(tmp_path / f"cluster{suffix}") == cluster
    measured = Cluster([Device("a", speed={"f": [1, 2], "i": 1, "w": [3, 4]}, node="n")], time_unit="s", size_unit="B")
    measured.save(tmp_path / f"measured{suffix}")
    assert Cluster.load(tmp_path / f"measured{suffix}") == measured


def test_a_file_may_count_devices_and_name_nodes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        """
latency = 20e-6
bandwidth = "12.5GB"
node_latency = 5e-6
node_bandwidth = "300GB"

[[devices]]
name = "a100"
count = 2
memory = "80GiB"
node = "big"

[[devices]]
name = "a10"
speed = {f = 0.4, i = 0.45, w = 0.4}
memory = "24GiB"
node = "small"
"""
    )
    cluster = Cluster.load(path)
    assert [device.name for device in cluster.devices] == ["a100", "a100", "a10"]
    assert cluster.describe() == "3 devices (2 a100, 1 a10) in 2 nodes"
    assert see(cluster, 0, 1)[0] == 5e-6
    assert cluster == Cluster.from_nodes(cluster.devices, latency=20e-6, bandwidth=12.5e9, node_latency=5e-6, node_bandwidth=3e11)


def test_a_cluster_is_described_in_one_line() -> None:
    assert Cluster([FAST]).describe() == "1 device (1 fast)"
    many = [Device(f"d{k}", memory=1) for k in range(20)]
    assert Cluster([FAST, SLOW, SLOW, *many]).describe().startswith("23 devices (1 fast, 2 slow, 1 d0, ")
    assert Cluster([FAST, SLOW, SLOW, *many]).describe().endswith(", 1 d5, 14 more kinds)")


def test_whole_numbers_of_any_length_are_refused_in_a_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("latency = " + "9" * 5000 + "\n[[devices]]\n")
    with pytest.raises(FileFormatError, match=r"cluster\.toml: not a TOML file: Exceeds the limit"):
        Cluster.load(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "a cluster: the data must be an object, got a list"),
        ("{}", "a cluster: 'devices' is missing"),
        ('{"devices": {}}', r"devices must be a list, got {}: in a \.toml file, begin each device with \[\[devices\]\]"),
        ('{"devices": [{"count": 1000000000000}]}', "device 0: with its count of 1,000,000,000,000 there are"),
        ('{"devices": [{"count": 4000}, {"count": 97}]}', "device 1: with its count of 97 there are 4,097 devices"),
        ('{"devices": ["a"]}', "device 0: the data must be an object, got text"),
        ('{"devices": [{}], "latency": ' + "9" * 5000 + "}", "not a JSON file: Exceeds the limit"),
        ("[" * 100_000, "not a JSON file: its lists or tables are nested too deeply"),
        ('{"devices": [{"name": "a", "sped": 1}]}', "device 0: there is no field 'sped': did you mean 'speed'"),
        ('{"devices": [{"count": 0}]}', "device 0: count must be a whole number of at least 1, got 0"),
        ('{"devices": [{}, {"speed": 0}]}', "device 1: speed must be more than 0"),
        ('{"devices": [{}], "latencey": 1}', "a cluster: there is no field 'latencey': did you mean 'latency'"),
        ('{"devices": [{}, {}], "latency": [[0, 1], [1, 0]], "card": "node"}', "latency is one number if links are described by nodes"),
        ('{"devices": [{}, {}], "lanes": [], "card": "node"}', "lanes are given by the nodes"),
        ('{"devices": [{}, {}], "bandwidth": [[null, 0], [1, null]]}', r"bandwidth\[0\]\[1\] must be more than 0"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=rf"cluster\.json: {reason}"):
        Cluster.load(path)


def test_shares_of_a_vocabulary_are_as_fast_as_equal_devices() -> None:
    costs = Cluster([Device(speed=2.0), Device(speed=2.0)]).apply(ps.Costs(s=1.0, t=0.5), ps.Placement.linear(2))
    assert (costs.per_stage("s", 2), costs.per_stage("t", 2)) == ((0.5, 0.5), (0.25, 0.25))


@pytest.mark.parametrize("speeds", [[2.0, 1.0, 0.5], [{"f": 2.0, "i": 1.0, "w": 0.5}, 1.0, {"f": 1.0, "i": 1.0, "w": 4.0}]])
def test_devices_take_rows_so_that_the_slowest_takes_least(speeds: list[Any]) -> None:
    """S and T together take as long on every device, all rows are on one, and with one speed for all S alone does too."""
    costs = ps.Costs(s=[0.5, 0, [2.0, 4.0]], t=[0.5, 0, 1.0], logits=6.0)
    made = Cluster([Device(speed=speed) for speed in speeds]).apply(costs, ps.Placement.linear(3))
    rank, stage, unit = np.meshgrid(range(3), (0, 2), range(2), indexing="ij")
    taken = sum(made.of_shares(name, (3, 2), rank, stage, unit) for name in "st").mean(axis=2).sum(axis=1)
    by_kind = [(speed["f"], speed["w"]) if isinstance(speed, dict) else (speed, speed) for speed in speeds]
    whole = [3 * (3.5 / f + 1.5 / w) for f, w in by_kind]
    assert taken == pytest.approx([1 / sum(1 / time for time in whole)] * 3)
    assert made.share_table("logits", 3, 3).sum(axis=0) == pytest.approx([18, 18])
    if 0.5 in speeds:
        assert made.rank_s == pytest.approx([6 / 7] * 3)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 1), st.floats(0, 5)), min_size=1, max_size=5).filter(
        lambda devices: sum(most for _, most, _ in devices) > 1.001
    )
)
def test_no_other_shares_are_faster(devices: list[tuple[float, float, float]]) -> None:
    """Every device ends at the same time, unless it is full, or has no rows and ends later without any."""
    times, most, before = (list(column) for column in zip(*devices, strict=True))
    parts = share_rows(times, most, before)
    assert sum(parts) == pytest.approx(1)
    ends = [base + time * part for base, time, part in zip(before, times, parts, strict=True)]
    last = max(end for end, part in zip(ends, parts, strict=True) if part > 1e-9)
    for end, part, room in zip(ends, parts, most, strict=True):
        assert part == pytest.approx(room) or end == pytest.approx(last) or (part == pytest.approx(0) and end >= last)


def test_rows_that_fit_nowhere_are_shared_out_nowhere() -> None:
    assert share_rows([1.0, 1.0], most=[0.4, 0.5]) == ()
    assert share_rows([0.0, 0.0], most=[0.4, 0.6]) == pytest.approx([0.4, 0.6])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('size_unit = "B"\n[[devices]]\nmemory = 40', r"memory=40 is that many bytes, because size_unit is B: write the unit, like 40GB"),
        ('bandwidth = 12.5\ntime_unit = "s"\nsize_unit = "B"\n[[devices]]', r"bandwidth=12.5 is that many bytes per s, .* like 12.5GB"),
        ('latency = 20\ntime_unit = "s"\n[[devices]]', r"latency=20 is in s, the time_unit, and a second or more: write the unit"),
        (
            'latency = [[0, 5], [2e6, 0]]\ntime_unit = "us"\n[[devices]]\n[[devices]]',
            r"latency=2e\+06 is in us, the time_unit, and a second or more",
        ),
    ],
)
def test_a_file_with_numbers_of_another_unit_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(text)
    with pytest.raises(FileFormatError, match=reason):
        Cluster.load(tmp_path / "cluster.toml")
