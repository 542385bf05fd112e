"""A stage whose parameters torch's `fully_shard` keeps in shards; the program says when they are in full.

torch gathers and reduces by hooks of its own, at times that a pipeline does not want. All of them are switched off: parameters are
in full from UNSHARD to RESHARD, and gradients stay where they are until REDUCE_GRAD, which sums them over all data ranks.

Models as users wrap them for data parallelism, and sharding that the pipeline applies itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PlacementError, ScheduleError
from penstock.runtime.model.partition import Partition
from penstock.runtime.parallel.mesh import PipelineMesh
from penstock.runtime.transport.activity import clock

_SPIN, _PAUSE = 200, 0.0002


class ShardedStage:
    """The modules of one stage that `fully_shard` was applied to, or `replicate`, which has the same machinery."""

    def __init__(self, stage: int, module: nn.Module, deadline: float) -> None:
        self.stage = stage
        self.modules = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self.groups = [group for part in self.modules for group in _groups(part)]
        self.gathered: list[tuple[int, int]] = []
        """When each gather of this step began, and when it was seen to have ended."""
        self._handles: list[Any] = []
        self._began = 0
        for part in self.modules:
            self._quieten(part)
        for connection in {each for group in self.groups for each in _connections(group)}:
            # Whoever waits in here notices a failure long before; after one, what was begun must not be waited for half an hour.
            _set_pg_timeout(timedelta(seconds=2 * deadline), connection)

    def _quieten(self, part: FSDPModule) -> None:
        """Nothing is gathered, freed or reduced but where the program says so, and gradients are sums rather than means."""
        if any(hasattr(group.mesh_info, "shard_mesh_size") for group in _groups(part)):
            part.set_reshard_after_forward(False, recurse=False)
        part.set_reshard_after_backward(False, recurse=False)
        part.set_requires_gradient_sync(False, recurse=False)
        part.set_is_last_backward(False)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no sum that multiplies first

    def check(self, ranks: Sequence[int], dims: Sequence[str]) -> None:
        """The shards must be over all data ranks and no others: torch reduces along its own mesh."""
        for group in self.groups:
            found = sorted(group.mesh_info.mesh.mesh.flatten().tolist())
            if found != sorted(ranks):
                raise PlacementError(
                    f"stage {self.stage} is sharded over processes {found}, but those that hold it are {sorted(ranks)}: "
                    f"apply fully_shard with mesh=mesh[{', '.join(map(repr, dims))}]"
                )

    def check_precision(self, dtype: torch.dtype) -> None:
        """Whether the gradients of microbatches are summed in this precision, which is the policy's to say."""
        for group in self.groups:
            wanted = {param.sharded_param.dtype for param in group.fsdp_params} | {group.mp_policy.param_dtype}
            if group.mp_policy.reduce_dtype != dtype and wanted - {None, dtype}:
                raise ScheduleError(
                    f"stage {self.stage} is sharded with reduce_dtype={group.mp_policy.reduce_dtype}, which is what its gradients are "
                    f"summed in: for accumulate_dtype={dtype} apply fully_shard with MixedPrecisionPolicy(reduce_dtype={dtype})"
                )

    @property
    def parameters(self) -> list[Any]:
        """torch's own records of the parameters that want a gradient."""
        return [param for group in self.groups for param in group.fsdp_params if param.sharded_param.requires_grad]

    @property
    def settles(self) -> bool:
        """Whether gradients are summed in another precision than they are computed in."""
        return any(param.reduce_dtype is not None for param in self.parameters if hasattr(param, "reduce_dtype"))

    @property
    def managed(self) -> set[int]:
        """The parameters that torch gathers, by their ids while they are in shards."""
        return {id(param.sharded_param) for group in self.groups for param in group.fsdp_params}

    def copied(self) -> Iterator[tuple[Any, list[Any]]]:
        """What several data ranks hold the same shards of, and the process group of those: torch takes them for equal."""
        for group in self.groups:
            connection = getattr(group.mesh_info, "replicate_process_group", None)
            if connection is not None:
                yield connection, [param.sharded_param.detach() for param in group.fsdp_params]

    # The program's actions --------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Begin to gather; whoever uses the parameters first waits."""
        self._began = clock()
        self._handles = [part.unshard(async_op=True) for part in self.modules]

    @property
    def pending(self) -> bool:
        return bool(self._handles)

    def wait(self, watch: Callable[[], None]) -> None:
        """Wait for the parameters; `watch` is called meanwhile, and raises when there is no more hope."""
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

    def settle(self) -> None:
        """Add new gradients to the sums in higher precision, where there are such."""
        for group in self.groups:
            group.post_backward()

    def present(self) -> list[bool]:
        """For each parameter that wants a gradient whether it has got one in this step."""
        return [
            hasattr(param, "_unsharded_param") and (param._unsharded_param.grad is not None or param.unsharded_accumulated_grad is not None)
            for param in self.parameters
        ]

    def reduce(self, wanted: Sequence[bool]) -> None:
        """Sum the gradients over all data ranks, each keeping its shard; `wanted` are those that any rank has one for."""
        for param, want, have in zip(self.parameters, wanted, self.present(), strict=True):
            if want and not have:
                param._unsharded_param.grad = torch.zeros_like(param._unsharded_param)
        self.settle()
        for part in self.modules:
            part.set_requires_gradient_sync(True, recurse=False)
        try:
            for group in self.groups:
                group.post_backward()
        finally:
            for part in self.modules:
                part.set_requires_gradient_sync(False, recurse=False)

    def finish(self) -> None:
        """The step is over: what torch noted of it for prefetching and streams is let go."""
        for state in self._roots():
            state._state_ctx.is_last_backward = True
            state._root_post_backward_final_callback()
            state._state_ctx.is_last_backward = False

    def reset(self) -> None:
        """The step has failed: its gradients are dropped, and the parameters are in shards again."""
        self._handles = []
        for group in self.groups:
            group._all_gather_result = None  # of which nobody knows whether it will ever end
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):
                    param._unsharded_param.grad = None
        for state in self._roots():
            state._reset_iter_state()
        self.reshard()

    def _roots(self) -> Iterator[Any]:
        """torch's states that have others under them, known once a forward has run."""
        states = {id(state): state for state in (part._get_fsdp_state() for part in self.modules)}
        return (state for state in states.values() if state._is_root)


def _groups(part: FSDPModule) -> list[Any]:
    """A module's parameters as torch gathers them together."""
    state: Any = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _connections(group: Any) -> list[Any]:
    """The process groups that gather and reduce a group of parameters."""
    found = (getattr(group.mesh_info, name, None) for name in ("shard_process_group", "replicate_process_group"))
    return [each for each in found if each is not None]


def _is_done(group: Any) -> bool:
    """Whether a gather that was begun has ended. On a device it ends in the order of the device's work, so that nobody waits here."""
    result = group._all_gather_result
    work = None if result is None else result.all_gather_work
    return work is None or group.device.type != "cpu" or bool(work.is_completed())


Sharding = bool | Callable[..., Any]
"""Whether the pipeline shards its stages, or how: called with each layer and `mesh=`, as `fully_shard` is."""


def unwrap_ddp(model: Any, grid: PipelineMesh | None) -> Any:
    """The model without `DistributedDataParallel`, whose work is done by the program's REDUCE_GRAD."""
    if isinstance(model, Mapping):
        return {stage: _unwrapped(module, grid) for stage, module in model.items()}
    if isinstance(model, (list, tuple)):
        return type(model)([_unwrapped(module, grid) for module in model])
    return _unwrapped(model, grid)


def _unwrapped(module: Any, grid: PipelineMesh | None) -> Any:
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


def shard_stages(partition: Partition, stages: Iterable[int], grid: PipelineMesh | None, sharding: Sharding) -> list[list[str]]:
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
