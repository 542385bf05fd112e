"""Passes over large matrices with one row per token, in place.

On a GPU each of them reads the matrix once or twice and writes it once, by a kernel of ours in Triton, which torch brings along there.
torch's own operations take several times as long, above all those that mix types or repeat a value along a row.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor


def take_softmax(logits: Tensor) -> Tensor:
    """Replace each row by its softmax, and return the logarithm of the sum of the exponentials of each row's logits.

    The softmax is computed in float32, or in the type of the logits if that has more digits. The logarithms are in float64: those of
    different ranks are subtracted from each other, which would cost large ones their digits. A row of nothing but -inf becomes zeros.

    >>> logits = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    >>> take_softmax(logits)
    tensor([0.6931,   -inf], dtype=torch.float64)
    >>> logits
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """
    kernels = _find_kernels(logits)
    if kernels is not None:
        totals: Tensor = kernels.take_softmax(logits)
        return totals
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = precise.amax(dim=1) if logits.shape[1] else precise.new_zeros(len(logits))
    exponentials = (precise - torch.where(largest.isneginf(), 0.0, largest)[:, None]).exp_()
    sums = exponentials.sum(dim=1)
    logits.copy_(exponentials.div_(torch.where(sums == 0, 1.0, sums)[:, None]))
    return largest.double() + sums.double().log()


def scale_rows(matrix: Tensor, factors: Tensor) -> None:
    """Multiply each row by a factor of its own."""
    kernels = _find_kernels(matrix)
    if kernels is not None:
        kernels.scale_rows(matrix, factors)
    else:
        matrix.mul_(factors[:, None])


def _find_kernels(matrix: Tensor) -> ModuleType | None:
    """Our kernels, if there are any for this matrix."""
    is_fit = matrix.is_cuda and matrix.dtype in {torch.float32, torch.bfloat16, torch.float16} and matrix.stride(1) == 1
    return _load_kernels() if is_fit else None


@cache
def _load_kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from penstock.runtime.device import row_kernels

    return row_kernels
