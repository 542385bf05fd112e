"""How tensors lie in memory."""

from __future__ import annotations

from torch import Tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, in whatever order of its dimensions."""
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != filled:
            return tensor.numel() == 0
        filled *= size
    return True


def match_layout(grad: Tensor, parameter: Tensor) -> Tensor:
    """Give a gradient the strides that autograd would: the parameter's if it fills its memory without gaps, else contiguous ones."""
    if not is_dense(parameter):
        return grad.contiguous()
    sizes = [(mine, wanted) for size, mine, wanted in zip(grad.shape, grad.stride(), parameter.stride(), strict=True) if size != 1]
    if all(mine == wanted for mine, wanted in sizes):
        return grad
    return grad.new_empty_strided(grad.shape, parameter.stride()).copy_(grad)
