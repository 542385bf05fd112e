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

from penstock.runtime.deferred import Deferral, Grads, Record, active, tie, tie_inner
from penstock.runtime.parts import laid_as

_linear, _embedding = functional.linear, functional.embedding
_CONVOLUTIONS = {name: getattr(functional, name) for name in ("conv1d", "conv2d", "conv3d")}


def _stand_in(weight: Any) -> tuple[Deferral | None, Tensor | None]:
    """What to record into and what to put in a weight's place, if it can wait now; weights in parts do so in linear maps alone."""
    deferral = active(weight)
    found = None if deferral is None else deferral.stand_ins.get(id(weight))
    return deferral, found if type(found) is Tensor else None


def _kept(value: Tensor, out: Tensor) -> Tensor:
    """What the weight's gradient needs of the input: it alone, in the type that autocast ran the operator in."""
    return value.detach() if value.dtype is out.dtype else value.detach().to(out.dtype)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - the operator's own name
    deferral = active(weight)
    stand_in = None if deferral is None else deferral.stand_ins.get(id(weight))
    dims = input.dim()
    if deferral is None or stand_in is None or dims < 2 or input.is_nested:
        return _linear(input, weight, bias)
    bias_in = None if bias is None else deferral.stand_ins.get(id(bias))
    added, wanted = (bias, None) if bias_in is None else (bias_in, bias)
    if type(stand_in) is not Tensor:
        out = _linear(input, stand_in, added)
        return tie(out, Record(deferral, _kept(input, out), weight, wanted, _grads_in_parts))
    if dims == 2:
        out = _linear(input, stand_in, added)
        return tie(out, Record(deferral, _kept(input, out), weight, wanted, _linear_grads, fuse=_fuse_linear))
    # As for a weight that wants a gradient: one product over all rows, with the bias in it or added after as torch does.
    whole = added is not None and input.is_contiguous()
    if whole and input.requires_grad:
        out = _linear(input, stand_in, added)  # a view of the product
        tie_inner(out._base, Record(deferral, _kept(input, out), weight, wanted, _linear_grads, fuse=_fuse_linear))
        return out
    rows = input.reshape(-1, input.shape[-1])
    out = _linear(rows, stand_in, added if whole else None)
    out = tie_inner(out, Record(deferral, _kept(rows, out), weight, wanted if whole else None, _linear_grads, fuse=_fuse_linear))
    shape = [*input.shape[:-1], out.shape[-1]]
    if whole or bias is None:
        return out.view(shape)
    # A bias that is added after is summed over the gradient as it lies, in an order that only autograd knows: it does not wait.
    made: Tensor = torch.ops.aten._unsafe_view(out, shape)
    return made.add_(bias if bias.dtype == out.dtype else bias.to(out.dtype))


def _linear_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    of_bias = None if bias is None else grad.sum(0)
    if weight is None:
        return None, of_bias
    if weight.stride(1) == 1 and weight.stride(0) == weight.size(1):
        return grad.t().mm(_rows(value)), of_bias
    return _rows(value).t().mm(grad).t(), of_bias  # autograd's choice for a weight that lies any other way


def _grads_in_parts(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    """Over tensor-parallel ranks: each gradient laid out as its parameter is."""
    rows = grad.flatten(0, -2)
    of_weight = None if weight is None else laid_as(rows.t().mm(value.flatten(0, -2)), weight)
    return of_weight, None if bias is None else laid_as(rows.sum(0), bias)


def _fuse_linear(grad: Tensor, value: Tensor, total: Tensor) -> None:
    total.addmm_(grad.t(), _rows(value))


def _rows(value: Tensor) -> Tensor:
    return value if value.dim() == 2 else value.view(-1, value.shape[-1])


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
    return tie(out, Record(deferral, input, weight, None, _embedding_grads, extra=extra))


def _embedding_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    return torch.ops.aten.embedding_dense_backward(grad, value, *extra), None


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
        wanted = None if bias_in is None else bias
        return tie(out, Record(deferral, _kept(input, out), weight, wanted, _convolution_grads, extra=(stand_in, *spread, groups)))

    return convolution


def _each(size: int | Sequence[int], count: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * count if len(sizes) == 1 else sizes


def _convolution_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    stand_in, stride, padding, dilation, groups = extra
    sizes = None if bias is None else list(bias.shape)
    which = [False, True, bias is not None]
    none = [0] * len(stride)
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        grad, value, stand_in.to(value.dtype), sizes, stride, padding, dilation, False, none, groups, which
    )
    return of_weight, of_bias


def _product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`value @ weight` with a matrix of weights, or a batch of matrices as large as the value's own."""

    def product(*args: Any, **named: Any) -> Tensor:
        if len(args) != 2 or named:
            return original(*args, **named)
        value, weight = args
        deferral, stand_in = _stand_in(weight)
        if deferral is None or stand_in is None or id(value) in deferral.stand_ins:
            return original(value, weight)
        if weight.dim() == 3 and value.dim() == 3 and value.shape[0] == weight.shape[0]:
            out = original(value, stand_in)
            return tie(out, Record(deferral, _kept(value, out), weight, None, _batched_grads))
        if weight.dim() != 2 or value.dim() < 2:
            return original(value, weight)
        rows = value if value.dim() == 2 else value.reshape(-1, value.shape[-1])
        out = original(rows, stand_in)
        record = Record(deferral, _kept(rows, out), weight, None, _product_grads)
        return tie(out, record) if value.dim() == 2 else tie_inner(out, record).view(*value.shape[:-1], out.shape[-1])

    return product


def _batched_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    return value.transpose(1, 2).bmm(grad), None


def _product_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    of_bias = None if bias is None else grad.sum(0)
    if weight.stride(0) == 1 and weight.stride(1) == weight.size(0):
        return grad.t().mm(value).t(), of_bias  # autograd's choice for a weight that lies in columns
    return value.t().mm(grad), of_bias


def _sum_product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`bias + value @ weight` with a matrix of weights and a bias for its columns."""

    def sum_product(*args: Any, **named: Any) -> Tensor:
        if len(args) != 3 or named:
            return original(*args, **named)
        bias, value, weight = args
        deferral, stand_in = _stand_in(weight)
        if deferral is None or stand_in is None or bias.dim() != 1 or id(value) in deferral.stand_ins:
            return original(bias, value, weight)
        bias_in = deferral.stand_ins.get(id(bias))
        out = original(bias if bias_in is None else bias_in, value, stand_in)
        return tie(out, Record(deferral, _kept(value, out), weight, None if bias_in is None else bias, _product_grads))

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
