"""Data parallelism: other processes hold the same stages and get other parts of the batch.

What they do together is part of the program: REDUCE_GRAD sums a stage's gradients once per step, UNSHARD and RESHARD say when a
sharded stage has its parameters in full. Before a step the data ranks agree on the weights of their microbatches and copy the
buffers of the first data rank; after it they sum the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError, PipelineError, PlacementError, ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.passes.shard import Shard
from penstock.runtime.batch.step_input import StepInput
from penstock.runtime.device.connections import broadcast_options
from penstock.runtime.device.timing import clock
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.tied_parameters import Gather
from penstock.runtime.parallel.fsdp import ShardedStage, find_sharded_stages
from penstock.runtime.parallel.mesh import PipelineMesh
from penstock.runtime.tensors.dtensor import DTensorPacker, has_same_placements, is_dtensor, redistribute_like, to_local
from penstock.runtime.tensors.layout import add_gradients, gradient_dtype, round_gradient
from penstock.runtime.torch_internals.modules import NormBase, own_buffers
from penstock.runtime.torch_internals.tensors import post_accumulate_hooks, read_version
from penstock.runtime.transport.group import Operation, do_nothing
from penstock.runtime.transport.subgroup import ProcessSubgroup

_BACKWARD = (Kind.B, Kind.I, Kind.W)
_OUTSIDE = -1
"""Stands for a stage among those that gradients are summed for: the parameters that are in no stage."""


class DataParallel:
    """Data parallelism of this rank's stages, if there are other data ranks.

    The pipeline calls `agree` before each step, `begin` and `finish` around a training step (`postpone` instead of `finish` if it does not
    finalize its gradients), `settle` when a training step has succeeded, `finish_evaluation` after an evaluation, and `reset` when a step
    has failed. When ranks were lost or have come back it calls `regroup`, and then `start` if some have come back. The executor asks for
    `operation` and `around` when it resolves the program.
    `dtype` is what gradients are accumulated in; None for the parameters' own. `outside` are parameters that are in no stage, a rank's rows
    of a spread vocabulary: data ranks hold the same, and sum their gradients when the step ends.
    """

    def __init__(
        self,
        mesh: PipelineMesh | None,
        stages: Mapping[int, Stage],
        *,
        shard: Shard,
        dtype: torch.dtype | None,
        deadline: float,
        outside: Iterable[nn.Parameter] = (),
    ) -> None:
        self.mesh, self.stages, self.deadline, self._outside = mesh, stages, deadline, list(outside)
        self.group: ProcessSubgroup | None
        self.group, self.rank, self.ranks = _use_if_several(None if mesh is None else mesh.data)
        self.sharded = find_sharded_stages({index: stage.module for index, stage in stages.items()}, deadline)
        self.dtype, self.replicas = dtype, ReplicaGradients(dtype)
        self._check(dtype)
        self._shard = shard
        self.shard: Shard | None = None
        """The pass that adds UNSHARD and RESHARD to programs, if any rank has sharded stages."""
        self.scattered = False
        """Whether any rank holds only a part of a parameter."""
        self.active = False
        """Whether there is anything to do in a step; if not, `agree`, `begin`, `finish` and `settle` need not be called."""
        self._broken = False
        self._finalizes = True
        """Whether the REDUCE_GRAD actions of this step sum gradients; if not, they leave it to a later step."""
        modules = {index: stage.module for index, stage in stages.items()}
        self.replicated = ReplicatedTensors(modules, {index: self._list_managed(index) for index in stages}, self._outside)
        self.start()

    @property
    def has_shards(self) -> bool:
        """Whether any rank holds parts of parameters that others do not hold."""
        return self.shard is not None or self.scattered

    def start(self) -> None:
        """Begin together with all ranks: give parameters and buffers the values of the first data rank that has not just come back."""
        mesh, parameters = self.mesh, [parameter for stage in self.stages.values() for parameter in stage.module.parameters()]
        own = bool(self.sharded), any(map(is_dtensor, parameters))
        everyone = [own] if mesh is None else mesh.whole.gather(mesh.whole.rank, "shards", own, self.deadline)
        self.shard = self._shard if any(sharded for sharded, _ in everyone) else None
        self.scattered = any(scattered for _, scattered in everyone)
        self.active = self.group is not None or self.dtype is not None or self.shard is not None
        if self.group is None:
            return
        newcomers = self.group.parent.newcomers
        root = next(place for place, member in enumerate(self.group.members) if member not in newcomers)
        self.group.gather(self.group.rank, "start", None, self.deadline)
        with self.notice_losses("the values of the parameters"):
            self.replicated.broadcast(self._connection, self.replicated.list_everything(), root)
        for sharded in self.sharded.values():
            for connection, shards in sharded.list_replicated_shards():
                self.replicated.broadcast(connection, shards)

    def regroup(self, group: ProcessSubgroup) -> None:
        """Go on with these data ranks, and forget the gradients of steps that were not finalized."""
        self.group, self.rank, self.ranks = _use_if_several(group)
        self.active = self.group is not None or self.dtype is not None or self.shard is not None
        self.replicas.forget()

    @contextmanager
    def notice_losses(self, what: str) -> Iterator[None]:
        """A context for torch's own collectives: if a connection is lost in it, all ranks raise a report of the rank that is gone."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, PenstockError) or self.group is None or not self.group.parent.goes_on:
                raise
            peer = self.group.members[(self.group.rank + 1) % self.group.ranks]
            self.group.parent.raise_lost(peer, what, error)

    def _check(self, dtype: torch.dtype | None) -> None:
        for index, stage in self.stages.items():
            if self.mesh is None and index in self.sharded:
                raise ScheduleError(f"stage {index} is sharded by fully_shard: give mesh=, whose data dimensions it is sharded over")
            if self.mesh is not None:
                self._check_shards(self.mesh, index, stage.module)
            if index in self.sharded and dtype is not None:
                self.sharded[index].check_precision(dtype)

    def _check_shards(self, mesh: PipelineMesh, index: int, module: nn.Module) -> None:
        """Check that what is sharded over data ranks is sharded over all of them, and gathered by this stage."""
        processes = mesh.data_processes
        if index in self.sharded:
            self.sharded[index].check(processes, mesh.data_dims)
        known, others = self._list_managed(index), set(processes) - {processes[mesh.data.rank]}
        for name, parameter in module.named_parameters():
            if is_dtensor(parameter) and id(parameter) not in known and others & set(parameter.device_mesh.mesh.flatten().tolist()):
                raise PlacementError(
                    f"{name!r} of stage {index} is sharded with a module that is not inside the stage: apply fully_shard to each layer, "
                    "or let the pipeline do it with shard=True"
                )

    def _list_managed(self, index: int) -> set[int]:
        """Return the ids of a stage's sharded parameters."""
        return self.sharded[index].managed if index in self.sharded else set()

    @property
    def _connection(self) -> Any:
        """The process group for collectives. The data ranks must just have met, so that no rank waits forever."""
        assert self.group is not None
        return self.group.connect_collectives(self.deadline)

    # Steps ------------------------------------------------------------------------------------------------------------

    def agree(self, step_input: StepInput, name: str) -> None:
        """Scale each microbatch's weight by the sum over all data ranks, which must run the same number of microbatches."""
        if self._broken:
            raise PipelineError(
                "an earlier step failed with sharded parameters, and torch's process groups that gather them may be out of step: start the "
                "processes again, from the last checkpoint"
            )
        for sharded in self.sharded.values():
            sharded.gathered.clear()
        if self.group is None:
            step_input.normalise(step_input.total)
            return
        own = SameOnDataRanks.of(step_input), step_input.total, self.replicated.list_changed()
        gathered = self.group.gather(self.group.rank, name, own, self.deadline)
        same, totals, changed = zip(*gathered, strict=True)
        SameOnDataRanks.check(same, self.group.describe_rank)
        step_input.normalise(sum(totals))
        self.copy_changed_buffers(changed)

    def copy_buffers(self) -> None:
        """Give the buffers of all data ranks the values of the first, as every step does when it begins."""
        if self.group is not None:
            self.copy_changed_buffers(self.group.gather(self.group.rank, "buffers", self.replicated.list_changed(), self.deadline))

    def copy_changed_buffers(self, changed: Sequence[list[bool]]) -> None:
        """Copy the buffers that have changed on any data rank; `changed` is `ReplicatedTensors.list_changed` of each."""
        buffers = self.replicated.buffers_of([any(by_rank) for by_rank in zip(*changed, strict=True)])
        if buffers and self.group is not None:
            with self.notice_losses("the values of buffers"):
                self.replicated.broadcast(self._connection, buffers)

    def begin(self, reduces: Sequence[int], *, finalizes: bool = True) -> None:
        """Begin a training step, whose program reduces these stages in this order; without `finalizes` nothing is reduced yet."""
        self._finalizes = finalizes
        self.replicas.begin({} if self.group is None and self.dtype is None else self._find_last_uses(reduces))

    def _find_last_uses(self, reduces: Sequence[int]) -> dict[int, list[nn.Parameter]]:
        """Return the parameters that are summed with each stage: one that several stages have, with the last of them."""
        seen: set[int] = set()
        parameters: dict[int, list[nn.Parameter]] = {}
        for index in reversed(reduces):
            skip, own = seen | self._list_managed(index), self.stages[index].module.parameters()
            parameters[index] = [p for p in own if self._has_gradients(p) and id(p) not in skip]
            seen |= {id(p) for p in parameters[index]}
        parameters[_OUTSIDE] = list(filter(self._has_gradients, self._outside))
        return parameters

    def _has_gradients(self, parameter: nn.Parameter) -> bool:
        return parameter.requires_grad or self.replicas.is_postponed(parameter)

    @torch.no_grad()
    def finish(self, shared: Collection[int] = ()) -> None:
        """End a training step; `shared` are the ids of parameters that other ranks of the pipeline hold too."""
        self.finish_evaluation()
        if self._outside and self.group is not None:
            self._reduce(_OUTSIDE)
        with self.notice_losses("the gradients of other data ranks"):
            self.replicas.finish(self.deadline, shared)

    def postpone(self) -> None:
        """End a training step that does not finalize its gradients: they stay on this rank, and the next step goes on with them."""
        self.finish_evaluation()
        self.replicas.postpone()

    def settle(self) -> None:
        """Note that a training step has succeeded on all ranks."""
        self.replicas.settle()

    def take_sum(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a shared parameter's gradient sum in `accumulate_dtype`, if there is one, and forget it."""
        return self.replicas.take(parameter)

    def finish_evaluation(self) -> None:
        """End an evaluation step."""
        for sharded in self.sharded.values():
            sharded.finish()

    def reset(self) -> None:
        """Drop what is left of a step that has failed on some rank."""
        self._broken = self._broken or self.shard is not None
        self.replicas.reset()
        for sharded in self.sharded.values():
            sharded.reset()

    def sum_values(self, values: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Sum each value over the data ranks, in their order."""
        if self.group is None:
            return values
        total: dict[str, Tensor | None] = {}
        for share in self.group.gather(self.group.rank, "sums", values, self.deadline):
            for name, value in share.items():
                before = total.get(name)
                total[name] = before if value is None else value if before is None else before + value
        return total

    def shard_gathers(self) -> Iterator[Gather]:
        """Yield all-gathers over the ranks that hold other parts of this rank's parameters, if any rank holds only parts."""
        for group in (self.mesh.data, self.mesh.tensor) if self.mesh is not None and self.scattered else ():
            yield lambda name, value, group=group: group.gather(group.rank, name, value, self.deadline)  # type: ignore[misc]

    @property
    def packer(self) -> DTensorPacker | None:
        """Packs the `DTensor`s of messages; None without a mesh."""
        return None if self.mesh is None else DTensorPacker(self.mesh.device_mesh)

    # Actions of the program -------------------------------------------------------------------------------------------

    def check_program(self, program: Program) -> None:
        """Check that a program which was lowered before has the actions that the data ranks need."""
        kinds = {Kind(int(kind)) for kind in set(program.rows.kind.tolist())}
        if self.shard is not None and Kind.UNSHARD not in kinds:
            raise ScheduleError("stages are sharded, but the program has no UNSHARD: lower it with fsdp=True")
        if self.ranks > 1 and program.training and Kind.REDUCE_GRAD not in kinds:
            raise ScheduleError(f"there are {self.ranks} data ranks, but the program has no REDUCE_GRAD: lower it with reduce-grad")

    def operation(self, kind: Kind, stage: int) -> Operation:
        """Return the operation of an UNSHARD, RESHARD, REDUCE_GRAD or WAIT_REDUCE_GRAD action."""
        sharded = self.sharded.get(stage)
        if kind in (Kind.REDUCE_GRAD, Kind.WAIT_REDUCE_GRAD):
            run = self._reduce if kind is Kind.REDUCE_GRAD else self._wait_reduction
            return do_nothing if self.group is None and sharded is None else partial(run, stage)
        if sharded is None:
            return do_nothing
        return sharded.unshard if kind is Kind.UNSHARD else sharded.reshard

    def collectives(self, actions: Sequence[Action], begun: Sequence[int], ended: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield for each gather and reduction of the last step its action's index, when it began, and when it was seen to have ended."""
        gathers = {stage: iter(sharded.gathered) for stage, sharded in self.sharded.items()}
        for at, action in enumerate(actions):
            if action.kind is Kind.UNSHARD and action.stage in gathers:
                yield at, *next(gathers[action.stage])
            elif action.kind is Kind.REDUCE_GRAD and self._finalizes and (self.group is not None or action.stage in gathers):
                yield at, begun[at], max(ended[at], self.replicas.ended.get(action.stage, 0))

    def surrounds(self, stage: int) -> bool:
        """Whether `around` changes a stage's compute actions."""
        return stage in self.sharded or self.dtype is not None

    def wrap(self, kind: Kind, stage: int, operation: Operation) -> Operation:
        """Wrap a compute action: wait for sharded parameters before it, and accumulate gradients in higher precision after it."""
        sharded = self.sharded.get(stage)
        if sharded is not None:
            return self._wrap_sharded(kind, stage, sharded, operation)
        if self.dtype is None or kind not in _BACKWARD:
            return operation
        module, waits = self.stages[stage].module, kind is Kind.I

        def accumulate() -> None:
            operation()
            # Post-accumulate hooks run after the backward for the weights, and must see the gradient then.
            self.replicas.accumulate([parameter for parameter in module.parameters() if not (waits and post_accumulate_hooks(parameter))])

        return accumulate

    def wrap_outside(self, operation: Operation) -> Operation:
        """Wrap an action that adds to gradients of parameters in no stage: accumulate these in higher precision after it."""
        if self.dtype is None:
            return operation

        def accumulate() -> None:
            operation()
            self.replicas.accumulate(self._outside)

        return accumulate

    def _wrap_sharded(self, kind: Kind, stage: int, sharded: ShardedStage, operation: Operation) -> Operation:
        assert self.mesh is not None
        refresh, activity = self.stages[stage].refresh, self.mesh.whole.activity(self.mesh.whole.rank)
        deferred, awaited = kind is Kind.W, f"the parameters of stage {stage} from the other data ranks"

        def watch() -> None:
            """Raise if a rank has failed or the deadline has passed."""
            assert self.group is not None
            self.group.parent.check_wait(awaited, self.deadline)

        def compute() -> None:
            if sharded.pending:
                sharded.wait(watch)
                activity.waits, activity.began = None, clock()  # the time before was spent waiting
                refresh()
            operation()
            if deferred and sharded.has_reduce_dtype:
                sharded.accumulate()

        return compute

    @torch.no_grad()
    def _reduce(self, stage: int) -> None:
        """Sum a stage's gradients over the data ranks. They exchange first which gradients each has, with a deadline."""
        if not self._finalizes:
            return
        group, sharded = self.group, self.sharded.get(stage)
        own = self.replicas.present(stage), [] if sharded is None else sharded.present()
        everyone = [own] if group is None else group.gather(group.rank, f"{stage}REDUCE_GRAD", own, self.deadline)
        copies, shards = ([any(by_rank) for by_rank in zip(*by_ranks, strict=True)] for by_ranks in zip(*everyone, strict=True))
        if group is not None and any(copies):
            with self.notice_losses(f"the gradients of stage {stage}"):
                self.replicas.reduce(stage, copies, self._connection)
        if sharded is not None and any(shards):
            sharded.reduce(shards)

    def _wait_reduction(self, stage: int) -> None:
        """Wait until the sum that `_reduce` began is there; without this the end of the step waits for it."""
        with self.notice_losses(f"the gradients of stage {stage}"):
            self.replicas.wait(stage, self.deadline)
        if stage in self.sharded:
            self.sharded[stage].wait_reduction()


def _use_if_several(group: ProcessSubgroup | None) -> tuple[ProcessSubgroup | None, int, int]:
    """A group of data ranks, this one's number in it, and their number; None for the group if there is only this rank."""
    return (None, 0, 1) if group is None or group.ranks == 1 else (group, group.rank, group.ranks)


@dataclass(frozen=True)
class SameOnDataRanks:
    """Properties of a step that must be the same on all data ranks."""

    microbatches: int
    finalizes: bool
    items: float | None
    schedule: str
    step: int | None
    """How many training steps the rank has run, if ranks may be lost and come back."""

    @classmethod
    def of(cls, step_input: StepInput) -> SameOnDataRanks:
        share = step_input.share
        return cls(len(step_input.args), share.finalizes, step_input.items, share.schedule or "the own", step_input.step)

    @staticmethod
    def check(everyone: Sequence[SameOnDataRanks], describe_rank: Callable[[int], str]) -> None:
        """Refuse a step that was not the same on all ranks."""
        order = "plan with schedules=() to keep the pipeline's own, and let only the order of microbatches differ"
        for name, what, advice in (
            ("microbatches", "run different numbers of microbatches", "give all the same count"),
            ("finalizes", "give finalize_gradients different values", "give all the same"),
            ("items", "divide their loss by different numbers of items", "give all the sum over all of them"),
            ("schedule", "run different schedules, but reduce their gradients in its order", order),
            ("step", "have run different numbers of steps", "load the last checkpoint on a rank that has come back, before its first step"),
        ):
            values = [getattr(one, name) for one in everyone]
            if len(set(values)) > 1:
                shown = ", ".join(f"{value} on {describe_rank(rank)}" for rank, value in enumerate(values))
                raise PipelineError(f"the data ranks {what}: {shown}; {advice}")


class ReplicatedTensors:
    """The parameters and buffers that every data rank holds in full: all get the values of the first data rank.

    `modules` are this rank's by stage, `managed` the ids of their parameters that are sharded, and `outside` the parameters in no stage.
    """

    def __init__(self, modules: Mapping[int, nn.Module], managed: Mapping[int, set[int]], outside: Sequence[nn.Parameter] = ()) -> None:
        self._modules, self._managed, self._outside = modules, managed, outside
        self._versions: dict[int, int] = {}
        """The version of each buffer when the data ranks had the same values, by id."""

    def list_everything(self) -> list[Tensor]:
        """Return all parameters and buffers."""
        buffers = [buffer for part in self._list_buffered() for buffer in part.buffers(recurse=False)]
        named = ((self._managed.get(index, ()), p) for index, module in self._modules.items() for p in module.parameters())
        own = [parameter for managed, parameter in named if id(parameter) not in managed]
        return buffers + [parameter.detach() for parameter in (*own, *self._outside)]

    def _list_buffered(self) -> Iterator[nn.Module]:
        """Yield the modules with buffers; also those of sharded stages, whose buffers torch leaves as they are on each rank."""
        for module in self._modules.values():
            yield from (part for part in module.modules() if own_buffers(part))

    @property
    def has_buffers(self) -> bool:
        """Whether there are any buffers."""
        return any(True for _ in self._list_buffered())

    def list_changed(self) -> list[bool]:
        """Return per module with buffers whether they may have changed. Norm layers change theirs without changing the version."""
        return [
            isinstance(part, NormBase)
            or any(read_version(buffer) != self._versions.get(id(buffer)) for buffer in part.buffers(recurse=False))
            for part in self._list_buffered()
        ]

    def buffers_of(self, wanted: Sequence[bool]) -> list[Tensor]:
        """Return the buffers of the wanted modules among those with buffers."""
        return [buffer for part in compress(self._list_buffered(), wanted) for buffer in part.buffers(recurse=False)]

    @torch.no_grad()
    def broadcast(self, connection: Any, tensors: Sequence[Tensor], root: int = 0) -> None:
        """Give the tensors the values of the first data rank, or of another."""
        options = broadcast_options(root)
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in map(to_local, tensors):
            if tensor.device.type != "meta":
                buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for bucket in buckets.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            connection.broadcast([flat], options).wait()
            for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        self._versions |= {id(tensor): read_version(tensor) for tensor in tensors}


class ReplicaGradients:
    """The gradients, during one step, of a rank's parameters that are the same on every data rank.

    `begin` sets aside what was accumulated in earlier steps, so that only this step's gradients are summed, once; `finish` adds the sums
    to it. In between, `accumulate` is called after each backward, and `reduce` once per stage. A step that does not finalize its
    gradients ends with `postpone` instead: the next one goes on with this rank's sums where this one has stopped.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        """The dtype in which the gradients of microbatches are summed; None for the parameters' own."""
        self._of_stage: dict[int, list[nn.Parameter]] = {}
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []
        self._sums: dict[int, Tensor] = {}
        self._running: list[tuple[int, Any, list[tuple[nn.Parameter, Tensor]]]] = []
        """The running all-reduces: the stage, the work, and each parameter's part of the sum."""
        self._postponed: dict[int, tuple[nn.Parameter, Tensor | None, Tensor | None]] = {}
        """The parameters with gradients of steps that were not finalized, by id: the gradient, and the sum in higher precision."""
        self._backup: dict[int, tuple[nn.Parameter, Tensor | None, Tensor | None]] | None = None
        """Copies of them, to be restored if the step fails; None between steps."""
        self.ended: dict[int, int] = {}
        """When each stage's all-reduce of the last step was seen to have ended."""

    def begin(self, of_stage: dict[int, list[nn.Parameter]]) -> None:
        """Begin a step; `of_stage` are the parameters that each stage is the last to give gradients to."""
        self._of_stage, self._sums, self._running, self.ended = of_stage, {}, [], {}
        self._before = [(parameter, parameter.grad) for parameters in of_stage.values() for parameter in parameters]
        self._backup = {key: (parameter, _copy(grad), _copy(total)) for key, (parameter, grad, total) in self._postponed.items()}
        for parameter, _ in self._before:
            _, grad, total = self._postponed.pop(id(parameter), (parameter, None, None))
            parameter.grad = grad
            if total is not None:
                self._sums[id(parameter)] = total

    def forget(self) -> None:
        """Drop the gradients of steps that were not finalized."""
        self._postponed.clear()

    def is_postponed(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has gradients of steps that were not finalized."""
        return id(parameter) in self._postponed

    def postpone(self) -> None:
        """End a step that does not finalize its gradients: keep this rank's sums, and restore what was accumulated before."""
        for parameter, before in self._before:
            grad, total = parameter.grad, self._sums.get(id(parameter))
            if grad is not None or total is not None:
                self._postponed[id(parameter)] = parameter, grad, total
            parameter.grad = before
        self._before, self._sums = [], {}

    def settle(self) -> None:
        """Drop the copies, because the step has succeeded on all ranks."""
        self._backup = None

    def accumulate(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move new gradients into the sums in higher precision."""
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None and self._is_summed(parameter):
                total = self._sums.get(id(parameter))
                if total is None:
                    self._sums[id(parameter)] = grad.to(self.dtype)
                elif total.is_sparse:
                    self._sums[id(parameter)] = add_gradients(total, grad.to(self.dtype))
                else:
                    total.add_(grad.to(self.dtype) if grad.is_sparse else grad)
                parameter.grad = None

    def _is_summed(self, parameter: nn.Parameter) -> bool:
        return self.dtype is not None and gradient_dtype(parameter) != self.dtype and parameter.is_floating_point()

    def _sum_total(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this step's gradient so far."""
        return self._sums.get(id(parameter), parameter.grad)

    def present(self, stage: int) -> list[bool]:
        """Return for each of a stage's parameters whether it has a gradient in this step."""
        return [self._sum_total(parameter) is not None for parameter in self._of_stage.get(stage, ())]

    def reduce(self, stage: int, wanted: Sequence[bool], connection: Any) -> None:
        """Start to sum a stage's gradients over all data ranks; `wanted` marks the parameters that any rank has a gradient for."""
        buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in compress(self._of_stage.get(stage, ()), wanted):
            total = self._sum_total(parameter)
            if total is not None and total.is_sparse:
                raise ScheduleError(
                    f"a parameter of stage {stage} has a sparse gradient, which cannot be summed over data ranks: use dense ones"
                )
            dtype = self.dtype if self.dtype is not None and self._is_summed(parameter) else gradient_dtype(parameter)
            buckets.setdefault((dtype, parameter.device), []).append(parameter)
        for (dtype, device), parameters in buckets.items():
            shapes = [to_local(parameter.detach()).shape for parameter in parameters]
            flat = torch.zeros(sum(shape.numel() for shape in shapes), dtype=dtype, device=device)
            split = torch.split(flat, [shape.numel() for shape in shapes])
            parts = [(parameter, part.view(shape)) for parameter, part, shape in zip(parameters, split, shapes, strict=True)]
            for parameter, part in parts:
                total = self._sum_total(parameter)
                if total is not None:
                    part.copy_(to_local(redistribute_like(total, parameter)))
            self._running.append((stage, connection.allreduce([flat]), parts))

    def wait(self, stage: int, deadline: float) -> None:
        """Wait for the all-reduces of one stage."""
        running, self._running = self._running, []
        for of, work, parts in running:
            if of != stage:
                self._running.append((of, work, parts))
                continue
            work.wait(timedelta(seconds=deadline))
            self.ended[stage] = clock()
            self._sums |= {id(parameter): part for parameter, part in parts}

    def finish(self, deadline: float, shared: Collection[int] = ()) -> None:
        """Wait for the all-reduces, round the sums, and add them to what was accumulated before.

        The sums of `shared` parameters, given by their ids, are kept for `take`, because other ranks of the pipeline hold them too.
        """
        for stage in dict.fromkeys(stage for stage, _, _ in self._running):
            self.wait(stage, deadline)
        for parameter, before in self._before:
            if id(parameter) in shared:
                continue
            grad, total = parameter.grad, self._sums.pop(id(parameter), None)
            if total is not None and total.is_sparse:
                grad = round_gradient(total, parameter)
            elif total is not None:
                if grad is None or not has_same_placements(grad, parameter):
                    grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter), requires_grad=False)
                to_local(grad).copy_(to_local(redistribute_like(total, parameter)))
            parameter.grad = grad if before is None else before if grad is None else _add_to(before, grad)
        self._before, self._running = [], []

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum of a shared parameter's gradients in higher precision, and forget it.

        None if the parameter's own gradient is the sum.
        """
        return self._sums.pop(id(parameter), None)

    def reset(self) -> None:
        """Drop the sums of a step that has failed, and restore those of the steps before it that were not finalized."""
        self._of_stage, self._before, self._sums, self._running = {}, [], {}, []
        self._postponed = self._postponed if self._backup is None else self._backup
        self._backup = None


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _add_to(before: Tensor, grad: Tensor) -> Tensor:
    """Add a gradient, in place if both are dense."""
    return add_gradients(before, grad) if before.is_sparse or grad.is_sparse else before.add_(grad)
