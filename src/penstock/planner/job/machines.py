"""The GPUs of a job, their nodes and their links, and what share of the printed rates they reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import CostsError, nearest
from penstock.ir.cluster import Cluster, Device
from penstock.ir.formats.reading import check_record
from penstock.text.units import LEAST_BYTES, check_count, check_number, parse_rate, parse_size, parse_time

_BANDWIDTHS = ("memory_bandwidth", "node_bandwidth", "bandwidth")
_TIMES = ("node_latency", "latency")
_SHARES = ("matmul_share", "attention_share", "memory_share", "link_share")


@dataclass(frozen=True, kw_only=True)
class Machines:
    """GPUs of one kind in equal nodes. Rates are those of the data sheet; the shares say how much of them is reached.

    >>> Machines.of("a100", gpus=64).nodes
    8
    """

    gpus: int
    gpus_per_node: int = 8
    flops: float
    """Peak matrix operations per second of one GPU, in the precision of training."""
    memory: float
    """Bytes of one GPU. A size or bandwidth may be text, such as "80GB"."""
    memory_bandwidth: float
    """Bytes per second of a GPU's own memory."""
    node_bandwidth: float
    """Bytes per second out of one GPU to others in its node, in one direction."""
    node_latency: float = 5e-6
    """Seconds, or text with a unit, such as "5us"."""
    bandwidth: float
    """Bytes per second out of one GPU to other nodes, in one direction."""
    latency: float = 10e-6
    matmul_share: float = 0.76
    """Share of `flops` that large matrix products reach."""
    attention_share: float = 0.5
    """Share of `flops` that the products inside flash attention reach."""
    memory_share: float = 0.7
    """Share of `memory_bandwidth` that norms, additions and activation functions reach."""
    link_share: float = 0.8
    """Share of both link bandwidths that collectives and messages reach."""

    def __post_init__(self) -> None:
        for name in ("gpus", "gpus_per_node"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        object.__setattr__(self, "flops", check_number("flops", self.flops))
        object.__setattr__(self, "memory", parse_size(self.memory, "memory"))
        for name in _BANDWIDTHS:
            object.__setattr__(self, name, parse_rate(getattr(self, name), name))
        for name in _TIMES:
            object.__setattr__(self, name, parse_time(getattr(self, name), name))
        self._check_amounts()
        for name in _SHARES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise CostsError(f"{name} must be a number above 0 and at most 1, got {value!r}")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise CostsError(f"gpus={self.gpus} do not fill whole nodes of gpus_per_node={self.gpus_per_node}: take a multiple")

    def _check_amounts(self) -> None:
        """Refuse numbers that cannot be meant in operations, bytes and seconds."""
        if not self.flops:
            raise CostsError("flops must be more than 0: it is the peak of operations per second, like 312e12")
        for name in ("memory", *_BANDWIDTHS):
            amount = getattr(self, name)
            if not amount:
                raise CostsError(f"{name} must be more than 0{', because every link needs one' if name.endswith('bandwidth') else ''}")
            if amount < LEAST_BYTES:
                each = " per second" if name.endswith("bandwidth") else ""
                raise CostsError(f"{name}={amount:g} is that many bytes{each}: write the unit, like {amount:g}GB")
        for name in _TIMES:
            latency = getattr(self, name)
            if latency >= 1.0:
                raise CostsError(f"{name}={latency:g} is that many seconds: write the unit, like {latency:g}us")

    @classmethod
    def of(cls, kind: str, **values: Any) -> Machines:
        """Machines of a known kind of GPU; `values` are further fields, or replace those of the kind."""
        if str(kind).lower() not in KINDS:
            raise CostsError(f"there are no numbers for the GPU {kind!r}: {nearest(kind, KINDS)}, or give flops, memory and bandwidths")
        return cls.from_fields({**KINDS[kind.lower()], **values})

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Machines:
        """Build from field values by name; an unknown or missing one is refused."""
        data: Any = values
        return cls(**check_record(dict(values) if isinstance(data, Mapping) else data, cls, "machines", error=CostsError))

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    def matmul_time(self, operations: float) -> float:
        return operations / (self.flops * self.matmul_share)

    def attention_time(self, operations: float) -> float:
        """Time of the products inside flash attention."""
        return operations / (self.flops * self.attention_share)

    def memory_time(self, size: float) -> float:
        """Time to read or write that many bytes of a GPU's memory."""
        return size / (self.memory_bandwidth * self.memory_share)

    def gather_time(self, size: float, ranks: int, stride: int = 1) -> float:
        """Time of an all-gather or a reduce-scatter of `size` bytes in all over GPUs that are `stride` apart.

        A ring passes (ranks - 1) / ranks of the bytes over every link. If the ring crosses nodes, the members in one node share the load of
        their links to other nodes.
        """
        if ranks == 1 or not size:
            return 0.0
        per_node = min(max(self.gpus_per_node // stride, 1), ranks)
        speed, latency = self.node_bandwidth, self.node_latency
        if per_node < ranks:
            speed, latency = min(speed, self.bandwidth * per_node), self.latency
        return latency + size * (ranks - 1) / ranks / (speed * self.link_share)

    def link(self, stride: int, ranks: int) -> tuple[float, float]:
        """Latency and bandwidth of a message to the GPU that is `stride` further, the slowest of a row of that many."""
        if stride * ranks <= self.gpus_per_node:
            return self.node_latency, self.node_bandwidth * self.link_share
        return self.latency, self.bandwidth * self.link_share

    def make_cluster(self) -> Cluster:
        """The GPUs as a cluster for `penstock.plan`, each with a network card of its own.

        >>> Machines.of("h100", gpus=16).make_cluster().describe()
        '16 devices (16 of speed 1) in 2 nodes'
        """
        devices = [Device(memory=self.memory, node=f"node {gpu // self.gpus_per_node}") for gpu in range(self.gpus)]
        return Cluster.from_nodes(
            devices,
            latency=self.latency,
            bandwidth=self.bandwidth * self.link_share,
            node_latency=self.node_latency,
            node_bandwidth=self.node_bandwidth * self.link_share,
            card="device",
            time_unit="s",
            size_unit="B",
        )

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


KINDS: dict[str, dict[str, Any]] = {
    "a100": {"flops": 312e12, "memory": 80e9, "memory_bandwidth": 2.039e12, "node_bandwidth": 300e9, "bandwidth": 25e9},
    "h100": {
        "flops": 989e12,
        "memory": 80e9,
        "memory_bandwidth": 3.35e12,
        "node_bandwidth": 450e9,
        "bandwidth": 50e9,
        "matmul_share": 0.56,
    },
    "h200": {
        "flops": 989e12,
        "memory": 141e9,
        "memory_bandwidth": 4.8e12,
        "node_bandwidth": 450e9,
        "bandwidth": 50e9,
        "matmul_share": 0.56,
    },
}
"""Data sheets (16-bit, without sparsity; NVLink and one InfiniBand or Ethernet card of 200 or 400 Gbit/s per GPU), and fitted shares."""
