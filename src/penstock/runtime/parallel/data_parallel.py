"""Data parallelism: other processes hold the same stages and get other parts of the batch.

What they do together is part of the program: REDUCE_GRAD sums a stage's gradients once per step, UNSHARD and RESHARD say when a
sharded stage has its parameters in full. Before a step the data ranks agree on the weights of their microbatches and copy the
buffers of the first data rank; after it they sum the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError, PlacementError, ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.passes.shard import Shard
from penstock.runtime.batch.step_input import StepInput
from penstock.runtime.device.timing import clock
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.tied_parameters import Gather
from penstock.runtime.parallel.fsdp import ShardedStage, find_sharded_stages
from penstock.runtime.parallel.mesh import PipelineMesh
from penstock.runtime.parallel.replicas import ReplicaGradients
from penstock.runtime.tensors.dtensor import is_dtensor, to_local
from penstock.runtime.torch_internals.modules import NormBase, own_buffers
from penstock.runtime.torch_internals.tensors import post_accumulate_hooks, read_version
from penstock.runtime.transport.group import Operation, nothing
from penstock.runtime.transport.subgroup import ProcessSubgroup

if TYPE_CHECKING:
    from penstock.runtime.tensors.dtensor_messages import DTensorPacker

_BACKWARD = (Kind.B, Kind.I, Kind.W)


class DataParallel:
    """What this rank's stages do together with the other data ranks, if there are any.

    The pipeline calls `agree` before each step, `begin` and `finish` around a training step (`postpone` instead of `finish` if it does not
    finalize its gradients), `settle` when a training step has succeeded, `finish_evaluation` after an evaluation, and `reset` when a step
    has failed. The executor asks for `operation` and `around` when it resolves the program.
    `dtype` is what gradients are accumulated in; None for the parameters' own.
    """

    def __init__(
        self, mesh: PipelineMesh | None, stages: Mapping[int, Stage], *, shard: Shard, dtype: torch.dtype | None, deadline: float
    ) -> None:
        self.mesh, self.stages, self.deadline = mesh, stages, deadline
        self.group: ProcessSubgroup | None = None if mesh is None or mesh.data.ranks == 1 else mesh.data
        self.rank, self.ranks = (0, 1) if self.group is None else (self.group.rank, self.group.ranks)
        self.sharded = find_sharded_stages({index: stage.module for index, stage in stages.items()}, deadline)
        self.replicas = ReplicaGradients(dtype) if self.group is not None or dtype is not None else None
        self.dtype = dtype
        self._check(dtype)
        mine = bool(self.sharded), any(is_dtensor(p) for stage in stages.values() for p in stage.module.parameters())
        everyone = [mine] if mesh is None else mesh.whole.gather(mesh.whole.rank, "shards", mine, deadline)
        self.shard = shard if any(sharded for sharded, _ in everyone) else None
        """The pass that adds UNSHARD and RESHARD to programs, if any rank has sharded stages."""
        self.scattered = any(scattered for _, scattered in everyone)
        """Whether any rank holds only a part of a parameter."""
        self._broken = False
        self._finalizes = True
        """Whether the REDUCE_GRAD actions of this step sum gradients; if not, they leave it to a later step."""
        modules = {index: stage.module for index, stage in stages.items()}
        self.replicated = ReplicatedTensors(modules, {index: self._managed(index) for index in stages})
        if self.group is not None:
            self.group.gather(self.group.rank, "start", None, deadline)
            self.replicated.broadcast(self._connection, self.replicated.everything())
            for sharded in self.sharded.values():
                for connection, shards in sharded.replicated_shards():
                    self.replicated.broadcast(connection, shards)

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
        known, others = self._managed(index), set(processes) - {processes[mesh.data.rank]}
        for name, parameter in module.named_parameters():
            if is_dtensor(parameter) and id(parameter) not in known and others & set(parameter.device_mesh.mesh.flatten().tolist()):
                raise PlacementError(
                    f"{name!r} of stage {index} is sharded with a module that is not inside the stage: apply fully_shard to each layer, "
                    "or let the pipeline do it with shard=True"
                )

    def _managed(self, index: int) -> set[int]:
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
        mine = len(step_input.args), step_input.total, self.replicated.changed(), step_input.share.finalizes
        counts, totals, changed, finalizes = zip(*self.group.gather(self.group.rank, name, mine, self.deadline), strict=True)
        if len(set(counts)) > 1:
            shown = ", ".join(f"{count} on {self.group.describe_rank(rank)}" for rank, count in enumerate(counts))
            raise PipelineError(f"the data ranks run different numbers of microbatches: {shown}; give all the same count")
        if len(set(finalizes)) > 1:
            shown = ", ".join(f"{flag} on {self.group.describe_rank(rank)}" for rank, flag in enumerate(finalizes))
            raise PipelineError(f"the data ranks give finalize_gradients different values: {shown}; give all the same")
        step_input.normalise(sum(totals))
        self._copy_buffers(changed)

    def copy_buffers(self) -> None:
        """Give the buffers of all data ranks the values of the first, as every step does when it begins."""
        if self.group is not None:
            self._copy_buffers(self.group.gather(self.group.rank, "buffers", self.replicated.changed(), self.deadline))

    def _copy_buffers(self, changed: Sequence[list[bool]]) -> None:
        """Copy the buffers that have changed on any data rank."""
        buffers = self.replicated.buffers_of([any(by_rank) for by_rank in zip(*changed, strict=True)])
        if buffers:
            self.replicated.broadcast(self._connection, buffers)

    def begin(self, reduces: Sequence[int], *, finalizes: bool = True) -> None:
        """Begin a training step, whose program reduces these stages in this order; without `finalizes` nothing is reduced yet."""
        self._finalizes = finalizes
        if self.replicas is not None:
            self.replicas.begin(self._last_uses(reduces))

    def _last_uses(self, reduces: Sequence[int]) -> dict[int, list[nn.Parameter]]:
        """Return the parameters that are summed with each stage: one that several stages have, with the last of them."""
        seen: set[int] = set()
        parameters: dict[int, list[nn.Parameter]] = {}
        postponed = self.replicas.is_postponed if self.replicas is not None else lambda parameter: False
        for index in reversed(reduces):
            skip = seen | self._managed(index)
            parameters[index] = [
                p for p in self.stages[index].module.parameters() if (p.requires_grad or postponed(p)) and id(p) not in skip
            ]
            seen |= {id(p) for p in parameters[index]}
        return parameters

    @torch.no_grad()
    def finish(self, shared: Collection[int] = ()) -> None:
        """End a training step; `shared` are the ids of parameters that other ranks of the pipeline hold too."""
        self.finish_evaluation()
        if self.replicas is not None:
            self.replicas.finish(self.deadline, shared)

    def postpone(self) -> None:
        """End a training step that does not finalize its gradients: they stay on this rank, and the next step goes on with them."""
        self.finish_evaluation()
        if self.replicas is not None:
            self.replicas.postpone()

    def settle(self) -> None:
        """Note that a training step has succeeded on all ranks."""
        if self.replicas is not None:
            self.replicas.settle()

    def take_sum(self, parameter: nn.Parameter) -> Tensor | None:
        """Return a shared parameter's gradient sum in `accumulate_dtype`, if there is one, and forget it."""
        return None if self.replicas is None else self.replicas.take(parameter)

    def finish_evaluation(self) -> None:
        """End an evaluation step."""
        for sharded in self.sharded.values():
            sharded.finish()

    def reset(self) -> None:
        """Drop what is left of a step that has failed on some rank."""
        self._broken = self._broken or self.shard is not None
        if self.replicas is not None:
            self.replicas.reset()
        for sharded in self.sharded.values():
            sharded.reset()

    def sum_values(self, values: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Sum each value over the data ranks, in their order."""
        if self.group is None:
            return values
        total: dict[str, Tensor | None] = {}
        for theirs in self.group.gather(self.group.rank, "sums", values, self.deadline):
            for name, value in theirs.items():
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
        if self.mesh is None:
            return None
        from penstock.runtime.tensors.dtensor_messages import DTensorPacker

        return DTensorPacker(self.mesh.device_mesh)

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
            return nothing if self.group is None and sharded is None else partial(run, stage)
        if sharded is None:
            return nothing
        return sharded.unshard if kind is Kind.UNSHARD else sharded.reshard

    def collectives(self, actions: Sequence[Action], begun: Sequence[int], ended: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield for each gather and reduction of the last step its action's index, when it began, and when it was seen to have ended."""
        gathers = {stage: iter(sharded.gathered) for stage, sharded in self.sharded.items()}
        for at, action in enumerate(actions):
            if action.kind is Kind.UNSHARD and action.stage in gathers:
                yield at, *next(gathers[action.stage])
            elif action.kind is Kind.REDUCE_GRAD and self._finalizes and (self.group is not None or action.stage in gathers):
                summed = 0 if self.replicas is None else self.replicas.ended.get(action.stage, 0)
                yield at, begun[at], max(ended[at], summed)

    def surrounds(self, stage: int) -> bool:
        """Whether `around` changes a stage's compute actions."""
        return stage in self.sharded or self.dtype is not None

    def around(self, kind: Kind, stage: int, operation: Operation) -> Operation:
        """Wrap a compute action: wait for sharded parameters before it, and accumulate gradients in higher precision after it."""
        sharded = self.sharded.get(stage)
        if sharded is not None:
            return self._around_sharded(kind, stage, sharded, operation)
        if self.dtype is None or kind not in _BACKWARD:
            return operation
        replicas, module = self.replicas, self.stages[stage].module
        assert replicas is not None

        def accumulate() -> None:
            operation()
            # Post-accumulate hooks run after the backward for the weights, and must see the gradient then.
            waits = kind is Kind.I
            replicas.accumulate([parameter for parameter in module.parameters() if not (waits and post_accumulate_hooks(parameter))])

        return accumulate

    def _around_sharded(self, kind: Kind, stage: int, sharded: ShardedStage, operation: Operation) -> Operation:
        assert self.mesh is not None
        refresh, watch, activity = self.stages[stage].refresh, self._watch(stage), self.mesh.whole.activity(self.mesh.whole.rank)
        deferred = kind is Kind.W

        def compute() -> None:
            if sharded.pending:
                sharded.wait(watch)
                activity.waits, activity.began = None, clock()  # the time before was spent waiting
                refresh()
            operation()
            if deferred and sharded.has_reduce_dtype:
                sharded.accumulate()

        return compute

    def _watch(self, stage: int) -> Callable[[], None]:
        """Return a check to call while waiting for a stage's parameters: it raises if a rank has failed or the deadline has passed."""
        awaited = f"the parameters of stage {stage} from the other data ranks"

        def watch() -> None:
            assert self.group is not None
            self.group.parent.check_wait(awaited, self.deadline)

        return watch

    @torch.no_grad()
    def _reduce(self, stage: int) -> None:
        """Sum a stage's gradients over the data ranks. They exchange first which gradients each has, with a deadline."""
        if not self._finalizes:
            return
        group, replicas, sharded = self.group, self.replicas, self.sharded.get(stage)
        mine = [] if replicas is None else replicas.present(stage), [] if sharded is None else sharded.present()
        everyone = [mine] if group is None else group.gather(group.rank, f"{stage}REDUCE_GRAD", mine, self.deadline)
        copies, shards = ([any(by_rank) for by_rank in zip(*theirs, strict=True)] for theirs in zip(*everyone, strict=True))
        if group is not None and replicas is not None and any(copies):
            replicas.reduce(stage, copies, self._connection)
        if sharded is not None and any(shards):
            sharded.reduce(shards)

    def _wait_reduction(self, stage: int) -> None:
        """Wait until the sum that `_reduce` began is there; without this the end of the step waits for it."""
        if self.replicas is not None:
            self.replicas.wait(stage, self.deadline)
        if stage in self.sharded:
            self.sharded[stage].wait_reduction()


class ReplicatedTensors:
    """The parameters and buffers that every data rank holds in full: all get the values of the first data rank.

    `modules` are this rank's by stage, and `managed` the ids of their parameters that are sharded.
    """

    def __init__(self, modules: Mapping[int, nn.Module], managed: Mapping[int, set[int]]) -> None:
        self._modules, self._managed = modules, managed
        self._versions: dict[int, int] = {}
        """The version of each buffer when the data ranks had the same values, by id."""

    def everything(self) -> list[Tensor]:
        """Return all parameters and buffers."""
        tensors = self.buffers_of([True for _ in self._buffered()])
        for index, module in self._modules.items():
            managed = self._managed.get(index, set())
            tensors += [parameter.detach() for parameter in module.parameters() if id(parameter) not in managed]
        return tensors

    def _buffered(self) -> Iterator[nn.Module]:
        """Yield the modules with buffers; also those of sharded stages, whose buffers torch leaves as they are on each rank."""
        for module in self._modules.values():
            yield from (part for part in module.modules() if own_buffers(part))

    def changed(self) -> list[bool]:
        """Return per module with buffers whether they may have changed. Norm layers change theirs without changing the version."""
        return [
            isinstance(part, NormBase)
            or any(read_version(buffer) != self._versions.get(id(buffer)) for buffer in part.buffers(recurse=False))
            for part in self._buffered()
        ]

    def buffers_of(self, wanted: Sequence[bool]) -> list[Tensor]:
        """Return the buffers of the wanted modules among those with buffers."""
        return [buffer for part, want in zip(self._buffered(), wanted, strict=True) if want for buffer in part.buffers(recurse=False)]

    @torch.no_grad()
    def broadcast(self, connection: Any, tensors: Sequence[Tensor]) -> None:
        """Give the tensors the values of the first data rank."""
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in map(to_local, tensors):
            if tensor.device.type != "meta":
                buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for held in buckets.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in held])
            connection.broadcast([flat]).wait()
            for tensor, part in zip(held, torch.split(flat, [tensor.numel() for tensor in held]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        self._versions |= {id(tensor): read_version(tensor) for tensor in tensors}
