"""The operators whose weight gradients can wait: each runs as it would, with a stand-in for the weight, and leaves a record.

Called where no deferral is active, or in a way that cannot wait, each is the operator itself. Each runs the very kernels that
autograd would have run, in both directions, so that the numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.runtime.deferred import Deferral, Record, Targets, active, tie, tie_inner

Grads = tuple[Tensor | None, ...]

_linear, _embedding = functional.linear, functional.embedding
_CONVOLUTIONS = {name: getattr(functional, name) for name in ("conv1d", "conv2d", "conv3d")}


def _stand_in(weight: Any) -> tuple[Deferral | None, Tensor | None]:
    """What to record into and what to put in a weight's place, if it can wait now."""
    deferral = active()
    return deferral, None if deferral is None else deferral.stand_ins.get(id(weight))


def _kept(value: Tensor, out: Tensor) -> Tensor:
    """What the weight's gradient needs of the input: it alone, in the type that autocast ran the operator in."""
    value = value.detach()
    return value if value.dtype == out.dtype else value.to(out.dtype)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - the operator's own name
    deferral, stand_in = _stand_in(weight)
    dims = input.dim()
    if deferral is None or stand_in is None or dims < 2:
        return _linear(input, weight, bias)
    bias_in = None if bias is None else deferral.stand_ins.get(id(bias))
    added = bias if bias_in is None else bias_in
    targets: Any = (weight, None if bias_in is None else bias)
    if dims == 2:
        out = _linear(input, stand_in, added)
        return tie(out, Record(deferral, _linear_grads, targets, _kept(input, out), None, _fuse_linear))
    # As for a weight that wants a gradient: one product over all rows, with the bias in it or added after as torch does.
    whole = dims == 3 and added is not None and input.is_contiguous()
    rows = input.reshape(-1, input.shape[-1])
    out = _linear(rows, stand_in, added if whole else None)
    out = tie_inner(out, Record(deferral, _linear_grads, targets, _kept(rows, out), None, _fuse_linear))
    if not whole and added is not None:
        out.add_(added if added.dtype == out.dtype else added.to(out.dtype))
    return out.view(input.shape[0], input.shape[1], -1) if dims == 3 else out.view(*input.shape[:-1], -1)


def _linear_grads(grad: Tensor, value: Tensor, targets: Targets, extra: Any) -> Grads:
    return None if targets[0] is None else grad.t().mm(value), None if targets[1] is None else grad.sum(0)


def _fuse_linear(grad: Tensor, value: Tensor, total: Tensor) -> None:
    total.addmm_(grad.t(), value)


def embedding(  # noqa: PLR0917 - the operator's own signature
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    deferral, stand_in = _stand_in(weight)
    if deferral is None or stand_in is None or sparse or max_norm is not None:
        return _embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    out = _embedding(input, stand_in, padding_idx, None, norm_type, scale_grad_by_freq)
    rows = weight.shape[0]
    extra = (rows, -1 if padding_idx is None else padding_idx % rows, scale_grad_by_freq)
    return tie(out, Record(deferral, _embedding_grads, (weight,), input, extra))  # type: ignore[arg-type]


def _embedding_grads(grad: Tensor, value: Tensor, targets: Targets, extra: Any) -> Grads:
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
        deferral, stand_in = _stand_in(weight)
        if deferral is None or stand_in is None or isinstance(padding, str) or input.dim() != weight.dim():
            made: Tensor = original(input, weight, bias, stride, padding, dilation, groups)
            return made
        bias_in = None if bias is None else deferral.stand_ins.get(id(bias))
        out = original(input, stand_in, bias if bias_in is None else bias_in, stride, padding, dilation, groups)
        spread = [_each(size, weight.dim() - 2) for size in (stride, padding, dilation)]
        targets: Any = (weight, None if bias_in is None else bias)
        return tie(out, Record(deferral, _convolution_grads, targets, _kept(input, out), (stand_in, *spread, groups)))

    return convolution


def _each(size: int | Sequence[int], count: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * count if len(sizes) == 1 else sizes


def _convolution_grads(grad: Tensor, value: Tensor, targets: Targets, extra: Any) -> Grads:
    weight, stride, padding, dilation, groups = extra
    bias = targets[1]
    sizes = None if bias is None else list(bias.shape)
    which = [False, True, bias is not None]
    none = [0] * len(stride)
    made = torch.ops.aten.convolution_backward(
        grad, value, weight.to(value.dtype), sizes, stride, padding, dilation, False, none, groups, which
    )
    return made[1], made[2] if bias is not None else None


def _product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`value @ weight` with a matrix of weights, or a batch of matrices as large as the value's own."""

    def product(*args: Any, **named: Any) -> Tensor:
        value, weight = args if len(args) == 2 and not named else (None, None)
        deferral, stand_in = _stand_in(weight)
        if deferral is None or stand_in is None or id(value) in deferral.stand_ins:
            return original(*args, **named)
        if weight.dim() == 3 and value.dim() == 3 and value.shape[0] == weight.shape[0]:
            out = original(value, stand_in)
            return tie(out, Record(deferral, _batched_grads, (weight,), _kept(value, out)))
        if weight.dim() != 2 or value.dim() < 2:
            return original(value, weight)
        rows = value if value.dim() == 2 else value.reshape(-1, value.shape[-1])
        out = original(rows, stand_in)
        record = Record(deferral, _product_grads, (weight,), _kept(rows, out))
        return tie(out, record) if value.dim() == 2 else tie_inner(out, record).view(*value.shape[:-1], -1)

    return product


def _batched_grads(grad: Tensor, value: Tensor, targets: Targets, extra: Any) -> Grads:
    return (value.transpose(1, 2).bmm(grad),)


def _product_grads(grad: Tensor, value: Tensor, targets: Targets, extra: Any) -> Grads:
    return None if targets[0] is None else value.t().mm(grad), *(grad.sum(0) for _ in targets[1:])


def _sum_product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`bias + value @ weight` with a matrix of weights and a bias for its columns."""

    def sum_product(*args: Any, **named: Any) -> Tensor:
        bias, value, weight = args if len(args) == 3 and not named else (None, None, None)
        deferral, stand_in = _stand_in(weight)
        if deferral is None or stand_in is None or bias.dim() != 1 or id(value) in deferral.stand_ins:
            return original(*args, **named)
        bias_in = deferral.stand_ins.get(id(bias))
        out = original(bias if bias_in is None else bias_in, value, stand_in)
        targets = (weight,) if bias_in is None else (weight, bias)
        return tie(out, Record(deferral, _product_grads, targets, _kept(value, out)))

    return sum_product


FUNCTIONAL: dict[str, tuple[Any, Any]] = {
    "linear": (_linear, linear),
    "embedding": (_embedding, embedding),
    **{name: (original, _convolution(name)) for name, original in _CONVOLUTIONS.items()},
}
"""Of `torch.nn.functional`: each operator and its wrapper."""

WATCHED: dict[Any, Callable[..., Tensor]] = {
    **dict(FUNCTIONAL.values()),
    **{each: _product(each) for each in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)},
    **{each: _sum_product(each) for each in (torch.addmm, Tensor.addmm)},
}
"""What a watched parameter puts in an operator's place."""
