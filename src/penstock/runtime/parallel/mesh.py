"""Device meshes: which processes form a pipeline, which hold the same stages, and which share a stage's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from penstock.errors import PipelineError, ScheduleError, nearest
from penstock.planner.losses import Survivors
from penstock.runtime.device.connections import default_backend
from penstock.runtime.transport import current_group
from penstock.runtime.transport.group import Group
from penstock.runtime.transport.subgroup import ProcessSubgroup, get_subgroup, join_members

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPE, TENSOR = "pp", "tp"
DATA = ("dp", "dp_replicate", "dp_shard")
"""The dimensions along which ranks hold the same stages: `dp`, or `dp_replicate` and `dp_shard` for hybrid sharding."""


def device_mesh(device: str | None = None, /, **sizes: int) -> DeviceMesh:
    """Make a device mesh of all processes, for `Pipeline(mesh=...)`: `device_mesh(pp=2, dp=2)`.

    The dimensions are those of `PipelineMesh`, in this order; one may have the size -1, for all processes that are left.
    torch.distributed is initialised first if it is not yet, such that processes which `torchrun` restarts do not meet those of the run
    before. `device` defaults to `cuda` if the processes have NCCL, and to `cpu` otherwise.
    """
    _check_names(tuple(sizes))
    current_group.refuse_threads()
    current_group.initialise()
    from torch.distributed.device_mesh import init_device_mesh

    shape = _read_shape(sizes, dist.get_world_size())
    backend = default_backend() if dist.get_backend() == "fake" else dist.get_backend_config()
    kind = ("cuda" if "cuda:nccl" in backend else "cpu") if device is None else device
    return init_device_mesh(kind, shape, mesh_dim_names=tuple(sizes))


def _read_shape(sizes: Mapping[str, int], processes: int) -> tuple[int, ...]:
    """Return the sizes of the dimensions; -1 becomes the number of processes that are left."""
    known = math.prod(size for size in sizes.values() if size != -1)
    free = [name for name, size in sizes.items() if size == -1]
    shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if any(type(size) is not int or size < -1 or size == 0 for size in sizes.values()) or len(free) > 1:
        raise ScheduleError(f"a device mesh of {shown}: give sizes of 1 or more, of which one may be -1")
    if processes % known or (not free and processes != known):
        raise ScheduleError(f"a device mesh of {shown} does not fit {processes} processes: start {'a multiple of ' if free else ''}{known}")
    return tuple(processes // known if size == -1 else size for size in sizes.values())


class PipelineMesh:
    """A device mesh whose dimensions have names, in any order, and this process's groups in it.

    Along `pp` are the ranks of the pipeline (one rank if there is no `pp`); along `dp`, or `dp_replicate` and `dp_shard`, ranks hold the
    same stages and split the batch; along `tp` they split each stage's tensors. This process's groups along them are `pipe`, `data` and
    `tensor`; `whole` is the group of all processes of the mesh.

    `devices[k]` is the rank along `pp` that becomes rank k of each pipeline; by default its own number.
    """

    def __init__(self, mesh: Any, transport: str = "auto", devices: Sequence[int] = ()) -> None:
        self.device_mesh, self.names = mesh, _list_dimension_names(mesh)
        self.places = places = np.arange(mesh.mesh.numel()).reshape(tuple(mesh.mesh.shape))
        """The ranks of `whole`, each at its place in the mesh."""
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise PipelineError(f"process {dist.get_rank()} is not in the device mesh that was given for the pipeline")
        self.coordinate = tuple(coordinate)
        self.whole = current_group.join_ranks(mesh.mesh.flatten().tolist(), transport)
        self.whole.names = [self._describe(place) for place in np.ndindex(places.shape)]
        self.refuse_losses("and all ranks of a mesh create a pipeline together: create it before any is lost, or when all have come back")
        self.data_dims = tuple(name for name in self.names if name in DATA)
        along = self._take_slice(places, (PIPE,))
        if devices:
            _check_devices(devices, along.ranks)
        self.devices = tuple(devices) or tuple(range(along.ranks))
        self.pipe = get_subgroup(self.whole, [along.members[device] for device in self.devices])
        self.data = self._take_slice(places, self.data_dims)
        self.tensor = self._take_slice(places, (TENSOR,))

    def _describe(self, place: tuple[int, ...]) -> str:
        return ", ".join(f"{name} {at}" for name, at in zip(self.names, place, strict=True))

    def _take_slice(self, places: Any, names: tuple[str, ...]) -> ProcessSubgroup:
        at = tuple(slice(None) if name in names else self.coordinate[dim] for dim, name in enumerate(self.names))
        members = [int(place) for place in places[at].flatten()]
        processes = self._list_processes(members)
        if processes != sorted(processes):  # torch's process groups number them in ascending order, whatever the mesh says
            raise ScheduleError(f"along {' and '.join(names)} the device mesh has processes {processes}: give them in ascending order")
        return get_subgroup(self.whole, members)

    # After losses ------------------------------------------------------------------------------------------------------

    def locate(self, rank: int) -> tuple[int, int]:
        """Return a rank's place: its rank in its pipeline, and its replica."""
        place = dict(zip(self.names, map(int, np.unravel_index(rank, self.places.shape)), strict=True))
        replica = 0
        for name in self.data_dims:
            replica = replica * self.places.shape[self.names.index(name)] + place[name]
        return self.devices.index(place.get(PIPE, 0)), replica

    @property
    def has_lost(self) -> bool:
        """Whether any rank is lost."""
        return len(self.whole.members) < self.whole.ranks

    def refuse_losses(self, reason: str) -> None:
        """Raise an error with this end if any rank is lost."""
        if self.has_lost:
            lost = [self.whole.describe_rank(rank) for rank in range(self.whole.ranks) if rank not in self.whole.members]
            raise PipelineError(f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} lost, {reason}")

    def describe_shards(self) -> str:
        """A sentence: who else has the shards of a lost rank."""
        if self.data_dims == ("dp_replicate", "dp_shard"):
            return (
                "The ranks along dp_replicate hold the same shards, but torch's process groups that gather them cannot go on without a "
                "rank."
            )
        return f"Along {' and '.join(self.data_dims)} no other rank holds the same shards."

    def find_survivors(self) -> Survivors:
        """Return the places of the ranks that are left."""
        return Survivors(self.pipe.ranks, self.data.ranks, tuple(map(self.locate, self.whole.members)))

    def join_survivors(self) -> ProcessSubgroup:
        """Return the group of all ranks that are left."""
        return get_subgroup(self.whole, self.whole.members)

    def join_peers(self) -> ProcessSubgroup:
        """Return the group of the ranks that are left with the same stages as this one."""
        return get_subgroup(self.whole, [member for member in self.data.members if member in self.whole.members])

    def find_replica_peer(self) -> int | None:
        """In a process that has come back: the number, among the ranks that stayed, of one in the same replica; None if all were lost."""
        stayed = [rank for rank in self.whole.members if rank not in self.whole.newcomers]
        replica = self.locate(self.whole.rank)[1]
        return next((number for number, rank in enumerate(stayed) if self.locate(rank)[1] == replica), None)

    def _list_processes(self, members: Sequence[int]) -> list[int]:
        """Return the processes at these places of the mesh."""
        flat = self.device_mesh.mesh.flatten()
        return [int(flat[place]) for place in members]

    @property
    def data_processes(self) -> list[int]:
        """The processes that hold the same stages as this one, itself among them."""
        return self._list_processes(self.data.members)

    @property
    def data_mesh(self) -> Any:
        """The submesh that `fully_shard` takes: one dimension, or `dp_replicate` and `dp_shard`."""
        return self.device_mesh[self.data_dims if len(self.data_dims) > 1 else self.data_dims[0]]


def _list_dimension_names(mesh: Any) -> tuple[str, ...]:
    """Return the names of the dimensions; refuse unknown ones and those that do not go together."""
    if not hasattr(mesh, "mesh_dim_names"):
        raise ScheduleError(f"mesh= takes a device mesh, got {type(mesh).__name__}; a process group goes into group=")
    names = mesh.mesh_dim_names
    if names is None:
        raise ScheduleError('the device mesh has no names: init_device_mesh(..., mesh_dim_names=("pp", "dp"))')
    _check_names(names)
    return tuple(names)


def _check_names(names: Sequence[str]) -> None:
    known = (PIPE, *DATA, TENSOR)
    if not names:
        raise ScheduleError("a device mesh without dimensions: give some, as in device_mesh(pp=2, dp=2)")
    for name in names:
        if name not in known:
            raise ScheduleError(f"the device mesh has a dimension {name!r}; {nearest(name, known)}")
    data = [name for name in names if name in DATA]
    if data not in ([], ["dp"], ["dp_replicate"], ["dp_shard"], ["dp_replicate", "dp_shard"]):
        raise ScheduleError(f"the device mesh has the data dimensions {data}: give one, or dp_replicate before dp_shard")


def find_group(within: Any, mesh: Any, transport: str, devices: Sequence[int] = ()) -> tuple[Any, int, PipelineMesh | None]:
    """Return the pipeline's group, this process's rank in it, and the mesh that it is part of, if any.

    `devices[k]` is the rank of the group, or of the mesh along `pp`, that becomes rank k of the pipeline; by default its own number.
    """
    if mesh is None:
        return *arrange_ranks(*current_group.get_group(within, transport), devices), None
    if within is not None:
        raise ScheduleError("give either group= or mesh=: the mesh's dimension 'pp' is the pipeline's group")
    pipeline_mesh = PipelineMesh(mesh, transport, devices)
    return pipeline_mesh.pipe, pipeline_mesh.pipe.rank, pipeline_mesh


def arrange_ranks(group: Group, rank: int, devices: Sequence[int]) -> tuple[Group, int]:
    """Return the group with its ranks in another order, and this one's number there: `devices[k]` becomes rank k."""
    if not devices or list(devices) == list(range(group.ranks)):
        return group, rank
    _check_devices(devices, group.ranks)
    arranged = join_members(group, rank, devices)
    return arranged, arranged.rank


def _check_devices(devices: Sequence[int], ranks: int) -> None:
    if sorted(devices) != list(range(ranks)):
        raise ScheduleError(f"the plan is for the devices {list(devices)} of a cluster, but there are {ranks} ranks: start one per device")
