"""Gradients of replicated parameters: summed over data ranks, and over microbatches in higher precision."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.runtime.device.timing import clock
from penstock.runtime.tensors.dtensor import has_same_placements, redistribute_like, to_local
from penstock.runtime.tensors.layout import add_gradients, round_gradient


class ReplicaGradients:
    """The gradients, during one step, of a rank's parameters that are the same on every data rank.

    `begin` sets aside what was accumulated in earlier steps, so that only this step's gradients are summed, once; `finish` adds the sums
    to it. In between, `accumulate` is called after each backward, and `reduce` once per stage. A step that does not finalize its
    gradients ends with `postpone` instead: the next one goes on with this rank's sums where this one has stopped.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        """The dtype in which the gradients of microbatches are summed; None for the parameters' own."""
        self._of_stage: dict[int, list[nn.Parameter]] = {}
        self._before: list[tuple[nn.Parameter, Tensor | None]] = []
        self._sums: dict[int, Tensor] = {}
        self._running: list[tuple[int, Any, list[tuple[nn.Parameter, Tensor]]]] = []
        """The running all-reduces: the stage, the work, and each parameter's part of the sum."""
        self._postponed: dict[int, tuple[nn.Parameter, Tensor | None, Tensor | None]] = {}
        """The parameters with gradients of steps that were not finalized, by id: the gradient, and the sum in higher precision."""
        self._backup: dict[int, tuple[nn.Parameter, Tensor | None, Tensor | None]] | None = None
        """Copies of them, to be restored if the step fails; None between steps."""
        self.ended: dict[int, int] = {}
        """When each stage's all-reduce of the last step was seen to have ended."""

    def begin(self, of_stage: dict[int, list[nn.Parameter]]) -> None:
        """Begin a step; `of_stage` are the parameters that each stage is the last to give gradients to."""
        self._of_stage, self._sums, self._running, self.ended = of_stage, {}, [], {}
        self._before = [(parameter, parameter.grad) for held in of_stage.values() for parameter in held]
        self._backup = {key: (parameter, _copy(grad), _copy(total)) for key, (parameter, grad, total) in self._postponed.items()}
        for parameter, _ in self._before:
            _, grad, total = self._postponed.pop(id(parameter), (parameter, None, None))
            parameter.grad = grad
            if total is not None:
                self._sums[id(parameter)] = total

    def is_postponed(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has gradients of steps that were not finalized."""
        return id(parameter) in self._postponed

    def postpone(self) -> None:
        """End a step that does not finalize its gradients: keep this rank's sums, and restore what was accumulated before."""
        for parameter, before in self._before:
            grad, total = parameter.grad, self._sums.get(id(parameter))
            if grad is not None or total is not None:
                self._postponed[id(parameter)] = parameter, grad, total
            parameter.grad = before
        self._before, self._sums = [], {}

    def settle(self) -> None:
        """Drop the copies, because the step has succeeded on all ranks."""
        self._backup = None

    def accumulate(self, parameters: Sequence[nn.Parameter]) -> None:
        """Move new gradients into the sums in higher precision."""
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
        """Return this step's gradient so far."""
        return self._sums.get(id(parameter), parameter.grad)

    def present(self, stage: int) -> list[bool]:
        """Return for each of a stage's parameters whether it has a gradient in this step."""
        return [self._total(parameter) is not None for parameter in self._of_stage.get(stage, ())]

    def reduce(self, stage: int, wanted: Sequence[bool], connection: Any) -> None:
        """Start to sum a stage's gradients over all data ranks; `wanted` marks the parameters that any rank has a gradient for."""
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
            totals = [self._total(parameter) for parameter in parameters]
            self._running.append((stage, *_start_all_reduce(connection, parameters, totals, dtype, device)))

    def wait(self, stage: int, deadline: float) -> None:
        """Wait for the all-reduces of one stage."""
        ending = [each for each in self._running if each[0] == stage]
        self._running = [each for each in self._running if each[0] != stage]
        for _, work, parts in ending:
            work.wait(timedelta(seconds=deadline))
            self.ended[stage] = clock()
            self._sums |= {id(parameter): part for parameter, part in parts}

    def finish(self, deadline: float, shared: Collection[int] = ()) -> None:
        """Wait for the all-reduces, round the sums, and add them to what was accumulated before.

        The sums of `shared` parameters, given by their ids, are kept for `take`, because other ranks of the pipeline hold them too.
        """
        for stage in dict.fromkeys(stage for stage, _, _ in self._running):
            self.wait(stage, deadline)
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
        self._before, self._running = [], []

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum of a shared parameter's gradients in higher precision, and forget it.

        None if the parameter's own gradient is the sum.
        """
        return self._sums.pop(id(parameter), None)

    def reset(self) -> None:
        """Drop the sums of a step that has failed, and restore those of the steps before it that were not finalized."""
        self._of_stage, self._before, self._sums, self._running = {}, [], {}, []
        self._postponed = self._postponed if self._backup is None else self._backup
        self._backup = None


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _add_to(before: Tensor, grad: Tensor) -> Tensor:
    """Add a gradient, in place if both are dense."""
    return add_gradients(before, grad) if before.is_sparse or grad.is_sparse else before.add_(grad)


def _start_all_reduce(
    connection: Any, parameters: list[nn.Parameter], totals: list[Tensor | None], dtype: torch.dtype, device: torch.device
) -> tuple[Any, list[tuple[nn.Parameter, Tensor]]]:
    """Start one all-reduce for all of these; return the work, and each parameter's part of the sum."""
    shapes = [to_local(parameter.detach()).shape for parameter in parameters]
    flat = torch.zeros(sum(shape.numel() for shape in shapes), dtype=dtype, device=device)
    parts = [piece.view(shape) for piece, shape in zip(torch.split(flat, [shape.numel() for shape in shapes]), shapes, strict=True)]
    for part, parameter, total in zip(parts, parameters, totals, strict=True):
        if total is not None:
            part.copy_(to_local(redistribute_like(total, parameter)))
    return connection.allreduce([flat]), list(zip(parameters, parts, strict=True))
