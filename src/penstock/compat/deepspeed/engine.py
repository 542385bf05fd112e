"""`PipelineEngine`: DeepSpeed's engine on the runtime's executor, on CPU and on the ranks of a `launch`.

The streams of all stages become one program. The executor walks a stage's instructions; those that are actions of the program run
the executor's operations for them, on the microbatch that their buffer holds. DeepSpeed itself is not used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from penstock.compat.deepspeed import proof as proofs
from penstock.compat.deepspeed.module import PipelineModule, recompute
from penstock.compat.deepspeed.schedule import InferenceSchedule, TrainSchedule
from penstock.errors import CheckpointError, NotAnIteratorError, PipelineError, PlacementError, ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.passes.deepspeed.instructions import Instruction
from penstock.passes.deepspeed.reader import KINDS, TRAINING, Duties, StreamReader
from penstock.passes.shard import Shard
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.step_input import NO_INPUT, StepInput
from penstock.runtime.checkpoint.checkpoints import Checkpoints
from penstock.runtime.checkpoint.training_state import ModelState
from penstock.runtime.execution.executor import Executor
from penstock.runtime.model.partition import Part, Partition, partition
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.tied_parameters import Place, SharedParameters
from penstock.runtime.parallel.data_parallel import DataParallel, ReplicatedTensors
from penstock.runtime.parallel.gradients import GradientBackup
from penstock.runtime.torch_internals import pytree
from penstock.runtime.transport.current_group import get_group
from penstock.runtime.transport.group import Group, Operation
from penstock.runtime.transport.subgroup import join_members

logger = logging.getLogger(__name__)

_LATEST = "latest"
"""The text file in a folder of checkpoints that names the tag that was saved last."""
_Result = TypeVar("_Result")


def _run_operation(name: str) -> Callable[[PipelineEngine, int], None]:
    """Return the method that runs the executor's operation for an instruction, and nothing else."""

    def run(engine: PipelineEngine, buffer_id: int) -> None:
        engine._operate(name, buffer_id)

    return run


class PipelineEngine:
    """One stage of a pipeline that is driven by instructions; every rank of a `launch` makes one, with the same arguments.

    - `model`: a `PipelineModule`, whose topology says which ranks are stages and which are replicas; or a whole module that is cut into
      one stage per rank (see `split` of `Pipeline`), or a list with one module per stage;
    - `micro_batches`: the microbatches per batch on one replica; DeepSpeed's gradient accumulation steps;
    - `micro_batch_size`: the samples per microbatch, for `train_batch_size` and `set_train_batch_size`;
    - `loss_fn(outputs, labels)`; defaults to that of the `PipelineModule`. Without one the last stage's output is the loss;
    - `optimizer`: a function that makes one from this stage's parameters, or an optimizer that has them. Without one, gradients stay;
    - `lr_scheduler`: a function that makes one from the optimizer, or a scheduler of it; it steps after the optimizer;
    - `train_schedule`, `eval_schedule`: `PipeSchedule` classes, ours, DeepSpeed's or your own;
    - `strict`: refuse also what only DeepSpeed's own engine cannot run, see `prove`; sends then wait for their receives;
    - `deadline`: the longest time in seconds that a rank waits for another.
    """

    def __init__(
        self,
        model: Any,
        *,
        micro_batches: int,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        micro_batch_size: int | None = None,
        train_schedule: Callable[..., Any] = TrainSchedule,
        eval_schedule: Callable[..., Any] = InferenceSchedule,
        split: Any = None,
        strict: bool = True,
        deadline: float = 300.0,
    ) -> None:
        grid = self.grid = model.mpu() if isinstance(model, PipelineModule) else None
        self._world, self._rank = get_group()
        self._pipe = list(range(self._world.ranks)) if grid is None else grid.pp_group
        self._group: Group = self._world if len(self._pipe) == self._world.ranks else join_members(self._world, self._rank, self._pipe)
        self._deadline = deadline
        self.stage_id, self.num_stages = self._pipe.index(self._rank), len(self._pipe)
        self.micro_batches, self.micro_batch_size, self.strict = micro_batches, micro_batch_size, strict
        self.global_steps = 0
        self.global_samples = 0
        """The samples trained on over all replicas, if `micro_batch_size` is known."""
        self.data_iterator: Iterator[Any] | None = None
        self.batch_fn: Callable[[Any], Any] | None = None
        self.train_schedule, self.eval_schedule = train_schedule, eval_schedule
        tied: Mapping[Any, nn.Parameter] = {}
        if isinstance(model, PipelineModule):
            if split is not None:
                raise ScheduleError("split= goes with a whole module: a PipelineModule is cut by its partition_method")
            self._partition, tied = model.cut(), model.tie_candidates()
            loss_fn = model.loss_fn if loss_fn is None else loss_fn
        else:
            self._partition = partition(model, self.num_stages, split)
        self.loss_fn = loss_fn
        part = self._partition.parts[self.stage_id]
        if part is None:
            raise ScheduleError(f"rank {self.stage_id} runs stage {self.stage_id}, but the map of modules has none for it")
        self.module = part.module
        self._stage = Stage(self.stage_id, part.module, unpack=False)
        self._replicas = Replicas(self._world, self._rank, (self._rank,) if grid is None else grid.dp_group, deadline)
        self._replicas.start(self.stage_id, self.module)
        names = {id(parameter): name for name, parameter in part.parameters}
        candidates = {key: names[id(parameter)] for key, parameter in tied.items()}
        self._parameters = StageParameters(self._partition, candidates, self._group, self.stage_id, deadline)
        self.optimizer = self._make_optimizer(optimizer)
        self.lr_scheduler = self._make_scheduler(lr_scheduler)
        self.program: Program | None = None
        """The instructions of the last batch as a program, if they could be proved."""
        self._number, self._batches = self._group.number_pipeline(self.stage_id), 0
        self._known: dict[bool, tuple[Any, Executor, dict[Any, Operation], Program | None]] = {}
        """The last streams of training and of evaluation, with their executor, its operations by action, and the proved program."""
        self._feed, self._reader = NO_INPUT, StreamReader(0, 0, Duties(True, True, True), ())
        self._operations: dict[Any, Operation] = {}
        self._losses: dict[int, Any] | None = None
        self._order: Iterator[int] = iter(())
        """The microbatches in the order in which the program receives their gradients."""
        self._gradients: dict[int, int] = {}
        """For each microbatch whose gradient was received, the microbatch in whose place it is."""

    # Parameters, sizes and data ---------------------------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this stage updates, each once, under the model's own names; tied ones come last."""
        return self._parameters.list_named()

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def _make_optimizer(self, optimizer: Any) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not isinstance(optimizer, torch.optim.Optimizer):
            return optimizer(parameters) if optimizer is not None and parameters else None
        idents = set(map(id, parameters))
        if any(id(p) not in idents for group in optimizer.param_groups for p in group["params"]):
            raise ScheduleError(
                f"the optimizer has parameters that stage {self.stage_id} is not to update: "
                "give a function that makes one, such as lambda parameters: SGD(parameters, lr=0.1)"
            )
        return optimizer

    def _make_scheduler(self, scheduler: Any) -> Any:
        """A learning-rate schedule for this stage's optimizer; None for a stage without one."""
        if scheduler is None or self.optimizer is None:
            return None
        return scheduler if hasattr(scheduler, "step") and not isinstance(scheduler, type) else scheduler(self.optimizer)

    def get_lr(self) -> list[float]:
        """The learning rates of this stage's optimizer, one per parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def train_micro_batch_size_per_gpu(self) -> int:
        """The samples per microbatch."""
        if self.micro_batch_size is None:
            raise ScheduleError("the engine does not know how many samples a microbatch has: give PipelineEngine(micro_batch_size=...)")
        return self.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """The microbatches per batch on one replica."""
        return self.micro_batches

    def train_batch_size(self) -> int:
        """The samples per batch, over all replicas."""
        return self.train_micro_batch_size_per_gpu() * self.micro_batches * self._replicas.count

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the samples per batch over all replicas, by the number of microbatches. Called on every rank."""
        size = self.train_micro_batch_size_per_gpu() * self._replicas.count
        if train_batch_size < 1 or train_batch_size % size:
            raise ScheduleError(
                f"a batch of {train_batch_size} samples is no multiple of {size}: {self._replicas.count} replicas with microbatches of "
                f"{self.micro_batch_size}"
            )
        self.micro_batches = train_batch_size // size

    def reset_activation_shape(self) -> None:
        """Do nothing: messages carry their shapes, which may change with every microbatch. Kept for DeepSpeed's callers."""

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take the data of the next batches from a loader, from its beginning."""
        self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Take the data of the next batches from an iterator; stages between the first and the last need none."""
        if iterator is not None and not hasattr(iterator, "__next__"):
            raise NotAnIteratorError(
                f"the data are a {type(iterator).__name__}, which would restart with every batch: give iter(...) of it, made once, "
                "or DeepSpeed's RepeatingLoader; set_dataloader() takes a loader"
            )
        if self.is_first_stage() or self.is_last_stage():
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Call this function on every microbatch that is loaded."""
        self.batch_fn = fn

    def _train_schedule(self) -> Any:
        """This stage's instructions for a batch; a subclass may override it."""
        return self.train_schedule(micro_batches=self.micro_batches, stages=self.num_stages, stage_id=self.stage_id)

    def _inference_schedule(self, micro_batches: int) -> Any:
        return self.eval_schedule(micro_batches=micro_batches, stages=self.num_stages, stage_id=self.stage_id)

    # Batches ----------------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on one batch, whose microbatches are pairs of inputs and labels; return the mean of their losses, on every rank."""
        if not torch.is_grad_enabled():
            raise PipelineError("train_batch() needs gradients: call it outside of no_grad(), or call eval_batch()")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        share = self._run(self._train_schedule, self.micro_batches, training=True).share
        self.global_samples += 0 if self.micro_batch_size is None else self.train_batch_size()
        losses = [share.losses[microbatch][0] for microbatch in sorted(share.losses)]
        loss: Tensor = self._share(self._replicas.average("loss of replicas", mean(losses)))
        return loss

    def eval_batch(  # noqa: PLR0917 - DeepSpeed's order
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run one batch forward in evaluation mode; return the mean loss on every rank, unless the options say otherwise.

        Without `bcast_loss` or `compute_loss` only the last stage gets it; without `compute_loss` it is the mean of the outputs;
        `reduce_output=None` gives a list. `return_logits` adds the outputs of all microbatches, on the last stage.
        """
        if reduce_output not in ("avg", None):
            raise ScheduleError(f"reduce_output is 'avg' or None, got {reduce_output!r}")
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        iterator = self.data_iterator
        self.set_dataiterator(data_iter)
        self.module.eval()
        self._losses = {} if compute_loss and self.loss_fn is not None else None
        try:
            with torch.no_grad():
                outputs = self._run(partial(self._inference_schedule, count), count, training=False).share.outputs
        finally:
            self.data_iterator = iterator
        results = outputs if self._losses is None else self._losses
        values: Any = [results[microbatch] for microbatch in sorted(results)]
        if reduce_output is not None:
            values = self._replicas.average("loss of replicas", mean(values))
        shared = self._share(values if compute_loss and bcast_loss else None)
        result = shared if compute_loss and bcast_loss else values if self.is_last_stage() else None
        logits = (
            mb.merge_outputs([outputs[microbatch] for microbatch in sorted(outputs)], 0) if return_logits and self.is_last_stage() else None
        )
        return (result, logits) if return_logits else result

    def _share(self, value: Any) -> Any:
        """The last stage's value, on every rank of the pipeline."""
        last = self._group.gather(self.stage_id, "end of a batch", value if self.is_last_stage() else None, self._deadline)[-1]
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, last)

    def _run(self, make: Callable[[], Any], count: int, *, training: bool) -> StepInput:
        """Run one batch; its losses and outputs are in the feed's share."""
        commands, buffers, everyone = self._run_together(lambda: self._meet(make), lambda: "making the schedule")
        labels = self.loss_fn is not None and (training or self._losses is not None)
        executor = self._prepare(count, everyone, training, labels)
        places = [(step, instruction) for step, instructions in enumerate(commands) for instruction in instructions]
        operations = [partial(self._find_function(instruction), self, **instruction.kwargs) for _, instruction in places]
        executor.replace_operations([instruction for _, instruction in places], operations)
        row = executor.program[self.stage_id]
        duties = Duties(self.is_first_stage(), self.is_last_stage(), training, labels)
        self._reader = StreamReader(
            self.stage_id, buffers, duties, [action.microbatch or 0 for action in row if action.kind is Kind.RECV_F]
        )
        self._order, self._gradients = iter([action.microbatch or 0 for action in row if action.kind is Kind.RECV_B]), {}
        feed = self._feed = StepInput([()] * count, {}, [None] * count, [1 / count] * count, outputs=not training, losses=training)
        self._stage.refresh()
        self._batches += 1
        self._group.agree(executor.links.number, self._batches, self._deadline)

        def describe_place() -> str:
            step, instruction = places[executor.activity.at]
            return f"{instruction!r} in step {step}"

        backup = GradientBackup.take(self.module.parameters())
        try:
            if training:
                self._run_together(self._parameters.begin, lambda: "the batch")
            self._run_together(lambda: executor.run(feed), describe_place)
        except BaseException:
            backup.restore()
            raise
        finally:
            self._feed = NO_INPUT
        return feed

    def _run_together(self, body: Callable[[], _Result], place: Callable[[], str]) -> _Result:
        """Run what all ranks take part in; a failure is raised on all of them, with `place` saying where it was."""
        world, rank = self._world, self._rank
        world.enter(rank, self._deadline)
        try:
            return body()
        except PipelineError as error:
            world.fail(rank, error)
            raise
        except Exception as error:
            raise world.report_failure(rank, f"{place()} failed on rank {rank}: {type(error).__name__}: {error}", error) from error
        except BaseException as error:
            world.fail(rank, error)
            raise
        finally:
            world.activity(rank).stop()

    # Before a batch runs ----------------------------------------------------------------------------------------------

    def _meet(self, make: Callable[[], Any]) -> tuple[list[list[Any]], int, list[Any]]:
        """This stage's instructions and number of buffers, and what every stage is about to run."""
        schedule = make()
        commands, buffers = [list(step) for step in schedule], schedule.num_pipe_buffers()
        for instruction in chain.from_iterable(commands):
            self._find_function(instruction)
        data = None if self.data_iterator is None else self._world.ident(self.data_iterator)
        own = proofs.to_plain(commands), buffers, data, type(schedule).__name__
        return commands, buffers, self._gather_all("begin of a batch", own)

    def _prepare(self, count: int, everyone: Sequence[Any], training: bool, labels: bool) -> Executor:
        """Refuse what cannot work, the same on every rank, before any of it runs; else the executor of the streams."""
        data = [share[2] for share in everyone if share[2] is not None]
        if len(set(data)) < len(data):
            raise ScheduleError("two ranks were given one and the same iterator: each needs its own, over the data of its replica")
        self._check_replicas(everyone)
        streams, buffers, _, classes = zip(*(everyone[rank] for rank in self._pipe), strict=True)
        names = {instruction.name for stream in streams for step in stream for instruction in step}
        if not training and names & set(TRAINING):
            raise ScheduleError(f"eval_batch() was given a schedule with {min(names & set(TRAINING))}: take one that only goes forward")
        if training and self._parameters.tied and "ReduceTiedGrads" not in names:
            raise ScheduleError("the stages share parameters, but the schedule has no ReduceTiedGrads: run it at the end of every stage")
        if training and self._replicas.count > 1 and "ReduceGrads" not in names:
            raise ScheduleError("the stages have replicas, but the schedule has no ReduceGrads: run it at the end of every stage")
        key = (streams, buffers, count, labels)
        if training not in self._known or self._known[training][0] != key:
            proved: Program | None = None
            strange = next(filter(None, map(proofs.find_unknown, streams)), None)
            if strange is None:
                program = proved = proofs.build_program(streams, count, buffers, strict=self.strict, labels=labels, name=classes[0])
            else:
                logger.info("%s is an instruction of your own: the streams run without a proof", strange)
                program = proofs.build_unproved_program(streams, count, buffers, training=training, labels=labels)
            executor = self._make_executor(program)
            operations = {(action.kind, action.microbatch): run for action, run in zip(executor.actions, executor.operations, strict=True)}
            self._known[training] = key, executor, operations, proved
        _, self._executor, self._operations, self.program = self._known[training]
        return self._executor

    def _check_replicas(self, everyone: Sequence[Any]) -> None:
        """Refuse replicas with different schedules, of which one would wait for the other."""
        rows: dict[int, Any] = {}
        for rank, (stream, buffers, *_) in enumerate(everyone):
            stage = 0 if self.grid is None else self.grid.topology().get_coord(rank).pipe
            if self._replicas.count > 1 and rows.setdefault(stage, (stream, buffers)) != (stream, buffers):
                raise ScheduleError(
                    f"the replicas run different instructions on stage {stage}: give all the same schedule and micro_batches"
                )

    def _make_executor(self, program: Program) -> Executor:
        """The executor of a program whose receives wait for their messages, and sends for their receives if the engine is strict."""
        stages = {self.stage_id: self._stage}
        executor = Executor(
            program,
            self.stage_id,
            stages,
            loss=Loss(self.loss_fn, "mean"),
            group=self._group,
            deadline=self._deadline,
            data=DataParallel(None, stages, shard=Shard(), dtype=None, deadline=self._deadline),
            number=self._number,
            blocking=(Kind.RECV_F, Kind.RECV_B, *((Kind.SEND_F, Kind.SEND_B) if self.strict else ())),
        )
        self._group.open((*executor.links.inboxes, *executor.links.outboxes), self._deadline)
        return executor

    # Instructions -----------------------------------------------------------------------------------------------------

    def _find_function(self, instruction: Any) -> Callable[..., None]:
        """The function that runs an instruction: by its class, as in DeepSpeed's engine, or by its name."""
        function = self._INSTRUCTION_MAP.get(type(instruction)) or self._INSTRUCTION_MAP.get(instruction.name)
        if function is None:
            raise PipelineError(f"{type(self).__name__} does not understand instruction {instruction!r}")
        return function

    def _read(self, name: str, buffer_id: int) -> int:
        """Check an instruction on a buffer; the microbatch that it is about."""
        for _, message, remedy in self._reader.read(Instruction(name, buffer_id)):
            raise ScheduleError(f"{message}. {remedy}")
        return self._reader.holds.get(buffer_id, self._reader.loads - 1)

    def _operate(self, name: str, buffer_id: int) -> int:
        """Run the executor's operation for an instruction; the microbatch that it was about."""
        microbatch, kind = self._read(name, buffer_id), KINDS[name]
        run = microbatch
        if kind is Kind.RECV_B:  # a stream that cannot be read ahead may receive gradients in another order than its program
            run = self._gradients[microbatch] = next(self._order, microbatch)
        elif kind is Kind.B and (place := self._gradients.pop(microbatch, microbatch)) != microbatch:
            self._executor.links.swap_received(Action(self.stage_id, Kind.RECV_B, place), Action(self.stage_id, Kind.RECV_B, microbatch))
            self._gradients = {key: place if at == microbatch else at for key, at in self._gradients.items()}
        self._operations[kind, run]()
        return microbatch

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        if not (self.is_first_stage() or self.is_last_stage()):
            return
        microbatch, feed = self._reader.loads, self._feed
        self._read("LoadMicroBatch", buffer_id)
        if microbatch >= len(feed.args):
            raise ScheduleError(f"it loads one microbatch more than the {len(feed.args)} of the batch: remove it, or change micro_batches")
        inputs, *labels = self._take_batch()
        if self.is_first_stage():
            needs_gradients = self._reader.duties.training and self._inputs_need_gradients
            feed.args[microbatch] = (_copy_inputs(_as_tuple(inputs), needs_gradients),)
        if self.is_last_stage() and feed.targets is not None:
            feed.targets[microbatch] = _as_tuple(labels[0]) if labels else None

    @property
    def _inputs_need_gradients(self) -> bool:
        """Whether the first stage's inputs must have gradients: a user's own recomputation may start from them."""
        function = getattr(self.module, "activation_checkpoint_func", recompute)
        return function is not recompute and getattr(self.module, "activation_checkpoint_interval", 0) > 0

    def _take_batch(self) -> Any:
        if self.data_iterator is None and self.batch_fn is None:
            raise ScheduleError("there is no data: give train_batch(data_iter=...) to the first and the last stage")
        try:
            batch = None if self.data_iterator is None else next(self.data_iterator)
        except StopIteration:
            raise ScheduleError("the data ended within the batch: give as many microbatches as a batch has") from None
        batch = batch if self.batch_fn is None else self.batch_fn(batch)
        if not isinstance(batch, tuple | list):
            raise ScheduleError(f"a microbatch is a pair of inputs and labels, got {type(batch).__name__}: set_batch_fn can make one")
        return batch

    def _exec_forward_pass(self, buffer_id: int) -> None:
        microbatch, feed = self._operate("ForwardPass", buffer_id), self._feed
        if self.is_last_stage() and not self._reader.duties.training and self._losses is not None and self.loss_fn is not None:
            labels = None if feed.targets is None else feed.targets[microbatch]
            self._losses[microbatch] = self.loss_fn(feed.share.outputs[microbatch], labels)
        feed.args[microbatch] = ()
        if feed.targets is not None:
            feed.targets[microbatch] = None

    _exec_backward_pass = _run_operation("BackwardPass")
    _exec_send_activations, _exec_recv_activations = _run_operation("SendActivation"), _run_operation("RecvActivation")
    _exec_send_grads, _exec_recv_grads = _run_operation("SendGrad"), _run_operation("RecvGrad")

    def _exec_reduce_grads(self) -> None:
        self._replicas.average_gradients(self.module)

    def _exec_reduce_tied_grads(self) -> None:
        self._parameters.sum_tied()

    def _exec_optimizer_step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.global_steps += 1

    # By name, so that DeepSpeed's own instructions run as well. A subclass may add its own, by name or by class.
    _INSTRUCTION_MAP: ClassVar[dict[Any, Callable[..., None]]] = {
        "OptimizerStep": _exec_optimizer_step,
        "ReduceGrads": _exec_reduce_grads,
        "ReduceTiedGrads": _exec_reduce_tied_grads,
        "LoadMicroBatch": _exec_load_micro_batch,
        "ForwardPass": _exec_forward_pass,
        "BackwardPass": _exec_backward_pass,
        "SendActivation": _exec_send_activations,
        "RecvActivation": _exec_recv_activations,
        "SendGrad": _exec_send_grads,
        "RecvGrad": _exec_recv_grads,
    }

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the model, the optimizer, the learning-rate schedule and the first rank's `client_state`. Called on every rank.

        The checkpoint is in `save_dir/tag`, by default `global_step<n>`, and is one of `Checkpoints`. Parameters and optimizers are saved
        under the names of the model's state dict, so it can be loaded with any number of stages and replicas, and into the unpipelined
        model. `save_latest` makes it the one that is loaded without a tag.
        """
        if exclude_frozen_parameters:
            raise CheckpointError(
                "exclude_frozen_parameters: our checkpoints hold the whole model, so that any number of stages loads them"
            )
        chosen = f"global_step{self.global_steps}" if tag is None else str(tag)
        tags = self._gather_all("tag of a checkpoint", chosen)
        if len(set(tags)) > 1:
            raise CheckpointError(f"the ranks save under different tags, {', '.join(sorted(set(tags)))}: give all the same")
        own_rates = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        rates = next((state for state in self._gather_all("learning rates", own_rates) if state is not None), None)
        counts = {"global_steps": self.global_steps, "global_samples": self.global_samples}
        state = EngineState(counts, rates, dict(client_state or {}))
        checkpoints = open_folder(save_dir, chosen, self._deadline)
        checkpoints.save(self._hold(), self.optimizer, step=self.global_steps, extra={"deepspeed": state})
        if save_latest and self._rank == 0:  # the checkpoint is complete
            written = Path(save_dir) / f".{_LATEST}.{os.getpid()}"
            written.write_text(chosen, encoding="utf-8")
            os.replace(written, Path(save_dir) / _LATEST)
        self._gather_all("checkpoint saved", None)
        return True

    def load_checkpoint(  # noqa: PLR0917 - DeepSpeed's order
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint of `save_checkpoint`, by default the last one; return its folder and its `client_state`.

        Called on every rank. Both are None if nothing was saved yet.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise CheckpointError("checkpoints are loaded strictly by name: load_module_strict=False and custom_load_fn are not supported")
        latest, name = Path(load_dir) / _LATEST, None if tag is None else str(tag)
        if tag is None and self._rank == 0:
            if latest.is_file():
                name = latest.read_text(encoding="utf-8").strip()
            else:
                logger.warning("there is no %s: nothing was saved in %s, or give a tag", latest, load_dir)
        chosen = self._gather_all("tag of a checkpoint", name)[0]
        if chosen is None:
            return None, None
        rates = None if load_module_only or not load_lr_scheduler_states else self.lr_scheduler
        optimizer = None if load_module_only or not load_optimizer_states else self.optimizer
        state = EngineState({}, None, {}, rates)
        loaded = open_folder(load_dir, chosen, self._deadline).load_latest(self._hold(), optimizer, extra={"deepspeed": state})
        if loaded is None:
            raise CheckpointError(f"there is no checkpoint under the tag {chosen!r} in {load_dir}")
        if not load_module_only:
            self.global_steps, self.global_samples = state.counts["global_steps"], state.counts["global_samples"]
        return str(loaded.path), state.client_state

    def _gather_all(self, name: str, value: Any) -> list[Any]:
        """The values of all ranks of all pipelines."""
        return self._world.gather(self._rank, name, value, self._deadline)

    def _hold(self) -> ModelState:
        """This stage as checkpoints take it: its modules by name, and the places of its parameters, which tied stages share.

        Slices of a layer have the same names on several ranks, so a slice adds its number to them.
        """
        sliced = self.grid is not None and self.grid.get_slice_parallel_world_size() > 1
        number = self.grid.get_slice_parallel_rank() if sliced and self.grid else 0
        part, prefix = self._partition.parts[self.stage_id], f"model_{number:02d}." if sliced else ""
        assert part is not None
        part = replace(part, layers=tuple(f"{prefix}{name}" for name in part.layers))
        places = {f"{prefix}{name}": (*place, number) for name, place in self._parameters.places().items()}
        return ModelState({self.stage_id: part}, places)


def _as_tuple(value: Any) -> Any:
    """Loaders give lists for tuples; layers get tuples, as in DeepSpeed."""
    return tuple(value) if isinstance(value, list) else value


def _copy_inputs(value: Any, needs_gradients: bool) -> Any:
    """A copy that a stage may change in place; with gradients if they are wanted."""

    def copy(leaf: Any) -> Any:
        return leaf.detach().requires_grad_(needs_gradients and leaf.is_floating_point()).clone() if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(copy, value)


# Checkpoints -----------------------------------------------------------------------------------------------------------


@dataclass
class EngineState:
    """The state besides the model and the optimizer. It is the same on every rank; `scheduler` is this rank's own."""

    counts: dict[str, int]
    """The engine's counters: `global_steps` and `global_samples`."""
    rates: Any
    """The state of the learning-rate schedule, from the first rank that has one."""
    client_state: dict[str, Any]
    scheduler: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "rates": self.rates, "client_state": self.client_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts, self.rates, self.client_state = dict(state["counts"]), state["rates"], dict(state["client_state"])
        if self.scheduler is None:
            return
        if self.rates is None:
            raise CheckpointError("the checkpoint was saved without a learning-rate schedule: give load_lr_scheduler_states=False")
        self.scheduler.load_state_dict(self.rates)


def open_folder(folder: str | os.PathLike[str], tag: str, deadline: float) -> Checkpoints:
    """The checkpoints of one tag."""
    if not tag or tag in (".", "..") or Path(tag).name != tag:
        raise CheckpointError(f"{tag!r} is not the name of a checkpoint in {folder}: give a tag such as 'global_step100', and no path")
    return Checkpoints(Path(folder) / tag, keep=1, deadline=max(deadline, 600.0))


# The parameters of one stage: those that it shares with other stages, and the copies of them on its replicas ----------


Candidates = Mapping[Hashable, str]
"""The names of parameters that other stages may have too, by keys that are the same on all of them."""


class StageParameters:
    """The parameters of this rank's stage. Tied ones are shared with other stages as in any pipeline, see `SharedParameters`.

    Names are made unique by their stage while they are compared, because tied layers have one name on several stages.
    """

    def __init__(self, partition: Partition, candidates: Candidates, group: Group, stage: int, deadline: float) -> None:
        self.group, self.rank, self.deadline = group, stage, deadline
        self.partition = Partition(tuple(part and _prefix(part, f"stage {number}") for number, part in enumerate(partition.parts)))
        ties = self._find_ties(candidates)
        self.tied = bool(ties or self.partition.list_tied())
        """Whether any stages share parameters."""
        self.shared = SharedParameters(
            self.partition,
            ties,
            self.local_parameters(),
            self.gather,
            rank=stage,
            identify=group.ident,
            parallel=group.parallel,
            sums_apart=False,
        )

    def _find_ties(self, candidates: Candidates) -> list[list[str]]:
        """The names of parameters that several stages have."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.local_parameters(unique=False)}
        own = {key: (self._unique(name), shapes[self._unique(name)]) for key, name in candidates.items()}
        holders: dict[Hashable, list[tuple[int, str, tuple[int, ...]]]] = {}
        for stage, entries in enumerate(self.gather("tied layers", own)):
            for key, (name, shape) in entries.items():
                holders.setdefault(key, []).append((stage, name, shape))
        for key, ((first, _, expected), *others) in holders.items():
            for stage, _, shape in others:
                if shape != expected:
                    raise PlacementError(
                        f"tied parameter {key} has shape {list(expected)} on stage {first} and {list(shape)} on stage {stage}: give layers "
                        "of one key the same arguments"
                    )
        return [[name for _, name, _ in entries] for entries in holders.values() if len(entries) > 1]

    def _unique(self, name: str) -> str:
        return f"stage {self.rank}.{name}"

    def _strip_prefix(self, name: str) -> str:
        return name.removeprefix(self._unique(""))

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all stages."""
        return self.group.gather(self.rank, name, value, self.deadline)

    def local_parameters(self, *, unique: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The stage's parameters by their unique names; each once, or under all its names."""
        part, seen = self.partition.parts[self.rank], set[int]()
        assert part is not None
        for name, parameter in part.parameters:
            if not unique or id(parameter) not in seen:
                yield name, parameter
            seen.add(id(parameter))

    def list_named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this stage updates, under the model's own names; tied ones come last.

        So the first of them, under whose name a checkpoint notes the options that many have in common, belongs to no other stage.
        """
        owned = [(name, parameter) for name, parameter in self.local_parameters() if name in self.shared.owned]
        return ((self._strip_prefix(name), parameter) for name, parameter in sorted(owned, key=lambda pair: pair[0] in self.shared.tied))

    def places(self) -> dict[str, Place]:
        """For each name of this stage's parameters, the first place of the parameter in the model."""
        first = {id(parameter): self.shared.place[name] for name, parameter in self.local_parameters()}
        return {self._strip_prefix(name): first[id(parameter)] for name, parameter in self.local_parameters(unique=False)}

    def begin(self) -> None:
        """Set aside the gradients of earlier batches, so that only those of this batch are summed over the stages."""
        self.shared.begin(self.local_parameters(), self.gather)

    def sum_tied(self) -> None:
        """Sum the gradients of tied parameters over the stages, which all meet here."""
        self.shared.sum_gradients(self.local_parameters(), self.gather, lambda parameter: None)
        self.gather("ReduceTiedGrads", None)


def _prefix(part: Part, prefix: str) -> Part:
    return replace(part, layers=tuple(f"{prefix}.{name}" for name in part.layers))


class Replicas:
    """The ranks that hold the same stage. They start from the values of the first, and take the mean of their gradients.

    `members` are these ranks among all of the launch.
    """

    def __init__(self, whole: Group, rank: int, members: Sequence[int], deadline: float) -> None:
        self.count, self.rank, self.deadline = len(members), list(members).index(rank), deadline
        self._group: Any = join_members(whole, rank, members) if self.count > 1 else None

    def start(self, stage: int, module: nn.Module) -> None:
        """Check that all replicas have the same parameters, and copy the values of the first."""
        if self.count == 1:
            return
        own = [
            (name, tuple(parameter.shape), parameter.dtype, self._group.ident(parameter)) for name, parameter in module.named_parameters()
        ]
        for replica, other in enumerate(self._gather("replicas", own)):
            if [entry[:-1] for entry in other] != [entry[:-1] for entry in own]:
                raise ScheduleError(
                    f"stage {stage} has other parameters in replica {replica} than in replica {self.rank}: build the same layers on "
                    "every rank"
                )
            if replica != self.rank and {entry[-1] for entry in other} & {entry[-1] for entry in own}:
                raise ScheduleError("two replicas have a parameter that is one object: build the layers on every rank, or give LayerSpec")
        copies = ReplicatedTensors({stage: module}, {})
        copies.broadcast(self._group.connect_collectives(self.deadline), copies.list_everything())

    def _gather(self, name: str, value: Any) -> list[Any]:
        return [value] if self.count == 1 else self._group.gather(self.rank, name, value, self.deadline)

    def average(self, name: str, value: Any) -> Any:
        """The mean of a tree of tensors over the replicas."""
        everyone = self._gather(name, value)
        return None if value is None else mean(everyone)

    @torch.no_grad()
    def average_gradients(self, module: nn.Module) -> None:
        """Give every replica the mean; a replica whose parameter took no part counts as zero."""
        if self.count == 1:
            return
        parameters = list(module.parameters())
        present = self._gather("ReduceGrads", [parameter.grad is not None for parameter in parameters])
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter, *some in zip(parameters, *present, strict=True):
            if any(some):
                grad = parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                if grad.is_sparse:
                    raise ScheduleError("a sparse gradient cannot be averaged over replicas: use dense ones")
                buckets.setdefault((grad.dtype, grad.device), []).append(grad)
        for grads in buckets.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            self._group.connect_collectives(self.deadline).allreduce([flat]).wait(timedelta(seconds=self.deadline))
            parts = torch.split(flat.div_(self.count), [grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view(grad.shape))


def mean(values: Sequence[Any]) -> Any:
    """The mean of trees of tensors; None if there are none."""
    if not values:
        return None
    return pytree.tree_map(lambda *leaves: sum(leaves[1:], start=leaves[0]) / len(leaves), values[0], *values[1:])
