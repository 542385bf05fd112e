"""Gradients that are gathered up outside of autograd: summed over data ranks, or over microbatches in higher precision."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.runtime.tensors.dtensor import has_same_placements, redistribute_like, to_local
from penstock.runtime.tensors.layout import add_gradients, round_gradient
from penstock.runtime.transport.activity import clock


class ReplicaGradients:
    """The parameters of a rank that are the same on every data rank, during one step.

    What was accumulated in earlier steps is set aside, so that only this step's gradients are summed, once, and added to it.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        """What the gradients of microbatches are summed in; None for the parameters' own."""
        self._of_stage: dict[int, list[nn.Parameter]] = {}
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []
        self._sums: dict[int, Tensor] = {}
        self._due: list[tuple[int, Any, list[tuple[nn.Parameter, Tensor]]]] = []
        """Sums under way: the stage, the work, and each parameter's part of the sum."""
        self.ended: dict[int, int] = {}
        """When each stage's sum of the last step was seen to have ended."""

    def begin(self, of_stage: dict[int, list[nn.Parameter]]) -> None:
        """A step begins; `of_stage` are the parameters that each stage is the last to give gradients to."""
        self._of_stage, self._sums, self._due, self.ended = of_stage, {}, [], {}
        self._before = [(parameter, parameter.grad) for held in of_stage.values() for parameter in held]
        for parameter, _ in self._before:
            parameter.grad = None

    def sweep(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move new gradients into the sums."""
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None and self._sums_up(parameter):
                total = self._sums.get(id(parameter))
                if total is None:
                    self._sums[id(parameter)] = grad.to(self.dtype)
                elif total.is_sparse:
                    self._sums[id(parameter)] = add_gradients(total, grad.to(self.dtype))
                else:
                    total.add_(grad.to(self.dtype) if grad.is_sparse else grad)
                parameter.grad = None

    def _sums_up(self, parameter: nn.Parameter) -> bool:
        return self.dtype is not None and parameter.dtype != self.dtype and parameter.is_floating_point()

    def _total(self, parameter: nn.Parameter) -> Tensor | None:
        """This step's gradient so far."""
        return self._sums.get(id(parameter), parameter.grad)

    def present(self, stage: int) -> list[bool]:
        """For each of a stage's parameters whether it has got a gradient in this step."""
        return [self._total(parameter) is not None for parameter in self._of_stage.get(stage, ())]

    def reduce(self, stage: int, wanted: Sequence[bool], connection: Any) -> None:
        """Begin to sum a stage's gradients over all data ranks; `wanted` are those that any rank has one for."""
        held = [parameter for parameter, want in zip(self._of_stage.get(stage, ()), wanted, strict=True) if want]
        buckets: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in held:
            total = self._total(parameter)
            if total is not None and total.is_sparse:
                raise ScheduleError(
                    f"a parameter of stage {stage} has a sparse gradient, which cannot be summed over data ranks: use dense ones"
                )
            dtype = self.dtype if self.dtype is not None and self._sums_up(parameter) else parameter.dtype
            buckets.setdefault((dtype, parameter.device), []).append(parameter)
        for (dtype, device), parameters in buckets.items():
            totals = [self._total(each) for each in parameters]
            self._due.append((stage, *_summing(connection, parameters, totals, dtype, device)))

    def finish(self, deadline: float, shared: Collection[int] = ()) -> None:
        """Wait for the sums, round them, and add them to what was accumulated before.

        The sums of parameters that other ranks hold too, given by their ids as `shared`, stay as they are until `take` asks for them.
        """
        for stage, work, parts in self._due:
            work.wait(timedelta(seconds=deadline))
            self.ended[stage] = clock()
            self._sums |= {id(parameter): part for parameter, part in parts}
        for parameter, before in self._before:
            if id(parameter) in shared:
                continue
            grad, total = parameter.grad, self._sums.pop(id(parameter), None)
            if total is not None and total.is_sparse:
                grad = round_gradient(total, parameter)
            elif total is not None:
                grad = (
                    torch.zeros_like(parameter, requires_grad=False) if grad is None or not has_same_placements(grad, parameter) else grad
                )
                to_local(grad).copy_(to_local(redistribute_like(total, parameter)))
            parameter.grad = grad if before is None else before if grad is None else _add_to(before, grad)
        self._before, self._due = [], []

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum for a parameter that other ranks hold too, over all data ranks and in the precision of the sums.

        None if the parameter's own gradient is the sum.
        """
        return self._sums.pop(id(parameter), None)

    def reset(self) -> None:
        """The step has failed: nothing of it is kept."""
        self._of_stage, self._before, self._sums, self._due = {}, [], {}, []


def _add_to(before: Tensor, grad: Tensor) -> Tensor:
    """The sum, in the memory of the first where that can hold it."""
    return add_gradients(before, grad) if before.is_sparse or grad.is_sparse else before.add_(grad)


def _summing(
    connection: Any, parameters: list[nn.Parameter], totals: list[Tensor | None], dtype: torch.dtype, device: torch.device
) -> tuple[Any, list[tuple[nn.Parameter, Tensor]]]:
    """Begin one sum over all of these; the work, and each parameter's part of it."""
    shapes = [to_local(parameter.detach()).shape for parameter in parameters]
    flat = torch.zeros(sum(shape.numel() for shape in shapes), dtype=dtype, device=device)
    parts = [piece.view(shape) for piece, shape in zip(torch.split(flat, [shape.numel() for shape in shapes]), shapes, strict=True)]
    for part, parameter, total in zip(parts, parameters, totals, strict=True):
        if total is not None:
            part.copy_(to_local(redistribute_like(total, parameter)))
    return connection.allreduce([flat]), list(zip(parameters, parts, strict=True))
