"""`Pipeline`: trains a model with any program, with the numbers of the unpipelined model."""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from penstock.errors import CopyError, PipelineError, ScheduleError
from penstock.ir.kind import SHARES
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
from penstock.runtime.device.host_memory import HostMemory
from penstock.runtime.device.streams import get_current_stream, use_stream
from penstock.runtime.execution.cuda_graphs import refuse_graphs
from penstock.runtime.execution.executor import Executor
from penstock.runtime.execution.overlap import make_overlap
from penstock.runtime.execution.programs import (
    OffloadChoice,
    add_moves,
    build_training_program,
    find_spread_ends,
    find_table,
    forward_program,
    rebuild_table,
)
from penstock.runtime.job_plan import check_degrees, settle_recompute, settle_sharding
from penstock.runtime.measure.metrics import OnStep, StepMeter, list_callbacks
from penstock.runtime.measure.parity import Parity, StepArguments, compare_step
from penstock.runtime.measure.recorder import StepTimes, build_timeline, clock_offsets
from penstock.runtime.model.hugging_face import HuggingFace, adapt_cutter, open_batch, recognise_model
from penstock.runtime.model.partition import Partition, apply_plan_split, check_slices, partition
from penstock.runtime.model.random_streams import add_layer_streams, preserve_random_state
from penstock.runtime.model.running_statistics import RunningStatistics, write_statistics
from penstock.runtime.model.spread_ends import take_ends
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.tied_parameters import Gather, SharedParameters, Ties, start_buffers_equal
from penstock.runtime.model.transforms import (
    Compile,
    MergedBackward,
    Recompute,
    predict_merged_backward,
    refuse_full_graphs,
    transform_stages,
)
from penstock.runtime.parallel.data_parallel import DataParallel
from penstock.runtime.parallel.fsdp import Sharding, shard_stages, unwrap_ddp
from penstock.runtime.parallel.gradients import BufferBackup, GradientBackup, HookGuard, clip_grad_norm
from penstock.runtime.parallel.joint_pipeline import JointPipeline
from penstock.runtime.parallel.mesh import PipelineMesh, find_group
from penstock.runtime.parallel.spread_vocabulary import SpreadVocabulary
from penstock.runtime.sequence.prefix import keep_uncompiled
from penstock.runtime.tensors.tensor_rows import TensorRows
from penstock.runtime.torch_internals import pytree
from penstock.runtime.transport.failures import describe_error
from penstock.runtime.transport.group import Group, describe_action, do_nothing
from penstock.runtime.transport.processes import Processes
from penstock.runtime.transport.recovery import Recovery, find_recovery
from penstock.runtime.weights.source import Weights, give_weights
from penstock.simulator.timeline import Timeline
from penstock.text.checks import check_function

logger = logging.getLogger(__name__)


_NO_COPY = (
    "a Pipeline cannot be copied or pickled, because it holds connections to the other ranks: copy the model and create another pipeline "
    "from it, or save it with Checkpoints"
)
_DRIFT = 1000
"""Recorded steps after which the ranks' clocks are compared again."""
Method = TypeVar("Method", bound=Callable[..., Any])


def leave_inference_mode() -> AbstractContextManager[Any]:
    """A context for evaluations, which compute no gradients by themselves: messages and inputs are watched for in-place changes."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


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
            try:
                if isinstance(error, PipelineError) or not isinstance(error, Exception):
                    self.group.fail(self.rank, error)
                    raise
                with suppress(PipelineError):  # an earlier failure that this rank had yet to raise: its own error is raised instead
                    self.group.enter(self.rank, self.deadline)
                    headline = f"{self.group.describe_rank(self.rank)} refused its input to the step: {describe_error(error)}"
                    self.group.report_failure(self.rank, headline, error)
                raise
            finally:
                self.abandon_collectives()

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
      elements, or `sum`) or by `weight(target)`. Without a loss function the last stage's output is the loss. A schedule that spreads the
      vocabulary over the ranks takes `TokenCrossEntropy()` and the whole model as layers, or a model of transformers, see
      docs/vocabulary.md;
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
      stage; or one `bool` per layer of the model, from the first to the last, for layers that do so by themselves. Defaults to the plan's
      choice;
    - `offload`: the percentage of each rank's activations to move to host memory between their forward and backward, one percentage per
      rank, or True for all, with any number of microbatches; defaults to what the plan, schedule or program says, which must not have
      copies otherwise;
    - `compile`: True, options for `torch.compile`, a function that compiles a stage's module, or one of these per stage.
      Compiled stages run a whole backward, and so do stages that ask autograd for a weight's gradient in their forward or loss, or that
      differentiate a gradient. If the schedule splits such a backward, `merged` says what that costs;
    - `slice_lengths`: for a schedule with slices, the number of tokens in each slice of a sequence, or a function that returns them for a
      sequence's length; defaults to the plan's, else to lengths as equal as possible. `sequence_dims` is the dimension that is cut, see
      `SequenceDims`;
    - `on_loss`: what happens when the process of a rank is gone. With "take-over", on a `mesh` with data ranks, its microbatches run on the
      data ranks with the same stages from the same step on, and a process that is started in its place joins at the next checkpoint; with
      "raise" every rank raises. Defaults to "take-over" under `launch(..., losses=...)`. See docs/losses.md;
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
        on_loss: str | None = None,
    ) -> None:
        ranks = GroupOptions(group, mesh, transport, deadline, on_loss)
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
        goes_on = ranks.allow_losses(self.group, self.rank, self.grid, self.table)
        returns = self.grid is not None and self.grid.whole.returning
        self.seed, self.overlap = run.seed, make_overlap(run.overlap)
        split = self._recognise(model, split, LossOptions(loss_fn, loss_reduction, weight), batch)
        self._tied = self._cut(model, ModelOptions(split, ties, weights, settle_recompute(self._plan, recompute), compile), data)
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
        self._host = HostMemory()  # the buffers of all programs
        self._clocks: tuple[int, list[int]] | None = None
        self._callbacks = list_callbacks(on_step)
        self.unsplit, self._sharing, measures = self._agree(goes_on)
        if self.table.slices > 1 and self.unsplit:
            keep_uncompiled()
        self._whole: dict[int, str] = {}  # the stages that turned out to need a whole backward, see `Stage.whole`
        self._set_merged(self._whole)
        self.data = DataParallel(
            self.grid,
            self.stages,
            shard=data.shard_pass,
            dtype=data.accumulate_dtype,
            deadline=self.deadline,
            outside=() if self.vocabulary is None else self.vocabulary.parameters(),
        )
        self._names: set[str] | None = None
        """The names of this rank's parameters, once the ranks have agreed on them."""
        self.shared, self.statistics = self._share_state()
        self._buffers = BufferBackup()
        self._meter = StepMeter(self._callbacks, self.rank) if measures else None
        self._allow_losses(ranks, goes_on, returns)
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
        model, stages = unwrap_ddp(model, self.grid), self.table.placement.stages_of(self.rank)
        self.vocabulary: SpreadVocabulary | None = None
        """This rank's rows of the embedding and the head, if the schedule spreads them over the ranks."""
        spread = find_spread_ends(self.table)
        ends: list[tuple[Tensor, TensorRows | None]] = []
        if any(spread):
            data.refuse_spread(options, self.grid, graphs=self.graphs)
            cut, ends = self._cut_between_ends(model, options.split, *spread)
        else:
            model, split = apply_plan_split(model, self._plan, options.split)
            cut = partition(model, self.table.stages, split)
        for index in stages:
            if cut.parts[index] is None:
                raise ScheduleError(f"rank {self.rank} holds stage {index}, but the mapping of modules has none for it")
        if self.table.slices > 1:
            check_slices(cut)
            refuse_full_graphs(options.compile)
        give_weights(options.weights, model, cut, stages, ends)
        tied = [*options.ties, *shard_stages(cut, stages, self.grid, data.shard)]
        cut = cut if self.seed is None else add_layer_streams(cut)
        self.partition: Partition = transform_stages(cut, self._plan, options.compile, options.recompute)
        return tied

    def _cut_between_ends(
        self, model: Any, split: Any, embedding: bool, head: bool
    ) -> tuple[Partition, list[tuple[Tensor, TensorRows | None]]]:
        """Cut the layers between the ends that are spread over the ranks into stages, and take this rank's rows of the ends.

        Returns the stages, and the tensors of the ends with the rows that need their values, see `give_weights`.
        """
        model, split, ends = take_ends(model, split, self._plan, self.table.stages, embedding=embedding, head=head)
        if head and self.loss.find_token_entropy() is None:
            raise ScheduleError(
                "the head is spread over the ranks, which compute the loss together: give loss_fn=TokenCrossEntropy() or "
                "torch.nn.functional.cross_entropy, without other options than ignore_index, or leave the head in its stage with "
                "ps.Vocabulary(head=False)"
            )
        cut = partition(model, self.table.stages, split, without=ends.names)
        members: dict[str, Any] = {"group": self.group, "rank": self.rank, "deadline": self.deadline}
        members["shares"] = getattr(self._plan, "row_shares", ())
        self.vocabulary = SpreadVocabulary(ends, self.loss.find_token_entropy() if head else None, self.table, **members)
        return cut, self.vocabulary.pair_tensors(ends, self.table.placement.stages_of(self.rank))

    def _share_state(self) -> tuple[SharedParameters, RunningStatistics]:
        """Agree with the other ranks of the pipeline on parameters, buffers and norm layers that several of them hold."""
        self._names = None
        shared = SharedParameters(
            self.partition,
            self._tied,
            self.local_parameters(),
            self.gather,
            rank=self.rank,
            identify=self.group.ident,
            parallel=self.group.parallel,
            sums_apart=self.data.dtype is not None,
            outside=None if self.vocabulary is None else self.vocabulary.places(),
        )
        self._names = set(shared.place)
        start_buffers_equal(self._modules, self.table.placement, self.gather)
        return shared, RunningStatistics(self._modules, self.table.placement, self.gather)

    @property
    def _modules(self) -> dict[int, nn.Module]:
        return {index: stage.module for index, stage in self.stages.items()}

    def _set_merged(self, whole: Mapping[int, str]) -> None:
        """Note which stages run their backward whole although the schedule splits it, and warn of what that costs."""
        self.merged: MergedBackward | None = predict_merged_backward(self.table, self.unsplit, self._plan, whole)
        if self.merged is not None and self.rank == 0:
            logger.warning("%s", self.merged)

    def _agree(self, goes_on: bool) -> tuple[tuple[int, ...], set[int], bool]:
        """Check that all ranks got the same arguments.

        Returns the stages that cannot split their backward, the ranks that share modules, and whether any rank measures its steps.
        """
        arguments = {
            "pipeline": self.number,
            "stages": self.table.stages,
            "microbatches": self.microbatches,
            "schedule": hashlib.blake2b(self.table.rows.codes.tobytes(), digest_size=8).hexdigest(),
            "loss_reduction": self.loss.reduction,
            "seed": self.seed,
            "slice_lengths": None if self._cutter is None else self._cutter.fixed_lengths,
            "on_loss": "take-over" if goes_on else "raise",
        }
        unable = [stage for stage, part in self.stages.items() if not part.splits]
        modules = {self.group.ident(module) for stage in self.stages.values() for module in stage.module.modules()}
        last = self.stages.get(self.table.stages - 1)
        lost = None if last is None else self.loss.find_outside_parameter(last.module)
        everyone = self._gather_whole("Pipeline", (arguments, unable, modules, lost, bool(self._callbacks)))
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
        holders = Counter(module for _, _, held, *_ in everyone for module in held)
        sharing = {rank for rank, (_, _, held, *_) in enumerate(everyone) if any(holders[module] > 1 for module in held)}
        return unsplit, sharing, any(measured for *_, measured in everyone)

    @property
    def gather(self) -> Gather:
        """All-gathers a value over the ranks of the pipeline: `gather(name, value)`. Those that it is handed to need not call back here."""
        return partial(self.group.gather, self.rank, deadline=self.deadline)

    def gather_all(self, name: str, value: Any) -> list[Any]:
        """All-gather a value over all ranks of the mesh, or of the pipeline if there is no mesh."""
        return self._gather_whole(name, value) if self.recovery is None else self._gather_survivors(self.recovery, name, lambda: value)

    def _gather_whole(self, name: str, value: Any) -> list[Any]:
        return self.gather(name, value) if self.grid is None else self.grid.whole.gather(self.grid.whole.rank, name, value, self.deadline)

    def _gather_survivors(self, recovery: Recovery, name: str, read: Callable[[], Any]) -> list[Any]:
        """Make a call that consists of one exchange between all ranks; `read` returns this rank's value, again after each loss."""
        return recovery.run(lambda: recovery.decide(name, read(), do_nothing, lambda values: values))

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages under the model's own names, each once, and its rows of a spread vocabulary."""
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
        if self.vocabulary is not None:
            yield from self.vocabulary.named_parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages that it updates, under the model's own names, and its rows of a spread vocabulary.

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

    def gather_vocabulary(self) -> dict[str, Tensor]:
        """The whole parameters of the layers that are spread over the ranks, by name, on every rank; called on all ranks."""
        return {} if self.vocabulary is None else self.vocabulary.gather_weights(self.gather)

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
            program = self._build_program(count, training, self.table if schedule is None else add_moves(schedule, self.offload))
            self.data.check_program(program)
            options: dict[str, Any] = {"overlap": self.overlap, "number": self.number, "graphs": self.graphs, "host": self._host}
            loss = self.loss if self._cutter is None else self._cutter.loss
            parts: dict[str, Any] = {"loss": loss, "group": self.group, "data": self.data, "statistics": self.statistics}
            parts["vocabulary"] = self.vocabulary
            executor = Executor(program, self.rank, self.stages, deadline=self.deadline, **parts, **options)
            self.group.open((*executor.links.inboxes, *executor.links.outboxes), self.deadline)
            self._executors[key] = executor
        return executor

    def _build_program(self, count: int, training: bool, table: Table) -> Program:
        """The program of a step with this many microbatches per replica, proved for the transport."""
        semantics = "rendezvous" if self.group.rendezvous else "channels"
        if self.joint is None:
            if training:
                return build_training_program(table, count, self.unsplit, semantics, self.data.shard)
            return forward_program(self.table, count, semantics, self.data.shard)
        total = count * self.joint.survivors.data
        if not training:
            return forward_program(self.table, total, semantics, placement=self.joint.survivors.place(self.table.placement, count))
        joint = self.joint.take_over(rebuild_table(table, count)).schedule
        return build_training_program(joint, total, self.unsplit, semantics, reduce_at_end=True)

    # Losses of ranks --------------------------------------------------------------------------------------------------

    def _allow_losses(self, options: GroupOptions, goes_on: bool, returns: bool) -> None:
        """Prepare for losses of ranks, if the others go on; `returns` says that this process takes the place of a lost one."""
        self.recovery: Recovery | None = None
        """Makes calls again when ranks are lost, if the others go on without them."""
        self.joint: JointPipeline | None = None
        """All ranks that are left as one pipeline, while any rank is lost."""
        self._postponed_inputs: list[tuple[StepInput, int]] = []
        """The inputs of the steps that have not finalized their gradients, and how many steps came before each, if ranks may be lost."""
        self._before_postponed: GradientBackup | None = None
        """The gradients before these steps."""
        if self.grid is not None and goes_on:
            if self.data.has_shards:
                options.refuse_shards(self.grid)
            self.recovery = find_recovery(self.grid.whole, self.deadline)
            self.recovery.add(self, self.deadline)
            self.grid.whole.allow_losses()
            if returns:
                self._calls = max(self.recovery.join(0))

    def regroup(self) -> None:
        """Go on with the ranks that are left, or with all of them if only a connection was lost. `Recovery` calls this on all ranks."""
        self._set_groups()
        if self.joint is None:
            self.statistics = RunningStatistics(self._modules, self.table.placement, self.gather)
        else:
            replicas, placement = self.joint.survivors.data, self.joint.take_over(self.table).schedule.placement
            self.statistics = RunningStatistics(self._modules, placement, self.gather, counts=lambda number: number % replicas == 0)
            if self.rank == 0:
                logger.warning("%s", self.joint.describe(self.table))
        self._repeat_postponed()

    def _set_groups(self) -> None:
        """Use the groups of the ranks that are there now, and forget everything that belongs to others."""
        assert self.grid is not None
        self._executors.clear()
        self._clocks = None
        if self._meter is not None:
            self._meter.forget_ranks()
        self.shared.forget()
        if self.grid.has_lost:
            self._refuse_lost_shards()
            whole, own = self.grid.whole, not self.unsplit and not self._whole  # a rank that has just come back has seen no forward yet
            splits = all(whole.gather(whole.rank, "split backwards", own, self.deadline))
            self.joint = JointPipeline(self.grid, self._plan, split=splits, deadline=self.deadline)
            self.group, self.rank = self.joint.group, self.joint.rank
            self.data.regroup(self.grid.join_peers())
        else:
            self.group, self.rank, self.joint = self.grid.pipe, self.grid.pipe.rank, None
            self.data.regroup(self.grid.data)

    def _refuse_lost_shards(self) -> None:
        """Refuse to go on if parts of parameters are lost, and say what would serve."""
        if not self.data.has_shards:
            return
        assert self.grid is not None
        mesh = self.grid
        gone = [rank for rank in range(mesh.whole.ranks) if rank not in mesh.whole.members]
        named = []
        for rank in gone:
            stages = ", ".join(map(str, self.table.placement.stages_of(mesh.locate(rank)[0])))
            named.append(f"{mesh.whole.describe_rank(rank)} with its shards of stage {stages}")
        raise PipelineError(
            f"lost: {'; '.join(named)}. {mesh.describe_shards()} Start again from the last checkpoint. Stages that every data rank holds "
            "in full, without shard= and fully_shard, can go on after a loss"
        )

    def _repeat_postponed(self) -> None:
        """Run the steps again that have not finalized their gradients, because those of the lost ranks are lost."""
        if not self._postponed_inputs:
            return
        assert self.recovery is not None
        assert self._before_postponed is not None
        self._before_postponed.restore()
        steps, postponed, inputs, buffers = self.steps, self.postponed_steps, self._postponed_inputs, BufferBackup()
        buffers.take(stage.module for stage in self.stages.values())
        self._postponed_inputs = []
        try:
            with self.recovery.repeat():
                for given, step in inputs:
                    self.steps = step
                    self._run_once(given, training=True)
        finally:
            self.steps, self.postponed_steps, self._postponed_inputs = steps, postponed, inputs
            buffers.restore()

    def readmit_ranks(self) -> None:
        """Let in the processes that wait in the place of lost ranks, once there is one for each. `Checkpoints` calls this after a save.

        The state of this rank must be that of the last checkpoint, which the others load.
        """
        if self.recovery is not None and not self.recovery.alone and not self.postponed_steps:
            self.recovery.run(self._readmit)

    def _readmit(self) -> None:
        assert self.recovery is not None
        assert self.grid is not None
        whole, waiting = self.grid.whole, list[int]()
        if self.joint is not None:
            waiting = whole.list_returning()
            if waiting and self.recovery.pipelines > 1:
                if whole.rank == whole.members[0]:
                    named, count = " and ".join(map(whole.describe_rank, waiting)), self.recovery.pipelines
                    logger.warning("%s cannot come back: there are %d pipelines, and a checkpoint has the state of one", named, count)
                waiting = []
            waiting = whole.gather(whole.rank, "returning ranks", waiting, self.deadline)[0]
        if not waiting or {*whole.members, *waiting} != set(range(whole.ranks)):
            # Also if no rank is lost: some may be told of a loss in the save before, and others not until the next call.
            self.recovery.decide("no rank returns", None, do_nothing, lambda _: None)
            return
        whole.readmit(waiting, self.deadline)
        self._set_groups()
        self._agree(goes_on=True)
        self.data.start()
        self.shared, self.statistics = self._share_state()
        self.recovery.let_in(self._calls)
        if whole.rank == whole.members[0]:
            logger.warning("%s came back", " and ".join(map(whole.describe_rank, waiting)))

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
        with leave_inference_mode():
            feed = self._take_batch(self.batches.split, args, target, microbatches, add_model_kwargs(stage_kwargs, kwargs), outputs)
            feed.losses = self.loss.can_run(feed.targets)
            feed.copy_inference_tensors()
            return self._run(feed, training=False)

    def infer(self, *args: Any, microbatches: int | None = None, stage_kwargs: StageKwargs | None = None, **kwargs: Any) -> Any:
        """Compute the outputs of a batch; every rank returns them."""
        with leave_inference_mode():
            feed = self._take_batch(self.batches.split, args, ABSENT, microbatches, add_model_kwargs(stage_kwargs, kwargs), True)
            feed.losses = False
            feed.copy_inference_tensors()
            return self._run(feed, training=False).outputs

    @report_refusal
    def _take_batch(self, take: Callable[..., StepInput], *arguments: Any) -> StepInput:
        """The input of the next step; `take` makes it out of the arguments."""
        self.flush_metrics()
        self._calls += 1
        feed = take(*arguments)
        feed.share.call = self._calls
        return feed

    @report_refusal
    def _prepare(self, feed: StepInput, training: bool, measured: bool) -> tuple[Executor, StepInput]:
        """Do everything that can refuse a step before it runs, and return its executor, and its input, of all replicas after a loss."""
        count, name = feed.microbatches, "step" if training else "eval_step"
        if training and torch.is_inference_mode_enabled():
            raise ScheduleError("a training step under torch.inference_mode() gets no gradients: call it outside, or use eval_step")
        if self.recovery is None and self.grid is not None:  # another pipeline may have gone on after a loss
            self.grid.refuse_losses("and this pipeline cannot go on without all ranks: start again from the last checkpoint")
        if self.vocabulary is not None:
            self.vocabulary.begin_step(feed, flat=self.loss.takes_flat_targets, training=training)
        feed.tokens = feed.total if self.batches.weight and feed.targets is not None else None
        if self.recovery is not None:
            feed = feed.renew()
            feed.step = self.steps
        if self.seed is not None:
            feed.seed, feed.first = f"{self.seed}/{self.steps}", self.data.rank * len(feed.args)
        if self.joint is not None:
            feed = self.joint.agree(feed, name, self.table if feed.schedule is None else feed.schedule, self.data)
        elif self.data.active:
            self.data.agree(feed, name)
        else:
            feed.normalise(feed.total)
        executor = self._executor(count, training, feed.schedule)
        feed.share.records = self.record
        executor.recording = self.record or measured
        if training and self.batches.stages - 1 in self.stages:
            self.batches.check_target(feed)
        self.group.enter(self.rank, self.deadline)
        if self.group.direct:
            self.group.agree(executor.links.number, self._looks(feed), self.deadline)
        return executor, feed

    def _run(self, feed: StepInput, training: bool, meter: StepMeter | None = None) -> StepResult:
        """Run a step; if ranks are lost in it, run it again with those that are left."""
        if self.recovery is None:
            return self._run_once(feed, training, meter)
        self.recovery.alone = False
        feed.note_versions()
        if training and not feed.share.finalizes and not self.postponed_steps:
            self._before_postponed = GradientBackup.take(parameter for _, parameter in self.local_parameters())
        return self.recovery.run(lambda: self._run_once(feed, training, meter))

    def _run_once(self, given: StepInput, training: bool, meter: StepMeter | None = None) -> StepResult:
        """Run a step, or make an attempt at it if ranks may be lost; `given` is this rank's own input."""
        if meter is not None:
            meter.begin()
        elif self._meter is not None:
            self._meter.pause()
        executor, feed = self._prepare(given, training, meter is not None)
        try:
            with nullcontext() if feed.seed is None else preserve_random_state():
                return self._train(executor, feed, given, meter) if training else self._evaluate(executor, feed)
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
                self.abandon_collectives()

    def abandon_collectives(self) -> None:
        """Leave the collectives of a spread vocabulary after a failure, which every rank raises; the next step starts anew."""
        if self.vocabulary is not None:
            self.vocabulary.abandon()

    def _looks(self, feed: StepInput) -> list[str]:
        """Everything that the shapes and types of this rank's messages can depend on."""
        kwargs = [feed.kwargs[stage] for stage in self.stages if stage in feed.kwargs]
        trained = [parameter.requires_grad for _, parameter in self.local_parameters()]
        leaves = pytree.tree_leaves((feed.args, kwargs, trained, list(find_autocast().items())))
        return [f"{leaf.dtype}{list(leaf.shape)}{leaf.requires_grad}" if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]

    def _train(self, executor: Executor, feed: StepInput, given: StepInput, meter: StepMeter | None) -> StepResult:
        parameters = list(self.local_parameters())
        for stage in self.stages.values():
            stage.refresh()
        if self.shared.tied:
            self._note_tied()
        # If ranks share modules without meeting at the beginning of the step, another rank may have changed them already.
        is_sharing = (self.rank if self.grid is None else self.grid.whole.rank) in self._sharing
        own = () if is_sharing and not self.shared.one_object else self.stages.values()
        self._buffers.take([stage.module for stage in own])
        backup = GradientBackup.take([parameter for _, parameter in parameters])
        feed.factor = 1.0 if self.scaler is None else self.scaler.get_scale()
        sums, folds = self.shared.active or self.data.active, self.statistics.gathers or bool(executor.compute.unordered)
        alone = len(feed.args) == 1 and self.data.ranks == 1 and not self.shared.active
        self._hooked.begin(parameters, alone=alone)
        undo = partial(self._undo_step, backup)
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
            folded = self.statistics.fold(self.gather) if folds else []
            if meter is not None:
                share.times = meter.take_times(executor, feed.tokens)
            share.whole = {index: stage.whole for index, stage in self.stages.items() if stage.whole is not None}
            shares = self._gather_shares("step", share)
            if folded:
                write_statistics(folded)
            complete = partial(self._complete_step, executor, shares, given=given, meter=meter)
            if self.recovery is not None:
                return self._commit_step(self.recovery, executor, shares, undo, complete)
        except BaseException:
            if self.recovery is None or not self.recovery.is_prepared:
                undo()
            raise
        return complete(None, None)

    def _commit_step(
        self,
        recovery: Recovery,
        executor: Executor,
        shares: list[ResultShare],
        undo: Callable[[], None],
        complete: Callable[..., StepResult],
    ) -> StepResult:
        """Decide a training step together with all ranks of the mesh, of which some may be lost."""
        if self.joint is None and self.data.replicated.has_buffers:
            self.data.copy_buffers()  # now, because the first data rank, which has the values that count, may be lost later
        recorded = self._gather_timeline(executor) if self.record else None
        return recovery.decide("commit", self._sum_losses(shares), undo, partial(complete, recorded))

    def _undo_step(self, backup: GradientBackup) -> None:
        """Restore everything as it was before a training step that has failed."""
        self.statistics.reset()
        self.data.reset()
        self.shared.reset()
        self._buffers.restore()
        backup.restore()

    def _complete_step(
        self,
        executor: Executor,
        shares: list[ResultShare],
        recorded: Callable[[], Timeline] | None,
        losses: Sequence[dict[int, Tensor | None]] | None,
        *,
        given: StepInput,
        meter: StepMeter | None,
    ) -> StepResult:
        """Note that a training step has succeeded on all ranks; `losses` are what each rank knows of all replicas, if ranks may be lost."""
        if self.group.direct:
            executor.links.settle_sends()
        self._note_whole_backwards(shares)
        self._buffers.settle()
        if self.shared.active or self.data.active:
            self.data.settle()
            self.shared.settle()
        self.steps += 1
        if given.share.finalizes:
            self.postponed_steps, self._postponed_inputs, self._before_postponed = 0, [], None
        else:
            self.postponed_steps += 1
            if self.recovery is not None:
                self._postponed_inputs.append((given, self.steps - 1))
        result = self._build_result(executor, shares, recorded, losses)
        if meter is not None:
            meter.end(self.steps, shares if self.joint is None else self.joint.keep_own(shares), result.loss)
        return result

    def _gather_shares(self, name: str, share: ResultShare) -> list[ResultShare]:
        """The shares of all ranks, which must have run the same step."""
        shares = self.gather(name, share)
        check_same_step(shares if self.joint is None else self.joint.keep_own(shares), self.group.describe_rank)
        return shares

    def _sum_losses(self, shares: list[ResultShare]) -> dict[int, Tensor | None]:
        """The loss of each replica that this rank knows, by its number: its own, and after a loss all."""
        if self.joint is None:
            return {self.data.rank: self._make_result(shares).loss}
        replicas = range(self.joint.survivors.data)
        return {replica: self._make_result(self.joint.take_replica(shares, replica)).loss for replica in replicas}

    def _make_result(self, shares: Sequence[ResultShare], recorded: Callable[[], Timeline] | None = None) -> StepResult:
        return StepResult(shares, partial(mb.merge_outputs, dim=self.batches.out_dim), recorded)

    def _build_result(
        self,
        executor: Executor,
        shares: list[ResultShare],
        recorded: Callable[[], Timeline] | None,
        losses: Sequence[dict[int, Tensor | None]] | None,
    ) -> StepResult:
        """The result of a step, the same on all ranks of a pipeline; the loss is that of all replicas."""
        if losses is None:
            result = self._make_result(shares, self._gather_timeline(executor) if self.record else None)
            if self.data.ranks > 1:
                result.loss = self.data.sum_values({"loss": result.loss})["loss"]
            return result
        result = self._make_result(shares if self.joint is None else self.joint.take_replica(shares, self.joint.replica), recorded)
        known = {replica: loss for by_replica in reversed(losses) for replica, loss in by_replica.items()}
        total: Tensor | None = None
        for _, loss in sorted(known.items()):
            total = loss if total is None else total if loss is None else total + loss
        result.loss = total
        result.lost = None if self.joint is None else self.joint.describe(self.table)
        return result

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
            gather = self.gather if self.joint is None else self.joint.gather_columns
            self.shared.sum_gradients(parameters, gather, self.data.take_sum)
        else:
            self.data.postpone()
            self.shared.postpone(parameters, self.gather)

    def _note_whole_backwards(self, shares: Sequence[ResultShare]) -> None:
        """Warn of the cost if more stages than before turned out to need a whole backward."""
        whole = {stage: reason for share in shares for stage, reason in share.whole.items()}
        if whole.keys() > self._whole.keys():
            self._whole = whole
            self._set_merged(whole)

    def _evaluate(self, executor: Executor, feed: StepInput) -> StepResult:
        modes = [(module, module.training) for stage in self.stages.values() for module in stage.module.modules()]
        if self._sharing:
            self.gather("modes", None)  # no rank changes a module's mode before all have noted it
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad():
                share = executor.run(feed)
            share.restore_order()
            self.data.finish_evaluation()
            shares = self._gather_shares("eval_step", share)
            if self.group.direct:
                executor.links.settle_sends()
            if self.recovery is None:
                return self._build_result(executor, shares, None, None)
            recorded = self._gather_timeline(executor) if self.record else None
            complete = partial(self._build_result, executor, shares, recorded)
            return self.recovery.decide("evaluated", self._sum_losses(shares), do_nothing, complete)
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
        options: dict[str, Any] = {"parameters": list(self.local_parameters()), "shared": self.shared, "data": self.data}
        gather = self.gather if self.recovery is None else partial(self._gather_norms, self.recovery)
        norm = clip_grad_norm(max_norm, norm_type, **options, gather=gather)
        self._deliver_metrics(norm)
        return norm

    def _gather_norms(self, recovery: Recovery, name: str, norms: dict[Any, Tensor]) -> list[dict[Any, Tensor]]:
        """All-gather of the norms of gradients, which data ranks have in common: the first of those that are left sends its own."""
        grid = self.grid
        assert grid is not None
        return self._gather_survivors(recovery, name, lambda: norms if grid.join_peers().rank == 0 else {})

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
        if self.joint is not None:
            raise PipelineError(f"parity compares a whole pipeline, but {self.joint.describe(self.table)}")
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
    on_loss: str | None

    def __post_init__(self) -> None:
        if self.on_loss not in (None, "raise", "take-over"):
            raise ScheduleError(f"on_loss must be 'raise' or 'take-over', got {self.on_loss!r}")
        deadline: Any = self.deadline
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline < math.inf:
            raise ScheduleError(f"deadline must be a number of seconds above 0, got {deadline!r}: a large one if ranks may be slow")
        object.__setattr__(self, "deadline", float(deadline))

    def allow_losses(self, group: Group, rank: int, mesh: PipelineMesh | None, table: Table) -> bool:
        """Whether the others go on when a rank is lost; refused if they are told to but cannot, with a warning if that is the default."""
        processes = group if mesh is None else mesh.whole
        is_expected = isinstance(processes, Processes) and processes.expects_losses
        if self.on_loss == "raise" or (self.on_loss is None and not is_expected):
            return False
        why = None
        if mesh is None or mesh.data.ranks == 1:
            why = "only ranks along dp or dp_replicate of a mesh hold the same stages: give mesh= with one of these"
        elif mesh.tensor.ranks > 1:
            why = f"each rank of a tensor-parallel group of {mesh.tensor.ranks} holds a part that no other has: leave out tp"
        elif table.slices > 1:
            why = f"the {table.slices} slices of a sequence must stay on one rank: use a schedule without slices"
        elif table.ranks == 1 and self.on_loss is not None:
            why = "it is the whole replica, whose part of the batch is lost with it: give a mesh with pp of 2 or more"
        elif table.rows.is_kind(*SHARES).any():
            why = "its share of the vocabulary is needed for every microbatch: use a schedule that keeps the vocabulary on one rank"
        text = f"no other rank can run the microbatches of a lost one, because {why}"
        if why is not None and self.on_loss is not None:
            raise ScheduleError(f"on_loss='take-over', but {text}")
        if why is not None and (rank if mesh is None else mesh.whole.rank) == 0:
            logger.warning("losses= was given to launch, but all ranks raise if one is lost: %s", text)
        return why is None

    def refuse_shards(self, mesh: PipelineMesh) -> None:
        """Refuse sharded stages if the others are told to go on when a rank is lost, rather than only allowed to."""
        if self.on_loss == "take-over":
            raise ScheduleError(
                f"on_loss='take-over', but stages are sharded, and the shards of a lost rank are lost with it. {mesh.describe_shards()} "
                "Leave out shard= and fully_shard, so that every data rank holds its stages in full, or leave out on_loss and start again "
                "from the last checkpoint after a loss"
            )


@dataclass(frozen=True)
class DataOptions:
    """How stages are sharded over data ranks, and how gradients are summed."""

    shard: Sharding
    shard_pass: Shard
    accumulate_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        dtype: Any = self.accumulate_dtype
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ScheduleError(f"accumulate_dtype must be a torch.dtype, like torch.float32, got {dtype!r}")

    def refuse_spread(self, model: ModelOptions, mesh: PipelineMesh | None, *, graphs: bool) -> None:
        """Refuse options that do not go with a vocabulary that is spread over the ranks, in one sentence each."""
        reasons = {
            "a tp dimension of mesh": (mesh is not None and mesh.tensor.ranks > 1, "its rows are not split over tensor-parallel ranks"),
            "ties": (bool(model.ties), "its rows belong to one layer each"),
            "graphs": (graphs, "collectives are joined by the host"),
        }
        for name, (is_given, reason) in reasons.items():
            if is_given:
                raise ScheduleError(f"{name}= does not go with a vocabulary that is spread over the ranks, because {reason}: leave one out")


@dataclass(frozen=True)
class LossOptions:
    """The loss function, and how much the losses of microbatches count."""

    fn: Callable[..., Any] | None
    reduction: str
    weight: Callable[[Any], Any] | None

    def __post_init__(self) -> None:
        if self.weight is not None:
            check_function("weight", self.weight, "weight(target)")


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
        seed: Any = self.seed
        if seed is not None and (isinstance(seed, bool) or not hasattr(seed, "__index__")):
            raise ScheduleError(f"seed must be a whole number, got {seed!r}")
        if self.accumulate not in ("autograd", "fused"):
            raise ScheduleError(f"accumulate must be 'autograd' or 'fused', got {self.accumulate!r}")
