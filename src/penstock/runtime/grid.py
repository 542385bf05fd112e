"""The processes as a device mesh: which of them are one pipeline, and which hold the same stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

from penstock.errors import PipelineError, ScheduleError, nearest
from penstock.runtime import here
from penstock.runtime.sliced import Slice

PIPE, TENSOR = "pp", "tp"
DATA = ("dp", "dp_replicate", "dp_shard")
"""Whose ranks hold the same stages: `dp`, or the two of hybrid sharding, copies of shards."""


class Grid:
    """A device mesh by the names of its dimensions, in any order.

    `pp` is the pipeline (one rank where there is none), `dp` or `dp_replicate` and `dp_shard` hold the same stages and split the
    batch, and `tp` splits each stage's tensors. The ranks along `pp` are `pipe`, those along all of the data's are `data`, and
    those along `tp` are `tensor`; each a group by itself.
    """

    def __init__(self, mesh: Any, transport: str = "auto") -> None:
        self.mesh, self.names = mesh, _names(mesh)
        places = np.arange(mesh.mesh.numel()).reshape(tuple(mesh.mesh.shape))
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise PipelineError(f"process {dist.get_rank()} is not in the device mesh that it was given for the pipeline")
        self.coordinate = tuple(coordinate)
        self.whole = here.join_ranks(mesh.mesh.flatten().tolist(), transport)
        self.whole.names = [self._called(place) for place in np.ndindex(places.shape)]
        self.data_dims = tuple(name for name in self.names if name in DATA)
        self.pipe = self._slice(places, (PIPE,))
        self.data = self._slice(places, self.data_dims)
        self.tensor = self._slice(places, (TENSOR,))

    def _called(self, place: tuple[int, ...]) -> str:
        return ", ".join(f"{name} {at}" for name, at in zip(self.names, place, strict=True))

    def _slice(self, places: Any, names: tuple[str, ...]) -> Slice:
        at = tuple(slice(None) if name in names else self.coordinate[dim] for dim, name in enumerate(self.names))
        members = [int(place) for place in places[at].flatten()]
        ranks = [int(self.mesh.mesh.flatten()[place]) for place in members]
        if ranks != sorted(ranks):  # torch's process groups number them in ascending order, whatever the mesh says
            raise ScheduleError(f"along {' and '.join(names)} the device mesh has processes {ranks}: give them in ascending order")
        return Slice.of(self.whole, members)

    @property
    def data_mesh(self) -> Any:
        """The part of the mesh that `fully_shard` takes: one dimension, or copies first and shards second."""
        return self.mesh[self.data_dims if len(self.data_dims) > 1 else self.data_dims[0]]


def _names(mesh: Any) -> tuple[str, ...]:
    """The names of the dimensions, if each is known and they go together."""
    if not hasattr(mesh, "mesh_dim_names"):
        raise ScheduleError(f"mesh= takes a device mesh, got {type(mesh).__name__}; a process group goes into group=")
    names = mesh.mesh_dim_names
    if names is None:
        raise ScheduleError('the device mesh has no names: init_device_mesh(..., mesh_dim_names=("pp", "dp"))')
    known = (PIPE, *DATA, TENSOR)
    for name in names:
        if name not in known:
            raise ScheduleError(f"the device mesh has a dimension {name!r}; {nearest(name, known)}")
    data = [name for name in names if name in DATA]
    if data not in ([], ["dp"], ["dp_replicate"], ["dp_shard"], ["dp_replicate", "dp_shard"]):
        raise ScheduleError(f"the device mesh has the data dimensions {data}: one is wanted, or dp_replicate before dp_shard")
    return tuple(names)


def group_of(within: Any, mesh: Any, transport: str) -> tuple[Any, int, Grid | None]:
    """The pipeline's group, this process's rank in it, and the mesh that it is a part of."""
    if mesh is None:
        return *here.current(within, transport), None
    if within is not None:
        raise ScheduleError("give either group= or mesh=: the mesh's dimension 'pp' is the pipeline's group")
    grid = Grid(mesh, transport)
    return grid.pipe, grid.pipe.rank, grid
