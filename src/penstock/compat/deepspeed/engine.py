"""Runs instructions on CPU, on the ranks of a `launch`, so that people's own schedules and modules can be tried out.

DeepSpeed's engine is not wrapped here: its names for what users call are kept, and the instructions run on our transports.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat.deepspeed import proof as proofs
from penstock.compat.deepspeed.buffers import PipeBuffers
from penstock.compat.deepspeed.checklist import Duties
from penstock.compat.deepspeed.checkpoint import EngineState, choose_tag, hold_stage, note_latest, open_folder
from penstock.compat.deepspeed.interpreter import Interpreter
from penstock.compat.deepspeed.module import PipelineModule
from penstock.compat.deepspeed.player import TRAINING
from penstock.compat.deepspeed.replicas import Replicas
from penstock.compat.deepspeed.schedule import InferenceSchedule, TrainSchedule
from penstock.compat.deepspeed.ties import Ties
from penstock.compat.deepspeed.transport import Mail, Transport
from penstock.errors import CheckpointError, NotAnIteratorError, PipelineError, ScheduleError
from penstock.ir.program import Program
from penstock.passes.deepspeed import Stream
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.model.partition import partition
from penstock.runtime.parallel.gradients import GradientBackup

logger = logging.getLogger(__name__)


class PipelineEngine(Interpreter):
    """One stage of a pipeline that is driven by instructions; made on every rank of a `launch`, with the same arguments.

    - `model`: a `PipelineModule`, whose topology says which ranks are stages and which replicas; or a whole module that is cut into one
      stage per rank (`split` says how), or a list with one module per stage;
    - `micro_batches`: how many make a batch on one replica; what DeepSpeed calls gradient accumulation steps;
    - `micro_batch_size`: how many samples each has, for `train_batch_size` and `set_train_batch_size`;
    - `loss_fn(outputs, labels)`, or that of the `PipelineModule`; without one the last stage's output is the loss;
    - `optimizer`: what makes one from this stage's parameters, or one that has them. Without one gradients are left as they are;
    - `lr_scheduler`: what makes one from the optimizer, or one that has it; it steps after the optimizer;
    - `train_schedule`, `eval_schedule`: `PipeSchedule` classes, ours, DeepSpeed's or your own;
    - `strict`: refuse also what only DeepSpeed's own engine cannot run, see `prove`; sends then wait for their receives;
    - `deadline`: seconds that a rank waits for another at most.
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
        self._deadline = deadline
        self._transport = Transport(deadline) if grid is None else Transport(deadline, grid.pp_group, grid.dp_group)
        self.stage_id, self.num_stages = self._transport.stage, self._transport.stages
        self.micro_batches, self.micro_batch_size, self.strict = micro_batches, micro_batch_size, strict
        self.global_samples = 0
        """How many samples were trained on over all replicas, where `micro_batch_size` is known."""
        self.train_schedule, self.eval_schedule = train_schedule, eval_schedule
        if isinstance(model, PipelineModule):
            if split is not None:
                raise ScheduleError("split= goes with a whole module: a PipelineModule is cut by its partition_method")
            self._partition, candidates = model.cut(), model.tie_candidates()
            loss_fn = model.loss_fn if loss_fn is None else loss_fn
        else:
            self._partition = partition(model, self.num_stages, split)
            tied = enumerate(self._partition.tied())
            candidates = {number: p for number, holders in tied for stage, _, p in holders if stage == self.stage_id}
        self.loss_fn = loss_fn
        part = self._partition.parts[self.stage_id]
        if part is None:
            raise ScheduleError(f"rank {self.stage_id} runs stage {self.stage_id}, but the map of modules has none for it")
        self._part, self.module = part, part.module
        self._replicas = Replicas(self.module, self._transport)
        self._ties = Ties(candidates, self._transport)
        self.optimizer = self._optimizer(optimizer)
        self.lr_scheduler = self._scheduler(lr_scheduler)
        self.program: Program | None = None
        """The last batch's instructions as a program, where they could be proved."""
        self._known: dict[bool, tuple[Any, Mail, Program | None]] = {}
        """What was proved last, for training and for evaluation."""
        self._reset(0)

    # What it is made of -----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this stage is to update, each once, under the model's own names; tied ones come last.

        So the first of them, under whose name a checkpoint notes the options that many have in common, is no other stage's.
        """
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in self._part.parameters:
            if self._ties.is_mine(parameter):
                named.setdefault(id(parameter), (name, parameter))
        return iter(sorted(named.values(), key=lambda each: self._ties.is_tied(each[1])))

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def _optimizer(self, given: Any) -> Any:
        mine = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not isinstance(given, torch.optim.Optimizer):
            return given(mine) if given is not None and mine else None
        idents = set(map(id, mine))
        if any(id(p) not in idents for group in given.param_groups for p in group["params"]):
            raise ScheduleError(
                f"the optimizer has parameters that stage {self.stage_id} is not to update: "
                "give a function that makes one, such as lambda parameters: SGD(parameters, lr=0.1)"
            )
        return given

    def _scheduler(self, given: Any) -> Any:
        """A learning-rate schedule for this stage's optimizer; a stage without one needs none."""
        if given is None or self.optimizer is None:
            return None
        return given if hasattr(given, "step") and not isinstance(given, type) else given(self.optimizer)

    def get_lr(self) -> list[float]:
        """The learning rates of this stage's optimizer, one per group of parameters."""
        return [group["lr"] for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def train_micro_batch_size_per_gpu(self) -> int:
        """How many samples a microbatch has."""
        if self.micro_batch_size is None:
            raise ScheduleError("the engine does not know how many samples a microbatch has: give PipelineEngine(micro_batch_size=...)")
        return self.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """How many microbatches make a batch on one replica."""
        return self.micro_batches

    def train_batch_size(self) -> int:
        """How many samples a batch has, over all replicas."""
        return self.train_micro_batch_size_per_gpu() * self.micro_batches * self._transport.replicas

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Make the batches to come of so many samples over all replicas, by the number of microbatches. Called on every rank."""
        size = self.train_micro_batch_size_per_gpu() * self._transport.replicas
        if train_batch_size < 1 or train_batch_size % size:
            raise ScheduleError(
                f"a batch of {train_batch_size} samples is no multiple of {size}: {self._transport.replicas} replicas with microbatches of "
                f"{self.micro_batch_size}"
            )
        self.micro_batches = train_batch_size // size

    def reset_activation_shape(self) -> None:
        """Nothing: messages tell their shapes, which may change from one microbatch to the next. Taken for DeepSpeed's sake."""

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take the data of the batches to come from a loader, from its beginning."""
        self.set_dataiterator(iter(loader))

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Take the data of the batches to come from here; stages between the first and the last need none."""
        if iterator is not None and not hasattr(iterator, "__next__"):
            raise NotAnIteratorError(
                f"the data are a {type(iterator).__name__}, which would begin anew with every batch: give iter(...) of it, made once, "
                "or DeepSpeed's RepeatingLoader; set_dataloader() takes a loader"
            )
        if self.is_first_stage() or self.is_last_stage():
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Call this on every microbatch that is loaded."""
        self.batch_fn = fn

    def _train_schedule(self) -> Any:
        """This stage's instructions for a batch; a subclass may give others."""
        return self.train_schedule(micro_batches=self.micro_batches, stages=self.num_stages, stage_id=self.stage_id)

    def _inference_schedule(self, micro_batches: int) -> Any:
        return self.eval_schedule(micro_batches=micro_batches, stages=self.num_stages, stage_id=self.stage_id)

    # Batches ----------------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run one batch, each microbatch a pair of inputs and labels; the mean of the microbatches' losses, on every rank."""
        if not torch.is_grad_enabled():
            raise PipelineError("train_batch() needs gradients: call it outside of no_grad(), or call eval_batch()")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        self._run(self._train_schedule, self.micro_batches, training=True)
        self.global_samples += 0 if self.micro_batch_size is None else self.train_batch_size()
        loss: Tensor = self._share(self._replicas.average("loss of replicas", _mean(self._results)))
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
        """Run one batch forward in evaluation mode: the mean loss on every rank, or as the options say.

        Without `bcast_loss` or `compute_loss` only the last stage gets it; without `compute_loss` it is the outputs' mean;
        `reduce_output=None` gives a list. `return_logits` adds the outputs of all microbatches, on the last stage.
        """
        if reduce_output not in ("avg", None):
            raise ScheduleError(f"reduce_output is 'avg' or None, got {reduce_output!r}")
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        kept = self.data_iterator
        self.set_dataiterator(data_iter)
        self.module.eval()
        try:
            with torch.no_grad():
                make = partial(self._inference_schedule, count)
                self._run(make, count, training=False, compute_loss=compute_loss, keep_outputs=return_logits)
        finally:
            self.data_iterator = kept
        mine: Any = self._results if reduce_output is None else self._replicas.average("loss of replicas", _mean(self._results))
        shared = self._share(mine if compute_loss and bcast_loss else None)
        result = shared if compute_loss and bcast_loss else mine if self.is_last_stage() else None
        return (result, mb.merge_outputs(self._outputs, 0) if self.is_last_stage() else None) if return_logits else result

    def _share(self, value: Any) -> Any:
        """The last stage's value, on every rank."""
        found = self._transport.gather_stages("end of a batch", value if self.is_last_stage() else None)[-1]
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, found)

    def _run(self, make: Callable[[], Any], count: int, *, training: bool, compute_loss: bool = True, keep_outputs: bool = False) -> None:
        commands, buffers, everyone = self._transport.together(lambda: self._meet(make), lambda: "making the schedule")
        mail = self._prepare(commands, count, everyone, training, compute_loss and self.loss_fn is not None)
        self._reset(buffers, training=training, compute_loss=compute_loss, keep_outputs=keep_outputs)
        backup = GradientBackup.take(parameter for _, parameter in self._part.parameters)
        try:
            if training:
                self._transport.together(self._ties.begin, lambda: self._at)
            self._transport.together(lambda: self._exec_schedule(commands, mail), lambda: self._at)
        except BaseException:
            backup.restore()
            raise
        finally:
            mail.end()
            self.pipe_buffers = PipeBuffers(0)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the model, the optimizer, the learning-rate schedule and `client_state`, of which the first rank's counts.

        Called on every rank. The checkpoint is in `save_dir/tag`, `global_step<n>` unless given, and is one of `Checkpoints`: it can be
        loaded with any number of stages and replicas. `save_latest` makes it the one that is loaded without a tag.
        """
        if exclude_frozen_parameters:
            raise CheckpointError(
                "exclude_frozen_parameters: our checkpoints hold the whole model, so that any number of stages loads them"
            )
        chosen = f"global_step{self.global_steps}" if tag is None else str(tag)
        tags = self._transport.gather_all("tag of a checkpoint", chosen)
        if len(set(tags)) > 1:
            raise CheckpointError(f"the ranks save under different tags, {', '.join(sorted(set(tags)))}: give all the same")
        mine = None if self.lr_scheduler is None else self.lr_scheduler.state_dict()
        rates = next((each for each in self._transport.gather_all("learning rates", mine) if each is not None), None)
        counts = {"global_steps": self.global_steps, "global_samples": self.global_samples}
        state = EngineState(counts, rates, dict(client_state or {}))
        checkpoints = open_folder(save_dir, chosen, self._deadline)
        checkpoints.save(self._held(), self.optimizer, step=self.global_steps, extra={"deepspeed": state})
        if save_latest and self._transport.is_first:
            note_latest(save_dir, chosen)
        self._transport.gather_all("checkpoint saved", None)
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
        """Load what `save_checkpoint` has saved, the last one unless a tag is given: its folder, and the `client_state` that is in it.

        Called on every rank. Where nothing was saved yet, both are None.
        """
        if not load_module_strict or custom_load_fn is not None:
            raise CheckpointError("checkpoints are loaded strictly, name by name: load_module_strict=False and custom_load_fn are not here")
        mine = str(tag) if tag is not None else choose_tag(load_dir) if self._transport.is_first else None
        chosen = self._transport.gather_all("tag of a checkpoint", mine)[0]
        if chosen is None:
            return None, None
        rates = None if load_module_only or not load_lr_scheduler_states else self.lr_scheduler
        optimizer = None if load_module_only or not load_optimizer_states else self.optimizer
        state = EngineState({}, None, {}, rates)
        loaded = open_folder(load_dir, chosen, self._deadline).load_latest(self._held(), optimizer, extra={"deepspeed": state})
        if loaded is None:
            raise CheckpointError(f"there is no checkpoint under the tag {chosen!r} in {load_dir}")
        if not load_module_only:
            self.global_steps, self.global_samples = state.counts["global_steps"], state.counts["global_samples"]
        return str(loaded.path), state.client_state

    def _held(self) -> Any:
        """This stage as checkpoints take it."""
        sliced = self.grid is not None and self.grid.get_slice_parallel_world_size() > 1
        return hold_stage(self._partition, self.stage_id, self._ties, self.grid.get_slice_parallel_rank() if sliced and self.grid else None)

    # Before it runs ---------------------------------------------------------------------------------------------------

    def _meet(self, make: Callable[[], Any]) -> tuple[list[list[Any]], int, list[Any]]:
        """This stage's instructions and buffers, and what every stage is about to run."""
        made = make()
        commands, buffers = [list(step) for step in made], made.num_pipe_buffers()
        strange = next((each for step in commands for each in step if not self._knows(each)), None)
        if strange is not None:
            raise PipelineError(f"{type(self).__name__} does not understand instruction {strange!r}")
        data = None if self.data_iterator is None else self._transport.ident(self.data_iterator)
        return (
            commands,
            buffers,
            self._transport.gather_all("begin of a batch", (proofs.plain(commands), buffers, data, type(made).__name__)),
        )

    def _prepare(self, commands: list[list[Any]], count: int, everyone: list[Any], training: bool, labels: bool) -> Mail:
        """Refuse what cannot work, the same on every rank, before any of it runs."""
        self._check_data([data for _, _, data, _ in everyone])
        pipeline = [everyone[rank] for rank in self._transport.pipe]
        streams, buffers, made = ([each[part] for each in pipeline] for part in (0, 1, 3))
        self._check_replicas(everyone)
        names = {each.name for stream in streams for step in stream for each in step}
        if not training and names & set(TRAINING):
            raise ScheduleError(f"eval_batch() was given a schedule with {min(names & set(TRAINING))}: take one that only goes forward")
        if training and self._ties.active and "ReduceTiedGrads" not in names:
            raise ScheduleError("the stages share parameters, but the schedule has no ReduceTiedGrads: run it at the end of every stage")
        if training and self._replicas.active and "ReduceGrads" not in names:
            raise ScheduleError("the stages have replicas, but the schedule has no ReduceGrads: run it at the end of every stage")
        key = (streams, buffers, count, labels)
        if training not in self._known or self._known[training][0] != key:
            program = self._proved(streams, count, buffers, labels, made[0])
            mail = self._transport.mail([each for step in commands for each in step], streams, blocking=self.strict)
            self._known[training] = (key, mail, program)
        _, mail, self.program = self._known[training]
        return mail

    @staticmethod
    def _check_data(data: list[Any]) -> None:
        """Refuse an iterator that two ranks would take from in turn."""
        given = [each for each in data if each is not None]
        if len(set(given)) < len(given):
            raise ScheduleError("two ranks were given one and the same iterator: each needs its own, over the data of its replica")

    def _check_replicas(self, everyone: list[Any]) -> None:
        """Refuse replicas that would run another schedule, of which one would wait for the other."""
        rows: dict[int, Any] = {}
        for rank, (stream, buffers, _, _) in enumerate(everyone):
            stage = 0 if self.grid is None else self.grid.topology().get_coord(rank).pipe
            if self._replicas.active and rows.setdefault(stage, (stream, buffers)) != (stream, buffers):
                raise ScheduleError(
                    f"the replicas run different instructions on stage {stage}: give all the same schedule and micro_batches"
                )

    def _proved(self, streams: list[Stream], count: int, buffers: list[int], labels: bool, name: str) -> Program | None:
        strange = next(filter(None, map(proofs.unknown, streams)), None)
        if strange is not None:
            logger.info("%s is an instruction of your own: the streams run without a proof", strange)
            _check_ends(streams)
            return None
        return proofs.program_of(streams, count, buffers, strict=self.strict, labels=labels, name=name)


def _check_ends(streams: list[Stream]) -> None:
    """Refuse messages to stages that are not there."""
    for stage, stream in enumerate(streams):
        duties = Duties(stage == 0, stage == len(streams) - 1, training=True)
        for each in (each for step in stream for each in step):
            if duties.nowhere(each.name):
                raise ScheduleError(f"{each} on stage {stage} cannot run: {duties.nowhere(each.name)}")


def _mean(values: list[Any]) -> Any:
    """The mean over the microbatches, of trees of tensors too; None where there is nothing."""
    if not values:
        return None
    return pytree.tree_map(lambda *leaves: sum(leaves[1:], start=leaves[0]) / len(leaves), values[0], *values[1:])
