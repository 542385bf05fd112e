"""The whole model of a pipeline, for adapters: its size by the user's arguments, and state dicts of the unpipelined model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import IntegrationError
from penstock.planner.plan import Plan
from penstock.runtime import Pipeline, device_mesh
from penstock.runtime.checkpoint.training_state import ModelState


def mesh_options(plan_or_schedule: Any, ranks: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a pipeline, with a mesh if the processes form several pipelines of `ranks` each.

    `ranks` defaults to the plan's or schedule's number, or to all processes if it is only a name.
    """
    processes = dist.get_world_size()
    own = plan_or_schedule.schedule if isinstance(plan_or_schedule, Plan) else plan_or_schedule
    ranks = ranks or getattr(own, "ranks", None) or processes
    if processes % ranks:
        raise IntegrationError(f"{processes} processes cannot form pipelines of {ranks} ranks: start a multiple of {ranks}")
    return dict(options) if ranks == processes or "mesh" in options else {**options, "mesh": device_mesh(pp=ranks, dp=-1)}


def gather_state_dict(pipeline: Pipeline, keep: bool) -> dict[str, Any]:
    """Gather the state dict of the unpipelined model, stage by stage, on the ranks that `keep` it; empty on the others. A collective call.

    Only the first pipeline's ranks can keep it. A tied parameter is there under the names of the stages that hold it.
    """
    values: dict[str, Any] = {}
    for stage in range(pipeline.table.stages):
        part = pipeline.partition.parts[stage] if stage in pipeline.stages else None
        own = {} if part is None else ModelState({stage: part}).values()
        whole = {name: _gather_tensor(value) for name, value in own.items()}
        if pipeline.data.rank == 0:
            for share in pipeline.gather("state dict", whole):
                values.update(share if keep else {})
    return values


def gather_module_state(pipeline: Pipeline, module: nn.Module, prefix: str, keep: bool) -> dict[str, Any]:
    """Gather the state dict of a whole module, whose part at `prefix` is cut into the pipeline; empty on ranks that do not `keep` it.

    A tied parameter is on the first stage that has it, under one of its names; a plain state dict has it under all of them.
    """
    gathered = {f"{prefix}{name}": value for name, value in gather_state_dict(pipeline, keep).items()}
    if not keep:
        return {}
    state = module.state_dict(keep_vars=True)
    shared = {id(value): gathered[name] for name, value in state.items() if name in gathered}
    return {name: gathered.get(name, shared.get(id(value), value)) for name, value in state.items()}


def _gather_tensor(value: Any) -> Any:
    """A tensor of its own on the host; shards are put together."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().cpu() if isinstance(value, Tensor) else value
