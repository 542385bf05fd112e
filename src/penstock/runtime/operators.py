"""The operators whose weight gradients can wait: each runs as it would, with a stand-in for the weight, and leaves a record.

Called where no deferral is active, or in a way that cannot wait, each is the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.runtime.deferred import Record, active

_linear, _embedding = functional.linear, functional.embedding
_CONVOLUTIONS = {name: getattr(functional, name) for name in ("conv1d", "conv2d", "conv3d")}


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - the operator's own name
    deferral, stand_ins = active()
    stand_in = stand_ins.get(id(weight))
    if deferral is None or stand_in is None:
        return _linear(input, weight, bias)
    bias_in = stand_ins.get(id(bias))
    out = _apply_linear(input, stand_in, bias if bias_in is None else bias_in)
    targets: Any = (weight, bias if bias_in is not None else None)
    return deferral.add(out, Record(_linear_grads, targets, input.detach(), fuse=_fuse_linear))


def _apply_linear(value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The operator as it runs for a weight that wants a gradient: one product over all rows, not a batch of them."""
    dims = value.dim()
    if dims <= 2 or (dims == 3 and bias is not None and value.is_contiguous()):
        return _linear(value, weight, bias)
    out = _linear(value.reshape(-1, value.shape[-1]), weight).view(*value.shape[:-1], -1)
    return out if bias is None else out + bias


def _linear_grads(grad: Tensor, value: Tensor, targets: tuple[Any, ...], extra: Any) -> tuple[Tensor | None, ...]:
    if grad.dim() != 2:
        grad, value = grad.reshape(-1, grad.shape[-1]), value.reshape(-1, value.shape[-1])
    return None if targets[0] is None else grad.t().mm(value), None if targets[1] is None else grad.sum(0)


def _fuse_linear(grad: Tensor, value: Tensor, targets: tuple[Any, ...]) -> bool:
    total = targets[0].grad
    if total is None or total.dtype != grad.dtype:
        return False
    total.addmm_(grad.reshape(-1, grad.shape[-1]).t(), value.reshape(-1, value.shape[-1]))
    return True


def embedding(  # noqa: PLR0917 - the operator's own signature
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    deferral, stand_ins = active()
    stand_in = stand_ins.get(id(weight))
    if deferral is None or stand_in is None or sparse or max_norm is not None:
        return _embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    out = _embedding(input, stand_in, padding_idx, None, norm_type, scale_grad_by_freq)
    rows = weight.shape[0]
    extra = (rows, -1 if padding_idx is None else padding_idx % rows, scale_grad_by_freq)
    return deferral.add(out, Record(_embedding_grads, (weight,), input, extra))  # type: ignore[arg-type]


def _embedding_grads(grad: Tensor, value: Tensor, targets: tuple[Any, ...], extra: Any) -> tuple[Tensor | None, ...]:
    return (torch.ops.aten.embedding_dense_backward(grad, value, *extra),)


def _convolution(name: str) -> Callable[..., Tensor]:
    original = _CONVOLUTIONS[name]

    def convolution(  # noqa: PLR0917 - the operator's own signature
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        deferral, stand_ins = active()
        stand_in = stand_ins.get(id(weight))
        if deferral is None or stand_in is None or isinstance(padding, str) or input.dim() != weight.dim():
            made: Tensor = original(input, weight, bias, stride, padding, dilation, groups)
            return made
        bias_in = stand_ins.get(id(bias))
        out = original(input, stand_in, bias if bias_in is None else bias_in, stride, padding, dilation, groups)
        spread = [_each(size, weight.dim() - 2) for size in (stride, padding, dilation)]
        targets: Any = (weight, bias if bias_in is not None else None)
        return deferral.add(out, Record(_convolution_grads, targets, input.detach(), (stand_in, *spread, groups)))

    return convolution


def _each(size: int | Sequence[int], count: int) -> list[int]:
    return [size] * count if isinstance(size, int) else list(size)


def _convolution_grads(grad: Tensor, value: Tensor, targets: tuple[Any, ...], extra: Any) -> tuple[Tensor | None, ...]:
    weight, stride, padding, dilation, groups = extra
    bias = targets[1]
    made = torch.ops.aten.convolution_backward(
        grad,
        value,
        weight.to(value.dtype),
        None if bias is None else list(bias.shape),
        stride,
        padding,
        dilation,
        False,
        [0] * len(stride),
        groups,
        [False, True, bias is not None],
    )
    return made[1], made[2] if bias is not None else None


def _product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`value @ weight` with a matrix of weights, or a batch of matrices as large as the value's own."""

    def product(value: Any, weight: Any, *rest: Any, **named: Any) -> Tensor:
        deferral, stand_ins = active()
        stand_in = stand_ins.get(id(weight))
        if deferral is None or stand_in is None or rest or named or id(value) in stand_ins:
            return original(value, weight, *rest, **named)
        batched = weight.dim() == 3 and value.dim() == 3 and value.shape[0] == weight.shape[0]
        if not batched and (weight.dim() != 2 or value.dim() < 2):
            return original(value, weight)
        if batched or value.dim() == 2:
            out = original(value, stand_in)
        else:
            out = original(value.reshape(-1, value.shape[-1]), stand_in).view(*value.shape[:-1], -1)
        return deferral.add(out, Record(_batched_grads if batched else _product_grads, (weight,), value.detach()))

    return product


def _batched_grads(grad: Tensor, value: Tensor, targets: tuple[Any, ...], extra: Any) -> tuple[Tensor | None, ...]:
    return (value.transpose(1, 2).bmm(grad),)


def _product_grads(grad: Tensor, value: Tensor, targets: tuple[Any, ...], extra: Any) -> tuple[Tensor | None, ...]:
    return (value.reshape(-1, value.shape[-1]).t().mm(grad.reshape(-1, grad.shape[-1])),)


FUNCTIONAL: dict[str, tuple[Any, Any]] = {
    "linear": (_linear, linear),
    "embedding": (_embedding, embedding),
    **{name: (original, _convolution(name)) for name, original in _CONVOLUTIONS.items()},
}
"""Of `torch.nn.functional`: each operator and its wrapper."""

WATCHED: dict[Any, Callable[..., Tensor]] = {
    **dict(FUNCTIONAL.values()),
    **{each: _product(each) for each in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)},
}
"""What a watched parameter puts in an operator's place."""
