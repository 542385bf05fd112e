"""What each instruction does to a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.compat.deepspeed.buffers import PipeBuffers
from penstock.compat.deepspeed.module import recompute
from penstock.compat.deepspeed.replicas import Replicas
from penstock.compat.deepspeed.ties import Ties
from penstock.compat.deepspeed.transport import Mail
from penstock.errors import ScheduleError
from penstock.runtime.model.partition import Part


class Interpreter:
    """A stage and what it holds while a stream runs. The engine sets it up."""

    stage_id: int
    num_stages: int
    micro_batches: int
    module: nn.Module
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: Any
    lr_scheduler: Any
    global_steps: int = 0
    data_iterator: Iterator[Any] | None = None
    batch_fn: Callable[[Any], Any] | None = None
    _ties: Ties
    _replicas: Replicas
    _part: Part
    _mail: Mail

    def _reset(self, buffers: int, *, training: bool = False, compute_loss: bool = True, keep_outputs: bool = False) -> None:
        self.pipe_buffers = PipeBuffers(buffers)
        self._training, self._compute_loss, self._keep_outputs = training, compute_loss, keep_outputs
        self._results: list[Any] = []
        """The last stage's losses, one a microbatch."""
        self._outputs: list[Any] = []
        self._at = "the batch"

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.num_stages - 1

    def _exec_schedule(self, commands: list[list[Any]], mail: Mail) -> None:
        """Run the stream."""
        self._mail, index = mail, 0
        mail.begin()
        for step, instructions in enumerate(commands):
            for each in instructions:
                self._at = f"{each!r} in step {step}"
                mail.at(index)
                self._function(each)(self, **each.kwargs)
                index += 1

    def _knows(self, each: Any) -> bool:
        return type(each) in self._INSTRUCTION_MAP or each.name in self._INSTRUCTION_MAP

    def _function(self, each: Any) -> Callable[..., None]:
        """What runs an instruction: by its class, as DeepSpeed's engine has it, or by its name."""
        return self._INSTRUCTION_MAP[type(each) if type(each) in self._INSTRUCTION_MAP else each.name]

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        if not (self.is_first_stage() or self.is_last_stage()):
            return
        batch = self._next_batch()
        if self.is_first_stage():
            self.pipe_buffers.put("inputs", buffer_id, _leaves(_as_tuple(batch[0]), wanted=self._training and self._inputs_lead))
        if self.is_last_stage():
            self.pipe_buffers.put("labels", buffer_id, _as_tuple(batch[1]) if len(batch) > 1 else None)

    @property
    def _inputs_lead(self) -> bool:
        """Whether the first stage's inputs must have gradients: a user's own recomputation may need one to begin with."""
        given = getattr(self.module, "activation_checkpoint_func", recompute)
        return given is not recompute and getattr(self.module, "activation_checkpoint_interval", 0) > 0

    def _next_batch(self) -> Any:
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
        buffers = self.pipe_buffers
        inputs = (buffers.get if self._training else buffers.take)("inputs", buffer_id)
        outputs = self.module(pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs))
        if not self.is_last_stage():
            buffers.put("outputs", buffer_id, outputs)
            return
        loss = outputs
        if self._compute_loss and self.loss_fn is not None:
            loss = self.loss_fn(outputs, buffers.take("labels", buffer_id))
        buffers.drop("labels", buffer_id)
        self._results.append(_detached(loss))
        if self._keep_outputs:
            self._outputs.append(_detached(outputs))
        if self._training:
            buffers.put("loss", buffer_id, loss)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        buffers = self.pipe_buffers
        if self.is_last_stage():
            loss = buffers.take("loss", buffer_id)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ScheduleError("the loss is no tensor of one number: give loss_fn= to compute one from the last stage's outputs")
            torch.autograd.backward(loss / self.micro_batches)
        else:
            pairs = zip(_floating(buffers.take("outputs", buffer_id)), buffers.take("gradients", buffer_id), strict=True)
            used = [(output, grad) for output, grad in pairs if grad is not None and output.requires_grad]
            torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])
        inputs = buffers.take("inputs", buffer_id)
        if not self.is_first_stage():
            buffers.put("input gradients", buffer_id, [leaf.grad for leaf in _floating(inputs)])

    def _exec_send_activations(self, buffer_id: int) -> None:
        outputs = (self.pipe_buffers.get if self._training else self.pipe_buffers.take)("outputs", buffer_id)
        self._mail.send("SendActivation", _detached(outputs))

    def _exec_recv_activations(self, buffer_id: int) -> None:
        self.pipe_buffers.put("inputs", buffer_id, _leaves(self._mail.receive("RecvActivation"), wanted=self._training))

    def _exec_send_grads(self, buffer_id: int) -> None:
        self._mail.send("SendGrad", self.pipe_buffers.take("input gradients", buffer_id))

    def _exec_recv_grads(self, buffer_id: int) -> None:
        self.pipe_buffers.put("gradients", buffer_id, self._mail.receive("RecvGrad"))

    def _exec_reduce_grads(self) -> None:
        self._replicas.average_gradients(self._part.module.parameters())

    def _exec_reduce_tied_grads(self) -> None:
        self._ties.sum_gradients()

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


def _as_tuple(value: Any) -> Any:
    """Loaders give lists for tuples; layers get tuples, as in DeepSpeed."""
    return tuple(value) if isinstance(value, list) else value


def _leaves(value: Any, *, wanted: bool) -> Any:
    """A copy as a new beginning for autograd; tensors that can have a gradient have one where it is wanted."""

    def leaf(each: Any) -> Any:
        return each.detach().clone().requires_grad_(wanted and each.is_floating_point()) if isinstance(each, Tensor) else each

    return pytree.tree_map(leaf, value)


def _detached(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def _floating(value: Any) -> list[Tensor]:
    """The tensors of a value that gradients belong to, the same on both sides of an edge."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
