"""Runs instructions on CPU, on the ranks of a `launch`, so that people's own schedules can be tried out.

DeepSpeed's engine is not wrapped here: its names for what users call are kept, and the instructions run on our transports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat.deepspeed import proof as proofs
from penstock.compat.deepspeed.buffers import PipeBuffers
from penstock.compat.deepspeed.interpreter import Interpreter
from penstock.compat.deepspeed.player import TRAINING
from penstock.compat.deepspeed.schedule import InferenceSchedule, TrainSchedule
from penstock.compat.deepspeed.ties import Ties
from penstock.compat.deepspeed.transport import Mail, Transport
from penstock.errors import NotAnIteratorError, PipelineError, ScheduleError
from penstock.ir.program import Program
from penstock.passes.deepspeed import Stream
from penstock.runtime import microbatch as mb
from penstock.runtime.gradients import Backup
from penstock.runtime.partition import partition

logger = logging.getLogger(__name__)


class PipelineEngine(Interpreter):
    """One stage of a pipeline that is driven by instructions; made on every rank of a `launch`, with the same arguments.

    - `model`: a whole module that is cut into stages (`split` says how), or a list with one module a stage;
    - `micro_batches`: how many make a batch; what DeepSpeed calls gradient accumulation steps;
    - `loss_fn(outputs, labels)`; without one the last stage's output is the loss;
    - `optimizer`: what makes one from this stage's parameters, or one that has them. Without one gradients are left as they are;
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
        train_schedule: Callable[..., Any] = TrainSchedule,
        eval_schedule: Callable[..., Any] = InferenceSchedule,
        split: Any = None,
        strict: bool = True,
        deadline: float = 300.0,
    ) -> None:
        self._transport = Transport(deadline)
        self.stage_id, self.num_stages = self._transport.rank, self._transport.ranks
        self.micro_batches, self.loss_fn, self.strict = micro_batches, loss_fn, strict
        self.train_schedule, self.eval_schedule = train_schedule, eval_schedule
        parts = partition(model, self.num_stages, split)
        part = parts.parts[self.stage_id]
        if part is None:
            raise ScheduleError(f"rank {self.stage_id} runs stage {self.stage_id}, but the map of modules has none for it")
        self._part, self.module = part, part.module
        self._ties = Ties(parts, self._transport)
        self.optimizer = self._optimizer(optimizer)
        self.program: Program | None = None
        """The last batch's instructions as a program, where they could be proved."""
        self._known: dict[bool, tuple[Any, Mail, Program | None]] = {}
        """What was proved last, for training and for evaluation."""
        self._reset(0)

    # What it is made of -----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this stage is to update, each once, under the model's own names."""
        seen: set[int] = set()
        for name, parameter in self._part.parameters:
            if id(parameter) not in seen and self._ties.is_mine(parameter):
                seen.add(id(parameter))
                yield name, parameter

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
        loss: Tensor = self._share(_mean(self._results))
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
        mine: Any = self._results if reduce_output is None else _mean(self._results)
        shared = self._share(mine if compute_loss and bcast_loss else None)
        result = shared if compute_loss and bcast_loss else mine if self.is_last_stage() else None
        return (result, mb.merge(self._outputs, 0) if self.is_last_stage() else None) if return_logits else result

    def _share(self, value: Any) -> Any:
        """The last stage's value, on every rank."""
        found = self._transport.gather("end of a batch", value if self.is_last_stage() else None)[-1]
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, found)

    def _run(self, make: Callable[[], Any], count: int, *, training: bool, compute_loss: bool = True, keep_outputs: bool = False) -> None:
        commands, buffers, everyone = self._transport.together(lambda: self._meet(make), lambda: "making the schedule")
        mail = self._prepare(commands, count, everyone, training, compute_loss and self.loss_fn is not None)
        self._reset(buffers, training=training, compute_loss=compute_loss, keep_outputs=keep_outputs)
        backup = Backup.take(parameter for _, parameter in self._part.parameters)
        try:
            self._transport.together(lambda: self._exec_schedule(commands, mail), lambda: self._at)
        except BaseException:
            backup.restore()
            raise
        finally:
            mail.end()
            self.pipe_buffers = PipeBuffers(0)

    # Before it runs ---------------------------------------------------------------------------------------------------

    def _meet(self, make: Callable[[], Any]) -> tuple[list[list[Any]], int, list[Any]]:
        """This stage's instructions and buffers, and what every stage is about to run."""
        made = make()
        commands, buffers = [list(step) for step in made], made.num_pipe_buffers()
        strange = next((each for step in commands for each in step if not self._knows(each)), None)
        if strange is not None:
            raise PipelineError(f"{type(self).__name__} does not understand instruction {strange!r}")
        data = None if self.data_iterator is None else self._transport.ident(self.data_iterator)
        return commands, buffers, self._transport.gather("begin of a batch", (proofs.plain(commands), buffers, data, type(made).__name__))

    def _prepare(self, commands: list[list[Any]], count: int, everyone: list[Any], training: bool, labels: bool) -> Mail:
        """Refuse what cannot work, the same on every rank, before any of it runs."""
        streams, buffers, data, made = ([each[part] for each in everyone] for part in range(4))
        if data[0] is not None and self.num_stages > 1 and data[0] == data[-1]:
            raise ScheduleError("the first and the last stage were given one and the same iterator: each needs its own over the same data")
        names = {each.name for stream in streams for step in stream for each in step}
        if not training and names & set(TRAINING):
            raise ScheduleError(f"eval_batch() was given a schedule with {min(names & set(TRAINING))}: take one that only goes forward")
        if training and self._ties.active and "ReduceTiedGrads" not in names:
            raise ScheduleError("the stages share parameters, but the schedule has no ReduceTiedGrads: run it at the end of every stage")
        key = (streams, buffers, count, labels)
        if training not in self._known or self._known[training][0] != key:
            program = self._proved(streams, count, buffers, labels, made[0])
            mail = self._transport.mail([each for step in commands for each in step], streams, blocking=self.strict)
            self._known[training] = (key, mail, program)
        _, mail, self.program = self._known[training]
        return mail

    def _proved(self, streams: list[Stream], count: int, buffers: list[int], labels: bool, name: str) -> Program | None:
        strange = next(filter(None, map(proofs.unknown, streams)), None)
        if strange is not None:
            logger.info("%s is an instruction of your own: the streams run without a proof", strange)
            return None
        return proofs.program_of(streams, count, buffers, strict=self.strict, labels=labels, name=name)


def _mean(values: list[Any]) -> Any:
    """The mean over the microbatches, of trees of tensors too; None where there is nothing."""
    if not values:
        return None
    return pytree.tree_map(lambda *leaves: sum(leaves[1:], start=leaves[0]) / len(leaves), values[0], *values[1:])
