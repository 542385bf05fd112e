"""`Pipeline`: trains a model with any program, with the numbers of the unpipelined model."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from penstock.errors import CopyError, PipelineError, ScheduleError
from penstock.ir.program import Program
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.result import ResultShare, StepResult, check_same_step
from penstock.runtime.batch.step_input import ABSENT, BatchSplitter, StageKwargs, StepInput
from penstock.runtime.device.streams import current_stream, use_stream
from penstock.runtime.execution.cuda_graphs import refuse_graphs
from penstock.runtime.execution.executor import Executor
from penstock.runtime.execution.overlap import make_overlap
from penstock.runtime.execution.programs import find_table, forward_program, training_program
from penstock.runtime.measure.parity import Parity, StepArguments, compare_step
from penstock.runtime.measure.recorder import StepTimes, build_timeline, clock_offsets
from penstock.runtime.model.compiled import Compile, MergedBackward, compile_stages, predict_merged_backward
from penstock.runtime.model.hugging_face import HuggingFace, open_batch, recognise_model
from penstock.runtime.model.partition import Partition, apply_plan_split, partition
from penstock.runtime.model.random_streams import add_layer_streams, preserve_random_state
from penstock.runtime.model.recompute import Recompute, recompute_stages
from penstock.runtime.model.running_statistics import RunningStatistics, write_statistics
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.tied_parameters import SharedParameters, Ties, start_buffers_equal
from penstock.runtime.options import BatchOptions, DataOptions, ExecutionOptions, GroupOptions, ModelOptions
from penstock.runtime.parallel.data_parallel import DataParallel
from penstock.runtime.parallel.fsdp import Sharding, shard_stages, unwrap_ddp
from penstock.runtime.parallel.gradients import BufferBackup, GradientBackup, HookGuard, clip_grad_norm
from penstock.runtime.parallel.mesh import find_group
from penstock.runtime.torch_internals import pytree
from penstock.runtime.transport.activity import describe_action
from penstock.runtime.transport.failures import describe_error
from penstock.runtime.transport.group import Group
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
        except Exception as error:
            if isinstance(error, PipelineError):
                self.group.fail(self.rank, error)
            else:
                with suppress(PipelineError):  # an earlier failure that this rank had yet to raise: its own error is raised instead
                    self.group.enter(self.rank, self.deadline)
                    headline = f"{self.group.describe_rank(self.rank)} refused its input to the step: {describe_error(error)}"
                    self.group.report_failure(self.rank, headline, error)
            raise
        except BaseException as error:
            self.group.fail(self.rank, error)
            raise

    return cast(Method, call)


class Pipeline:
    """A model cut into stages, and the program that this rank runs on its stages.

    Every rank of the group creates one with the same arguments and calls the same methods in the same order.

    - `model`: a whole module (with `split`), a causal language model from transformers (see `HuggingFace`), a list with one module per
      stage, or a mapping with this rank's stages. A module of a list or mapping that returns a tuple passes several arguments on;
    - `plan`: a plan, schedule or program; `schedule=` takes the same, or a name together with `microbatches=`;
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
      replicated; `shard=True` applies it to every layer, and `shard=partial(fully_shard, ...)` does so with options;
    - `lookahead`, `residency`: when sharded stages are gathered, and how many a rank holds in full at once, see `Shard`;
    - `accumulate_dtype`: sum the gradients of microbatches and data ranks in this precision, and round once to the parameters' own;
    - `record`: whether steps return a `timeline` of what ran when on every rank. It can be changed between steps, on all ranks alike. On
      a GPU, the times are those of its own work;
    - `transport`: under `torchrun`, how tensors travel between processes, see `Processes`;
    - `weights`: for a model built on the meta device, the source of its values: `Initial`, `Built`, `Replayed`, `Safetensors`, or several
      of them;
    - `recompute`: whether stages keep only their inputs and run their forward again before their backward: a `bool`, or one `bool` per
      stage; defaults to the plan's choice;
    - `compile`: True, options for `torch.compile`, a function that compiles a stage's module, or one of these per stage.
      Compiled stages run a whole backward, and so do stages that ask autograd for a weight's gradient in their forward or loss, or that
      differentiate a gradient. If the schedule splits such a backward, `merged` says what that costs;
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
        ranks = GroupOptions(group, mesh, transport, deadline)
        run = ExecutionOptions(seed, accumulate, overlap, graphs)
        data = DataOptions(shard, lookahead, residency, accumulate_dtype)
        self._plan: Any = plan if schedule is None else schedule
        self._join(ranks)
        self.table = find_table(self._plan, self.group.ranks, microbatches)
        self.microbatches = self.table.microbatches
        self.record, self.graphs = record, run.graphs
        self.seed, self.overlap = run.seed, make_overlap(run.overlap)
        split, loss_fn, weight = recognise_model(model, split, loss_fn, weight)
        self._read_batches(
            BatchOptions(batch_dims, target_dims, kwarg_dims, loss_fn, loss_reduction, weight), isinstance(split, HuggingFace)
        )
        tied = self._cut(model, ModelOptions(split, ties, weights, recompute, compile), data)
        self.stages = self._stages(fused=run.accumulate == "fused")
        self.scaler: Any = None
        """Scales the losses before their backward, see `GradScaler`."""
        self._hooked = HookGuard()
        self.steps = 0
        """How many training steps were run; with a seed, each step draws from streams of its own. Checkpoints save it."""
        self.postponed_steps = 0
        """How many steps in a row, the last ones, have not finalized their gradients, see `step`."""
        self._calls = 0
        """How many batches this rank was given, including those that it refused."""
        self._executors: dict[tuple[int, bool], Executor] = {}
        self._clocks: tuple[int, list[int]] | None = None
        self.unsplit, self._shares_modules = self._agree()
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
        if self.shared.one_object:  # ranks that share parameters take turns on a device too
            use_stream(self.gather("stream", current_stream())[0])
        if graphs:
            refuse_graphs(
                self.stages,
                seeded=self.seed is not None,
                shares_parameters=self.shared.one_object,
                sums_elsewhere=self.grid is not None or self.data.dtype is not None,
                gathers_statistics=self.statistics.gathers,
            )

    # Construction -----------------------------------------------------------------------------------------------------

    def _join(self, options: GroupOptions) -> None:
        """Find this rank's place among the others."""
        self.deadline = options.deadline
        self.group: Group
        self.group, self.rank, self.grid = find_group(options.group, options.mesh, options.transport)
        self.number = self.group.number_pipeline(self.rank)

    def _read_batches(self, options: BatchOptions, named: bool) -> None:
        """Prepare to split batches and to compute their losses; `named` if the model takes its arguments by name."""
        self.loss = Loss(options.loss_fn, options.loss_reduction)
        if options.weight is None:
            self.loss.check_own_reduction()
        dims = options.batch_dims, options.target_dims, options.kwarg_dims
        counts, opener = (self.table.stages, self.microbatches), open_batch if named else None
        self.batches = BatchSplitter(*dims, self.loss, options.weight, *counts, open_batch=opener)

    def _cut(self, model: Any, options: ModelOptions, data: DataOptions) -> list[Sequence[str]]:
        """Cut the model into stages and give this rank's stages their weights; the groups of tied parameters."""
        model, split = apply_plan_split(unwrap_ddp(model, self.grid), self._plan, options.split)
        cut, mine = partition(model, self.table.stages, split), self.table.placement.stages_of(self.rank)
        give_weights(options.weights, model, cut, mine)
        tied = [*options.ties, *shard_stages(cut, mine, self.grid, data.shard)]
        cut = compile_stages(cut if self.seed is None else add_layer_streams(cut), options.compile)
        self.partition: Partition = recompute_stages(cut, self._plan, options.recompute)
        return tied

    def _set_merged(self, whole: Mapping[int, str]) -> None:
        """Note which stages run their backward whole although the schedule splits it, and warn of what that costs."""
        self.merged: MergedBackward | None = predict_merged_backward(self.table, self.unsplit, self._plan, whole)
        if self.merged is not None and self.rank == 0:
            logger.warning("%s", self.merged)

    def _stages(self, fused: bool) -> dict[int, Stage]:
        stages = {}
        for index in self.table.placement.stages_of(self.rank):
            part = self.partition.parts[index]
            if part is None:
                raise ScheduleError(f"rank {self.rank} holds stage {index}, but the mapping of modules has none for it")
            stages[index] = Stage(index, part.module, unpack=part.unpack, fused=fused)
        return stages

    def _agree(self) -> tuple[tuple[int, ...], bool]:
        """Check that all ranks got the same arguments; the stages that cannot split their backward, and whether ranks share modules."""
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
                        f"the ranks disagree on {what}: {first[what]!r} on rank 0, {value!r} on rank {rank}; give all the same arguments"
                    )
        unsplit = tuple(sorted({stage for _, stages, *_ in found for stage in stages}))
        own = self.rank if self.grid is None else self.grid.whole.rank
        return unsplit, any(rank != own and modules & theirs for rank, (_, _, theirs, _) in enumerate(found))

    def gather(self, name: str, value: Any) -> list[Any]:
        """All-gather a value over the ranks of the pipeline."""
        return self.group.gather(self.rank, name, value, self.deadline)

    def gather_all(self, name: str, value: Any) -> list[Any]:
        """All-gather a value over all ranks of the mesh, or of the pipeline if there is no mesh."""
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
        """Refuse a parameter that was added after the ranks compared theirs."""
        if self._names is not None and name not in self._names:
            raise ScheduleError(
                f"parameter {name!r} was added to the model after the pipeline was created, so the pipeline does not know it: create the "
                "pipeline after the model has all its parameters"
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages that it updates, under the model's own names.

        A parameter that is the same object on several ranks, because virtual ranks share a model, is updated by the first of them only.
        """
        return ((name, parameter) for name, parameter in self.local_parameters() if name in self.shared.owned)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this rank updates. Warns if there are none, because torch's optimizers do not accept an empty list."""
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
        """The program of a step with this many microbatches."""
        return self._executor(self.microbatches if microbatches is None else microbatches, training).program

    def _executor(self, count: int, training: bool) -> Executor:
        executor = self._executors.get((count, training))
        if executor is None:
            semantics = "rendezvous" if self.group.rendezvous else "channels"
            if training:
                program = training_program(self.table, count, self.unsplit, semantics, self.data.shard)
            else:
                program = forward_program(self.table, count, semantics, self.data.shard)
            self.data.check_program(program)
            options: dict[str, Any] = {
                "loss": self.loss,
                "group": self.group,
                "deadline": self.deadline,
                "data": self.data,
                "statistics": self.statistics,
                "overlap": self.overlap,
                "number": self.number,
                "graphs": self.graphs,
            }
            executor = Executor(program, self.rank, self.stages, **options)
            self.group.open((*executor.links.inboxes, *executor.links.outboxes), self.deadline)
            self._executors[count, training] = executor
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
    ) -> StepResult:
        """Run forward and backward of a batch, split along its batch dimension; adds to the parameters' gradients.

        With `finalize_gradients=False`, gradients are not summed over data ranks and copies of a parameter, and `grad` is incomplete: the
        next step that finalizes sums those of all steps since the last one that did, once.
        """
        feed = self._split_batch(args, target, microbatches, stage_kwargs, outputs=outputs)
        feed.share.finalizes = finalize_gradients
        return self._run(feed, training=True)

    def step_list(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any] | None = None,
        *,
        stage_kwargs: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
        outputs: bool = False,
        finalize_gradients: bool = True,
    ) -> StepResult:
        """Run forward and backward of microbatches that are already split, of any shapes; a tuple is several arguments.

        For `finalize_gradients` see `step`.
        """
        feed = self._take_microbatches(inputs, targets, stage_kwargs, outputs)
        feed.share.finalizes = finalize_gradients
        return self._run(feed, training=True)

    def eval_step(
        self,
        *args: Any,
        target: Any = ABSENT,
        microbatches: int | None = None,
        stage_kwargs: StageKwargs | None = None,
        outputs: bool = False,
    ) -> StepResult:
        """Run the forward of a batch in evaluation mode, with the loss if there is a target. No gradients are computed."""
        feed = self._split_batch(args, target, microbatches, stage_kwargs, outputs=outputs)
        feed.losses = self.loss.can_run(feed.targets)
        return self._run(feed, training=False)

    def infer(self, *args: Any, microbatches: int | None = None, stage_kwargs: StageKwargs | None = None) -> Any:
        """Compute the outputs of a batch; every rank returns them."""
        feed = self._split_batch(args, ABSENT, microbatches, stage_kwargs, outputs=True)
        feed.losses = False
        return self._run(feed, training=False).outputs

    @report_refusal
    def _split_batch(
        self, args: tuple[Any, ...], target: Any, microbatches: int | None, stage_kwargs: StageKwargs | None, outputs: bool
    ) -> StepInput:
        self._calls += 1
        return self.batches.split(args, target, microbatches, stage_kwargs, outputs)

    @report_refusal
    def _take_microbatches(self, *microbatches: Any) -> StepInput:
        self._calls += 1
        return self.batches.take_list(*microbatches)

    @report_refusal
    def _prepare(self, feed: StepInput, training: bool) -> Executor:
        """Do everything that can refuse a step before it runs, and return its executor."""
        self.data.agree(feed, "step" if training else "eval_step")
        executor = self._executor(len(feed.args), training)
        executor.recording = feed.share.records = self.record
        feed.share.call = self._calls
        if training and self.table.stages - 1 in self.stages:
            self.batches.check_target(feed)
        self.group.enter(self.rank, self.deadline)
        if self.group.direct:
            self.group.agree(executor.links.number, self._looks(feed), self.deadline)
        return executor

    def _run(self, feed: StepInput, training: bool) -> StepResult:
        executor = self._prepare(feed, training)
        if self.seed is not None:
            feed.seed, feed.first = f"{self.seed}/{self.steps}", self.data.rank * len(feed.args)
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
        recorded = self._gather_timeline(executor) if self.record else None
        result = StepResult(shares, partial(mb.merge_outputs, dim=self.batches.out_dim), recorded)
        if self.data.ranks > 1:
            result.loss = self.data.sum_values({"loss": result.loss})["loss"]
        return result

    def _looks(self, feed: StepInput) -> list[str]:
        """Everything that the shapes and types of this rank's messages can depend on."""
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
        # If ranks share modules without meeting at the beginning of the step, another rank may have changed them already.
        own = () if self._shares_modules and not self.shared.one_object else self.stages.values()
        self._buffers.take(module for stage in own for module in stage.module.modules())
        backup = GradientBackup.take(parameter for _, parameter in self.local_parameters())
        feed.factor = 1.0 if self.scaler is None else self.scaler.get_scale()
        alone = len(feed.args) == 1 and self.data.ranks == 1 and not self.shared.active
        self._hooked.begin(self.local_parameters(), alone=alone)
        try:
            self.shared.begin(self.local_parameters(), self.gather)
            self.data.begin(executor.reduces, finalizes=feed.share.finalizes)
            with torch.enable_grad(), self._hooked.watch():
                share = executor.run(feed)
            if feed.share.finalizes:
                self.data.finish(self.shared.ids(self.local_parameters()))
                self.shared.sum_gradients(self.local_parameters(), self.gather, self.data.take_sum)
            else:
                self.data.postpone()
                self.shared.postpone(self.local_parameters(), self.gather)
            folded = self.statistics.fold(self.gather)
            share.whole = {index: stage.whole for index, stage in self.stages.items() if stage.whole is not None}
            shares = self._gather_shares("step", share)
            self._note_whole_backwards(shares)
            write_statistics(folded)
        except BaseException:
            self.statistics.reset()
            self.data.reset()
            self.shared.reset()
            self._buffers.restore()
            backup.restore()
            raise
        self._buffers.settle()
        self.data.settle()
        self.shared.settle()
        self.steps += 1
        self.postponed_steps = 0 if feed.share.finalizes else self.postponed_steps + 1
        return shares

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
            return self._gather_shares("eval_step", share)
        except BaseException:
            self.data.reset()
            raise
        finally:
            for module, mode in modes:
                module.training = mode

    def _gather_shares(self, name: str, share: ResultShare) -> list[ResultShare]:
        """Gather every rank's share of the result, and check that all ran the same step."""
        shares = self.gather(name, share)
        check_same_step(shares, self.group.describe_rank)
        return shares

    def _gather_timeline(self, executor: Executor) -> Callable[[], Timeline]:
        """Gather every rank's times. Clocks drift, so they are compared again every `_DRIFT` steps."""
        if self._clocks is None or self._clocks[0] >= _DRIFT:
            self._clocks = 0, clock_offsets(self.group, self.rank, self.deadline)
        count, ahead = self._clocks
        self._clocks = count + 1, ahead
        records = self.gather("timeline", StepTimes.of(executor))
        return partial(build_timeline, executor.program, records, ahead)

    def _report(self, error: Exception, executor: Executor) -> PipelineError:
        """Report a failure to all ranks; the error to raise."""
        where = "the step" if executor.failed_at is None else describe_action(executor.failed_at)
        headline = f"{where} failed on {self.group.describe_rank(self.rank)}: {describe_error(error)}"
        return self.group.report_failure(self.rank, headline, error)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most `max_norm`; returns the norm before. Tied ones count once."""
        self._check_finalized("clip_grad_norm_")
        return clip_grad_norm(max_norm, norm_type, self.local_parameters(), self.shared, data=self.data, gather=self.gather)

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
        mine = batch.copy()  # a stage may change its input in place
        feed, steps = self._split_batch(mine.args, mine.target, microbatches, mine.stage_kwargs or None, outputs=False), self.steps
        try:
            return compare_step(self, lambda feed: self._run(feed, training=True).loss, feed, batch)
        finally:
            self.steps = steps
