"""`Pipeline`: trains a model with any program, with the numbers of the unpipelined model."""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from penstock.errors import CopyError, PipelineError, ScheduleError
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.passes.shard import Shard
from penstock.planner.batches.batch_planner import BatchOrder
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.order import apply_order, identify_schedule
from penstock.runtime.batch.result import ResultShare, StepResult, check_same_step
from penstock.runtime.batch.slices import SequenceCutter, SequenceDims, SliceLengths
from penstock.runtime.batch.step_input import ABSENT, BatchSplitter, StageKwargs, StepInput, add_model_kwargs
from penstock.runtime.device.autocast import find_autocast
from penstock.runtime.device.streams import get_current_stream, use_stream
from penstock.runtime.execution.cuda_graphs import refuse_graphs
from penstock.runtime.execution.executor import Executor
from penstock.runtime.execution.overlap import make_overlap
from penstock.runtime.execution.programs import OffloadChoice, add_moves, build_training_program, find_table, forward_program
from penstock.runtime.job_plan import check_degrees, settle_recompute, settle_sharding
from penstock.runtime.measure.metrics import OnStep, StepMeter, list_callbacks
from penstock.runtime.measure.parity import Parity, StepArguments, compare_step
from penstock.runtime.measure.recorder import StepTimes, build_timeline, clock_offsets
from penstock.runtime.model.hugging_face import HuggingFace, adapt_cutter, open_batch, recognise_model
from penstock.runtime.model.partition import Partition, apply_plan_split, check_slices, partition
from penstock.runtime.model.random_streams import add_layer_streams, preserve_random_state
from penstock.runtime.model.running_statistics import RunningStatistics, write_statistics
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.tied_parameters import Gather, SharedParameters, Ties, start_buffers_equal
from penstock.runtime.model.transforms import (
    Compile,
    MergedBackward,
    Recompute,
    compile_stages,
    predict_merged_backward,
    recompute_stages,
    refuse_full_graphs,
)
from penstock.runtime.parallel.data_parallel import DataParallel
from penstock.runtime.parallel.fsdp import Sharding, shard_stages, unwrap_ddp
from penstock.runtime.parallel.gradients import BufferBackup, GradientBackup, HookGuard, clip_grad_norm
from penstock.runtime.parallel.mesh import find_group
from penstock.runtime.sequence.prefix import keep_uncompiled
from penstock.runtime.torch_internals import pytree
from penstock.runtime.transport.failures import describe_error
from penstock.runtime.transport.group import Group, describe_action
from penstock.runtime.weights.source import Weights, give_weights
from penstock.simulator.timeline import Timeline

logger = logging.getLogger(__name__)


_NO_COPY = (
    "a Pipeline cannot be copied or pickled, because it holds connections to the other ranks: copy the model and create another pipeline "
    "from it, or save it with Checkpoints"
)
_DRIFT = 1000
"""Recorded steps after which the ranks' clocks are compared again."""
Method = TypeVar("Method", bound=Callable[..., Any])


def report_refusal(method: Method) -> Method:
    """A method of `Pipeline` that may refuse its input: if it does, the other ranks raise too.

    This rank raises the reason. The others raise that it has refused, in the call that they are in meanwhile: they must not take this
    rank's next step for the one that it refused.
    """

    @wraps(method)
    def call(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, PipelineError) or not isinstance(error, Exception):
                self.group.fail(self.rank, error)
                raise
            with suppress(PipelineError):  # an earlier failure that this rank had yet to raise: its own error is raised instead
                self.group.enter(self.rank, self.deadline)
                headline = f"{self.group.describe_rank(self.rank)} refused its input to the step: {describe_error(error)}"
                self.group.report_failure(self.rank, headline, error)
            raise

    return cast(Method, call)


class Pipeline:
    """A model cut into stages, and the program that this rank runs on its stages.

    Every rank of the group creates one with the same arguments and calls the same methods in the same order.

    - `model`: a whole module (with `split`), a causal language model from transformers (see `HuggingFace`), a list with one module per
      stage, or a mapping with this rank's stages. A module of a list or mapping that returns a tuple passes several arguments on;
    - `plan`: a plan, schedule or program; `schedule=` takes the same, or a name together with `microbatches=`. A plan for a cluster says
      which rank of the group, its `devices`, becomes which rank of the pipeline: device k of the cluster is rank k of the group. What the
      plan of a whole job asks for is run or refused, see `job_plan`;
    - `loss_fn(output, target)` or `loss_fn(output)`. The losses of microbatches are summed, weighted by `loss_reduction` (`mean` by batch
      elements, or `sum`) or by `weight(target)`. Without a loss function the last stage's output is the loss;
    - `batch_dims`, `target_dims`, `kwarg_dims`: the batch dimension of the inputs, the target and the stages' keyword arguments
      (by name), see `microbatch.Dims`;
    - `ties`: groups of parameter names to tie, if the parameters are not one object already;
    - `seed`: draw the random numbers of a forward from a stream of (seed, step, layer, microbatch), so that they do not depend on ranks,
      schedule or cuts. Microbatches are numbered across data ranks, the first rank's first. With one module per stage, the stage counts
      as the layer;
    - `accumulate="fused"` adds the weight gradients of split backwards in one fused operation, which rounds differently;
    - `overlap`: how to run overlapped actions: "streams" for two streams of a GPU, or your own function `(action, operations)`; defaults
      to one after the other. A module with a method `overlapped_forward_backward` runs them itself, see `execution.overlap`;
    - `deadline`: the most seconds that a rank waits for another;
    - `group`: the process group, or device mesh of one dimension, that the pipeline runs on; defaults to all processes;
    - `mesh`: a device mesh with named dimensions. `pp` is the pipeline; the ranks along `dp`, or `dp_replicate` and `dp_shard`, hold the
      same stages and get a part of the batch each. Stages that `fully_shard` was applied to stay sharded, all others are
      replicated; `shard=True` applies it to every layer, and `shard=partial(fully_shard, ...)` does so with options; defaults to a job
      plan's choice, else to False;
    - `lookahead`, `residency`: when sharded stages are gathered, and how many a rank holds in full at once, see `Shard`;
    - `accumulate_dtype`: sum the gradients of microbatches and data ranks in this precision, and round once to the parameters' own;
    - `record`: whether steps return a `timeline` of what ran when on every rank. It can be changed between steps, on all ranks alike. On
      a GPU, the times are those of its own work;
    - `on_step`: a function, or several, to call with the `StepMetrics` of each training step: loss, gradient norm, throughput, bubble, and
      each rank's compute and waits. It is called on each rank that was given one, when `clip_grad_norm_` has computed the norm, else when
      the next step begins or `flush_metrics` is called. If any rank has one, ranks whose times drift are logged;
    - `transport`: under `torchrun`, how tensors travel between processes, see `Processes`;
    - `weights`: for a model built on the meta device, the source of its values: `Initial`, `Built`, `Replayed`, `Safetensors`, or several
      of them;
    - `recompute`: whether stages keep only their inputs and run their forward again before their backward: a `bool`, or one `bool` per
      stage; defaults to the plan's choice;
    - `offload`: the percentage of each rank's activations to move to host memory between their forward and backward, one percentage per
      rank, or True for all, with any number of microbatches; defaults to what the plan, schedule or program says, which must not have
      copies otherwise;
    - `compile`: True, options for `torch.compile`, a function that compiles a stage's module, or one of these per stage.
      Compiled stages run a whole backward, and so do stages that ask autograd for a weight's gradient in their forward or loss, or that
      differentiate a gradient. If the schedule splits such a backward, `merged` says what that costs;
    - `slice_lengths`: for a schedule with slices, the number of tokens in each slice of a sequence, or a function that returns them for a
      sequence's length; defaults to the plan's, else to lengths as equal as possible. `sequence_dims` is the dimension that is cut, see
      `SequenceDims`;
    - `graphs`: record each stage's work as CUDA graphs and launch those, see `execution.cuda_graphs`. Gradients then stay at the same
      addresses from step to step. Refused if a stage's work cannot be recorded; a microbatch of another shape runs without graphs.
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
        kwarg_dims: mb.Dims = 0,
        ties: Ties = (),
        seed: int | None = None,
        accumulate: str = "autograd",
        overlap: Callable[..., None] | str | None = None,
        deadline: float = 300.0,
        group: Any = None,
        mesh: Any = None,
        shard: Sharding | None = None,
        lookahead: int = 1,
        residency: int | None = None,
        accumulate_dtype: torch.dtype | None = None,
        record: bool = False,
        on_step: OnStep | Sequence[OnStep] | None = None,
        transport: str = "auto",
        weights: Weights = None,
        recompute: Recompute = None,
        offload: OffloadChoice = None,
        compile: Compile | Sequence[Compile] = None,  # noqa: A002 - torch's own name
        graphs: bool = False,
        slice_lengths: SliceLengths = None,
        sequence_dims: mb.Dims | SequenceDims = 1,
    ) -> None:
        ranks = GroupOptions(group, mesh, transport, deadline)
        run = ExecutionOptions(seed, accumulate, overlap, graphs, offload)
        batch = BatchOptions(batch_dims, target_dims, kwarg_dims, slice_lengths, sequence_dims)
        self._plan: Any = plan if schedule is None else schedule
        data = DataOptions(settle_sharding(self._plan, shard), Shard(lookahead, residency), accumulate_dtype)
        self.deadline = ranks.deadline
        self.group: Group
        devices = getattr(self._plan, "devices", ())  # of a plan for a cluster
        self.group, self.rank, self.grid = find_group(ranks.group, ranks.mesh, ranks.transport, devices)
        check_degrees(self._plan, self.grid)
        self.number = self.group.number_pipeline(self.rank)
        self.record, self.graphs, self.offload = record, run.graphs, run.offload
        self.table = add_moves(find_table(self._plan, self.group.ranks, microbatches), self.offload)
        self.microbatches = self.table.microbatches
        self.seed, self.overlap = run.seed, make_overlap(run.overlap)
        split = self._recognise(model, split, LossOptions(loss_fn, loss_reduction, weight), batch)
        tied = self._cut(model, ModelOptions(split, ties, weights, settle_recompute(self._plan, recompute), compile), data)
        self.stages = {
            index: Stage(index, part.module, unpack=part.unpack, fused=run.accumulate == "fused")
            for index in self.table.placement.stages_of(self.rank)
            if (part := self.partition.parts[index]) is not None
        }
        self.scaler: Any = None
        """Scales the losses before their backward, see `GradScaler`."""
        self._hooked = HookGuard()
        self.steps = 0
        """How many training steps were run; with a seed, each step draws from streams of its own. Checkpoints save it."""
        self.postponed_steps = 0
        """How many steps in a row, the last ones, have not finalized their gradients, see `step`."""
        self._calls = 0
        """How many batches this rank was given, including those that it refused."""
        self._executors: dict[tuple[str, int, bool], Executor] = {}  # by schedule ("" is the own), number of microbatches, training or not
        self._clocks: tuple[int, list[int]] | None = None
        callbacks = list_callbacks(on_step)
        self.unsplit, self._shares_modules, measures = self._agree(bool(callbacks))
        if self.table.slices > 1 and self.unsplit:
            keep_uncompiled()
        self._whole: dict[int, str] = {}
        """The stages that turned out to need a whole backward, see `Stage.whole`."""
        self._set_merged(self._whole)
        self.data = DataParallel(self.grid, self.stages, shard=data.shard_pass, dtype=data.accumulate_dtype, deadline=self.deadline)
        self._names: set[str] | None = None
        """The names of this rank's parameters, once the ranks have agreed on them."""
        self.shared = SharedParameters(
            self.partition,
            tied,
            self.local_parameters(),
            self.gather,
            rank=self.rank,
            identify=self.group.ident,
            parallel=self.group.parallel,
            sums_apart=data.accumulate_dtype is not None,
        )
        self._names = set(self.shared.place)
        modules = {index: stage.module for index, stage in self.stages.items()}
        start_buffers_equal(modules, self.table.placement, self.gather)
        self.statistics = RunningStatistics(modules, self.table.placement, self.gather)
        self._buffers = BufferBackup()
        self._meter = StepMeter(callbacks, self.rank) if measures else None
        if self.shared.one_object:  # ranks that share parameters take turns on a device too
            use_stream(self.gather("stream", get_current_stream())[0])
        if graphs:
            refuse_graphs(
                self.stages,
                seeded=self.seed is not None,
                shares_parameters=self.shared.one_object,
                sums_elsewhere=self.grid is not None or self.data.dtype is not None,
                gathers_statistics=self.statistics.gathers,
                slices=self.table.slices,
            )

    def __repr__(self) -> str:
        name = f"{self.table.name!r}, " if self.table.name else ""
        stages = ", ".join(map(str, self.stages))
        return f"<Pipeline {name}{self.table.describe()}; rank {self.rank} has {'stage' if len(self.stages) == 1 else 'stages'} {stages}>"

    # Construction -----------------------------------------------------------------------------------------------------

    def _recognise(self, model: Any, split: Any, loss: LossOptions, batch: BatchOptions) -> Any:
        """Choose how the model is split, which is returned, its loss, and how its batches are split and cut."""
        split, loss_fn, weight = recognise_model(model, split, loss.fn, loss.weight)
        known = isinstance(split, HuggingFace)
        self.loss = Loss(loss_fn, loss.reduction)
        if weight is None:
            self.loss.check_own_reduction()
        self._cutter = batch.make_cutter(self.table, self.loss, self._plan)
        if self._cutter is not None and known:
            self._cutter = adapt_cutter(self._cutter, model, own_loss=loss.fn is None)
        counts = self.table.stages, self.microbatches
        self.batches = BatchSplitter(*batch.dims, self.loss, weight, *counts, open_batch if known else None, self._cutter)
        return split

    def _cut(self, model: Any, options: ModelOptions, data: DataOptions) -> list[Sequence[str]]:
        """Cut the model into stages and give this rank's stages their weights; the groups of tied parameters."""
        model, split = apply_plan_split(unwrap_ddp(model, self.grid), self._plan, options.split)
        cut, stages = partition(model, self.table.stages, split), self.table.placement.stages_of(self.rank)
        for index in stages:
            if cut.parts[index] is None:
                raise ScheduleError(f"rank {self.rank} holds stage {index}, but the mapping of modules has none for it")
        if self.table.slices > 1:
            check_slices(cut)
            refuse_full_graphs(options.compile)
        give_weights(options.weights, model, cut, stages)
        tied = [*options.ties, *shard_stages(cut, stages, self.grid, data.shard)]
        cut = compile_stages(cut if self.seed is None else add_layer_streams(cut), options.compile)
        self.partition: Partition = recompute_stages(cut, self._plan, options.recompute)
        return tied

    def _set_merged(self, whole: Mapping[int, str]) -> None:
        """Note which stages run their backward whole although the schedule splits it, and warn of what that costs."""
        self.merged: MergedBackward | None = predict_merged_backward(self.table, self.unsplit, self._plan, whole)
        if self.merged is not None and self.rank == 0:
            logger.warning("%s", self.merged)

    def _agree(self, measures: bool) -> tuple[tuple[int, ...], bool, bool]:
        """Check that all ranks got the same arguments.

        Returns the stages that cannot split their backward, whether ranks share modules, and whether any rank measures its steps.
        """
        arguments = {
            "pipeline": self.number,
            "stages": self.table.stages,
            "microbatches": self.microbatches,
            "schedule": hashlib.blake2b(self.table.rows.codes.tobytes(), digest_size=8).hexdigest(),
            "loss_reduction": self.loss.reduction,
            "seed": self.seed,
            "slice_lengths": None if self._cutter is None else self._cutter.fixed_lengths,
        }
        unable = [stage for stage, part in self.stages.items() if not part.splits]
        modules = {self.group.ident(module) for stage in self.stages.values() for module in stage.module.modules()}
        last = self.stages.get(self.table.stages - 1)
        lost = None if last is None else self.loss.find_outside_parameter(last.module)
        everyone = self.gather_all("Pipeline", (arguments, unable, modules, lost, measures))
        first = everyone[0][0]
        for *_, lost, _ in everyone:
            if lost is not None:
                raise ScheduleError(
                    f"loss_fn has a trainable parameter, {lost!r}, that is not in the last stage, so no optimizer would get it: make it "
                    "part of the last stage, which can take the target by stage_kwargs and return the loss itself, or freeze it"
                )
        for rank, (others, *_) in enumerate(everyone):
            for what, value in others.items():
                if value != first[what]:
                    raise PipelineError(
                        f"the ranks disagree on {what}: {first[what]!r} on rank 0, {value!r} on rank {rank}; give all the same arguments"
                    )
        unsplit = tuple(sorted({stage for _, stages, *_ in everyone for stage in stages}))
        own = self.rank if self.grid is None else self.grid.whole.rank
        shares_modules = any(rank != own and modules & others for rank, (_, _, others, *_) in enumerate(everyone))
        return unsplit, shares_modules, any(measured for *_, measured in everyone)

    @property
    def gather(self) -> Gather:
        """All-gathers a value over the ranks of the pipeline: `gather(name, value)`. Those that it is handed to need not call back here."""
        return partial(self.group.gather, self.rank, deadline=self.deadline)

    def gather_all(self, name: str, value: Any) -> list[Any]:
        """All-gather a value over all ranks of the mesh, or of the pipeline if there is no mesh."""
        return self.gather(name, value) if self.grid is None else self.grid.whole.gather(self.grid.whole.rank, name, value, self.deadline)

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages under the model's own names, each once."""
        seen: set[int] = set()
        for index in self.stages:
            part = self.partition.parts[index]
            for name, parameter in part.parameters if part is not None else ():
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                if self._names is not None and name not in self._names:
                    raise ScheduleError(
                        f"parameter {name!r} was added to the model after the pipeline was created, so the pipeline does not know it: "
                        "create the pipeline after the model has all its parameters"
                    )
                yield name, parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages that it updates, under the model's own names.

        A parameter that is the same object on several ranks, because virtual ranks share a model, is updated by the first of them only.
        """
        return ((name, parameter) for name, parameter in self.local_parameters() if name in self.shared.owned)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank updates. Warns if there are none, because torch's optimizers do not accept an empty list."""
        parameters = [parameter for _, parameter in self.named_parameters()]
        if not parameters:
            warnings.warn(
                f"rank {self.rank} has no parameters to update: its stages have none, or another rank updates them. An optimizer takes an "
                "empty list only in a group: AdamW([{'params': list(pipe.parameters())}])",
                stacklevel=2,
            )
        return iter(parameters)

    def __deepcopy__(self, memo: Any) -> Any:
        raise CopyError(_NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CopyError(_NO_COPY)

    def program(self, microbatches: int | None = None, *, training: bool = True) -> Program:
        """The program of a step with this many microbatches."""
        return self._executor(self.microbatches if microbatches is None else microbatches, training).program

    def _executor(self, count: int, training: bool, schedule: Schedule | None = None) -> Executor:
        """The executor of a step; a schedule that was not run before is lowered and proved."""
        key = "" if schedule is None else identify_schedule(schedule), count, training
        executor = self._executors.get(key)
        if executor is None:
            semantics = "rendezvous" if self.group.rendezvous else "channels"
            if training:
                table = self.table if schedule is None else add_moves(schedule, self.offload)
                program = build_training_program(table, count, self.unsplit, semantics, self.data.shard)
            else:
                program = forward_program(self.table, count, semantics, self.data.shard)
            self.data.check_program(program)
            options: dict[str, Any] = {"overlap": self.overlap, "number": self.number, "graphs": self.graphs}
            loss = self.loss if self._cutter is None else self._cutter.loss
            parts: dict[str, Any] = {"loss": loss, "group": self.group, "data": self.data, "statistics": self.statistics}
            executor = Executor(program, self.rank, self.stages, deadline=self.deadline, **parts, **options)
            self.group.open((*executor.links.inboxes, *executor.links.outboxes), self.deadline)
            self._executors[key] = executor
        return executor

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = ABSENT,
        microbatches: int | None = None,
        stage_kwargs: StageKwargs | None = None,
        outputs: bool = False,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> StepResult:
        """Run forward and backward of a batch, split along its batch dimension; adds to the parameters' gradients.

        All other keyword arguments are the model's: its first stage gets them, split like the batch. `stage_kwargs` has those of any stage.
        With `finalize_gradients=False`, gradients are not summed over data ranks and copies of a parameter, and `grad` is incomplete: the
        next step that finalizes sums those of all steps since the last one that did, once.
        """
        feed = self._take_batch(self.batches.split, args, target, microbatches, add_model_kwargs(stage_kwargs, kwargs), outputs)
        feed.share.finalizes = finalize_gradients
        return self._run(feed, training=True, meter=self._meter)

    def step_list(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None = None,
        *,
        stage_kwargs: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
        order: BatchOrder | Sequence[int] | None = None,
        outputs: bool = False,
        finalize_gradients: bool = True,
    ) -> StepResult:
        """Run forward and backward of microbatches that are already split, of any shapes; a tuple is several arguments.

        With an `order` they run in that order, and under its schedule if a `BatchPlanner` made it; a list has the number of the microbatch
        that runs first, then of the second, and so on. The result is in the order of `inputs` all the same. For `finalize_gradients` see
        `step`.
        """
        feed = self._take_batch(self._take_list, inputs, targets, stage_kwargs, outputs, order)
        feed.share.finalizes = finalize_gradients
        return self._run(feed, training=True, meter=self._meter)

    def _take_list(self, inputs: Sequence[Any], targets: Sequence[Any] | None, stage_kwargs: Any, outputs: bool, order: Any) -> StepInput:
        feed = self.batches.take_list(inputs, targets, stage_kwargs, outputs)
        if order is not None:
            apply_order(feed, order, self.table)
        return feed

    def eval_step(
        self,
        *args: Any,
        target: Any = ABSENT,
        microbatches: int | None = None,
        stage_kwargs: StageKwargs | None = None,
        outputs: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """Run the forward of a batch in evaluation mode, with the loss if there is a target. No gradients are computed."""
        feed = self._take_batch(self.batches.split, args, target, microbatches, add_model_kwargs(stage_kwargs, kwargs), outputs)
        feed.losses = self.loss.can_run(feed.targets)
        return self._run(feed, training=False)

    def infer(self, *args: Any, microbatches: int | None = None, stage_kwargs: StageKwargs | None = None, **kwargs: Any) -> Any:
        """Compute the outputs of a batch; every rank returns them."""
        feed = self._take_batch(self.batches.split, args, ABSENT, microbatches, add_model_kwargs(stage_kwargs, kwargs), True)
        feed.losses = False
        return self._run(feed, training=False).outputs

    @report_refusal
    def _take_batch(self, take: Callable[..., StepInput], *arguments: Any) -> StepInput:
        """The input of the next step; `take` makes it out of the arguments."""
        self.flush_metrics()
        self._calls += 1
        return take(*arguments)

    @report_refusal
    def _prepare(self, feed: StepInput, training: bool, measured: bool) -> Executor:
        """Do everything that can refuse a step before it runs, and return its executor."""
        if self.data.active:
            self.data.agree(feed, "step" if training else "eval_step")
        else:
            feed.normalise(feed.total)
        executor = self._executor(feed.microbatches, training, feed.schedule)
        feed.share.records = self.record
        executor.recording = self.record or measured
        feed.share.call = self._calls
        if training and self.batches.stages - 1 in self.stages:
            self.batches.check_target(feed)
        self.group.enter(self.rank, self.deadline)
        if self.group.direct:
            self.group.agree(executor.links.number, self._looks(feed), self.deadline)
        return executor

    def _run(self, feed: StepInput, training: bool, meter: StepMeter | None = None) -> StepResult:
        if meter is not None:
            meter.begin()
        elif self._meter is not None:
            self._meter.pause()
        executor = self._prepare(feed, training, meter is not None)
        if self.seed is not None:
            feed.seed, feed.first = f"{self.seed}/{self.steps}", self.data.rank * len(feed.args)
        try:
            with nullcontext() if feed.seed is None else preserve_random_state():
                shares = self._train(executor, feed, meter) if training else self._evaluate(executor, feed)
        except BaseException as error:
            try:
                if isinstance(error, PipelineError) or not isinstance(error, Exception):
                    self.group.fail(self.rank, error)
                    raise
                where = "the step" if executor.failed_at is None else describe_action(executor.failed_at)
                headline = f"{where} failed on {self.group.describe_rank(self.rank)}: {describe_error(error)}"
                raise self.group.report_failure(self.rank, headline, error) from error
            finally:
                executor.activity.stop()
        recorded = self._gather_timeline(executor) if self.record else None
        result = StepResult(shares, partial(mb.merge_outputs, dim=self.batches.out_dim), recorded)
        if self.data.ranks > 1:
            result.loss = self.data.sum_values({"loss": result.loss})["loss"]
        if meter is not None:
            meter.end(self.steps, shares, result.loss)
        return result

    def _looks(self, feed: StepInput) -> list[str]:
        """Everything that the shapes and types of this rank's messages can depend on."""
        kwargs = [feed.kwargs[stage] for stage in self.stages if stage in feed.kwargs]
        trained = [parameter.requires_grad for _, parameter in self.local_parameters()]
        leaves = pytree.tree_leaves((feed.args, kwargs, trained, list(find_autocast().items())))
        return [f"{leaf.dtype}{list(leaf.shape)}{leaf.requires_grad}" if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]

    def _train(self, executor: Executor, feed: StepInput, meter: StepMeter | None) -> list[ResultShare]:
        parameters = list(self.local_parameters())
        for stage in self.stages.values():
            stage.refresh()
        if self.shared.tied:
            self._note_tied()
        # If ranks share modules without meeting at the beginning of the step, another rank may have changed them already.
        own = () if self._shares_modules and not self.shared.one_object else self.stages.values()
        self._buffers.take([stage.module for stage in own])
        backup = GradientBackup.take([parameter for _, parameter in parameters])
        feed.factor = 1.0 if self.scaler is None else self.scaler.get_scale()
        sums, folds = self.shared.active or self.data.active, self.statistics.gathers or bool(executor.compute.unordered)
        alone = len(feed.args) == 1 and self.data.ranks == 1 and not self.shared.active
        self._hooked.begin(parameters, alone=alone)
        try:
            if self.shared.active or self.shared.one_object:
                self.shared.begin(parameters, self.gather)
            if self.data.active:
                self.data.begin(executor.reduces, finalizes=feed.share.finalizes)
            with torch.enable_grad(), self._hooked.watch():
                share = executor.run(feed)
            share.restore_order()
            if sums:
                self._sum_gradients(parameters, feed.share.finalizes)
            folded = self.statistics.fold(self.gather) if folds else ()
            if meter is not None:
                share.times = meter.take_times(executor, feed.total if self.batches.weight and feed.targets is not None else None)
            share.whole = {index: stage.whole for index, stage in self.stages.items() if stage.whole is not None}
            shares = check_same_step(self.gather("step", share), self.group.describe_rank)
            if self.group.direct:
                executor.links.settle_sends()
            self._note_whole_backwards(shares)
            if folded:
                write_statistics(folded)
        except BaseException:
            self.statistics.reset()
            self.data.reset()
            self.shared.reset()
            self._buffers.restore()
            backup.restore()
            raise
        self._buffers.settle()
        if sums:
            self.data.settle()
            self.shared.settle()
        self.steps += 1
        self.postponed_steps = 0 if feed.share.finalizes else self.postponed_steps + 1
        return shares

    def _note_tied(self) -> None:
        """Tell each stage which of its parameters other stages use too."""
        for index, stage in self.stages.items():
            part = self.partition.parts[index]
            if part is not None:
                stage.tied = frozenset(id(parameter) for name, parameter in part.parameters if name in self.shared.tied)

    def _sum_gradients(self, parameters: Sequence[tuple[str, nn.Parameter]], finalizes: bool) -> None:
        """Sum the gradients over data ranks and copies of a parameter, or leave that to a later step."""
        if finalizes:
            self.data.finish(self.shared.ids(parameters))
            self.shared.sum_gradients(parameters, self.gather, self.data.take_sum)
        else:
            self.data.postpone()
            self.shared.postpone(parameters, self.gather)

    def _note_whole_backwards(self, shares: Sequence[ResultShare]) -> None:
        """Warn of the cost if more stages than before turned out to need a whole backward."""
        whole = {stage: reason for share in shares for stage, reason in share.whole.items()}
        if whole.keys() > self._whole.keys():
            self._whole = whole
            self._set_merged(whole)

    def _evaluate(self, executor: Executor, feed: StepInput) -> list[ResultShare]:
        modes = [(module, module.training) for stage in self.stages.values() for module in stage.module.modules()]
        if self._shares_modules:
            self.gather("modes", None)  # no rank changes a module's mode before all have noted it
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad():
                share = executor.run(feed)
            self.data.finish_evaluation()
            shares = check_same_step(self.gather("eval_step", share), self.group.describe_rank)
            if self.group.direct:
                executor.links.settle_sends()
            return shares
        except BaseException:
            self.data.reset()
            raise
        finally:
            for module, mode in modes:
                module.training = mode

    def _gather_timeline(self, executor: Executor) -> Callable[[], Timeline]:
        """Gather every rank's times. Clocks drift, so they are compared again every `_DRIFT` steps."""
        if self._clocks is None or self._clocks[0] >= _DRIFT:
            self._clocks = 0, clock_offsets(self.group, self.rank, self.deadline)
        count, ahead = self._clocks
        self._clocks = count + 1, ahead
        records = self.gather("timeline", StepTimes.of(executor))
        return partial(build_timeline, executor.program, records, ahead)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most `max_norm`; returns the norm before. Tied ones count once."""
        self._check_finalized("clip_grad_norm_")
        norm = clip_grad_norm(max_norm, norm_type, self.local_parameters(), self.shared, data=self.data, gather=self.gather)
        self._deliver_metrics(norm)
        return norm

    def flush_metrics(self) -> None:
        """Give the metrics of the last step to `on_step`, if that was not done yet. Call it after the last step if nothing clips."""
        self._deliver_metrics(None)

    def _deliver_metrics(self, grad_norm: Tensor | None) -> None:
        """Call `on_step`; if it raises, the other ranks raise too."""
        if self._meter is None:
            return
        try:
            self._meter.deliver(grad_norm)
        except Exception as error:
            headline = f"on_step failed on {self.group.describe_rank(self.rank)}: {describe_error(error)}"
            raise self.group.report_failure(self.rank, headline, error) from error

    def _check_finalized(self, name: str) -> None:
        """Refuse a call that needs the gradients, as long as they are not summed over all ranks."""
        if self.postponed_steps:
            raise ScheduleError(
                f"{name} needs the gradients, but those of the last {self.postponed_steps} steps are not finalized: give "
                "finalize_gradients=True, the default, to the last step before it"
            )

    def parity(self, *args: Any, target: Any = ABSENT, microbatches: int | None = None, stage_kwargs: StageKwargs | None = None) -> Parity:
        """Compare a step with the unpipelined model: the loss, every gradient, the norm, and all state. All is restored."""
        self._check_finalized("parity")
        batch = StepArguments(args, target, stage_kwargs or {})
        own = batch.copy()  # a stage may change its input in place
        feed = self._take_batch(self.batches.split, own.args, own.target, microbatches, own.stage_kwargs or None, False)
        steps = self.steps
        try:
            return compare_step(self, lambda feed: self._run(feed, training=True).loss, feed, batch)
        finally:
            self.steps = steps


# Options --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelOptions:
    """How the model becomes this rank's stages."""

    split: Any
    ties: Ties
    weights: Weights
    recompute: Recompute
    compile: Compile | Sequence[Compile]


@dataclass(frozen=True)
class GroupOptions:
    """The processes or threads that are the ranks, and how they exchange messages."""

    group: Any
    mesh: Any
    transport: str
    deadline: float

    def __post_init__(self) -> None:
        deadline: Any = self.deadline
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline < math.inf:
            raise ScheduleError(f"deadline must be a number of seconds above 0, got {deadline!r}: a large one if ranks may be slow")
        object.__setattr__(self, "deadline", float(deadline))


@dataclass(frozen=True)
class DataOptions:
    """How stages are sharded over data ranks, and how gradients are summed."""

    shard: Sharding
    shard_pass: Shard
    accumulate_dtype: torch.dtype | None


@dataclass(frozen=True)
class LossOptions:
    """The loss function, and how much the losses of microbatches count."""

    fn: Callable[..., Any] | None
    reduction: str
    weight: Callable[[Any], Any] | None


@dataclass(frozen=True)
class BatchOptions:
    """How a batch is split into microbatches, and these into slices."""

    inputs: mb.Dims
    targets: mb.Dims
    kwargs: mb.Dims
    slice_lengths: SliceLengths
    sequence_dims: mb.Dims | SequenceDims

    @property
    def dims(self) -> tuple[mb.Dims, mb.Dims, mb.Dims]:
        """The batch dimensions."""
        return self.inputs, self.targets, self.kwargs

    def make_cutter(self, table: Table, loss: Loss, plan: Any) -> SequenceCutter | None:
        """The cutter of microbatches into slices, if the schedule has any: in the plan's proportions unless lengths are given."""
        if table.slices == 1:
            if self.slice_lengths is not None:
                raise ScheduleError(
                    f"slice_lengths={self.slice_lengths!r}, but {table.name or 'the schedule'} has no slices: build it with slices=, or "
                    "leave the lengths out"
                )
            return None
        dims = self.sequence_dims
        if not isinstance(dims, SequenceDims):  # one number holds for everything, a tree for the inputs
            dims = SequenceDims(dims, dims, dims) if isinstance(dims, int) else SequenceDims(dims)
        planned = getattr(plan, "slice_lengths", None) if self.slice_lengths is None else None
        lengths = list(planned) if planned else self.slice_lengths
        return SequenceCutter(table.slices, loss, lengths, scales=bool(planned), dims=dims)


@dataclass(frozen=True)
class ExecutionOptions:
    """How a rank runs its program."""

    seed: int | None
    accumulate: str
    overlap: Callable[..., None] | str | None
    graphs: bool
    offload: OffloadChoice

    def __post_init__(self) -> None:
        if self.accumulate not in ("autograd", "fused"):
            raise ScheduleError(f"accumulate must be 'autograd' or 'fused', got {self.accumulate!r}")
