"""The whole model of a pipeline, for adapters: its size by the user's arguments, optimizers that can be split, and all weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from penstock.errors import IntegrationError
from penstock.planner.plan import Plan
from penstock.runtime import Pipeline, device_mesh
from penstock.runtime.checkpoint.training_state import ModelState

_JOINT_OPTIMIZERS = ("LBFGS", "SAM", "Prodigy", "DAdapt", "GrokAdamW")
"""How the names of optimizers begin whose step needs several evaluations of the loss, or a figure over all parameters."""


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


# Optimizers ---------------------------------------------------------------------------------------------------------------


def refuse_joint_optimizer(kind: type) -> None:
    """Refuse a kind of optimizer that looks at all parameters together: on a rank it would see those of that rank's layers alone."""
    closure = inspect.signature(kind.step).parameters.get("closure") if hasattr(kind, "step") else None
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    if needs_closure or any(base.__name__.startswith(_JOINT_OPTIMIZERS) for base in kind.__mro__):
        raise IntegrationError(
            f"{kind.__name__} steps by all parameters together, but each rank updates its own layers: choose an optimizer that updates "
            "each parameter by itself, such as AdamW"
        )


def check_optimizer(optimizer: Optimizer, pipeline: Pipeline, module: nn.Module, advice: str) -> None:
    """Refuse an optimizer that cannot be split over ranks, or that got parameters of layers on other ranks."""
    refuse_joint_optimizer(type(optimizer))
    own = {id(parameter) for _, parameter in pipeline.named_parameters()}
    names = {id(parameter): name for name, parameter in module.named_parameters() if id(parameter) not in own}
    others = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"] if id(parameter) in names]
    if others:
        raise IntegrationError(
            f"{type(optimizer).__name__} got {len(others)} parameters that other ranks update, {others[0]} among them: {advice}"
        )


# Weights ------------------------------------------------------------------------------------------------------------------


class StaleWeights:
    """Refuses to run or save a whole model on this rank once other ranks have trained their layers of it.

    It watches the modules from `set()` until `clear()`. A pipeline of one rank has the whole model, and needs none of this.
    """

    def __init__(self, pipeline: Pipeline, modules: Iterable[nn.Module], advice: str) -> None:
        self._modules, self._advice = tuple(modules) if pipeline.group.ranks > 1 else (), advice
        self._handles: list[Any] = []
        self._ignored = False

    def _refuse(self, module: nn.Module, *_: Any) -> None:
        if not self._ignored:
            raise IntegrationError(
                f"this {type(module).__name__} has the trained values of this rank's layers only, because other ranks have trained the "
                f"others: {self._advice}"
            )

    def set(self) -> None:
        """Note that the layers of other ranks have changed."""
        for module in () if self._handles else self._modules:
            self._handles.append(module.register_forward_pre_hook(self._refuse))
            self._handles.append(module.register_state_dict_pre_hook(self._refuse))  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Note that this rank has the values of all layers."""
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def ignore(self) -> Iterator[None]:
        """Let code inside use the modules, which knows what they hold."""
        before, self._ignored = self._ignored, True
        try:
            yield
        finally:
            self._ignored = before


def gather_state_dict(pipeline: Pipeline, keep: bool, *, everywhere: bool = False) -> dict[str, Any]:
    """Gather the state dict of the unpipelined model, stage by stage, on the ranks that `keep` it; empty on the others. A collective call.

    Only the first pipeline's ranks can keep it, unless it is gathered `everywhere`. A tied parameter is there under the names of the stages
    that hold it.
    """
    values: dict[str, Any] = {}
    for stage in range(pipeline.table.stages):
        part = pipeline.partition.parts[stage] if stage in pipeline.stages else None
        own = {} if part is None else ModelState({stage: part}).values()
        whole = {name: gather_tensor(value) for name, value in own.items()}
        if everywhere or pipeline.data.rank == 0:
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


def gather_into_module(pipeline: Pipeline, module: nn.Module, prefix: str) -> None:
    """Give the layers of a module on this process the values that other ranks have trained. A collective call of all processes."""
    state = module.state_dict(keep_vars=True)
    own = {id(value) for part in pipeline.stages.values() for value in (*part.module.parameters(), *part.module.buffers())}
    for name, value in state.items():
        if isinstance(value, Tensor) and (value.is_meta or isinstance(value, DTensor)):
            raise IntegrationError(
                f"{name} is {'on the meta device' if value.is_meta else 'sharded'}, so this process cannot hold the whole model: save it, "
                "and load what was saved"
            )
    gathered = {f"{prefix}{name}": value for name, value in gather_state_dict(pipeline, keep=True, everywhere=True).items()}
    with torch.no_grad():
        for name, value in state.items():
            if name in gathered and isinstance(value, Tensor) and id(value) not in own:
                value.copy_(gathered[name])


def gather_tensor(value: Any) -> Any:
    """A tensor of its own on the host; shards are put together, by all ranks that have them."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().cpu() if isinstance(value, Tensor) else value


def shard_like(value: Any, target: Any) -> Any:
    """This rank's shard of a whole tensor, if the target is sharded; any other value as it is."""
    if not isinstance(target, DTensor) or not isinstance(value, Tensor) or value.shape != target.shape:
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
