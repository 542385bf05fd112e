"""Stages that torch's `fully_shard` keeps in shards, and models that are wrapped for data parallelism.

torch gathers parameters and reduces gradients by hooks, at times that do not suit a pipeline. All of them are switched off:
parameters are in full from UNSHARD to RESHARD, and REDUCE_GRAD sums gradients over all data ranks. `torch.distributed.fsdp` takes
seconds to import, so it is imported only if the pipeline shards, and looked up only if it has been imported.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.device.timing import clock
from penstock.runtime.model.partition import Partition
from penstock.runtime.parallel.mesh import PipelineMesh
from penstock.runtime.torch_internals.lookup import check_names, check_private, find_private

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Sharding = bool | Callable[..., Any]
"""Whether the pipeline shards its stages, or a function to do so, called like `fully_shard` with each layer and `mesh=`."""
_SPIN, _PAUSE = 200, 0.0002
"""How often to ask for a gather's end without a pause, and the pause in seconds afterwards."""

# Preparing a model ----------------------------------------------------------------------------------------------------


def unwrap_ddp(model: Any, mesh: PipelineMesh | None) -> Any:
    """Return the model without `DistributedDataParallel`, whose work the program's REDUCE_GRAD does."""
    if isinstance(model, Mapping):
        return {stage: _unwrap_module(module, mesh) for stage, module in model.items()}
    if isinstance(model, (list, tuple)):
        return type(model)([_unwrap_module(module, mesh) for module in model])
    return _unwrap_module(model, mesh)


def _unwrap_module(module: Any, mesh: PipelineMesh | None) -> Any:
    if not isinstance(module, DistributedDataParallel):
        return module
    if mesh is None:
        raise ScheduleError("the model is wrapped in DistributedDataParallel: give mesh=, whose data dimensions hold its copies")
    expected = sorted(mesh.data_processes)
    actual = sorted(dist.get_process_group_ranks(module.process_group))
    if actual != expected:
        raise PlacementError(
            f"DistributedDataParallel copies the model over processes {actual}, but the mesh's data dimensions over {expected}: "
            "give it process_group=mesh['dp'].get_group()"
        )
    return module.module


def shard_stages(partition: Partition, stages: Iterable[int], mesh: PipelineMesh | None, sharding: Sharding) -> list[list[str]]:
    """Shard the layers of these stages over the data ranks; return the groups of names that were one parameter before."""
    if not sharding:
        return []
    if mesh is None or not mesh.data_dims or mesh.data_dims == ("dp_replicate",):
        raise ScheduleError("shard= needs mesh= with a dimension to shard over: 'dp', or 'dp_shard' with or without 'dp_replicate'")
    from torch.distributed.fsdp import fully_shard

    tied = [[name for _, name, _ in holders] for holders in partition.list_tied()]
    apply: Callable[..., Any] = fully_shard if sharding is True else sharding
    seen: set[nn.Module] = set()
    for index in stages:
        part = partition.parts[index]
        for layer in () if part is None else part.modules:
            if layer not in seen and next(layer.parameters(), None) is not None:
                seen.add(layer)
                apply(layer, mesh=mesh.data_mesh)
    return tied


# Running sharded stages -----------------------------------------------------------------------------------------------


def find_sharded_stages(modules: Mapping[int, nn.Module], deadline: float) -> dict[int, ShardedStage]:
    """Return the stages that `fully_shard` was applied to, or `replicate`, which works the same way; `modules` are by stage."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    sharded = {index: [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)] for index, module in modules.items()}
    return {index: ShardedStage(index, parts, deadline) for index, parts in sharded.items() if parts}


class ShardedStage:
    """The sharded modules of one stage. `unshard`, `reshard` and `reduce` are the program's actions."""

    def __init__(self, stage: int, modules: Sequence[FSDPModule], deadline: float) -> None:
        self.stage, self.modules = stage, modules
        for part in modules:
            check_private(part, "_get_fsdp_state")
            state: Any = part._get_fsdp_state()
            check_private(state, "_state_ctx", "_is_root", "_root_post_backward_final_callback")
            check_private(state._state_ctx, "is_last_backward")
            if not hasattr(state, "_reset_iter_state"):
                check_private(state._state_ctx, "iter_forward_root", "post_backward_final_callback_queued")
        check_names("torch.distributed.fsdp._fully_shard._fsdp_collectives.AllGatherResult.all_gather_work")
        self.groups = [group for part in self.modules for group in _list_groups(part)]
        for group in self.groups:
            check_private(group, "_all_gather_result", "_wait_for_post_backward", "post_backward")
            check_private(group, "fsdp_params", "mesh_info", "device")
            check_private(group.mesh_info, "mesh")
            for param in group.fsdp_params:
                check_private(param, "sharded_param", "unsharded_accumulated_grad", "mp_policy")
        self.gathered: list[tuple[int, int]] = []
        """When each gather of this step began, and when it was seen to have ended."""
        self._handles: list[Any] = []
        self._began = 0
        for part in self.modules:
            self._disable_hooks(part)
        for connection in {connection for group in self.groups for connection in _list_connections(group)}:
            # A waiting rank notices a failure long before; after one, a collective must not keep it for torch's default of half an hour.
            _set_timeout(timedelta(seconds=2 * deadline), connection)

    @staticmethod
    def _disable_hooks(part: FSDPModule) -> None:
        """Have torch gather, free and reduce nothing by itself, and make gradients sums rather than means."""
        if any(hasattr(group.mesh_info, "shard_mesh_size") for group in _list_groups(part)):
            part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(False, recurse=False)
        part.set_requires_gradient_sync(False, recurse=False)
        part.set_is_last_backward(False)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first

    def check(self, processes: Sequence[int], dims: Sequence[str]) -> None:
        """Check that the shards are over all data ranks and no others, because torch reduces along its own mesh."""
        for group in self.groups:
            actual = sorted(group.mesh_info.mesh.mesh.flatten().tolist())
            if actual != sorted(processes):
                raise PlacementError(
                    f"stage {self.stage} is sharded over processes {actual}, but those that hold it are {sorted(processes)}: "
                    f"apply fully_shard with mesh=mesh[{', '.join(map(repr, dims))}]"
                )

    def check_precision(self, dtype: torch.dtype) -> None:
        """Check that the mixed-precision policy sums the gradients of microbatches in this dtype."""
        for param in (param for group in self.groups for param in group.fsdp_params):
            policy = param.mp_policy  # torch 2.15 can have one per parameter
            if policy.reduce_dtype != dtype and {param.sharded_param.dtype, policy.param_dtype} - {None, dtype}:
                raise ScheduleError(
                    f"stage {self.stage} is sharded with reduce_dtype={policy.reduce_dtype}, which is what its gradients are "
                    f"summed in: for accumulate_dtype={dtype} apply fully_shard with MixedPrecisionPolicy(reduce_dtype={dtype})"
                )

    @property
    def parameters(self) -> list[Any]:
        """The parameters that require a gradient, as torch's FSDP represents them."""
        return [param for group in self.groups for param in group.fsdp_params if param.sharded_param.requires_grad]

    @property
    def has_reduce_dtype(self) -> bool:
        """Whether gradients are summed in another dtype than they are computed in."""
        return any(param.reduce_dtype is not None for param in self.parameters if hasattr(param, "reduce_dtype"))

    @property
    def managed(self) -> set[int]:
        """The ids of the sharded parameters."""
        return {id(param.sharded_param) for group in self.groups for param in group.fsdp_params}

    def list_replicated_shards(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield shards that several data ranks hold, with the process group of those ranks; torch assumes that they are equal."""
        for group in self.groups:
            connection = getattr(group.mesh_info, "replicate_process_group", None)
            if connection is not None:
                yield connection, [param.sharded_param.detach() for param in group.fsdp_params]

    def unshard(self) -> None:
        """Start to gather the parameters; `wait` before using them."""
        self._began = clock()
        self._handles = [part.unshard(async_op=True) for part in self.modules]

    @property
    def pending(self) -> bool:
        """Whether a gather was started and not waited for."""
        return bool(self._handles)

    def wait(self, watch: Callable[[], None]) -> None:
        """Wait for the parameters; `watch` is called meanwhile, and raises if a rank has failed or the deadline has passed."""
        count = 0
        while not all(_is_done(group) for group in self.groups):
            watch()
            count += 1
            time.sleep(0.0 if count < _SPIN else _PAUSE)
        for handle in self._handles:
            handle.wait()
        self._handles = []
        self.gathered.append((self._began, clock()))

    def reshard(self) -> None:
        for part in self.modules:
            part.reshard()

    def accumulate(self) -> None:
        """Add new gradients to torch's sums in the reduce dtype."""
        for group in self.groups:
            group.post_backward()

    def present(self) -> list[bool]:
        """Return for each parameter that requires a gradient whether it has one in this step."""
        return [
            hasattr(param, "_unsharded_param") and (param._unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None)
            for param in self.parameters
        ]

    def reduce(self, wanted: Sequence[bool]) -> None:
        """Reduce-scatter the gradients over all data ranks; `wanted` marks the parameters that any rank has a gradient for."""
        for param, want, have in zip(self.parameters, wanted, self.present(), strict=True):
            if want and not have:
                param._unsharded_param.grad = torch.zeros_like(param._unsharded_param, dtype=param._unsharded_param.grad_dtype)
        self.accumulate()
        for part in self.modules:
            part.set_requires_gradient_sync(True, recurse=False)
        try:
            self.accumulate()  # which reduces too, now that synchronisation is on
        finally:
            for part in self.modules:
                part.set_requires_gradient_sync(False, recurse=False)

    def wait_reduction(self) -> None:
        """Let the current stream wait for the reduce-scatter that `reduce` has begun."""
        for group in self.groups:
            group._wait_for_post_backward()

    def finish(self) -> None:
        """End a step: drop what torch has noted for prefetching and streams."""
        for state in self._find_roots():
            context = state._state_ctx
            if getattr(context, "manual_backward_finalization_active", False) is None:
                context.manual_backward_finalization_active = False  # from torch 2.15 on a backward sets it; an evaluation has none
            context.is_last_backward = True
            state._root_post_backward_final_callback()
            context.is_last_backward = False

    def reset(self) -> None:
        """Drop the gradients of a step that has failed, and shard the parameters again."""
        self._handles = []
        for group in self.groups:
            group._all_gather_result = None  # it may never end
            for param in group.fsdp_params:
                if not isinstance(getattr(type(param), "unsharded_accumulated_grad", None), property):
                    param.unsharded_accumulated_grad = None  # since torch 2.15 this is the gradient below
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
        for state in self._find_roots():
            if hasattr(state, "_reset_iter_state"):
                state._reset_iter_state()
            else:  # up to torch 2.12; later steps are refused anyway, see `DataParallel.agree`
                state._state_ctx.iter_forward_root = None
                state._state_ctx.post_backward_final_callback_queued = False
                self._forget_training_state()
        self.reshard()

    def _forget_training_state(self) -> None:
        """Have torch take a step that has failed in a forward as ended; else it does not reshard."""
        idle = find_private("torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState").IDLE
        for owner in (*(part._get_fsdp_state() for part in self.modules), *self.groups):
            check_private(owner, "_training_state")
            owner._training_state = idle

    def _find_roots(self) -> Iterator[Any]:
        """Yield torch's root states, which are known once a forward has run."""
        states = {id(state): state for state in (part._get_fsdp_state() for part in self.modules)}
        return (state for state in states.values() if state._is_root)


def find_communication_context(part: FSDPModule) -> object:
    """Return the streams and buffers that a module communicates with: the same object for modules that share them."""
    check_private(part, "_get_fsdp_state")
    state: Any = part._get_fsdp_state()
    check_private(state, "_comm_ctx")
    context: object = state._comm_ctx
    return context


def _list_groups(part: FSDPModule) -> list[Any]:
    """Return a module's parameter groups, each of which torch gathers together."""
    state: Any = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    check_private(state, "_fsdp_param_group")
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _list_connections(group: Any) -> list[Any]:
    """Return the process groups that gather and reduce a group of parameters."""
    names = ("shard_process_group", "reduce_scatter_process_group", "replicate_process_group")
    connections = [getattr(group.mesh_info, name) for name in names if hasattr(group.mesh_info, name)]
    if not connections:
        check_private(group.mesh_info, "shard_process_group")
    return [connection for connection in connections if connection is not None]


def _set_timeout(timeout: timedelta, connection: Any) -> None:
    """Limit the time of later collectives on a process group; the function is public since torch 2.14."""
    public: Any = getattr(dist, "set_timeout", None)
    limit = find_private("torch.distributed.distributed_c10d._set_pg_timeout") if public is None else public
    limit(timeout, connection)


def _is_done(group: Any) -> bool:
    """Whether a gather has ended. On a device it ends in stream order, so there is nothing to wait for here."""
    result = group._all_gather_result
    work = None if result is None else result.all_gather_work
    return work is None or group.device.type != "cpu" or bool(work.is_completed())
