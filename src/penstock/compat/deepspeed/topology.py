"""The names of `deepspeed.runtime.pipe.topology`: which rank is where among stages, replicas and slices of a model.

A `ProcessTopology` is arithmetic and needs no torch. A `PipelineParallelGrid` is one rank's view of it, made on every rank of a
`launch` or of `torchrun`.
"""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from penstock.errors import ScheduleError, nearest

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]


class ProcessTopology:
    """Ranks as points of a grid with named axes, the last axis running fastest.

    >>> topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
    >>> topology.get_rank(pipe=1, data=0), topology.get_coord(4)
    (3, ProcessCoord(pipe=1, data=1))
    >>> topology.get_axis_comm_lists("pipe")
    [[0, 3], [1, 4], [2, 5]]
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) < len(axes) or any(dim < 1 for dim in dims):
            raise ScheduleError(f"axes {list(axes)} with dims {list(dims)}: give each axis a name of its own and a size of 1 or more")
        self.axes, self.dims = list(axes), list(dims)
        self.ProcessCoord = _coordinates(self.axes)
        self._coords = [self.ProcessCoord(*place) for place in product(*map(range, self.dims))]
        self.mapping: dict[Any, int] = {coord: rank for rank, coord in enumerate(self._coords)}

    def __str__(self) -> str:
        return str(self.mapping)

    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._coords)

    def get_axis_names(self) -> list[str]:
        """The axes in their order."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The size of an axis; 0 for an unknown axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a point, which is given by all its coordinates."""
        if sorted(coord_kwargs) != sorted(self.axes):
            raise ScheduleError(
                f"get_rank() takes a coordinate for each of {', '.join(self.axes)}, got {', '.join(coord_kwargs) or 'none'}: "
                "filter_match() takes some of them"
            )
        coord = self.ProcessCoord(**coord_kwargs)
        if coord not in self.mapping:
            raise ScheduleError(f"{coord} is outside of the topology, whose sizes are {dict(zip(self.axes, self.dims, strict=True))}")
        return self.mapping[coord]

    def get_coord(self, rank: int) -> Any:
        """The point of a rank, a named tuple."""
        if not 0 <= rank < self.world_size():
            raise ScheduleError(f"rank {rank} is not in the topology, which has ranks 0 to {self.world_size() - 1}")
        return self._coords[rank]

    def get_rank_repr(self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-") -> str:
        """A rank's coordinates as text.

        >>> ProcessTopology(["pipe", "model"], [2, 2]).get_rank_repr(3, omit_axes=[])
        'pipe_01-model_01'
        """
        omitted, coord = set(omit_axes), self.get_coord(rank)
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in self.axes if axis not in omitted)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The ranks that differ along this axis alone, one list for each choice of the other coordinates; none for an unknown axis."""
        if axis not in self.axes:
            return []
        lists: dict[Any, list[int]] = {}
        for rank, coord in enumerate(self._coords):
            lists.setdefault(coord._replace(**{axis: 0}), []).append(rank)
        return list(lists.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with these coordinates.

        >>> ProcessTopology(["pipe", "data", "model"], [2, 2, 2]).filter_match(pipe=0, data=1)
        [2, 3]
        """
        for axis in filter_kwargs:
            self._check_axis(axis)
        return [rank for rank, coord in enumerate(self._coords) if all(getattr(coord, axis) == at for axis, at in filter_kwargs.items())]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks with one coordinate."""
        return self.filter_match(**{axis: idx})

    def _check_axis(self, axis: str) -> None:
        if axis not in self.axes:
            raise ScheduleError(f"the topology has no axis {axis!r}: {nearest(axis, self.axes)}")


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines and their replicas; the ranks of one stage are neighbours, since they exchange the most."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipelines, their replicas, and slices of every layer."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """This rank's place in a topology, and the ranks that it works with along each axis.

    Without a topology the number of ranks is divided between pipelines and replicas. `pp_group`, `dp_group` and `slice_group` are
    lists of ranks on any transport; the methods named `get_..._group` give process groups of torch.distributed, which exist where
    ranks are processes.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        from penstock.runtime.transport.current_group import get_group

        group, self.global_rank = get_group(process_group)
        self.world_size = group.ranks
        self._topo = _divide(self.world_size) if topology is None else topology
        if self._topo.world_size() != self.world_size:
            shape = " x ".join(f"{axis} {dim}" for axis, dim in zip(self._topo.axes, self._topo.dims, strict=True))
            raise ScheduleError(f"a topology of {shape} has {self._topo.world_size()} ranks, but there are {self.world_size}")
        self.pipe_parallel_size, self.data_parallel_size, self.model_parallel_size = (
            max(1, self._topo.get_dim(axis)) for axis in ("pipe", "data", "model")
        )
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self.dp_groups, self.pipe_groups = self._lists("data"), self._lists("pipe")
        self.dp_group, self.pp_group, self.slice_group = (self._list_along(axis) for axis in ("data", "pipe", "model"))
        self.p2p_groups = self._list_next()
        replica = self._topo.filter_match(data=self.data_parallel_id) if "data" in self._topo.axes else list(range(self.world_size))
        self.ds_model_rank, self.ds_model_world_size = replica.index(self.global_rank), len(replica)
        self._process_groups = _process_groups(data=self.dp_group, pipe=self.pp_group, slice=self.slice_group, model=replica)

    def _lists(self, axis: str) -> list[list[int]]:
        return self._topo.get_axis_comm_lists(axis) or [[rank] for rank in range(self.world_size)]

    def _list_along(self, axis: str) -> list[int]:
        """This rank and those that differ from it along the axis alone."""
        return next(ranks for ranks in self._lists(axis) if self.global_rank in ranks)

    def _list_next(self) -> list[list[int]]:
        """Every rank with that of the next stage; after the last stage comes the first."""
        following = {rank: ranks[(at + 1) % len(ranks)] for ranks in self.pipe_groups for at, rank in enumerate(ranks)}
        return [[rank, following[rank]] for rank in range(self.world_size)]

    def _coordinate(self, axis: str) -> int:
        return int(getattr(self._topo.get_coord(self.global_rank), axis, 0))

    def _process_group(self, name: str) -> Any:
        if name not in self._process_groups:
            raise ScheduleError(
                "process groups exist only if ranks are processes: launch with backend='gloo' or torchrun, or use the lists of ranks"
            )
        return self._process_groups[name]

    def topology(self) -> ProcessTopology:
        """The topology that this is a view of."""
        return self._topo

    def get_global_rank(self) -> int:
        """This rank among all."""
        return self.global_rank

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of another stage; other coordinates are this rank's, or as given."""
        return self._topo.get_rank(**(self._topo.get_coord(self.global_rank)._asdict() | {"pipe": stage_id} | kwargs))

    # Stages -----------------------------------------------------------------------------------------------------------

    def get_stage_id(self) -> int:
        """The stage that this rank holds."""
        return self._coordinate("pipe")

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """The number of stages."""
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> Any:
        """The process group of this pipeline."""
        return self._process_group("pipe")

    # Replicas ---------------------------------------------------------------------------------------------------------

    def get_data_parallel_id(self) -> int:
        """The replica of the pipeline that this rank is in."""
        return self._coordinate("data")

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """The number of replicas of the pipeline."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """The process group of this stage in all replicas."""
        return self._process_group("data")

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    # Slices, and everything that makes one replica --------------------------------------------------------------------

    def get_slice_parallel_rank(self) -> int:
        """The slice of its layers that this rank holds."""
        return self._coordinate("model")

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        return self.slice_parallel_size

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> Any:
        """The process group of this stage's slices."""
        return self._process_group("slice")

    def get_model_parallel_rank(self) -> int:
        """This rank among all stages and slices of its replica."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """The process group of all stages and slices of this replica."""
        return self._process_group("model")


def _coordinates(axes: list[str]) -> Any:
    return namedtuple("ProcessCoord", axes)


def _divide(ranks: int) -> ProcessTopology:
    """A topology for so many ranks: their prime factors go to stages and replicas in turn, as DeepSpeed has it."""
    factors = []
    for candidate in range(2, ranks + 1):
        while ranks % candidate == 0:
            factors.append(candidate)
            ranks //= candidate
    return PipeDataParallelTopology(num_pp=math.prod(factors[::2]), num_dp=math.prod(factors[1::2]))


def _process_groups(**members: Sequence[int]) -> dict[str, Any]:
    """This rank's process groups by name; none if ranks are threads. Every rank makes its own, in the same order of names."""
    import torch.distributed as dist

    from penstock.runtime.transport.current_group import get_group
    from penstock.runtime.transport.threads import VirtualGroup

    if not dist.is_initialized() or isinstance(get_group()[0], VirtualGroup):
        return {}
    return {name: dist.new_group(list(ranks), use_local_synchronization=True) for name, ranks in members.items()}
