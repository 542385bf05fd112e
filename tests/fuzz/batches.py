"""The batch of each call, and the cutting of batches, written apart from the library's."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuzz.case import Case
from fuzz.trees import WIDTH, Box, Packet, Pair, map_tensors, read

Make = Callable[[Tensor, Tensor], tuple[Any, ...]]

INPUTS: dict[str, Make] = {
    "tensor": lambda x, m: (x,),
    "two": lambda x, m: (x, m),
    "list": lambda x, m: ([x],),
    "tensor_and_list": lambda x, m: (x, [m]),
    "dict": lambda x, m: ({"a": x},),
    "two_dicts": lambda x, m: ({"a": x}, {"b": m}),
    "tuple": lambda x, m: ((x,),),
    "deep": lambda x, m: ({"b": [m, (x, 2.0)], "a": x},),
    "named": lambda x, m: (Pair(x, m),),
    "packet": lambda x, m: (Packet(x, [m]),),
    "plain": lambda x, m: (x, 2.5, "ab", None),
    "mask": lambda x, m: (x, m > 0),
    "integers": lambda x, m: ((x[:, :1] * 4).long(),),
    "whole": lambda x, m: (x, m[0]),
    "second_dim": lambda x, m: (x.t().contiguous(),),
    "box": lambda x, m: (Box(x),),
    "box_beside": lambda x, m: (x, Box(m)),
    "userdict": lambda x, m: (x, UserDict(a=m)),
    "array": lambda x, m: (x, m.numpy()),
}
"""The arguments of a step, by name, made of two tensors of shape (batch, WIDTH)."""

TARGETS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda y, m: y,
    "list": lambda y, m: [y],
    "tuple": lambda y, m: (y,),
    "dict": lambda y, m: {"y": y},
    "tuple_of_dict": lambda y, m: ({"y": y},),
    "two": lambda y, m: (y, m),
    "named": lambda y, m: Pair(y, [m * 0.5]),
    "plain": lambda y, m: {"y": y, "factor": 2.0, "name": "a"},
    "packet": lambda y, m: Packet([y], m),
    "box": lambda y, m: Box(y),
    "userdict": lambda y, m: UserDict(y=y),
    "array": lambda y, m: y.numpy(),
}
REFUSED_BATCHES = ("box", "box_beside", "userdict", "array")
"""Inputs and targets that may be refused: they hide tensors, or hold arrays, which would not be cut."""

DIMS: dict[str, Any] = {"whole": (0, None), "second_dim": 1}
"""The batch dimensions of inputs that are not cut along the first."""


@dataclass
class Batch:
    """What one call is given."""

    args: tuple[Any, ...]
    target: Any
    kwargs: dict[int, dict[str, Any]]
    sizes: list[int]
    """The elements of each microbatch."""
    dims: Any
    """The batch dimension of the arguments, or one per argument."""
    ready: bool
    """Whether it is given as ready microbatches, each with memory of its own."""

    def cut_args(self) -> list[tuple[Any, ...]]:
        """The arguments of each microbatch."""
        dims = self.dims if isinstance(self.dims, tuple) else (self.dims,) * len(self.args)
        columns = [self._cut(arg, dim) for arg, dim in zip(self.args, dims, strict=True)]
        return list(zip(*columns, strict=True))

    def cut_target(self) -> list[Any]:
        """The target of each microbatch."""
        return self._cut(self.target, 0)

    def cut_kwargs(self) -> dict[int, list[dict[str, Any]]]:
        """The keyword arguments of each stage, by microbatch."""
        return {stage: self._cut(given, 0) for stage, given in self.kwargs.items()}

    def _cut(self, value: Any, dim: int | None) -> list[Any]:
        if dim is None:
            return [value] * len(self.sizes)

        def piece(tensor: Tensor, number: int) -> Tensor:
            part = torch.split(tensor, self.sizes, dim)[number]
            return part.clone() if self.ready else part

        return [map_tensors(partial(piece, number=number), value) for number in range(len(self.sizes))]


def even_sizes(total: int, count: int) -> list[int]:
    """As even as can be, the larger ones first."""
    return [total // count + (number < total % count) for number in range(count)]


def count_of(case: Case, call: str) -> int:
    """The microbatches of a call."""
    return case.microbatches + (call == "more")


def make_batch(case: Case, number: int, call: str) -> Batch:
    """The batch of the call with this number in the script: the same on every rank and in the plain loop."""
    generator = torch.Generator().manual_seed(1000 * case.number + number)
    count = count_of(case, call)
    sizes = [2 + (k + number) % 3 for k in range(count)] if call == "list" else even_sizes(2 * count + case.extra, count)
    total, dtype = sum(sizes), getattr(torch, case.dtype)

    def draw(width: int = WIDTH) -> Tensor:
        return torch.randn(total, width, generator=generator).to(dtype)

    args = INPUTS[case.inputs](draw(), draw())
    target = None if case.loss in ("alone", "output") else TARGETS[case.target](draw(), draw())
    kwargs = {stage: {"scale": draw(1)} for stage in case.kwargs}
    return Batch(args, target, kwargs, sizes, DIMS.get(case.inputs, 0), ready=call == "list")


def join(values: list[Any], dim: int) -> Any:
    """Outputs of microbatches as the pipeline gives them back: tensors joined, single numbers stacked, other values in a list."""
    first = values[0]
    if isinstance(first, dict):
        return {key: join([value[key] for value in values], dim) for key in first}
    if isinstance(first, Packet):
        parts = zip(*([value.value, value.other] for value in values), strict=True)
        return Packet(*(join(list(column), dim) for column in parts))
    if isinstance(first, (tuple, list)):
        joined = [join(list(column), dim) for column in zip(*values, strict=True)]
        return Pair(*joined) if isinstance(first, Pair) else type(first)(joined)
    if not isinstance(first, Tensor):
        return values
    if first.dim() == 0:
        return torch.stack(values)
    shapes = {tuple(size for axis, size in enumerate(value.shape) if axis != dim) for value in values}
    return torch.cat(values, dim) if len(shapes) == 1 and dim < first.dim() else values


# The loss -------------------------------------------------------------------------------------------------------------


class MeanSquares:
    """The loss of an output and a target of any structure, by mean or sum."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def __call__(self, output: Any, target: Any) -> Tensor:
        apart = (read(output) - read(target)).square()
        return apart.mean() if self.reduction == "mean" else apart.sum()


class Alone(MeanSquares):
    """A loss that needs no target."""

    def __call__(self, output: Any) -> Tensor:  # type: ignore[override]
        apart = read(output).square()
        return apart.mean() if self.reduction == "mean" else apart.sum()


class Adaptive(MeanSquares):
    """A loss that is scaled by the size of a weight's gradient, for which it asks autograd."""

    def __init__(self, reduction: str, weight: Tensor | None) -> None:
        super().__init__(reduction)
        self.weight = weight

    def __call__(self, output: Any, target: Any) -> Tensor:
        loss = super().__call__(output, target)
        if self.weight is None or not torch.is_grad_enabled():
            return loss
        (grad,) = torch.autograd.grad(loss, self.weight, retain_graph=True, allow_unused=True)
        return loss * (2.0 if grad is None else 1 / (1 + grad.norm().detach()))


def make_loss(case: Case, last: torch.nn.Module) -> Any:
    """The loss function of a case, None if the last stage gives the loss itself."""
    if case.loss == "output":
        return None
    if case.loss == "alone":
        return Alone(case.reduction)
    if case.loss == "adaptive":
        trained = [parameter for parameter in last.parameters() if parameter.requires_grad]
        return Adaptive(case.reduction, trained[0] if trained else None)
    return MeanSquares(case.reduction)


def weigh(target: Any) -> float:
    """How much a microbatch counts: how many elements of its target are positive in the first column."""
    return float((read(target)[:, 0] > 0).sum())
