"""The operators whose weight gradients can be deferred: each runs with a stand-in for the weight and leaves a `DeferredOperator`.

Without an active deferral, or when called in a way that cannot be deferred, each is torch's operator itself. All run the kernels that
autograd would run, in both directions, so the numbers are the same to the last bit.

Batch norm and RNNs are left to autograd: one kernel, or one loop in C++, computes the gradients of both weights and input, so
computing them separately would do the same work twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.runtime.split_backward.deferral import (
    Deferral,
    DeferredOperator,
    Grads,
    attach,
    attach_inner,
    attach_product,
    get_deferral,
    has_saved_tensor_hooks,
    make_in_place_error,
)
from penstock.runtime.tensors.dtensor import redistribute_like
from penstock.runtime.torch_internals.lookup import check_private
from penstock.runtime.torch_internals.tensors import find_base, read_version, unsafe_view

_linear, _embedding, _embedding_bag, _bilinear = functional.linear, functional.embedding, functional.embedding_bag, functional.bilinear
_layer_norm, _group_norm, _rms_norm = functional.layer_norm, functional.group_norm, functional.rms_norm
_CONVOLUTIONS = {name: getattr(functional, name) for kind in ("conv", "conv_transpose") for name in (f"{kind}1d", f"{kind}2d", f"{kind}3d")}
_aten = torch.ops.aten
check_private(_aten, "_embedding_bag_backward", "_trilinear")
_HAS_FUSED_RMS_NORM = hasattr(_aten, "_fused_rms_norm") and hasattr(_aten, "_fused_rms_norm_backward")


def _stand_in(weight: Any) -> tuple[Deferral | None, Tensor | None]:
    """Return the active deferral and the weight's stand-in; None if it cannot be deferred. A `DTensor` can be only in linear maps."""
    deferral = get_deferral(weight)
    stand_in = None if deferral is None else deferral.stand_ins.get(id(weight))
    return deferral, stand_in if type(stand_in) is Tensor else None


def _stand_ins(weight: Any, bias: Any) -> tuple[Deferral | None, Tensor | None, Any, Any]:
    """Return the active deferral, the weight's stand-in, the bias to apply, and the bias whose gradient is deferred."""
    deferral, stand_in = _stand_in(weight)
    bias_in = None if deferral is None or bias is None else deferral.stand_ins.get(id(bias))
    return deferral, stand_in, bias if bias_in is None else bias_in, None if bias_in is None else bias


def _save_input(value: Tensor, out: Tensor) -> Tensor:
    """Return the input as the weight's gradient needs it: detached, in the dtype that autocast ran the operator in."""
    return value.detach() if value.dtype is out.dtype else value.detach().to(out.dtype)


def _is_autocast(value: Tensor) -> bool:
    """Whether autocast may change the dtype of a normalisation; on a CPU it does not."""
    return not value.is_cpu and torch.is_autocast_enabled(value.device.type)


_LINEAR_RETURNS_VIEW = find_base(_linear(torch.zeros(1, 1, 1), torch.zeros(1, 1, requires_grad=True), torch.zeros(1))) is not None
"""Whether a linear map with a bias returns a view of its product if its input has more than two dimensions: up to torch 2.13 it does.
It matters when the output is hooked and then changed in place."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - the operator's own name
    deferral = get_deferral(weight)
    stand_in = None if deferral is None else deferral.stand_ins.get(id(weight))
    dims = input.dim()
    if deferral is None or stand_in is None or dims < 1 or input.is_nested:
        return _linear(input, weight, bias)
    bias_in = None if bias is None else deferral.stand_ins.get(id(bias))
    added, wanted = (bias, None) if bias_in is None else (bias_in, bias)
    if type(stand_in) is not Tensor:
        out = _linear(input, stand_in, added)
        return attach(out, DeferredOperator(deferral, _save_input(input, out), weight, wanted, _dtensor_linear_grads))
    if dims == 2:
        out = _linear(input, stand_in, added)
        return attach(out, DeferredOperator(deferral, _save_input(input, out), weight, wanted, _linear_grads, fuse=_fuse_linear))
    # As torch does for a weight that requires a gradient: one product over all rows, with the bias fused or added afterwards.
    whole = added is not None and input.is_contiguous()
    if whole and input.requires_grad:
        out = _linear(input, stand_in, added)
        attach_product(out, DeferredOperator(deferral, _save_input(input, out), weight, wanted, _linear_grads, fuse=_fuse_linear))
        return out
    rows = input.reshape(-1, input.shape[-1])
    out = _linear(rows, stand_in, added if whole else None)
    out = attach_inner(
        out, DeferredOperator(deferral, _save_input(rows, out), weight, wanted if whole else None, _linear_grads, fuse=_fuse_linear)
    )
    shape = [*input.shape[:-1], out.shape[-1]]
    product: Tensor = out.view(shape) if whole and _LINEAR_RETURNS_VIEW else unsafe_view(out, shape)
    if whole or bias is None:
        return product
    # The gradient of a bias added afterwards is summed in an order that only autograd knows, so it is not deferred.
    return product.add_(bias if bias.dtype == out.dtype else bias.to(out.dtype))


def _linear_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    of_bias = None if bias is None else grad.sum(0)
    if weight is None:
        return None, of_bias
    if weight.stride(1) == 1 and weight.stride(0) == weight.size(1):
        return grad.t().mm(_flatten_rows(value)), of_bias
    return _flatten_rows(value).t().mm(grad).t(), of_bias  # as autograd does for a weight with other strides


def _dtensor_linear_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    """Compute gradients over tensor-parallel ranks, each distributed as its parameter is."""
    rows = grad.flatten(0, -2)
    of_weight = None if weight is None else redistribute_like(rows.t().mm(value.flatten(0, -2)), weight)
    return of_weight, None if bias is None else redistribute_like(rows.sum(0), bias)


def _fuse_linear(grad: Tensor, value: Tensor, total: Tensor) -> None:
    total.addmm_(grad.t(), _flatten_rows(value))


def _flatten_rows(value: Tensor) -> Tensor:
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
    return attach(out, DeferredOperator(deferral, input, weight, None, _embedding_grads, extra=extra))


def _embedding_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    return torch.ops.aten.embedding_dense_backward(grad, value, *extra), None


_MODES = {"sum": 0, "mean": 1, "max": 2}


def embedding_bag(  # noqa: PLR0917 - the operator's own signature
    input: Tensor,  # noqa: A002
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    deferral, stand_in = _stand_in(weight)
    plain = type(input) is Tensor and input.dim() == (2 if offsets is None else 1) and mode in _MODES
    plain = plain and not (sparse or (scale_grad_by_freq and mode == "max")) and max_norm is None and per_sample_weights is None
    if deferral is None or stand_in is None or not plain:
        rest = (scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx)
        return _embedding_bag(input, weight, offsets, max_norm, norm_type, *rest)
    indices = input
    if offsets is None:
        offsets = torch.arange(0, input.numel(), input.size(1), dtype=input.dtype, device=input.device)
        indices, include_last_offset = input.reshape(-1), False
    rows = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx % rows
    out, *bags = _aten._embedding_bag(
        stand_in, indices, offsets, scale_grad_by_freq, _MODES[mode], False, None, include_last_offset, padding
    )
    extra = (offsets, *bags, rows, scale_grad_by_freq, _MODES[mode], False, None, padding)
    return attach(out, DeferredOperator(deferral, indices, weight, None, _embedding_bag_grads, extra=extra))


def _embedding_bag_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    return _aten._embedding_bag_backward(grad, value, *extra), None


def _convolution(original: Callable[..., Tensor], transposed: bool) -> Callable[..., Tensor]:
    """Wrap a convolution. A transposed one has an output padding too, and another order of arguments."""
    names = ("stride", "padding", "output_padding", "groups", "dilation") if transposed else ("stride", "padding", "dilation", "groups")

    def convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **named: Any) -> Tensor:  # noqa: A002
        options = {
            "stride": 1,
            "padding": 0,
            "dilation": 1,
            "output_padding": 0,
            "groups": 1,
            **dict(zip(names, args, strict=False)),
            **named,
        }
        deferral, stand_in, added, wanted = _stand_ins(weight, bias)
        if deferral is None or stand_in is None or isinstance(options["padding"], str) or input.dim() != weight.dim():
            return original(input, weight, bias, *args, **named)
        out = original(input, stand_in, added, *args, **named)
        groups = options.pop("groups")
        sizes = {name: _expand_sizes(size, weight.dim() - 2) for name, size in options.items()}
        extra = (stand_in, sizes["stride"], sizes["padding"], sizes["dilation"], transposed, sizes["output_padding"], groups)
        return attach(out, DeferredOperator(deferral, _save_input(input, out), weight, wanted, _convolution_grads, extra=extra))

    return convolution


def _expand_sizes(size: int | Sequence[int], count: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * count if len(sizes) == 1 else sizes


def _convolution_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    stand_in, *shape = extra
    sizes = None if bias is None else list(bias.shape)
    which = [False, True, bias is not None]
    _, of_weight, of_bias = _aten.convolution_backward(grad, value, stand_in.to(value.dtype), sizes, *shape, which)
    return of_weight, of_bias


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    deferral, stand_in = _stand_in(weight)
    plain = type(input1) is Tensor and type(input2) is Tensor and input1.shape[:-1] == input2.shape[:-1]
    if deferral is None or stand_in is None or not plain or _is_autocast(input1) or has_saved_tensor_hooks():
        return _bilinear(input1, input2, weight, bias)
    first, second = (value.reshape(-1, value.shape[-1]) for value in (input1, input2))
    out = _aten._trilinear(first, stand_in, second, [1, 3], [0], [1, 2], [2, 3])
    other = second.detach()
    out = attach_inner(out, DeferredOperator(deferral, first.detach(), weight, None, _bilinear_grads, extra=(other, read_version(other))))
    out = out.view(*input1.shape[:-1], out.shape[-1])
    return out if bias is None else out + bias  # a separate operator in torch too, and left to autograd


def _bilinear_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    other, version = extra
    if read_version(other) != version:
        raise make_in_place_error(other)
    return _aten._trilinear(value, grad, other, [1, 3], [2, 3], [1, 2], [0]), None


def _product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `value @ weight` with a weight matrix, or with as many weight matrices as the value has."""

    def product(*args: Any, **named: Any) -> Tensor:
        if len(args) != 2 or named:
            return original(*args, **named)
        value, weight = args
        deferral, stand_in = _stand_in(weight)
        if deferral is None or stand_in is None or id(value) in deferral.stand_ins:
            return original(value, weight)
        if weight.dim() == 3 and value.dim() == 3 and value.shape[0] == weight.shape[0]:
            out = original(value, stand_in)
            return attach(out, DeferredOperator(deferral, _save_input(value, out), weight, None, _batched_grads))
        if weight.dim() != 2 or value.dim() < 2:
            return original(value, weight)
        rows = value if value.dim() == 2 else value.reshape(-1, value.shape[-1])
        out = original(rows, stand_in)
        deferred = DeferredOperator(deferral, _save_input(rows, out), weight, None, _product_grads)
        if value.dim() == 2:
            return attach(out, deferred)
        reshaped: Tensor = unsafe_view(attach_inner(out, deferred), [*value.shape[:-1], out.shape[-1]])
        return reshaped

    return product


def _batched_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    return value.transpose(1, 2).bmm(grad), None


def _product_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    of_bias = None if bias is None else grad.sum(0)
    if weight.stride(0) == 1 and weight.stride(1) == weight.size(0):
        return grad.t().mm(value).t(), of_bias  # as autograd does for a weight in column-major order
    return value.t().mm(grad), of_bias


def _sum_product(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `bias + value @ weight` with a weight matrix and a bias for its columns."""

    def sum_product(*args: Any, **named: Any) -> Tensor:
        if len(args) != 3 or named:
            return original(*args, **named)
        bias, value, weight = args
        deferral, stand_in, added, wanted = _stand_ins(weight, bias)
        if deferral is None or stand_in is None or bias.dim() != 1 or id(value) in deferral.stand_ins:
            return original(bias, value, weight)
        out = original(added, value, stand_in)
        return attach(out, DeferredOperator(deferral, _save_input(value, out), weight, wanted, _product_grads))

    return sum_product


# Normalisations -------------------------------------------------------------------------------------------------------


def _make_norm_stand_ins(input: Tensor, weight: Any, bias: Any) -> tuple[Deferral | None, Tensor | None, Any, Any]:  # noqa: A002
    """Return `_stand_ins` for a normalisation whose weight gradients are worth deferring."""
    pays = type(input) is Tensor and input.numel() >= SMALLEST_NORM and not _is_autocast(input)
    return _stand_ins(weight, bias) if pays else (None, None, None, None)


SMALLEST_NORM = 1 << 16
"""The fewest elements of an input for which a normalisation's weight gradients are deferred: deferring costs some 10 microseconds, more
than computing the gradients of a smaller one."""


def layer_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    deferral, stand_in, added, wanted = _make_norm_stand_ins(input, weight, bias)
    if deferral is None or stand_in is None:
        return _layer_norm(input, normalized_shape, weight, bias, eps)
    out, mean, deviation = torch.native_layer_norm(input, normalized_shape, stand_in, added, eps)
    extra = normalized_shape, mean, deviation, stand_in, None if wanted is None else added
    return attach(out, DeferredOperator(deferral, input.detach(), weight, wanted, _layer_norm_grads, extra=extra))


def _layer_norm_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    _, of_weight, of_bias = _aten.native_layer_norm_backward(grad, value, *extra, [False, True, bias is not None])
    return of_weight, of_bias


def group_norm(
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    deferral, stand_in, added, wanted = _make_norm_stand_ins(input, weight, bias)
    if deferral is None or stand_in is None or input.dim() < 2 or input.numel() <= num_groups or not input.is_contiguous():
        # With channels last, torch's kernel for a CPU crashes if the input's gradient is not asked for.
        return _group_norm(input, num_groups, weight, bias, eps)
    stand_in, added = stand_in.contiguous(), None if added is None else added.contiguous()
    rows, channels = input.shape[:2]
    sizes = rows, channels, input.numel() // (rows * channels), num_groups
    out, mean, deviation = torch.native_group_norm(input, stand_in, added, *sizes, eps)
    extra = mean, deviation, stand_in, *sizes
    return attach(out, DeferredOperator(deferral, input.detach(), weight, wanted, _group_norm_grads, extra=extra))


def _group_norm_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    which = [False, True, bias is not None]
    _, of_weight, of_bias = _aten.native_group_norm_backward(grad.contiguous(), value, *extra, which)
    return of_weight, of_bias


def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    deferral, stand_in, _, _ = _make_norm_stand_ins(input, weight, None)
    if deferral is None or stand_in is None or stand_in.dtype is not input.dtype:
        return _rms_norm(input, normalized_shape, weight, eps)
    if input.is_cuda and _HAS_FUSED_RMS_NORM:
        out, deviation = _aten._fused_rms_norm(input, normalized_shape, stand_in, eps)
        extra = normalized_shape, deviation, stand_in
        return attach(out, DeferredOperator(deferral, input.detach(), weight, None, _fused_rms_norm_grads, extra=extra))
    if not input.is_cpu or input.dtype not in (torch.float32, torch.float64):  # torch computes these in float32 and rounds once at the end
        return _rms_norm(input, normalized_shape, weight, eps)
    normal = _rms_norm(input, normalized_shape, None, eps)
    return attach(normal * stand_in, DeferredOperator(deferral, normal.detach(), weight, None, _scale_grads))


def _fused_rms_norm_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    return _aten._fused_rms_norm_backward(grad, value, *extra, [False, True])[1], None


def _scale_grads(grad: Tensor, value: Tensor, weight: Any, bias: Any, extra: Any) -> Grads:
    return (grad * value).sum_to_size(weight.shape), None


FUNCTIONAL: dict[str, tuple[Any, Any]] = {
    "linear": (_linear, linear),
    "embedding": (_embedding, embedding),
    "embedding_bag": (_embedding_bag, embedding_bag),
    "bilinear": (_bilinear, bilinear),
    "layer_norm": (_layer_norm, layer_norm),
    "group_norm": (_group_norm, group_norm),
    "rms_norm": (_rms_norm, rms_norm),
    **{name: (original, _convolution(original, "transpose" in name)) for name, original in _CONVOLUTIONS.items()},
}
"""The operators of `torch.nn.functional`, each with its wrapper."""

WATCHED: dict[Any, Callable[..., Tensor]] = {
    **dict(FUNCTIONAL.values()),
    **{
        operator: _product(operator)
        for operator in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
    },
    **{operator: _sum_product(operator) for operator in (torch.addmm, Tensor.addmm)},
}
"""The operators that a watched parameter intercepts, each with its wrapper."""
