"""The data-parallel side of a pipeline: other processes that hold the same stages and get another part of the batch.

What they do together is part of the program: REDUCE_GRAD sums a stage's gradients once a step, UNSHARD and RESHARD say when the
parameters of a stage that is kept in shards are there in full. Before a step the data ranks agree on how much each one's
microbatches count, and after it on the loss.

Values that every data rank holds in full and that must be the same: those of the first data rank are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.errors import PipelineError, PlacementError, ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.passes.shard import Shard
from penstock.runtime.batch.step_input import StepInput
from penstock.runtime.model.stage import Stage
from penstock.runtime.parallel.mesh import PipelineMesh
from penstock.runtime.parallel.replicas import ReplicaGradients
from penstock.runtime.tensors.dtensor import is_dtensor, to_local
from penstock.runtime.transport.activity import clock
from penstock.runtime.transport.group import Operation, nothing
from penstock.runtime.transport.subgroup import Slice

if TYPE_CHECKING:
    from penstock.runtime.parallel.fsdp import ShardedStage
    from penstock.runtime.tensors.dtensor_messages import DTensorPacker

_BACKWARD = (Kind.B, Kind.I, Kind.W)


class DataParallel:
    """What this rank's stages have to do with the other data ranks, if there are any."""

    def __init__(
        self, grid: PipelineMesh | None, stages: Mapping[int, Stage], *, shard: Shard, dtype: torch.dtype | None, deadline: float
    ) -> None:
        self.grid, self.stages, self.deadline = grid, stages, deadline
        self.group: Slice | None = None if grid is None or grid.data.ranks == 1 else grid.data
        self.rank, self.ranks = (0, 1) if self.group is None else (self.group.rank, self.group.ranks)
        self.sharded = _sharded(stages, deadline)
        self.replicas = ReplicaGradients(dtype) if self.group is not None or dtype is not None else None
        self.dtype = dtype
        self._check(dtype)
        mine = bool(self.sharded), any(is_dtensor(p) for stage in stages.values() for p in stage.module.parameters())
        found = [mine] if grid is None else grid.whole.gather(grid.whole.rank, "shards", mine, deadline)
        self.shard = shard if any(sharded for sharded, _ in found) else None
        """The pass that says when parameters are in full, if any rank keeps them in shards."""
        self.scattered = any(scattered for _, scattered in found)
        """Whether any rank has parameters of which it holds a part only."""
        self._broken = False
        self.copies = ReplicatedTensors(
            {index: stage.module for index, stage in stages.items()}, {index: self._managed(index) for index in stages}
        )
        if self.group is not None:
            self.group.gather(self.group.rank, "start", None, deadline)
            self.copies.copy(self._connection, self.copies.everything())
            for connection, shards in (each for sharded in self.sharded.values() for each in sharded.copied()):
                self.copies.copy(connection, shards)

    def _check(self, dtype: torch.dtype | None) -> None:
        for index, stage in self.stages.items():
            if self.grid is None and index in self.sharded:
                raise ScheduleError(f"stage {index} is sharded by fully_shard: give mesh=, whose data dimensions it is sharded over")
            if self.grid is not None:
                self._check_shards(self.grid, index, stage.module)
            if index in self.sharded and dtype is not None:
                self.sharded[index].check_precision(dtype)

    def _check_shards(self, grid: PipelineMesh, index: int, module: nn.Module) -> None:
        """Whatever is in shards over data ranks must be so over all of them, and gathered by this stage."""
        ranks = [int(grid.mesh.mesh.flatten()[place]) for place in grid.data.members]
        if index in self.sharded:
            self.sharded[index].check(ranks, grid.data_dims)
        known, others = self._managed(index), set(ranks) - {int(grid.mesh.mesh.flatten()[grid.whole.rank])}
        for name, parameter in module.named_parameters():
            if is_dtensor(parameter) and id(parameter) not in known and others & set(parameter.device_mesh.mesh.flatten().tolist()):
                raise PlacementError(
                    f"{name!r} of stage {index} is sharded with a module that is not inside the stage: apply fully_shard to each layer, "
                    "or let the pipeline do it with shard=True"
                )

    def _managed(self, index: int) -> set[int]:
        """The parameters of a stage that torch keeps in shards, by their ids while they are."""
        return self.sharded[index].managed if index in self.sharded else set()

    @property
    def _connection(self) -> Any:
        """For what the data ranks compute together. They must just have met, so that none waits without an end."""
        assert self.group is not None
        return self.group.collectives(self.deadline)

    # Steps ------------------------------------------------------------------------------------------------------------

    def agree(self, feed: StepInput, name: str) -> None:
        """How much each microbatch counts, out of those of all data ranks, which must run as many each."""
        if self._broken:
            raise PipelineError(
                "an earlier step failed while parameters were in shards, and the process groups of torch that gather them may be out of "
                "step: start the processes again, from the last checkpoint"
            )
        for sharded in self.sharded.values():
            sharded.gathered.clear()
        if self.group is None:
            feed.normalise(feed.total)
            return
        found = self.group.gather(self.group.rank, name, (len(feed.args), feed.total, self.copies.changed()), self.deadline)
        counts, totals, changed = zip(*found, strict=True)
        self._check_counts(self.group, counts)
        feed.normalise(sum(totals))
        self._copy_buffers(changed)

    def copy_buffers(self) -> None:
        """Give the buffers of all data ranks the values of the first, as every step does when it begins."""
        if self.group is not None:
            self._copy_buffers(self.group.gather(self.group.rank, "buffers", self.copies.changed(), self.deadline))

    def _copy_buffers(self, changed: Sequence[list[bool]]) -> None:
        """Copy the buffers that have changed on any data rank."""
        buffers = self.copies.buffers_of([any(each) for each in zip(*changed, strict=True)])
        if buffers:
            self.copies.copy(self._connection, buffers)

    def _check_counts(self, group: Slice, counts: Sequence[int]) -> None:
        if len(set(counts)) > 1:
            shown = ", ".join(f"{count} on {group.called(rank)}" for rank, count in enumerate(counts))
            raise PipelineError(f"the data ranks run different numbers of microbatches: {shown}; give all the same count")

    def begin(self, reduces: Sequence[int]) -> None:
        """A training step begins, whose program reduces these stages in this order."""
        if self.replicas is not None:
            self.replicas.begin(self._last_uses(reduces))

    def _last_uses(self, reduces: Sequence[int]) -> dict[int, list[nn.Parameter]]:
        """Each stage's parameters that are summed with it: one that several stages have, with the last of them."""
        seen: set[int] = set()
        found: dict[int, list[nn.Parameter]] = {}
        for index in reversed(reduces):
            module = self.stages[index].module
            skip = seen | self._managed(index)
            found[index] = [p for p in module.parameters() if p.requires_grad and id(p) not in skip]
            seen |= {id(p) for p in found[index]}
        return found

    @torch.no_grad()
    def finish(self, shared: Collection[int] = ()) -> None:
        """All of a training step has run; `shared` are the ids of parameters that other ranks of the pipeline hold too."""
        for each in self.sharded.values():
            each.finish()
        if self.replicas is not None:
            self.replicas.finish(self.deadline, shared)

    def take_sum(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum of a shared parameter's gradients on this rank in `accumulate_dtype`, if it was summed in that."""
        return None if self.replicas is None else self.replicas.take(parameter)

    def rest(self) -> None:
        """All of an evaluation has run."""
        for each in self.sharded.values():
            each.finish()

    def reset(self) -> None:
        """A step has failed on some rank."""
        self._broken = self._broken or self.shard is not None
        if self.replicas is not None:
            self.replicas.reset()
        for each in self.sharded.values():
            each.reset()

    def summed(self, values: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Each value added up over the data ranks, in their order."""
        if self.group is None:
            return values
        total: dict[str, Tensor | None] = {}
        for theirs in self.group.gather(self.group.rank, "sums", values, self.deadline):
            for name, value in theirs.items():
                before = total.get(name)
                total[name] = before if value is None else value if before is None else before + value
        return total

    @property
    def pieces(self) -> DTensorPacker | None:
        """What takes tensors apart that lie over the mesh, to send them."""
        if self.grid is None:
            return None
        from penstock.runtime.tensors.dtensor_messages import DTensorPacker

        return DTensorPacker(self.grid.mesh)

    # Actions of the program -------------------------------------------------------------------------------------------

    def check_program(self, program: Program) -> None:
        """A program that was lowered already must have the actions that the data ranks need."""
        kinds = {Kind(int(kind)) for kind in set(program.rows.kind.tolist())}
        if self.shard is not None and Kind.UNSHARD not in kinds:
            raise ScheduleError("stages are kept in shards, but the program has no UNSHARD: lower it with fsdp=True")
        if self.ranks > 1 and program.training and Kind.REDUCE_GRAD not in kinds:
            raise ScheduleError(f"there are {self.ranks} data ranks, but the program has no REDUCE_GRAD: lower it with reduce-grad")

    def operation(self, kind: Kind, stage: int) -> Operation:
        """What an action of sharding or reduction does."""
        sharded = self.sharded.get(stage)
        if kind is Kind.REDUCE_GRAD:
            return nothing if self.group is None and sharded is None else lambda: self._reduce(stage)
        if sharded is None:
            return nothing
        return sharded.unshard if kind is Kind.UNSHARD else sharded.reshard

    def collectives(self, actions: Sequence[Action], begun: Sequence[int], ended: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """For each gather and reduction of the last step: which action began it, and when it began and was seen to have ended."""
        gathers = {stage: iter(sharded.gathered) for stage, sharded in self.sharded.items()}
        for at, action in enumerate(actions):
            if action.kind is Kind.UNSHARD and action.stage in gathers:
                yield at, *next(gathers[action.stage])
            elif action.kind is Kind.REDUCE_GRAD and (self.group is not None or action.stage in gathers):
                summed = 0 if self.replicas is None else self.replicas.ended.get(action.stage, 0)
                yield at, begun[at], max(ended[at], summed)

    def surrounds(self, stage: int) -> bool:
        """Whether anything goes before or after a stage's compute actions."""
        return stage in self.sharded or self.dtype is not None

    def around(self, kind: Kind, stage: int, operation: Operation) -> Operation:
        """A compute action with what goes before and after it: waiting for parameters, and sums in higher precision."""
        sharded = self.sharded.get(stage)
        if sharded is not None:
            return self._around_sharded(kind, stage, sharded, operation)
        if self.dtype is None or kind not in _BACKWARD:
            return operation
        replicas, module = self.replicas, self.stages[stage].module
        assert replicas is not None

        def summed() -> None:
            operation()
            # Hooks that run once a gradient is complete wait for the backward for the weights, and want to see it.
            waits = kind is Kind.I
            replicas.sweep([parameter for parameter in module.parameters() if not (waits and parameter._post_accumulate_grad_hooks)])

        return summed

    def _around_sharded(self, kind: Kind, stage: int, sharded: ShardedStage, operation: Operation) -> Operation:
        assert self.grid is not None
        refresh, watch, activity = self.stages[stage].refresh, self._watch(stage), self.grid.whole.mine
        deferred = kind is Kind.W

        def computed() -> None:
            if sharded.pending:
                sharded.wait(watch)
                activity.waits, activity.began = None, clock()  # what came before was waiting
                refresh()
            operation()
            if deferred and sharded.settles:
                sharded.settle()

        return computed

    def _watch(self, stage: int) -> Callable[[], None]:
        """What is looked at while a stage's parameters are waited for: whether all ranks are well, and the deadline."""
        what = f"the parameters of stage {stage} from the other data ranks"

        def watch() -> None:
            assert self.group is not None
            activity, peer = self.group.mine, (self.group.rank + 1) % self.group.ranks
            if activity.waits != what:
                activity.since, activity.waits = clock(), what
            if self.group.connection is None:
                self.group.lost(peer, what, AttributeError("the connection was closed"))
            if clock() - activity.since > self.deadline * 1e9:
                self.group.lost(peer, what, RuntimeError("timed out"))

        return watch

    @torch.no_grad()
    def _reduce(self, stage: int) -> None:
        """Sum a stage's gradients over the data ranks: all meet, so that none waits without an end, and say which they have."""
        group, replicas, sharded = self.group, self.replicas, self.sharded.get(stage)
        mine = [] if replicas is None else replicas.present(stage), [] if sharded is None else sharded.present()
        found = [mine] if group is None else group.gather(group.rank, f"{stage}REDUCE_GRAD", mine, self.deadline)
        copies, shards = ([any(each) for each in zip(*theirs, strict=True)] for theirs in zip(*found, strict=True))
        if group is not None and replicas is not None and any(copies):
            replicas.reduce(stage, copies, self._connection)
        if sharded is not None and any(shards):
            sharded.reduce(shards)


def _sharded(stages: Mapping[int, Stage], deadline: float) -> dict[int, ShardedStage]:
    """The stages that `fully_shard` was applied to, if its module was ever imported: that takes long."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    found = [index for index, stage in stages.items() if fsdp and any(isinstance(part, fsdp.FSDPModule) for part in stage.module.modules())]
    if not found:
        return {}
    from penstock.runtime.parallel.fsdp import ShardedStage

    return {index: ShardedStage(index, stages[index].module, deadline) for index in found}


class ReplicatedTensors:
    """The modules of a rank with parameters or buffers that are not kept in shards; `managed` are the parameters that are."""

    def __init__(self, modules: Mapping[int, nn.Module], managed: Mapping[int, set[int]]) -> None:
        self._modules, self._managed = modules, managed
        self._versions: dict[int, int] = {}
        """Of each buffer, when the data ranks had the same values."""

    def everything(self) -> list[Tensor]:
        """All parameters and buffers."""
        found = [buffer for part in self._buffered() for buffer in part.buffers(recurse=False)]
        for index, module in self._modules.items():
            known = self._managed.get(index, set())
            found += [parameter.detach() for parameter in module.parameters() if id(parameter) not in known]
        return found

    def _buffered(self) -> Iterator[nn.Module]:
        """Modules with buffers, those of stages in shards among them: torch leaves these as they are on each rank."""
        for module in self._modules.values():
            yield from (part for part in module.modules() if part._buffers)

    def changed(self) -> list[bool]:
        """For each module with buffers, whether they may have changed. Normalisations change theirs without a trace."""
        return [
            isinstance(part, _NormBase) or any(buffer._version != self._versions.get(id(buffer)) for buffer in part.buffers(recurse=False))
            for part in self._buffered()
        ]

    def buffers_of(self, wanted: Sequence[bool]) -> list[Tensor]:
        """The buffers of those modules."""
        return [buffer for part, want in zip(self._buffered(), wanted, strict=True) if want for buffer in part.buffers(recurse=False)]

    @torch.no_grad()
    def copy(self, connection: Any, tensors: Sequence[Tensor]) -> None:
        """Give the tensors the values that the first data rank has."""
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in map(to_local, tensors):
            if tensor.device.type != "meta":
                buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for held in buckets.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in held])
            connection.broadcast([flat]).wait()
            for tensor, part in zip(held, torch.split(flat, [tensor.numel() for tensor in held]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        self._versions |= {id(tensor): tensor._version for tensor in tensors}
