"""Input that a rank refuses: the other ranks, whose input may be in order, must not take its next step for this one.

Train a model with any program, with the numbers of the unpipelined model.
"""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import CopyError, PipelineError, ScheduleError
from penstock.ir.program import Program
from penstock.passes.shard import Shard
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.result import ResultShare, StepResult, check_same_step
from penstock.runtime.batch.step_input import ABSENT, BatchSplitter, StageKwargs, StepInput
from penstock.runtime.device import device
from penstock.runtime.execution.cuda_graphs import refuse_graphs
from penstock.runtime.execution.executor import Executor
from penstock.runtime.execution.overlap import overlap_of
from penstock.runtime.execution.programs import find_table, forward_program, training_program
from penstock.runtime.measure.parity import Batch, Parity, parity
from penstock.runtime.measure.recorder import Record, offsets, timeline
from penstock.runtime.model.compiled import Compile, MergedBackward, compile_stages, predict_merged_backward
from penstock.runtime.model.hugging_face import HuggingFace, open_batch, recognise_model
from penstock.runtime.model.partition import Partition, apply_plan_split, partition
from penstock.runtime.model.random_streams import add_layer_streams, preserve_random_state
from penstock.runtime.model.recompute import Recompute, recompute_stages
from penstock.runtime.model.running_statistics import RunningStatistics, write_statistics
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.tied_parameters import SharedParameters, Ties, start_buffers_equal
from penstock.runtime.parallel.data_parallel import DataParallel
from penstock.runtime.parallel.fsdp import Sharding, shard_stages, unwrap_ddp
from penstock.runtime.parallel.gradients import BufferBackup, GradientBackup, HookGuard, clip_grad_norm
from penstock.runtime.parallel.mesh import find_group
from penstock.runtime.transport.activity import in_words
from penstock.runtime.transport.failures import describe
from penstock.runtime.transport.group import Group
from penstock.runtime.weights.source import Weights, give_weights
from penstock.simulator.timeline import Timeline

Made = TypeVar("Made", bound=Callable[..., Any])


def told(make: Made) -> Made:
    """A pipeline's method that refuses input: this rank raises why, and all others, in the call that they make meanwhile, that it has."""

    @wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return make(self, *args, **kwargs)
        except PipelineError as error:
            self.group.fail(self.rank, error)
            raise
        except Exception as error:
            _tell(self, error)
            raise
        except BaseException as error:
            self.group.fail(self.rank, error)
            raise

    return cast(Made, made)


def _tell(pipeline: Any, error: Exception) -> None:
    try:
        pipeline.group.enter(pipeline.rank, pipeline.deadline)
    except PipelineError:  # a failure that this rank had yet to raise; its own error does instead
        return
    headline = f"{pipeline.group.called(pipeline.rank)} refused what it was given for the step: {describe(error)}"
    pipeline.group.report_failure(pipeline.rank, headline, error)


logger = logging.getLogger(__name__)


_NO_COPY = (
    "a Pipeline cannot be copied or pickled, because it holds connections to the other ranks: copy the model and make another pipeline of "
    "it, or save it with save_checkpoint"
)
_DRIFT = 1000
"""Recorded steps after which the ranks' clocks are compared again."""


class Pipeline:
    """A model cut into stages, and the program that this rank runs of it.

    Every rank of the group makes one, with the same arguments, and calls the same methods in the same order.

    - `model`: a whole module (with `split`), a causal language model of transformers' (see `HuggingFace`), a list with one module a
      stage, or a map with this rank's stages. Modules of a list or map that return a tuple give the next stage several arguments;
    - `plan`: a plan, schedule or program; `schedule=` takes the same, or a name with `microbatches=`;
    - `loss_fn(output, target)` or `loss_fn(output)`, weighted over microbatches by `loss_reduction` (`mean` by batch elements, or
      `sum`) or by `weight(target)`, summed over all of them. Without one the last stage's output is the loss;
    - `batch_dims`, `target_dims`, `kwarg_dims`: the batch dimension of the inputs, the target and the stages' keyword arguments
      (by name), see `microbatch.Dims`;
    - `ties`: groups of names of parameters that are to be one, where they are not one object already;
    - `seed`: draw a forward's random numbers from a stream of (seed, step, layer, microbatch), whatever the ranks, the schedule and
      the cuts. Microbatches are numbered over all data ranks, the first one's first. For modules that were given one a stage, the
      stage is the layer;
    - `accumulate="fused"` adds weight gradients of split backwards by one fused operation, with a rounding of its own;
    - `overlap`: how to run actions together: "streams" on two streams of a GPU, or a function of one's own, `(action, operations)`; one
      after the other unless given. A stage's module with a method `overlapped_forward_backward` runs them itself, see `overlap`;
    - `deadline`: seconds that a rank waits for another at most;
    - `group`: the process group, or device mesh of one dimension, whose ranks are the pipeline's, where they are not all;
    - `mesh`: a device mesh with named dimensions of which `pp` is the pipeline, and `dp`, or `dp_replicate` and `dp_shard`, hold the
      same stages and get a part of the batch each, see `PipelineMesh`. Stages that `fully_shard` was applied to stay in shards, all others
      are copies; `shard=True` applies it to every layer, and `shard=partial(fully_shard, ...)` does so with options;
    - `lookahead`, `residency`: when stages in shards are gathered, and how many a rank has in full at once, see `Shard`;
    - `accumulate_dtype`: sum the gradients of microbatches and data ranks in this precision, and round once to the parameters' own;
    - `record`: whether steps give a `timeline` of what ran when on every rank. It may be set at any time, on all ranks alike. On a
      GPU, times are those of its own work;
    - `transport`: under `torchrun`, how tensors go between processes, see `Processes`;
    - `weights`: for a model that was built on the meta device, what gives this rank's stages their values: `Initial`, `Built`,
      `Replayed`, `Safetensors`, or several of them;
    - `recompute`: whether stages keep their inputs alone and run their forward again before their backward: for all, or one word a
      stage; as the plan says unless given;
    - `compile`: True, options for `torch.compile`, a function that makes a compiled module of a stage's, or one of these a stage.
      Compiled stages run their backward in one piece, and so do stages that ask autograd for a weight's gradient in their forward or
      loss, or that differentiate a gradient. Where the schedule splits it, `merged` says what that costs;
    - `graphs`: record each stage's work as CUDA graphs and launch those, see `graphs`. Gradients then stay in the same memory from
      step to step. Refused where a stage's work cannot be recorded; a microbatch of another shape runs as without.
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
        shard: Sharding = False,
        lookahead: int = 1,
        residency: int | None = None,
        accumulate_dtype: torch.dtype | None = None,
        record: bool = False,
        transport: str = "auto",
        weights: Weights = None,
        recompute: Recompute = None,
        compile: Compile | Sequence[Compile] = None,  # noqa: A002 - torch's own name
        graphs: bool = False,
    ) -> None:
        self.deadline = _checked_deadline(deadline)
        self.group: Group
        self.group, self.rank, self.grid = find_group(group, mesh, transport)
        self.number = self.group.count(self.rank)
        self.table = find_table(plan if schedule is None else schedule, self.group.ranks, microbatches)
        self.microbatches = self.table.microbatches
        split, loss_fn, weight = recognise_model(model, split, loss_fn, weight)
        self.loss = Loss(loss_fn, loss_reduction)
        if weight is None:
            self.loss.check_own_reduction()
        self.seed, self.overlap = seed, overlap_of(overlap)
        self.record, self.graphs = record, graphs
        self._clocks: tuple[int, list[int]] | None = None
        dims, counts = (batch_dims, target_dims, kwarg_dims), (self.table.stages, self.microbatches)
        self.batches = BatchSplitter(*dims, self.loss, weight, *counts, open_batch=open_batch if isinstance(split, HuggingFace) else None)
        plan = plan if schedule is None else schedule
        model, split = apply_plan_split(unwrap_ddp(model, self.grid), plan, split)
        cut, mine = partition(model, self.table.stages, split), self.table.placement.stages_of(self.rank)
        give_weights(weights, model, cut, mine)
        tied = shard_stages(cut, mine, self.grid, shard)
        cut = compile_stages(cut if seed is None else add_layer_streams(cut), compile)
        self.partition: Partition = recompute_stages(cut, plan, recompute)
        self.stages = self._stages(fused=_checked_accumulate(accumulate) == "fused")
        self.scaler: Any = None
        """What scales the losses before their backward, see `GradScaler`."""
        self._hooked = HookGuard()
        self._steps = 0
        self._calls = 0
        """How many batches this rank was given, those that it refused included."""
        self._executors: dict[tuple[int, bool], Executor] = {}
        self.unsplit, self._shares_modules = self._agree()
        self._plan: Any = plan
        self._whole: dict[int, str] = {}
        """The stages that turned out to need their backward whole, see `Stage.whole`."""
        self.merged: MergedBackward | None = predict_merged_backward(self.table, self.unsplit, plan)
        if self.merged is not None and self.rank == 0:
            logger.warning("%s", self.merged)
        self.data = DataParallel(self.grid, self.stages, shard=Shard(lookahead, residency), dtype=accumulate_dtype, deadline=deadline)
        self._names: set[str] | None = None
        """This rank's parameters by name, once the ranks have agreed on them."""
        self.shared = SharedParameters(
            self.partition,
            [*ties, *tied],
            self.local_parameters(),
            self.gather,
            rank=self.rank,
            identify=self.group.ident,
            parallel=self.group.parallel,
            sums_apart=accumulate_dtype is not None,
        )
        self._names = set(self.shared.place)
        modules = {index: stage.module for index, stage in self.stages.items()}
        start_buffers_equal(modules, self.table.placement, self.gather)
        self.statistics = RunningStatistics(modules, self.table.placement, self.gather)
        self._buffers = BufferBackup()
        if self.shared.one_object:  # ranks that share parameters take turns on a device too
            device.stand_on(self.gather("stream", device.lane())[0])
        if graphs:
            refuse_graphs(self)

    # What it is made of -----------------------------------------------------------------------------------------------

    def _stages(self, fused: bool) -> dict[int, Stage]:
        stages = {}
        for index in self.table.placement.stages_of(self.rank):
            part = self.partition.parts[index]
            if part is None:
                raise ScheduleError(f"rank {self.rank} holds stage {index}, but the map of modules has none for it")
            stages[index] = Stage(index, part.module, unpack=part.unpack, fused=fused)
        return stages

    def _agree(self) -> tuple[tuple[int, ...], bool]:
        """Compare what the ranks were given: the stages whose backward cannot be split, and whether ranks share modules."""
        mine = {
            "pipeline": self.number,
            "stages": self.table.stages,
            "microbatches": self.microbatches,
            "schedule": hashlib.blake2b(self.table.rows.codes.tobytes(), digest_size=8).hexdigest(),
            "loss_reduction": self.loss.reduction,
            "seed": self.seed,
        }
        unable = [stage for stage, part in self.stages.items() if not part.splits]
        modules = {self.group.ident(module) for stage in self.stages.values() for module in stage.module.modules()}
        last = self.stages.get(self.table.stages - 1)
        lost = None if last is None else self.loss.find_outside_parameter(last.module)
        found = self.gather_all("Pipeline", (mine, unable, modules, lost))
        first = found[0][0]
        for *_, lost in found:
            if lost is not None:
                raise ScheduleError(
                    f"loss_fn has a trainable parameter, {lost!r}, that is not in the last stage, so no optimizer would get it: make it "
                    "part of the last stage, which can take the target by stage_kwargs and return the loss itself, or freeze it"
                )
        for rank, (theirs, *_) in enumerate(found):
            for what, value in theirs.items():
                if value != first[what]:
                    raise PipelineError(
                        f"the ranks disagree on {what}: {first[what]!r} on rank 0, {value!r} on rank {rank}; give all the same"
                    )
        unsplit = tuple(sorted({stage for _, stages, *_ in found for stage in stages}))
        own = self.rank if self.grid is None else self.grid.whole.rank
        return unsplit, any(rank != own and modules & theirs for rank, (_, _, theirs, _) in enumerate(found))

    def gather(self, name: str, value: Any) -> list[Any]:
        """Everyone's value, by rank."""
        return self.group.gather(self.rank, name, value, self.deadline)

    def gather_all(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks of the mesh, where the pipeline is a part of one."""
        return self.gather(name, value) if self.grid is None else self.grid.whole.gather(self.grid.whole.rank, name, value, self.deadline)

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages under the model's own names, each once."""
        seen: set[int] = set()
        for index in self.stages:
            part = self.partition.parts[index]
            for name, parameter in part.parameters if part is not None else ():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    self._check_known(name)
                    yield name, parameter

    def _check_known(self, name: str) -> None:
        """Refuse a parameter that the ranks have not agreed on."""
        if self._names is not None and name not in self._names:
            raise ScheduleError(
                f"parameter {name!r} was added to the model after the pipeline was made, which knows nothing of it: make the pipeline once "
                "the model has all its parameters"
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank is to update, under the model's own names.

        Those of its stages; but one that is the same object on several ranks, as where virtual ranks share a model, is
        only on the first of them.
        """
        return ((name, parameter) for name, parameter in self.local_parameters() if name in self.shared.owned)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank is to update. Warns if there are none, which torch's optimizers do not take."""
        found = [parameter for _, parameter in self.named_parameters()]
        if not found:
            warnings.warn(
                f"rank {self.rank} has no parameters to update: its stages have none, or another rank updates them. An optimizer takes an "
                "empty list only in a group: AdamW([{'params': list(pipe.parameters())}])",
                stacklevel=2,
            )
        return iter(found)

    def __deepcopy__(self, memo: Any) -> Any:
        raise CopyError(_NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CopyError(_NO_COPY)

    def program(self, microbatches: int | None = None, *, training: bool = True) -> Program:
        """The program that a step of so many microbatches runs."""
        return self._executor(self.microbatches if microbatches is None else microbatches, training).program

    def _executor(self, count: int, training: bool) -> Executor:
        found = self._executors.get((count, training))
        if found is None:
            semantics = "rendezvous" if self.group.rendezvous else "channels"
            if training:
                program = training_program(self.table, count, self.unsplit, semantics, self.data.shard)
            else:
                program = forward_program(self.table, count, semantics, self.data.shard)
            self.data.check_program(program)
            given: dict[str, Any] = {
                "loss": self.loss,
                "group": self.group,
                "deadline": self.deadline,
                "data": self.data,
                "statistics": self.statistics,
                "overlap": self.overlap,
                "number": self.number,
                "graphs": self.graphs,
            }
            found = Executor(program, self.rank, self.stages, **given)
            self.group.open((*found.inboxes, *found.outboxes), self.deadline)
            self._executors[count, training] = found
        return found

    # Steps ------------------------------------------------------------------------------------------------------------

    def step(
        self,
        *args: Any,
        target: Any = ABSENT,
        microbatches: int | None = None,
        stage_kwargs: StageKwargs | None = None,
        outputs: bool = False,
    ) -> StepResult:
        """Forward and backward of a batch, split along its batch dimension; gradients are added to the parameters'."""
        return self._run(self._feed(args, target, microbatches, stage_kwargs, outputs=outputs), training=True)

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
        target: Any = ABSENT,
        microbatches: int | None = None,
        stage_kwargs: StageKwargs | None = None,
        outputs: bool = False,
    ) -> StepResult:
        """Forward of a batch in evaluation mode, with the loss if it can be had; no gradients, and nothing is left of it."""
        feed = self._feed(args, target, microbatches, stage_kwargs, outputs=outputs)
        feed.losses = self.loss.can_run(feed.targets)
        return self._run(feed, training=False)

    def infer(self, *args: Any, microbatches: int | None = None, stage_kwargs: StageKwargs | None = None) -> Any:
        """The outputs of a batch, on every rank."""
        feed = self._feed(args, ABSENT, microbatches, stage_kwargs, outputs=True)
        feed.losses = False
        return self._run(feed, training=False).outputs

    @told
    def _feed(
        self, args: tuple[Any, ...], target: Any, microbatches: int | None, stage_kwargs: StageKwargs | None, outputs: bool
    ) -> StepInput:
        self._calls += 1
        return self.batches.split(args, target, microbatches, stage_kwargs, outputs)

    @told
    def _ready(self, *given: Any) -> StepInput:
        self._calls += 1
        return self.batches.take_list(*given)

    @told
    def _prepared(self, feed: StepInput, training: bool) -> Executor:
        """Everything for which a step can be refused before it runs."""
        self.data.agree(feed, "step" if training else "eval_step")
        executor = self._executor(len(feed.args), training)
        executor.recording = feed.share.records = self.record
        feed.share.call = self._calls
        if training and self.table.stages - 1 in self.stages:
            self.batches.check_target(feed)
        self.group.enter(self.rank, self.deadline)
        if self.group.direct:
            self.group.agree(executor.number, self._looks(feed), self.deadline)
        return executor

    def _run(self, feed: StepInput, training: bool) -> StepResult:
        executor = self._prepared(feed, training)
        if self.seed is not None:
            feed.seed, feed.first = f"{self.seed}/{self._steps}", self.data.rank * len(feed.args)
        try:
            with nullcontext() if feed.seed is None else preserve_random_state():
                shares = self._train(executor, feed) if training else self._evaluate(executor, feed)
        except PipelineError as error:
            self.group.fail(self.rank, error)
            raise
        except Exception as error:
            raise self._report(error, executor) from error
        except BaseException as error:
            self.group.fail(self.rank, error)
            raise
        finally:
            self.group.activity(self.rank).stop()
        recorded = self._recorded(executor) if self.record else None
        result = StepResult(shares, partial(mb.merge_outputs, dim=self.batches.out_dim), recorded)
        if self.data.ranks > 1:
            result.loss = self.data.sum_values({"loss": result.loss})["loss"]
        return result

    def _looks(self, feed: StepInput) -> list[str]:
        """All that the forms of this rank's messages can depend on."""
        kwargs = [feed.kwargs[stage] for stage in self.stages if stage in feed.kwargs]
        trained = [parameter.requires_grad for _, parameter in self.local_parameters()]
        leaves = pytree.tree_leaves((feed.args, kwargs, trained, torch.is_autocast_enabled("cpu")))
        return [f"{leaf.dtype}{list(leaf.shape)}{leaf.requires_grad}" if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]

    def _train(self, executor: Executor, feed: StepInput) -> list[ResultShare]:
        for index, stage in self.stages.items():
            stage.refresh()
            part = self.partition.parts[index]
            if self.shared.tied and part is not None:
                stage.tied = frozenset(id(parameter) for name, parameter in part.parameters if name in self.shared.tied)
        # Of modules that ranks share without meeting at the step's beginning, another may have changed a part already.
        own = () if self._shares_modules and not self.shared.one_object else self.stages.values()
        self._buffers.take(module for stage in own for module in stage.module.modules())
        backup = GradientBackup.take(parameter for _, parameter in self.local_parameters())
        feed.factor = 1.0 if self.scaler is None else self.scaler.get_scale()
        alone = len(feed.args) == 1 and self.data.ranks == 1 and not self.shared.active
        self._hooked.begin(self.local_parameters(), alone=alone)
        try:
            self.shared.begin(self.local_parameters(), self.gather)
            self.data.begin(executor.reduces)
            with torch.enable_grad(), self._hooked.watch():
                share = executor.run(feed)
            self.data.finish(self.shared.ids(self.local_parameters()))
            self.shared.sum_gradients(self.local_parameters(), self.gather, self.data.take_sum)
            folded = self.statistics.fold(self.gather)
            share.whole = {index: stage.whole for index, stage in self.stages.items() if stage.whole is not None}
            shares = self._meet("step", share)
            self._look_for_whole(shares)
            write_statistics(folded)
        except BaseException:
            self.statistics.reset()
            self.data.reset()
            self._buffers.restore()
            backup.restore()
            raise
        self._buffers.settle()
        self._steps += 1
        return shares

    def _look_for_whole(self, shares: Sequence[ResultShare]) -> None:
        """Say what it costs if more stages than before turned out to need their backward whole."""
        whole = {stage: reason for share in shares for stage, reason in share.whole.items()}
        if whole.keys() > self._whole.keys():
            self._whole, self.merged = whole, predict_merged_backward(self.table, self.unsplit, self._plan, whole)
            if self.merged is not None and self.rank == 0:
                logger.warning("%s", self.merged)

    def _evaluate(self, executor: Executor, feed: StepInput) -> list[ResultShare]:
        modes = [(module, module.training) for stage in self.stages.values() for module in stage.module.modules()]
        if self._shares_modules:
            self.gather("modes", None)  # nobody changes a module's mode that another has yet to note
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad():
                share = executor.run(feed)
            self.data.finish_evaluation()
            return self._meet("eval_step", share)
        except BaseException:
            self.data.reset()
            raise
        finally:
            for module, mode in modes:
                module.training = mode

    def _meet(self, name: str, share: ResultShare) -> list[ResultShare]:
        """Everyone's share of a result, if all ran the same step."""
        shares = self.gather(name, share)
        check_same_step(shares, self.group.called)
        return shares

    def _recorded(self, executor: Executor) -> Callable[[], Timeline]:
        """Everyone's times; clocks are compared again every so many steps, for they drift."""
        if self._clocks is None or self._clocks[0] >= _DRIFT:
            self._clocks = 0, offsets(self.group, self.rank, self.deadline)
        count, ahead = self._clocks
        self._clocks = count + 1, ahead
        records = self.gather("timeline", Record.of(executor))
        return partial(timeline, executor.program, records, ahead)

    def _report(self, error: Exception, executor: Executor) -> PipelineError:
        """One report for all ranks: what failed where."""
        where = "the step" if executor.failed_at is None else in_words(executor.failed_at)
        headline = f"{where} failed on {self.group.called(self.rank)}: {describe(error)}"
        return self.group.report_failure(self.rank, headline, error)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most this; the norm before. Shared parameters count once."""
        return clip_grad_norm(max_norm, norm_type, self.local_parameters(), self.shared, data=self.data, gather=self.gather)

    def parity(self, *args: Any, target: Any = ABSENT, microbatches: int | None = None, stage_kwargs: StageKwargs | None = None) -> Parity:
        """Compare a step with the unpipelined model: the loss, every gradient, the norm, and all state. Nothing is left of it."""
        batch = Batch(args, target, stage_kwargs or {})
        mine = batch.copy()  # a stage may change its input in place
        return parity(self, self._feed(mine.args, mine.target, microbatches, mine.stage_kwargs or None, outputs=False), batch)


def _checked_deadline(deadline: Any) -> float:
    if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline < math.inf:
        raise ScheduleError(f"deadline must be a number of seconds above 0, got {deadline!r}: a large one where ranks may be slow")
    return float(deadline)


def _checked_accumulate(accumulate: str) -> str:
    if accumulate not in ("autograd", "fused"):
        raise ScheduleError(f"accumulate must be 'autograd' or 'fused', got {accumulate!r}")
    return accumulate
