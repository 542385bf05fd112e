"""The costs of an action: time, memory held and bytes sent.

`Costs` is the one form in which the simulator, the verifier and the planner read them. A cost model has no base class: it is a function or
record that makes `Costs`, or a `Profile` of layers, from which `planner.partition.stage_costs` makes them. Measured layers
(`runtime.measure.profile`), estimates (`planner.profile.transformer`), whole jobs (`planner.job.layer_costs`), slices
(`planner.profile.slices`) and lengths of samples (`planner.batches.lengths`) are such models. The contract:

- it is asked when a problem is made, once for each partition, slice or batch; searches and simulations only read the numbers;
- it depends on its arguments alone, so that every rank that plans by itself gets the same numbers;
- numbers are finite and at least 0, in one unit of time and one of size;
- `i` and `w` are the halves of a backward and `b` a full one; `activation` and `weight_stash` are held as `ir.memory_ledger` says.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import itemgetter
from os import PathLike
from typing import TYPE_CHECKING, Any

from penstock.errors import CostsError, FileFormatError
from penstock.ir.cluster.links import Bandwidth, Lanes, Latency, as_array, check_bandwidth, check_lanes, check_latency, check_ranks
from penstock.ir.formats.reading import check_record, read_settings, suffix_of
from penstock.ir.formats.toml_form import toml_value
from penstock.ir.kind import Kind
from penstock.text.units import check_number
from penstock.text.units import parse_size as parse_size  # noqa: PLC0414 - also under this name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.ir.placement import Placement
    from penstock.ir.table import Table

PerStage = float | tuple[float, ...]
PerAction = float | tuple[float | tuple[float, ...], ...]
PerRank = float | tuple[float | tuple[float, float], ...]

CONTENTION = ("independent", "pair", "duplex", "rank", "links")

_TIMES = ("f", "i", "w", "b", "s", "t", "broadcast", "combine", "latency", "unshard", "reduce", "optimizer", "host_latency")
_ONE_NUMBER = ("overlap", "host_latency", "host_bandwidth", "host_link_shared")
_LINKS = ("latency", "bandwidth", "lanes")
"""Tables with one value per pair of ranks."""
_OPTIONAL = ("b", "host_bandwidth")
_PER_ACTION = (
    *("f", "i", "w", "b", "s", "t", "broadcast", "combine"),
    *("activation", "weight_stash", "kept", "kept_gradients", "logits", "output"),
)
_MULTIPLES = {"s": "rank_s", "t": "rank_t", "logits": "rank_logits"}
"""What every rank has a value of, and the field with its multiples for each rank."""
_PER_RANK = (*_LINKS, *_MULTIPLES.values())


@dataclass(frozen=True)
class Costs:
    """Scalars, or one value per stage; times, activations and outputs also one per stage and microbatch (a sequence of sequences).

    If microbatches are cut into slices, one value per stage and slice takes the place of one per microbatch: the slices of microbatch 0 in
    order, then those of microbatch 1 and so on. A single value is then that of a slice.

    Units are the caller's, one for time and one for size.

    >>> Costs(f=1.0, activation=[1.0, 2.0]).of_stage("activation", 1)
    2.0
    """

    f: PerAction = 1.0
    """Forward."""
    i: PerAction = 1.0
    """Backward for the input."""
    w: PerAction = 1.0
    """Backward for the weights."""
    b: PerAction | None = None
    """Full backward; defaults to i + w."""
    latency: Latency = 0.0
    """Time of a message of size 0. A message occupies its link for the latency and for its size divided by the bandwidth.
    One number, or a table with one row per sending rank and one column per receiving rank."""
    activation: PerAction = 1.0
    """Held from a microbatch's F to its I or B, unless it is moved to the host in between."""
    weight_stash: PerAction = 0.0
    """Held from a microbatch's I to its W."""
    kept: PerAction = 0.0
    """What a slice keeps for later slices of its microbatch, such as keys and values. Held on the device from the slice's F to the I or B
    of the microbatch's first slice; never moved to the host, and not part of the activation."""
    kept_gradients: PerAction = 0.0
    """The sum of gradients of what a slice keeps. Held from the I or B of the microbatch's last slice, which is the first to add to it, to
    that of the slice itself. The last slice has no such sum."""
    overlap: float = 1.0
    """Time of actions that run together, as a share of their time one after the other."""
    output: PerAction = 0.0
    """Size of the output of a stage, and of its gradient."""
    bandwidth: Bandwidth = None
    """Size per time that a link carries; None for unlimited. One number, or a table as for the latency."""
    contention: str = "independent"
    """`independent`: one link per channel; `pair`: one each way for each pair of ranks; `duplex`: one out of and one into each rank, as a
    full-duplex network card has; `rank`: one per rank, for both directions; `links`: as `lanes` says."""
    parameters: PerStage = 0.0
    """The size of a stage's parameters in full."""
    shard: PerStage = 0.0
    """The size of the part of a stage's parameters that the rank keeps while they are sharded."""
    unshard: PerStage = 0.0
    """The time to gather a stage's parameters."""
    reduce: PerStage = 0.0
    """The time to reduce a stage's gradients."""
    optimizer: PerStage = 0.0
    """The time of the optimizer's step for a stage, after everything else on the rank."""
    host_latency: float = 0.0
    """Time of a copy of size 0 to host memory or back. A copy occupies its direction of the link for this and for the activation's size
    divided by the bandwidth."""
    host_bandwidth: float | None = None
    """Size per time that the link to host memory carries in each direction; None for unlimited."""
    host_link_shared: int = 1
    """How many neighbouring ranks share one link to host memory: 2 for ranks 0 and 1, 2 and 3, and so on."""
    lanes: Lanes | None = None
    """With contention `links`: for each sending rank and each receiving rank, the numbers of the out lane and the in lane that a message
    occupies. Messages with a lane in common go one after the other."""
    s: PerAction = 0.0
    """Each rank's share of a spread embedding (the value of stage 0) or head (that of the last stage): embeddings, or logits, their softmax
    and the gradient of the head's input. Other stages have none."""
    t: PerAction = 0.0
    """The gradients of the weights of that share."""
    broadcast: PerAction = 0.0
    """Time of a BROADCAST: the head's input to all ranks, or the gradient of the embedding's output. One collective runs at a time."""
    combine: PerAction = 0.0
    """Time of a COMBINE: what the shares have made, put together."""
    logits: PerAction = 0.0
    """Held on each rank from a microbatch's S to its T: the logits of its share, and its part of the gradient of the head's input. What a
    BROADCAST brings, of the size of the stage's `output`, is counted apart."""
    rank_s: PerRank = 1.0
    """How many times `s` each rank takes, if their shares or their devices differ: one value per rank, which may be a pair, of the
    embedding and of the head."""
    rank_t: PerRank = 1.0
    """How many times `t` each rank takes."""
    rank_logits: PerRank = 1.0
    """How many times `logits` each rank holds."""

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if name == "contention":
                if value not in CONTENTION:
                    raise CostsError(f"contention must be one of {', '.join(CONTENTION)}, got {value!r}")
            elif name in _LINKS:
                self._check_link_field(name, value)
            elif value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, _check_value(name, value))
        for name in _MULTIPLES.values():
            self._check_multiples(name)
        if self.host_bandwidth == 0:
            raise CostsError("host_bandwidth must be more than 0, or None for unlimited")
        if (self.contention == "links") != (self.lanes is not None):
            raise CostsError(f"contention={self.contention!r} with {'' if self.lanes else 'no '}lanes: 'links' and lanes= go together")
        if self.host_link_shared < 1 or self.host_link_shared != int(self.host_link_shared):
            raise CostsError(f"host_link_shared is the number of ranks per link, a whole number of at least 1, got {self.host_link_shared}")
        object.__setattr__(self, "host_link_shared", int(self.host_link_shared))

    def _check_link_field(self, name: str, value: Any) -> None:
        if name != "lanes":
            object.__setattr__(self, name, (check_latency if name == "latency" else check_bandwidth)(name, value))
        elif value is not None:
            object.__setattr__(self, name, check_lanes(name, value))

    def _check_multiples(self, name: str) -> None:
        value = getattr(self, name)
        for rank, item in enumerate(value if isinstance(value, tuple) else ()):
            if isinstance(item, tuple) and len(item) != 2:
                raise CostsError(f"{name}[{rank}] has {len(item)} values: give one number, or one for the embedding and one for the head")

    def of_stage(self, name: str, stage: int, microbatch: int = 0) -> float:
        """One stage's value of a field, for a microbatch or slice by its number."""
        value = getattr(self, name)
        if isinstance(value, tuple):
            if stage >= len(value):
                raise CostsError(f"{name} has {len(value)} values, one per stage, but stage {stage} is asked for")
            value = value[stage]
        if isinstance(value, tuple):
            if microbatch >= len(value):
                raise CostsError(f"{name}[{stage}] has {len(value)} values, one per microbatch, but microbatch {microbatch} is asked for")
            value = value[microbatch]
        return float(value)

    def per_stage(self, name: str, stages: int) -> tuple[float, ...]:
        """Every stage's value of a field."""
        self._check_stages(name, stages)
        return tuple(self.of_stage(name, stage) for stage in range(stages))

    def per_rank(self, name: str, placement: Placement) -> NDArray[np.float64]:
        """The sum of a field over the stages of each rank."""
        import numpy as np

        values = self.per_stage(name, placement.stages)
        return np.array([sum(values[stage] for stage in placement.stages_of(rank)) for rank in range(placement.ranks)], dtype=np.float64)

    def table(self, name: str, stages: int, microbatches: int) -> NDArray[np.float64]:
        """A field's value for every stage (row) and microbatch or slice (column); `b` defaults to i + w."""
        import numpy as np

        value = getattr(self, name)
        if name == "b" and value is None:
            return self.table("i", stages, microbatches) + self.table("w", stages, microbatches)
        self._check_stages(name, stages)
        key = name, stages, microbatches
        if key in self._tables:
            return self._tables[key].copy()
        table = np.empty((stages, microbatches))
        for stage in range(stages):
            of_stage = value[stage] if isinstance(value, tuple) else value
            if isinstance(of_stage, tuple) and len(of_stage) != microbatches:
                raise CostsError(
                    f"{name}[{stage}] has {len(of_stage)} values for {microbatches} microbatches, or slices of them: give one number, or "
                    "one per microbatch, or per slice if microbatches are cut"
                )
            table[stage] = of_stage
        self._tables[key] = table
        return table.copy()

    def of_shares(self, name: str, shape: tuple[int, int], rank: Any, stage: Any, microbatch: Any) -> NDArray[np.float64]:
        """What actions of these ranks, stages and microbatches take or hold: `s`, `t` or `logits`. `shape` is that of `table`.

        >>> Costs(s=[1.0, 4.0], rank_s=[0.5, 1.5]).of_shares("s", (2, 1), [0, 1], [1, 1], [0, 0]).tolist()
        [2.0, 6.0]
        """
        import numpy as np

        values: NDArray[np.float64] = self.table(name, *shape)[stage, microbatch]
        multiple = getattr(self, _MULTIPLES[name])
        return np.asarray(values * (self._multiples[name][rank, np.minimum(stage, 1)] if isinstance(multiple, tuple) else multiple))

    def share_table(self, name: str, stages: int, ranks: int) -> NDArray[np.float64]:
        """What every rank (row) takes or holds of one microbatch of the embedding and of the head (columns): `s`, `t` or `logits`."""
        import numpy as np

        rank, end = np.indices((ranks, 2))
        return self.of_shares(name, (stages, 1), rank, end * (stages - 1), np.zeros_like(rank))

    @cached_property
    def _multiples(self) -> dict[str, NDArray[np.float64]]:
        """The multiples that differ between ranks: of every rank (row) for the embedding and the head (columns)."""
        import numpy as np

        values = {name: getattr(self, of) for name, of in _MULTIPLES.items()}
        return {
            name: np.array([item if isinstance(item, tuple) else (item, item) for item in value])
            for name, value in values.items()
            if isinstance(value, tuple)
        }

    @cached_property
    def _tables(self) -> dict[tuple[str, int, int], NDArray[np.float64]]:
        """The tables that were asked for before."""
        return {}

    def tabulate_held(self, stages: int, microbatches: int) -> NDArray[np.float64]:
        """What every stage (row) holds of every microbatch or slice (column) from its F to its I or B, if nothing is moved to the host.

        What slices keep is held for longer, and the sums of its gradients for less: this much is held in any order.
        """
        held = self.table("activation", stages, microbatches)
        return held if self.kept == 0.0 else held + self.table("kept", stages, microbatches)

    def check(self, stages: int, microbatches: int, ranks: int) -> None:
        """Refuse sequences that do not fit these counts."""
        for field in fields(self):
            if field.name in _LINKS:
                check_ranks(field.name, getattr(self, field.name), ranks)
            elif field.name in _MULTIPLES.values():
                value = getattr(self, field.name)
                if isinstance(value, tuple) and len(value) != ranks:
                    raise CostsError(f"{field.name} has {len(value)} values for {ranks} ranks: give one number or one per rank")
            elif isinstance(getattr(self, field.name), tuple):
                self.table(field.name, stages, microbatches)

    @property
    def differing(self) -> list[str]:
        """The fields with a value per microbatch rather than per stage."""
        tables = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _PER_RANK}
        return [name for name, value in tables.items() if isinstance(value, tuple) and any(isinstance(row, tuple) for row in value)]

    def travel(self, sizes: Any, source: Any, target: Any) -> NDArray[np.float64]:
        """Times of messages of these sizes from ranks to other ranks; one rank or size stands for all.

        >>> Costs(latency=[[0, 1], [2, 0]], bandwidth=4.0).travel(2.0, [0, 1], [1, 0]).tolist()
        [1.5, 2.5]
        """
        import numpy as np

        latency, bandwidth = (table[source, target] if table.ndim else table for table in self._rates)
        sent = np.asarray(sizes, dtype=np.float64)
        times: NDArray[np.float64] = latency + np.broadcast_to(sent, np.broadcast_shapes(sent.shape, np.shape(source))) / bandwidth
        return times

    def with_slowest_link(self) -> Costs:
        """The same costs with one latency and one bandwidth for all pairs of ranks, the worst of any, and no shared lanes.

        >>> Costs(latency=[[0, 1], [2, 0]], bandwidth=[[None, 8], [None, None]]).with_slowest_link().bandwidth
        8.0
        """
        if self.lanes is None and not isinstance(self.latency, tuple) and not isinstance(self.bandwidth, tuple):
            return self
        latency, bandwidth = float(self._rates[0].max()), float(self._rates[1].min())
        shared: dict[str, Any] = {} if self.lanes is None else {"contention": "independent", "lanes": None}
        return replace(self, latency=latency, bandwidth=None if bandwidth == float("inf") else bandwidth, **shared)

    def name_links(self, source: int, target: int, backward: bool) -> tuple[object, ...]:
        """Names of the links that a message from one rank to another occupies, activation or gradient: equal for a link that is shared."""
        if self.lanes is not None:
            return tuple(dict.fromkeys(self.lanes[source][target]))
        names: dict[str, tuple[object, ...]] = {
            "independent": ((source, target, backward),),
            "pair": ((source, target),),
            "duplex": (("from", source), ("to", target)),
            "rank": (source, target),
        }
        return names[self.contention]

    @cached_property
    def _rates(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return as_array(self.latency), as_array(self.bandwidth)

    def _check_stages(self, name: str, stages: int) -> None:
        value = getattr(self, name)
        if isinstance(value, tuple) and len(value) != stages:
            raise CostsError(f"{name} has {len(value)} values for {stages} stages: give one number or one per stage")

    def list_unused(self, table: Table) -> list[str]:
        """The times that were set and that no action of the schedule or program takes: `b`, if every backward is split.

        >>> from penstock.ir.schedule import Schedule
        >>> Costs(b=40).list_unused(Schedule.from_actions([["0F0", "0I0", "0W0"]]))
        ['b']
        """
        kinds = set(table.rows.kind.tolist())
        full = {Kind.B} if self.b is None else set()  # without a time of its own a full backward takes that of its halves
        users = {"f": {Kind.F}, "i": {Kind.I} | full, "w": {Kind.W} | full, "b": {Kind.B}}
        users |= {"s": {Kind.S}, "t": {Kind.T}, "broadcast": {Kind.BROADCAST}, "combine": {Kind.COMBINE}}
        defaults = Costs()
        return [name for name, of in users.items() if getattr(self, name) != getattr(defaults, name) and not kinds & of]

    def scaled(self, factor: float) -> Costs:
        """The same costs in another unit of time: every time multiplied by the factor."""
        times: dict[str, Any] = {name: _change(getattr(self, name), lambda time: time * factor) for name in _TIMES}
        rates: dict[str, Any] = {name: _change(getattr(self, name), lambda rate: rate / factor) for name in ("bandwidth", "host_bandwidth")}
        return replace(self, **times, **rates)

    def permuted(self, order: Sequence[int]) -> Costs:
        """The same costs with the microbatches in another order: `order[k]` is the microbatch that becomes microbatch k.

        >>> Costs(f=[[1.0, 2.0, 3.0]]).permuted([2, 0, 1]).f
        ((3.0, 1.0, 2.0),)
        """
        copy = object.__new__(Costs)  # every value has been checked
        copy.__dict__.update({name: value if name in _PER_RANK else _permute(value, order) for name, value in self.__dict__.items()})
        chosen = list(order)
        copy.__dict__["_tables"] = {key: table[:, chosen] for key, table in self._tables.items() if key[2] == len(chosen)}
        return copy

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain data."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) != field.default}
        return {name: _to_lists(value) for name, value in values.items()}

    @classmethod
    def from_json(cls, data: Any) -> Costs:
        """The reverse of `to_json`."""
        return cls(**check_record(data, cls, "costs", error=CostsError))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a `.json` or `.toml` file."""
        from penstock.ir.formats.csv_form import write_whole

        data = self.to_json()
        if suffix_of(path) == ".json":
            write_whole(path, json.dumps(data, indent=1) + "\n")
        else:
            write_whole(path, "".join(f"{name} = {toml_value(value)}\n" for name, value in data.items()))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Costs:
        """Read a `.json` or `.toml` file."""
        data = read_settings(path)
        try:
            return cls.from_json(data)
        except CostsError as error:
            raise FileFormatError(os.fspath(path), str(error)) from None


def _change(value: Any, change: Callable[[float], float]) -> Any:
    """Every number of a field changed; None stays."""
    if isinstance(value, tuple):
        return tuple(_change(item, change) for item in value)
    return None if value is None else change(value)


def _permute(value: Any, order: Sequence[int]) -> Any:
    """A field's value with every row of one value per microbatch in another order."""
    if not isinstance(value, tuple):
        return value
    if len(order) < 2:
        return value
    pick = itemgetter(*order)
    return tuple(pick(row) if isinstance(row, tuple) else row for row in value)


def _to_lists(value: Any) -> Any:
    return [_to_lists(item) for item in value] if isinstance(value, tuple) else value


def _is_valid(values: NDArray[np.float64]) -> bool:
    """Whether all values of an array are finite numbers of at least 0, as `check_number` wants them."""
    return bool(((values >= 0) & (values <= sys.float_info.max)).all())


def _check_value(name: str, value: Any, depth: int = 0) -> Any:
    if type(value) is float:
        return check_number(name, value)
    if hasattr(value, "tolist"):
        if depth == 0 and name in _PER_ACTION and getattr(value, "ndim", 0) == 2 and value.dtype == float and _is_valid(value):
            return tuple(map(tuple, value.tolist()))
        value = value.tolist()  # an array, or a scalar of one
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if name in _ONE_NUMBER:
            raise CostsError(f"{name} is one number, not one per stage")
        nested = *_PER_ACTION, *_MULTIPLES.values()
        if depth == 2 or (depth == 1 and not name.startswith(tuple(f"{field}[" for field in nested))):
            raise CostsError(f"{name} must be a number, got {value!r}")
        if all(type(item) is float and 0 <= item <= sys.float_info.max for item in value):
            return tuple(value)
        return tuple(_check_value(f"{name}[{k}]", v, depth + 1) for k, v in enumerate(value))
    return check_number(name, value)


def check_costs(costs: object) -> Costs:
    """Give the costs, or the default ones for None; refuse anything else."""
    if costs is None:
        return Costs()
    if isinstance(costs, Costs):
        return costs
    hint = " by keyword: penstock.Costs(**costs)" if isinstance(costs, dict) else ", like penstock.Costs(f=1.0, i=1.0, w=1.0)"
    raise CostsError(f"costs must be a penstock.Costs, got {type(costs).__name__}: make one{hint}")
