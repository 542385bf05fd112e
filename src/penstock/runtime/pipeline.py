"""Train a model with any program, with the numbers of the unpipelined model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PipelineError, ScheduleError
from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.passes.lower import lower
from penstock.passes.merge_backward import MergeBackward
from penstock.runtime import microbatch as mb
from penstock.runtime.executor import Executor, Feed
from penstock.runtime.gradients import Backup, Shared, clip_grad_norm
from penstock.runtime.launch import current
from penstock.runtime.loss import check_reduction, scales, warn_of_ignored
from penstock.runtime.partition import Partition, partition
from penstock.runtime.result import StepResult, combine
from penstock.runtime.stage import Stage

logger = logging.getLogger(__name__)


class Pipeline:
    """A model cut into stages, and the program that this rank runs of it.

    Every rank of the group makes one, with the same arguments, and calls the same methods in the same order.

    - `model`: a whole module (with `split`), a list with one module a stage, or a map with this rank's stages;
    - `plan`: a plan, schedule or program; `schedule=` takes the same, or a name with `microbatches=`;
    - `loss_fn(output, target)`, weighted over microbatches by `loss_reduction` (`mean` by batch elements, or `sum`) or by
      `weight(target)`, summed over all of them;
    - `batch_dims`: the batch dimension of the inputs and the target, see `microbatch.Dims`;
    - `seed`: draw a forward's random numbers from a stream of (seed, step, stage, microbatch), whatever the ranks and the schedule;
    - `accumulate="fused"` adds weight gradients of split backwards by one fused operation, with a rounding of its own;
    - `overlap(action, operations)`: how to run actions together; one after the other unless given;
    - `deadline`: seconds that a rank waits for another at most.
    """

    def __init__(
        self,
        model: Any,
        plan: Any = None,
        *,
        schedule: Any = None,
        microbatches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        loss_reduction: str = "mean",
        weight: Callable[[Any], Any] | None = None,
        split: Any = None,
        batch_dims: mb.Dims = 0,
        target_dims: mb.Dims = 0,
        seed: int | None = None,
        accumulate: str = "autograd",
        overlap: Callable[..., None] | None = None,
        deadline: float = 300.0,
    ) -> None:
        check_reduction(loss_reduction)
        self.group, self.rank = current()
        self.table = _table(plan if schedule is None else schedule, self.group.ranks, microbatches)
        if self.table.ranks != self.group.ranks:
            raise ScheduleError(
                f"the schedule is for {self.table.ranks} ranks, but there are {self.group.ranks}: launch as many, or build it anew"
            )
        self.microbatches = self.table.microbatches
        self.loss_fn, self.loss_reduction, self.weight = loss_fn, loss_reduction, weight
        self.batch_dims, self.target_dims, self.seed = batch_dims, target_dims, seed
        self.overlap, self.deadline = overlap, deadline
        self.partition: Partition = partition(model, self.table.stages, split)
        self.stages = self._stages(fused=_checked_accumulate(accumulate) == "fused")
        self._steps = 0
        self._executors: dict[tuple[int, bool], Executor] = {}
        self.unsplit = self._agree()
        self.shared = Shared.find(self)

    # What it is made of -----------------------------------------------------------------------------------------------

    def _stages(self, fused: bool) -> dict[int, Stage]:
        stages = {}
        for index in self.table.placement.stages_of(self.rank):
            part = self.partition.parts[index]
            if part is None:
                raise ScheduleError(f"rank {self.rank} holds stage {index}, but the map of modules has none for it")
            last = not self.table.graph.outputs_of(index)
            stages[index] = Stage(index, part.module, self.loss_fn if last else None, fused)
        return stages

    def _agree(self) -> tuple[int, ...]:
        """Compare what the ranks were given; the stages whose backward cannot be split."""
        mine = (self.table.ranks, self.table.stages, self.table.microbatches, hash(self.table.rows.codes.tobytes()))
        able = [stage for stage, part in self.stages.items() if not part.splits]
        found = self.gather("build", (mine, able))
        for rank, (theirs, _) in enumerate(found):
            if theirs != mine:
                what = f"{theirs[:3]} against {mine[:3]} (ranks, stages, microbatches)"
                raise PipelineError(f"rank {rank} was given another schedule than rank {self.rank}: {what}")
        unsplit = tuple(sorted({stage for _, stages in found for stage in stages}))
        splits = self.table.rows.is_kind(Kind.I)
        merged = [stage for stage in unsplit if bool((self.table.rows.stage[splits] == stage).any())]
        if merged:
            logger.warning("stages %s are compiled and cannot split their backward: they run I and W as one B", merged)
        return unsplit

    def gather(self, key: Any, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        self._gathers = getattr(self, "_gathers", 0) + 1
        return self.group.gather(self.rank, (key, self._gathers), value, self.deadline)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names, shared ones once."""
        seen: set[int] = set()
        for index in self.stages:
            part = self.partition.parts[index]
            for name, parameter in part.parameters if part is not None else ():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def program(self, microbatches: int | None = None, *, training: bool = True) -> Program:
        """The program that a step of so many microbatches runs."""
        return self._executor(microbatches or self.microbatches, training).program

    def _executor(self, count: int, training: bool) -> Executor:
        found = self._executors.get((count, training))
        if found is None:
            program = self._lowered(count, training)
            found = Executor(program, self.rank, self.stages, group=self.group, deadline=self.deadline, overlap=self.overlap)
            self._executors[count, training] = found
        return found

    def _lowered(self, count: int, training: bool) -> Program:
        table = self.table if count == self.table.microbatches else self._remade(count)
        if not training:
            schedule = table.schedule() if isinstance(table, Program) else table
            forwards = schedule.rows.keep(schedule.rows.is_kind(Kind.F))
            return lower(Schedule.from_rows(forwards, table.placement, count, graph=table.graph, name=table.name))
        program = table if isinstance(table, Program) and table.lowered else None
        if self.unsplit:
            start = program if program is not None else Program.start(table)
            merged = MergeBackward(self.unsplit, apart=True).apply(start)
            return merged if merged.lowered else lower(merged.schedule())
        return program if program is not None else lower(_schedule(table))

    def _remade(self, count: int) -> Table:
        if not isinstance(self.table, Schedule) or self.table.remake is None:
            raise ScheduleError(
                f"{count} microbatches, but {self.table.name or 'the schedule'} was loaded or written for {self.table.microbatches}: "
                "give a schedule by name for other counts"
            )
        return self.table.remake(count)

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = None,
        microbatches: int | None = None,
        stage_kwargs: Mapping[int, Mapping[str, Any]] | None = None,
        outputs: bool = False,
    ) -> StepResult:
        """Forward and backward of a batch, split along its batch dimension; gradients are added to the parameters'."""
        feed = self._feed(args, target, microbatches, stage_kwargs, outputs)
        return self._run(feed, training=True)

    def step_list(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None = None,
        *,
        stage_kwargs: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
        outputs: bool = False,
    ) -> StepResult:
        """Forward and backward of microbatches that are ready, of any shapes; a tuple is several arguments."""
        return self._run(self._ready(inputs, targets, stage_kwargs, outputs), training=True)

    def eval_step(
        self,
        *args: Any,
        target: Any = None,
        microbatches: int | None = None,
        stage_kwargs: Mapping[int, Mapping[str, Any]] | None = None,
        outputs: bool = False,
    ) -> StepResult:
        """Forward of a batch in evaluation mode, with the loss; no gradients, and nothing is left of it."""
        feed = self._feed(args, target, microbatches, stage_kwargs, outputs)
        return self._run(feed, training=False)

    def infer(self, *args: Any, microbatches: int | None = None, stage_kwargs: Mapping[int, Mapping[str, Any]] | None = None) -> Any:
        """The outputs of a batch, on every rank."""
        return self.eval_step(*args, microbatches=microbatches, stage_kwargs=stage_kwargs, outputs=True).outputs

    def _feed(self, args: tuple[Any, ...], target: Any, microbatches: int | None, stage_kwargs: Any, outputs: bool) -> Feed:
        count = self.microbatches if microbatches is None else microbatches
        if count < 1:
            raise ScheduleError(f"{count} microbatches: at least 1 is needed")
        total = mb.batch_size((args, target), (self.batch_dims, self.target_dims))
        sizes = mb.sizes_of(total, count) if total is not None else [1] * count
        pieces = mb.split(args, self.batch_dims, sizes)
        targets = None if target is None else mb.split(target, self.target_dims, sizes)
        kwargs = {
            stage: mb.split(dict(given), self.batch_dims if isinstance(self.batch_dims, int) else 0, sizes)
            for stage, given in (stage_kwargs or {}).items()
        }
        return self._weighed(Feed(pieces, kwargs, targets, [], outputs=outputs), sizes if total is not None else None)

    def _ready(self, inputs: Sequence[Any], targets: Sequence[Any] | None, stage_kwargs: Any, outputs: bool) -> Feed:
        if not inputs or (targets is not None and len(targets) != len(inputs)):
            raise ScheduleError(
                f"{len(inputs)} microbatches and {0 if targets is None else len(targets)} targets: give as many of each, at least one"
            )
        pieces = [each if isinstance(each, tuple) else (each,) for each in inputs]
        dims = (self.batch_dims, self.target_dims)
        sizes = [mb.batch_size((piece, None if targets is None else targets[k]), dims) for k, piece in enumerate(pieces)]
        known = [size for size in sizes if size is not None]
        kwargs = {stage: [dict(each) for each in given] for stage, given in (stage_kwargs or {}).items()}
        feed = Feed(pieces, kwargs, None if targets is None else list(targets), [], outputs=outputs)
        return self._weighed(feed, known if len(known) == len(sizes) else None)

    def _weighed(self, feed: Feed, sizes: Sequence[int] | None) -> Feed:
        if feed.targets is not None and self.weight is None and self.loss_reduction == "mean" and len(feed.args) > 1:
            warn_of_ignored(self.loss_fn, feed.targets)
        weight = self.weight if feed.targets is not None else None
        feed.scales = scales(self.loss_reduction, weight, sizes, feed.targets, len(feed.args))
        return feed

    def _run(self, feed: Feed, training: bool) -> StepResult:
        executor = self._executor(len(feed.args), training)
        self._steps += 1
        self.group.enter_step(self.rank, self._steps, self.deadline)
        if self.seed is not None:
            feed.seed = hash((self.seed, self._steps)) & (2**62 - 1)
        return self._train(executor, feed) if training else self._evaluate(executor, feed)

    def _train(self, executor: Executor, feed: Feed) -> StepResult:
        for stage in self.stages.values():
            stage.refresh()
        backup = Backup.take(self.parameters())
        self.shared.begin(self)
        state = torch.get_rng_state() if feed.seed is not None else None
        try:
            with torch.enable_grad():
                share = executor.run(feed)
            self.shared.sum(self)
            shares = self.gather("step", share)
        except BaseException as error:
            backup.restore()
            raise self._failed(error) from (error.__cause__ if isinstance(error, PipelineError) else error)
        finally:
            if state is not None:
                torch.set_rng_state(state)
        return combine(shares, feed.scales, lambda values: mb.merge(values, self._out_dim()))

    def _evaluate(self, executor: Executor, feed: Feed) -> StepResult:
        modes = [(module, module.training) for stage in self.stages.values() for module in stage.module.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad():
                shares = self.gather("eval", executor.run(feed))
        except BaseException as error:
            raise self._failed(error) from (error.__cause__ if isinstance(error, PipelineError) else error)
        finally:
            for module, mode in modes:
                module.training = mode
        return combine(shares, feed.scales, lambda values: mb.merge(values, self._out_dim()))

    def _out_dim(self) -> int:
        return self.batch_dims if isinstance(self.batch_dims, int) else 0

    def _failed(self, error: BaseException) -> PipelineError:
        """One report for all ranks: what failed where, as its first rank saw it."""
        if isinstance(error, PipelineError):
            self.group.fail(error, self._steps)
            return PipelineError(*error.args)
        action = getattr(error, "__penstock_action__", None)
        where = (
            f"{action}" + (_in_words(action) if action is not None and action.kind in COMPUTE else "") if action is not None else "the step"
        )
        report = PipelineError(f"{where} failed on rank {self.rank}: {type(error).__name__}: {error}\n{self.group.report()}")
        report.__cause__ = error
        self.group.fail(report, self._steps)
        return report

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most this; the norm before. Shared parameters count once."""
        return clip_grad_norm(self, max_norm, norm_type)

    def parity(self, *args: Any, target: Any = None, microbatches: int | None = None, stage_kwargs: Any = None) -> Any:
        """Compare a step with the unpipelined model: the loss, every gradient and the norm. Gradients are left as they were."""
        from penstock.runtime.parity import parity

        return parity(self, self._feed(args, target, microbatches, stage_kwargs, outputs=False))


def _in_words(action: Any) -> str:
    what = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward for the input", Kind.W: "backward for the weights"}[action.kind]
    return f" (stage {action.stage}, {what} of microbatch {action.microbatch})"


def _checked_accumulate(accumulate: str) -> str:
    if accumulate not in ("autograd", "fused"):
        raise ScheduleError(f"accumulate must be 'autograd' or 'fused', got {accumulate!r}")
    return accumulate


def _table(given: Any, ranks: int, microbatches: int | None) -> Table:
    """The schedule or program that was given, in whatever form."""
    if isinstance(given, str):
        from penstock.schedules.registry import schedule

        if microbatches is None:
            raise ScheduleError(f"schedule {given!r} by name needs microbatches=")
        return schedule(given, ranks, microbatches)
    table = given if isinstance(given, Table) else getattr(given, "schedule", None)
    if not isinstance(table, Table):
        raise ScheduleError(f"a pipeline needs a plan, a schedule or a program, got {type(given).__name__}")
    if microbatches is not None and microbatches != table.microbatches:
        if isinstance(table, Schedule) and table.remake is not None:
            return table.remake(microbatches)
        raise ScheduleError(f"microbatches={microbatches}, but the schedule is for {table.microbatches}")
    return table


def _schedule(table: Table) -> Schedule:
    return table.schedule() if isinstance(table, Program) else table  # type: ignore[return-value]
