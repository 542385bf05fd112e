"""Devices of different speeds and memory, and the links between them."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from penstock.errors import CostsError, FileFormatError, nearest
from penstock.ir.cluster.links import Bandwidth, Lanes, Latency, as_array, check_bandwidth, check_lanes, check_latency, is_table, permute
from penstock.ir.formats.reading import check_record, read_settings, suffix_of
from penstock.ir.formats.toml_form import toml_value
from penstock.text.numbers import format_count
from penstock.text.units import LEAST_BYTES, SECONDS, check_count, check_number, parse_size, shorten

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.ir.costs import Costs
    from penstock.ir.placement import Placement

PerLayer = float | tuple[float, ...]

CARDS = ("node", "device")
MOST_DEVICES = 4096
"""There is one table row per device, and one rank."""
_NODE_FIELDS: dict[str, tuple[type, ...]] = {
    "node_latency": (int, float, str),
    "node_bandwidth": (int, float, str, type(None)),
    "card": (str,),
}
"""Fields of a file that describe links by nodes, with their types."""
_MOST_SPEED = 1e100
"""Times that are divided by a speed must remain finite."""
_ROUNDING = 1e-12
"""Parts that make up less than 1 by this much make up everything."""
_LONGEST_NAME, _MOST_KINDS = 200, 8
"""Characters of a name; and how many kinds of devices are named in one line."""


@dataclass(frozen=True)
class Speeds:
    """How many times as fast as the profile each kind of action runs on a device: one number, or one per layer of the model."""

    f: PerLayer = 1.0
    i: PerLayer = 1.0
    w: PerLayer = 1.0
    optimizer: PerLayer = 1.0
    """The optimizer's step; as fast as w if it is left out of a table."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _check_speed(f"speed.{field.name}", getattr(self, field.name)))
        counts = {field.name: len(getattr(self, field.name)) for field in fields(self) if isinstance(getattr(self, field.name), tuple)}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{count} for {name}" for name, count in counts.items())
            raise CostsError(f"speeds per layer have different lengths: {listed}")

    @classmethod
    def of(cls, value: Any) -> Speeds:
        """From one number for all kinds, or from a table with f, i and w."""
        if isinstance(value, Speeds):
            return value
        if not isinstance(value, Mapping):
            same = _check_speed("speed", value)
            return cls(same, same, same, same)
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                raise CostsError(f"there is no speed of {name!r}: {nearest(str(name), known)}")
        missing = [name for name in known[:3] if name not in value]
        if missing:
            raise CostsError(f"speed is one number, or a table with f, i and w: {' and '.join(missing)} missing")
        return cls(**{"optimizer": value["w"], **value})

    @property
    def layers(self) -> int | None:
        """Of how many layers it knows the speed; None if the speeds are the same on all layers."""
        return next((len(value) for value in (self.f, self.i, self.w, self.optimizer) if isinstance(value, tuple)), None)

    @property
    def is_one(self) -> bool:
        """Whether everything takes as long as the profile says."""
        return self.f == self.i == self.w == self.optimizer == 1.0

    def on_layer(self, layer: int) -> tuple[float, float, float, float]:
        """The speeds of f, i, w and the optimizer on a layer."""
        f, i, w, optimizer = (value[layer] if isinstance(value, tuple) else value for value in (self.f, self.i, self.w, self.optimizer))
        return f, i, w, optimizer

    @property
    def rate(self) -> float:
        """One number for all kinds: the speed of a step whose f, i and w take as long as each other in the profile."""
        return 3 / sum(1 / _mean(value) for value in (self.f, self.i, self.w))

    def describe(self) -> str:
        """One number, or one per kind; the mean over layers that differ."""
        means = [_mean(value) for value in (self.f, self.i, self.w)]
        return f"{means[0]:.3g}" if len(set(means)) == 1 else "f {:.3g}, i {:.3g}, w {:.3g}".format(*means)

    def to_json(self) -> Any:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if len(set(values.values())) == 1:
            return _plain(self.f)
        if self.optimizer == self.w:
            del values["optimizer"]
        return {name: _plain(value) for name, value in values.items()}


def _mean(value: PerLayer) -> float:
    return sum(value) / len(value) if isinstance(value, tuple) else value


def _plain(value: PerLayer) -> float | list[float]:
    return list(value) if isinstance(value, tuple) else value


def _check_speed(name: str, value: Any) -> PerLayer:
    if is_table(value):
        values = list(value)
        if not values:
            raise CostsError(f"{name} is empty: give one number, or one per layer")
        return tuple(_check_one_speed(f"{name}[{layer}]", item) for layer, item in enumerate(values))
    return _check_one_speed(name, value)


def _check_one_speed(name: str, value: Any) -> float:
    if isinstance(value, str):
        raise CostsError(f"{name} must be a number, 1 for a device that is as fast as the profile, got {shorten(value)}")
    if not isinstance(value, bool) and isinstance(value, (int, float)) and not value > 0:
        raise CostsError(f"{name} must be more than 0, got {shorten(value)}: leave out devices that do not run")
    speed = check_number(name, value)
    if not 1 / _MOST_SPEED <= speed <= _MOST_SPEED:
        raise CostsError(f"{name} must be from {1 / _MOST_SPEED:g} to {_MOST_SPEED:g}, got {speed:g}: it is relative to the profile")
    return speed


@dataclass(frozen=True)
class Device:
    """One device: how fast it is compared with the profile, its memory and the node that it is in.

    >>> Device("a100", speed=0.5, memory="40GiB").speeds.w
    0.5
    """

    name: str = ""
    speed: float | Mapping[str, Any] | Speeds = 1.0
    """1 is as fast as the profile says, 2 twice as fast: one number, or a table with one per kind of action (f, i, w, and optimizer if it
    differs from w). Each may be one number per layer, for a device on which the model was measured itself."""
    memory: float | str | None = None
    """In the unit of the profile's sizes, or like "80GiB"."""
    node: str = ""
    """The machine that the device is in. Devices of one node have links of their own between them."""

    def __post_init__(self) -> None:
        for name in ("name", "node"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise CostsError(f"a device's {name} is text, got {shorten(text)}")
            if not text.isprintable() or len(text) > _LONGEST_NAME:
                raise CostsError(f"a device's {name} is one line of at most {_LONGEST_NAME} printable characters, got {shorten(text)}")
        object.__setattr__(self, "speed", Speeds.of(self.speed))
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_size(self.memory, "memory"))
            if not self.memory:
                raise CostsError("memory must be more than 0, got 0: leave it out, for all devices, if it has no limit")

    @property
    def speeds(self) -> Speeds:
        assert isinstance(self.speed, Speeds)
        return self.speed

    @property
    def size(self) -> float | None:
        """Its memory as a number."""
        assert not isinstance(self.memory, str)
        return self.memory

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for devices that take and hold the same, wherever they are."""
        return self.speeds, self.memory

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"name": self.name} if self.name else {}
        if not self.speeds.is_one:
            data["speed"] = self.speeds.to_json()
        if self.memory is not None:
            data["memory"] = self.memory
        return data | ({"node": self.node} if self.node else {})

    @classmethod
    def from_json(cls, data: Any) -> Device:
        return cls(**check_record(data, cls, "a device", error=CostsError))


@dataclass(frozen=True)
class Cluster:
    """Devices, and the links between each pair of them.

    Times and sizes are in the units of the profile or costs that it is used with.

    >>> fast, slow = Device("fast", memory=8), Device("slow", speed=0.5, memory=4)
    >>> Cluster([fast, slow, slow], latency=0.1).assign([1, 0, 2]).memory_limit
    (4.0, 8.0, 4.0)
    """

    devices: Sequence[Device]
    latency: Latency = 0.0
    """Time of a message of size 0: one number, or a table with one row per sender and one column per receiver. With a `time_unit`, a time
    may be text with a unit of its own, such as "20us"."""
    bandwidth: Bandwidth = None
    """Size per time that a link carries, in the same form; None is unlimited."""
    lanes: Lanes | None = None
    """Which messages share a link: for each sender and receiver the numbers of an out lane and an in lane. By default activations and
    gradients have a link of their own between each two ranks."""
    time_unit: str = ""
    """The unit of times, if it is known: s, ms, us or ns."""
    size_unit: str = ""
    """The unit of sizes, if it is known: B for bytes."""

    def __post_init__(self) -> None:
        devices = _check_devices(self.devices)
        object.__setattr__(self, "devices", devices)
        if self.time_unit not in ("", *SECONDS):
            raise CostsError(f"time_unit must be one of {', '.join(SECONDS)}, got {self.time_unit!r}")
        if self.size_unit not in ("", "B"):
            raise CostsError(f"size_unit must be B for bytes, or left out, got {self.size_unit!r}")
        object.__setattr__(self, "latency", check_latency("latency", self.latency, self.time_unit))
        object.__setattr__(self, "bandwidth", check_bandwidth("bandwidth", self.bandwidth, text=True))
        if self.lanes is not None:
            object.__setattr__(self, "lanes", check_lanes("lanes", self.lanes))
        for name in ("latency", "bandwidth", "lanes"):
            table = getattr(self, name)
            if isinstance(table, tuple) and len(table) != len(devices):
                raise CostsError(f"{name} is a table for {len(table)} devices, but the cluster has {len(devices)}")
        self._check_memory()

    def _check_units(self) -> None:
        """Refuse numbers in a file that were meant in another unit than the one that it names."""
        if self.size_unit == "B":
            small = next((device.size for device in self.devices if device.size is not None and device.size < LEAST_BYTES), None)
            if small is not None:
                raise CostsError(f"memory={small:g} is that many bytes, because size_unit is B: write the unit, like {small:g}GB")
        if not self.time_unit:
            return
        second = 1 / SECONDS[self.time_unit]
        rates = [rate for rate in _list_values(self.bandwidth) if rate is not None]
        if self.size_unit == "B" and rates and min(rates) < LEAST_BYTES / second:
            raise CostsError(
                f"bandwidth={min(rates):g} is that many bytes per {self.time_unit}, because size_unit is B: write the unit, like "
                f"{min(rates):g}GB"
            )
        longest = max(_list_values(self.latency))
        if longest >= second:
            raise CostsError(
                f'latency={longest:g} is in {self.time_unit}, the time_unit, and a second or more: write the unit, like "20us"'
            )

    def _check_memory(self) -> None:
        without = [place for place, device in enumerate(self.devices) if device.memory is None]
        known = len(self.devices) - len(without)
        if without and known:
            raise CostsError(
                f"device {without[0]} has no memory, but {known} of {len(self.devices)} devices have: give the memory of all or of none"
            )
        counts = {device.speeds.layers for device in self.devices} - {None}
        if len(counts) > 1:
            raise CostsError(f"devices have speeds for {' and '.join(map(str, sorted(counts, key=str)))} layers: they are of other models")

    @classmethod
    def from_nodes(
        cls,
        devices: Sequence[Device],
        *,
        latency: float | str = 0.0,
        bandwidth: float | str | None = None,
        node_latency: float | str = 0.0,
        node_bandwidth: float | str | None = None,
        card: str = "node",
        time_unit: str = "",
        size_unit: str = "",
    ) -> Cluster:
        """Devices in nodes: one link each way for each pair in a node, and network cards between nodes.

        `latency` and `bandwidth` are those between nodes, `node_latency` and `node_bandwidth` those within one. With `card="node"` all
        devices of a node share one network card, which sends one message and receives one at a time; with `card="device"` each device has
        its own.

        >>> four = [Device(node="a"), Device(node="a"), Device(node="b"), Device(node="b")]
        >>> cluster = Cluster.from_nodes(four, latency=1.0, node_latency=0.1)
        >>> cluster.latency[0], cluster.lanes[0][2] == cluster.lanes[1][3]
        ((0.0, 0.1, 1.0, 1.0), True)
        """
        if card not in CARDS:
            raise CostsError(f"card must be one of {', '.join(CARDS)}, got {card!r}")
        rates = {"latency": latency, "bandwidth": bandwidth, "node_latency": node_latency, "node_bandwidth": node_bandwidth}
        for name, value in rates.items():
            if is_table(value):
                raise CostsError(f"{name} is one number if links are described by nodes: leave out {', '.join(_NODE_FIELDS)} for a table")
            if name.endswith("latency"):
                check_latency(name, value, time_unit)
            else:
                check_bandwidth(name, value, text=True)
        devices = _check_devices(devices)
        within_nodes = [name for name, unset in (("node_latency", 0.0), ("node_bandwidth", None)) if rates[name] != unset]
        if within_nodes and not any(device.node for device in devices):
            raise CostsError(f"{' and '.join(within_nodes)}: no device has a node, so no link is within one. Name the node of each device")
        owners: list[str | int] = [device.node if card == "node" and device.node else place for place, device in enumerate(devices)]
        cards = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
        first_pair = 2 * len(cards)
        within = [[_is_same_node(one, other) for other in devices] for one in devices]
        lanes = [
            [
                (first_pair + source * len(devices) + target,) * 2
                if within[source][target]
                else (2 * cards[owners[source]], 2 * cards[owners[target]] + 1)
                for target in range(len(devices))
            ]
            for source in range(len(devices))
        ]
        tables = {
            name: tuple(tuple(near if same else far for same in row) for row in within)
            for name, near, far in (("latency", node_latency, latency), ("bandwidth", node_bandwidth, bandwidth))
        }
        return cls(devices, tables["latency"], tables["bandwidth"], lanes, time_unit, size_unit)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def memory_limit(self) -> tuple[float, ...] | None:
        """The memory of each device; None if it is not known."""
        sizes = [device.size for device in self.devices]
        return None if None in sizes else tuple(size for size in sizes if size is not None)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, in the order of their first devices."""
        return tuple(dict.fromkeys(device.node for device in self.devices))

    @property
    def has_equal_devices(self) -> bool:
        """Whether all devices have the same speeds."""
        return len({device.speeds for device in self.devices}) == 1

    @property
    def is_even(self) -> bool:
        """Whether it does not matter which device is where: the same speeds, memory and links everywhere."""
        return len(self.list_groups()) == 1

    def list_groups(self, limits: Sequence[float] | None = None) -> list[tuple[int, ...]]:
        """The devices in groups: any two of one group can change places without any difference.

        With `limits`, one memory limit per device that counts instead of its memory.

        >>> Cluster([Device(), Device()]).list_groups(limits=[4.0, 8.0])
        [(0,), (1,)]
        """
        groups: list[list[int]] = []
        for device in range(len(self.devices)):
            equal = [group for group in groups if limits is None or limits[group[0]] == limits[device]]
            group = next((group for group in equal if self._are_alike(group[0], device, limits is None)), None)
            if group is None:
                groups.append([device])
            else:
                group.append(device)
        return [tuple(group) for group in groups]

    def _are_alike(self, one: int, other: int, memory: bool) -> bool:
        """Whether everything stays the same if two devices change places, up to the numbers of lanes, and their memory if that counts."""
        import numpy as np

        first, second = self.devices[one], self.devices[other]
        if first.kind != second.kind if memory else first.speeds != second.speeds:
            return False
        order = np.arange(len(self.devices))
        order[one], order[other] = other, one
        if not all(np.array_equal(table, table[order][:, order]) for table in self._rates):
            return False
        if self.lanes is None:
            return True
        lanes, apart = np.array(self.lanes), ~np.eye(len(order), dtype=np.bool_)
        before, after = lanes[apart].ravel(), lanes[order][:, order][apart].ravel()
        pairs = len(np.unique(before * (lanes.max() + 1) + after))
        return pairs == len(np.unique(before)) == len(np.unique(after))

    def assign(self, devices: Sequence[int]) -> Cluster:
        """The cluster as the ranks of a pipeline see it: `devices[k]` is the device that becomes rank k. Some may be left out."""
        known = len(self.devices)
        if not is_table(devices):
            raise CostsError(f"devices must be a list of numbers of devices, like [1, 0], got {devices!r}")
        if not devices or any(type(device) is not int or not 0 <= device < known for device in devices) or len(set(devices)) < len(devices):
            raise CostsError(f"devices={list(devices)}: name devices of 0..{known - 1}, each at most once")
        return replace(
            self,
            devices=tuple(self.devices[device] for device in devices),
            latency=permute(self.latency, devices),
            bandwidth=permute(self.bandwidth, devices),
            lanes=None if self.lanes is None else permute(self.lanes, devices),
        )

    def apply(self, costs: Costs, placement: Placement, microbatches: int | None = None) -> Costs:
        """Costs in which every stage takes as long as it does on the device of its rank, and messages as long as on its links.

        If a placement has several copies of the model, whose devices differ in speed, give the number of `microbatches`: a stage takes as
        long as on the device that runs it for the microbatch. The optimizer's step takes as long as on the slowest of these devices.
        If a vocabulary is spread over devices of different speeds (`s` and `t`), each takes as many rows as it is fast.

        >>> from penstock.ir.costs import Costs
        >>> from penstock.ir.placement import Placement
        >>> slow_second = Cluster([Device(), Device(speed=0.5)])
        >>> slow_second.apply(Costs(f=1.0), Placement.linear(2)).f
        (1.0, 2.0)
        >>> slow_second.apply(Costs(f=1.0), Placement.bidirectional(2), microbatches=4).f
        ((1.0, 2.0, 1.0, 2.0), (2.0, 1.0, 2.0, 1.0))
        """
        from penstock.ir.costs import check_costs

        costs = check_costs(costs)
        _check_placement(placement)
        self.check_ranks(placement.ranks)
        if microbatches is None:
            self._check_copies(placement)
        else:
            check_count("microbatches", microbatches, error=CostsError)
        speeds = [[self.devices[rank].speeds for rank in ranks] for ranks in placement.copies]
        of_devices = {speed for of_copy in speeds for speed in of_copy}
        if any(speed.layers is not None for speed in of_devices):
            raise CostsError("the speeds of the devices are per layer, and costs know only stages: plan with a profile instead")
        if costs.b is not None and any(speed.i != speed.w for speed in of_devices):
            raise CostsError("costs.b is the time of a full backward, and i and w differ in speed: give i and w instead of b")
        names = {"f": "f", "i": "i", "w": "w", "b": "w", "optimizer": "optimizer"}
        names |= {"s": "f", "t": "w"} if self.has_equal_devices else {}
        times: dict[str, Any] = {}
        for name, of in names.items():
            by_copy = [tuple(getattr(speed, of) for speed in of_copy) for of_copy in speeds]
            if not getattr(costs, name):
                continue
            if name == "optimizer" or len(set(by_copy)) == 1 or microbatches is None:
                times[name] = _divide(getattr(costs, name), list(map(min, zip(*by_copy, strict=True))))
            else:
                times[name] = _divide_by_copies(costs.table(name, placement.stages, microbatches), by_copy)
        if not self.has_equal_devices or not self.devices[0].speeds.is_one:
            costs = replace(costs, **times, **self._share_vocabulary(costs, placement))
        return replace(costs, **self.link_fields)

    def _share_vocabulary(self, costs: Costs, placement: Placement) -> dict[str, Any]:
        """The multiples of S, T and logits if every rank has as much of a spread vocabulary as its device is fast at it."""
        if self.has_equal_devices or not (costs.s or costs.t):
            return {}
        if any(getattr(costs, name) != 1.0 for name in ("rank_s", "rank_t", "rank_logits")):
            raise CostsError("rank_s, rank_t and rank_logits follow from the devices of the cluster: leave them out")
        by_stage = (_divide(value, [1.0] * placement.stages) for value in (costs.s, costs.t))
        s, t = (_find_mean(values[0]) + _find_mean(values[-1]) for values in by_stage)
        speeds = [device.speeds for device in self.devices]
        rows = [len(self) * part for part in share_rows([s / _mean(speed.f) + t / _mean(speed.w) for speed in speeds])]
        return {
            "rank_s": tuple(part / _mean(speed.f) for part, speed in zip(rows, speeds, strict=True)),
            "rank_t": tuple(part / _mean(speed.w) for part, speed in zip(rows, speeds, strict=True)),
            "rank_logits": tuple(rows),
        }

    @property
    def link_fields(self) -> dict[str, Any]:
        """The fields of `Costs` that describe the links."""
        shared = {"contention": "independent", "lanes": None} if self.lanes is None else {"contention": "links", "lanes": self.lanes}
        return {"latency": self.latency, "bandwidth": self.bandwidth, **shared}

    @property
    def ignores_nodes(self) -> bool:
        """Whether a node has several devices, and links within it are given like those between nodes: their rates may be forgotten."""
        shared = len({device.node for device in self.devices if device.node}) < sum(bool(device.node) for device in self.devices)
        plain = not isinstance(self.latency, tuple) and not isinstance(self.bandwidth, tuple) and self.lanes is None
        return shared and len(self.nodes) > 1 and plain and (self.latency, self.bandwidth) != (0.0, None)

    def check_ranks(self, ranks: int) -> None:
        """Refuse another number of ranks than devices."""
        if ranks != len(self.devices):
            raise CostsError(
                f"{ranks} ranks on a cluster of {len(self.devices)} devices: take one rank per device, or leave devices out "
                "of the file (in Python, with cluster.assign([0, 1, ...]))"
            )

    def _check_copies(self, placement: Placement) -> None:
        """Refuse copies of the model of which one runs a stage on a faster device than another: a stage then has a time per microbatch."""
        for stage, ranks in enumerate(zip(*placement.copies, strict=True)):
            of_ranks = {rank: self.devices[rank].speeds for rank in ranks}
            other = next((rank for rank, speeds in of_ranks.items() if speeds != of_ranks[ranks[0]]), None)
            if other is not None:
                one, two = of_ranks[ranks[0]].describe(), of_ranks[other].describe()
                differ = f"speeds {one} and {two}" if one != two else "speeds that differ on single layers or in the optimizer"
                raise CostsError(
                    f"stage {stage} is on ranks {ranks[0]} and {other}, one for each copy of the model, and their devices have {differ}: "
                    "give the number of microbatches, each of which takes as long as on the devices of its copy"
                )

    def describe(self) -> str:
        """Devices and nodes in one line: `6 devices (2 fast, 4 slow) in 2 nodes`."""
        names = Counter(device.name or f"of speed {device.speeds.describe()}" for device in self.devices)
        listed = [f"{count} {name}" for name, count in [*names.items()][:_MOST_KINDS]]
        kinds = ", ".join([*listed, *([f"{len(names) - len(listed)} more kinds"] if len(names) > len(listed) else [])])
        nodes = f" in {len(self.nodes)} nodes" if len(self.nodes) > 1 else ""
        return f"{format_count(len(self.devices), 'device')} ({kinds}){nodes}"

    def name_of(self, device: int) -> str:
        """The name of a device, or its number."""
        if type(device) is not int or not 0 <= device < len(self.devices):
            raise CostsError(f"device {device!r}: the cluster has devices 0 to {len(self.devices) - 1}")
        return self.devices[device].name or f"device {device}"

    # Links ------------------------------------------------------------------------------------------------------------

    @cached_property
    def _rates(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Latency and bandwidth of every pair, the diagonal left out by infinite latency."""
        import numpy as np

        shape = (len(self.devices),) * 2
        latency = np.broadcast_to(as_array(self.latency), shape).copy()
        np.fill_diagonal(latency, math.inf)
        bandwidth = np.broadcast_to(as_array(self.bandwidth), shape).copy()
        np.fill_diagonal(bandwidth, math.inf)
        return latency, bandwidth

    def find_least_hop(self, size: float) -> float:
        """The least time of a message of this size between any two devices; 0 if there is only one."""
        latency, bandwidth = self._rates
        return 0.0 if len(self.devices) == 1 else float((latency + size / bandwidth).min())

    def find_least_tour(self, size: float) -> float:
        """The least time of messages of this size there and back over links that connect all devices: a spanning tree.

        >>> Cluster([Device()] * 3, latency=[[0, 1, 9], [2, 0, 4], [9, 4, 0]]).find_least_tour(0.0)
        11.0
        """
        latency, bandwidth = self._rates
        there = latency + size / bandwidth
        both, total, left = there + there.T, 0.0, list(range(1, len(self.devices)))
        near = both[0].copy()
        while left:
            device = min(left, key=near.__getitem__)
            left.remove(device)
            total += float(near[device])
            near = both[device].clip(max=near)
        return total

    # Files ------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The cluster as plain data; unlimited bandwidth is null."""
        plain = ("time_unit", "size_unit", "latency", "bandwidth", "lanes")
        changed = [field.name for field in fields(self) if field.name in plain and getattr(self, field.name) != field.default]
        devices = [device.to_json() for device in self.devices]
        return {**{name: _lists(getattr(self, name)) for name in changed}, "devices": devices}

    def to_toml(self) -> str:
        """The text of a `.toml` file, which `load` reads: the links, one row per line, then the devices."""
        data = self.to_json()
        lines = [f"{name} = {_toml_table(value)}" for name, value in data.items() if name != "devices"]
        for device in data["devices"]:
            lines += ["", "[[devices]]"]
            lines += [f"{name} = {toml_value(value)}" for name, value in device.items()]
        return "\n".join(lines).lstrip("\n") + "\n"

    @classmethod
    def from_json(cls, data: Any) -> Cluster:
        """The reverse of `to_json`; a device may have a `count`, and links may be described by nodes, as in `from_nodes`."""
        check_record(data, cls, "a cluster", error=CostsError, types=_NODE_FIELDS)
        values = {**data, "devices": list(_read_devices(data["devices"]))}
        if not any(name in data for name in _NODE_FIELDS):
            return cls(**values)
        if "lanes" in data:
            raise CostsError("lanes are given by the nodes: leave out lanes, or give latency and bandwidth as tables")
        return cls.from_nodes(**values)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a `.json` or `.toml` file."""
        from penstock.ir.formats.csv_form import write_whole

        if suffix_of(path) == ".json":
            write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")
        else:
            write_whole(path, self.to_toml())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Cluster:
        """Read a `.json` or `.toml` file."""
        data = read_settings(path)
        try:
            cluster = cls.from_json(data)
            cluster._check_units()
            return cluster
        except CostsError as error:
            raise FileFormatError(os.fspath(path), str(error)) from None


def share_rows(times: Sequence[float], most: Sequence[float] = (), before: Sequence[float] = ()) -> tuple[float, ...]:
    """The part of the rows of a vocabulary that each device takes so that the slowest takes least; nothing if there is too little room.

    `times` are those of all rows on each device, `most` is the largest part that each has memory for, and `before` what each takes besides.

    >>> share_rows([1.0, 2.0, 2.0])
    (0.5, 0.25, 0.25)
    >>> share_rows([1.0, 2.0, 2.0], most=[0.25, 1.0, 1.0])
    (0.25, 0.375, 0.375)
    >>> share_rows([1.0, 1.0, 1.0], before=[0.5, 0.0, 9.0])
    (0.25, 0.75, 0.0)
    """
    count = len(times)
    room = [min(part, 1.0) for part in most] or [1.0] * count
    taken = list(before) or [0.0] * count
    each = list(times) if any(times) else [1.0] * count

    def share_until(end: float) -> list[float]:
        return [min(max((end - base) / time, 0.0), part) for base, time, part in zip(taken, each, room, strict=True)]

    ends = sorted({*taken, *(base + time * part for base, time, part in zip(taken, each, room, strict=True))})
    totals = [sum(share_until(end)) for end in ends]
    place = next((place for place, total in enumerate(totals) if total >= 1.0 - _ROUNDING), None)
    if place is None:
        return ()
    low, high = share_until(ends[max(place - 1, 0)]), share_until(ends[place])
    grown = sum(high) - sum(low)
    share = min((1.0 - sum(low)) / grown, 1.0) if grown else 1.0
    return tuple(one + share * (other - one) for one, other in zip(low, high, strict=True))


def _check_devices(value: Any) -> tuple[Device, ...]:
    """The devices of a cluster: at least one, and not too many."""
    devices = tuple(value) if is_table(value) else ()
    if not devices or not all(isinstance(device, Device) for device in devices):
        raise CostsError(f"devices must be a list of at least one penstock.Device, got {shorten(value)}")
    if len(devices) > MOST_DEVICES:
        raise CostsError(f"{len(devices):,} devices: a cluster has at most {MOST_DEVICES:,}, one for each rank of a pipeline")
    return devices


def _check_placement(value: Any) -> None:
    """Refuse anything but a placement."""
    from penstock.ir.placement import Placement

    if not isinstance(value, Placement):
        hint = ": take its .placement" if isinstance(getattr(value, "placement", None), Placement) else ""
        raise CostsError(f"placement must be a penstock.Placement, got {type(value).__name__}{hint}")


def _find_mean(value: float | tuple[float, ...]) -> float:
    """The value of a stage, as the mean over its microbatches."""
    return sum(value) / len(value) if isinstance(value, tuple) else value


def _is_same_node(one: Device, other: Device) -> bool:
    return bool(one.node) and one.node == other.node


def _divide(value: Any, speeds: Sequence[float]) -> Any:
    """One value per stage, divided by the speed of each."""
    rows = value if isinstance(value, tuple) else (value,) * len(speeds)
    if len(rows) != len(speeds):
        raise CostsError(f"costs have {len(rows)} values for {len(speeds)} stages: give one number or one per stage")
    return tuple(
        tuple(item / speed for item in row) if isinstance(row, tuple) else row / speed for row, speed in zip(rows, speeds, strict=True)
    )


def _divide_by_copies(table: NDArray[np.float64], speeds: Sequence[Sequence[float]]) -> Any:
    """Values per stage (row) and microbatch, divided by the speeds of the stages in the microbatch's copy of the model."""
    rows = table.tolist()
    for stage, row in enumerate(rows):
        for microbatch, value in enumerate(row):
            row[microbatch] = value / speeds[microbatch % len(speeds)][stage]
    return tuple(map(tuple, rows))


def _read_devices(data: Any) -> Iterator[Device]:
    if not isinstance(data, list):
        raise CostsError(f"devices must be a list, got {shorten(data)}: in a .toml file, begin each device with [[devices]]")
    total = 0
    for place, entry in enumerate(data):
        name = f"device {place}"
        values = dict(check_record(entry, Device, name, error=CostsError, types={"count": ()}))
        count = check_count(f"{name}: count", values.pop("count", 1))
        total += count
        if total > MOST_DEVICES:
            raise CostsError(f"{name}: with its count of {count:,} there are {total:,} devices; a cluster has at most {MOST_DEVICES:,}")
        try:
            device = Device(**values)
        except CostsError as error:
            raise CostsError(f"{name}: {error}") from None
        yield from [device] * count


def _list_values(value: Any) -> list[Any]:
    """One number, or those of a table."""
    return [item for row in value for item in row] if isinstance(value, tuple) else [value]


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _toml_table(value: Any) -> str:
    if not isinstance(value, list):
        return toml_value(value)
    rows = "".join(f"  {toml_value(row)},\n" for row in value)
    return f"[\n{rows}]"
