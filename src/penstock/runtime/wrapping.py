"""Models as users wrap them for data parallelism, and sharding that the pipeline applies itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.grid import Grid
from penstock.runtime.partition import Partition

Sharding = bool | Callable[..., Any]
"""Whether the pipeline shards its stages, or how: called with each layer and `mesh=`, as `fully_shard` is."""


def unwrapped(model: Any, grid: Grid | None) -> Any:
    """The model without `DistributedDataParallel`, whose work is done by the program's REDUCE_GRAD."""
    if isinstance(model, Mapping):
        return {stage: _unwrapped(module, grid) for stage, module in model.items()}
    if isinstance(model, (list, tuple)):
        return type(model)([_unwrapped(module, grid) for module in model])
    return _unwrapped(model, grid)


def _unwrapped(module: Any, grid: Grid | None) -> Any:
    if not isinstance(module, DistributedDataParallel):
        return module
    if grid is None:
        raise ScheduleError("the model is wrapped in DistributedDataParallel: give mesh=, whose data dimensions hold its copies")
    wanted = sorted(int(grid.mesh.mesh.flatten()[place]) for place in grid.data.members)
    found = sorted(dist.get_process_group_ranks(module.process_group))
    if found != wanted:
        raise PlacementError(
            f"DistributedDataParallel copies the model over processes {found}, but the mesh's data dimensions over {wanted}: "
            "give it process_group=mesh['dp'].get_group()"
        )
    return module.module


def shard_stages(partition: Partition, stages: Iterable[int], grid: Grid | None, sharding: Sharding) -> list[list[str]]:
    """Shard the layers of these stages over the data ranks; the groups of names that were one parameter before."""
    tied = [[name for _, name, _ in holders] for holders in partition.tied()]
    if not sharding:
        return []
    if grid is None or not grid.data_dims or grid.data_dims == ("dp_replicate",):
        raise ScheduleError("shard= needs mesh= with a dimension to shard over: 'dp', or 'dp_shard' with or without 'dp_replicate'")
    from torch.distributed.fsdp import fully_shard

    apply: Callable[..., Any] = fully_shard if sharding is True else sharding
    seen: set[nn.Module] = set()
    for index in stages:
        part = partition.parts[index]
        for layer in () if part is None else part.modules:
            if layer not in seen and next(layer.parameters(), None) is not None:
                seen.add(layer)
                apply(layer, mesh=grid.data_mesh)
    return tied
