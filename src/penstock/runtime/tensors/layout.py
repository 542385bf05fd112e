"""The memory layout and precision of gradients, as autograd would choose them; gradients may be dense or sparse."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype that sums of a parameter's gradients are kept in: `Tensor.grad_dtype`, or its own if any dtype is allowed."""
    return parameter.grad_dtype or parameter.dtype


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, with its dimensions in any order."""
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != filled:
            return tensor.numel() == 0
        filled *= size
    return True


def match_layout(grad: Tensor, parameter: Tensor) -> Tensor:
    """Give a gradient the strides that autograd would: the parameter's if it is dense, else contiguous ones."""
    if not is_dense(parameter):
        return grad.contiguous()
    sizes = [(own, expected) for size, own, expected in zip(grad.shape, grad.stride(), parameter.stride(), strict=True) if size != 1]
    if all(own == expected for own, expected in sizes):
        return grad
    return grad.new_empty_strided(grad.shape, parameter.stride()).copy_(grad)


def add_gradients(one: Tensor, other: Tensor) -> Tensor:
    """Add two gradients; the sum is sparse only if both are. torch itself cannot add a dense tensor to a sparse one."""
    return other + one if one.is_sparse and not other.is_sparse else one + other


def round_gradient(total: Tensor, parameter: Tensor) -> Tensor:
    """Copy a gradient sum into a tensor with the dtype of the parameter's gradients and the strides of `match_layout`."""
    rounded = (total.coalesce() if total.is_sparse else total).to(gradient_dtype(parameter), copy=True)
    if total.is_sparse or type(total) is not Tensor or type(parameter) not in (Tensor, nn.Parameter):
        return rounded
    return match_layout(rounded, parameter)
