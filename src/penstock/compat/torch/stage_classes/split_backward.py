"""The backward of one stage, whole or split by our deferral of weight gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.compat.torch._backward import (
    Grads,
    Group,
    describe_failure,
    pair_with_grads,
    stage_backward_input,
    stage_backward_weight,
    take_grad,
)
from penstock.runtime.model.stage import Stage
from penstock.runtime.split_backward.deferrable import run_backward
from penstock.runtime.split_backward.deferral import Deferral


class StageBackward:
    """Runs the backwards of one stage: whole, or split into one for the inputs and one for the weights.

    A split that is announced, by running the forward through `forward`, defers weight gradients at the operator. A split that was not
    announced is found in the finished graph.
    """

    def __init__(self, index: int, module: Any) -> None:
        self.module = module
        self.stage = Stage(index, module)
        self.splits = isinstance(module, nn.Module) and self.stage.splits
        """Whether the module can be split. The backward of a compiled module runs whole, in the first half."""
        self.deferrals: dict[int, Deferral] = {}
        """By microbatch: the weight gradients that its forward deferred."""
        self.groups: dict[int, list[Group]] = {}
        """By microbatch: the same for a split that was not announced."""

    def begin(self, split: bool) -> None:
        """Begin a step: parameters may have been replaced, frozen or given hooks, and the module compiled, since the last one."""
        self.clear()
        self.stage.refresh()
        if split:
            self.splits = isinstance(self.module, nn.Module) and self.stage.splits

    def clear(self) -> None:
        self.deferrals.clear()
        self.groups.clear()

    def forward(self, microbatch: int, run: Any) -> Any:
        """Run a forward whose backward will be split."""
        if not (self.splits and torch.is_grad_enabled()):
            return run()
        deferral = self.deferrals[microbatch] = Deferral()
        with self.stage.deferrable().forward(deferral):
            return run()

    def backward(self, microbatch: int, outputs: Any, grads: Any, inputs: list[Any]) -> Grads:
        """Accumulate all gradients; return those of the inputs."""
        deferral = self.deferrals.pop(microbatch, None)
        input_grads = self._run(deferral, outputs, grads, inputs)
        if deferral is not None:
            self.stage.backward_weights(deferral)
        return input_grads

    def backward_input(self, microbatch: int, outputs: Any, grads: Any, inputs: list[Any]) -> Grads:
        """Return the gradients of the inputs; accumulate those of weights that cannot be deferred."""
        deferral = self.deferrals.get(microbatch)
        if deferral is not None or not self.splits:
            return self._run(deferral, outputs, grads, inputs)
        ends = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        input_grads, self.groups[microbatch] = stage_backward_input(ends, grads, inputs, self.module.parameters())
        return input_grads

    def backward_weight(self, microbatch: int) -> None:
        """Accumulate the gradients of the weights that `backward_input` left."""
        deferral = self.deferrals.pop(microbatch, None)
        if deferral is not None:
            self.stage.backward_weights(deferral)
        elif microbatch in self.groups:
            stage_backward_weight(self.module.parameters(), self.groups.pop(microbatch))

    def _run(self, deferral: Deferral | None, outputs: Any, grads: Any, inputs: list[Any]) -> Grads:
        try:
            pairs: list[tuple[Any, Any]] = list(pair_with_grads(outputs, grads)) if grads is not None else _start_from_loss(outputs)
            pairs = [(end, grad) for end, grad in pairs if grad is not None]
            if pairs:
                ends, starts = [end for end, _ in pairs], [grad for _, grad in pairs]
                if deferral is None:
                    run_backward(ends, starts)
                else:
                    self.stage.deferrable().backward_input(deferral, ends, starts)
            return tuple(map(take_grad, inputs))
        except Exception as error:
            raise describe_failure("stage backward", outputs, grads, inputs) from error


def _start_from_loss(loss: Any) -> list[tuple[Any, Any]]:
    """Return the loss and its gradient, from which the last stage's backward starts."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise RuntimeError(f"the loss is {what}, but a backward starts from a tensor with one element")
    return [(loss, torch.ones_like(loss))] if loss.requires_grad else []
