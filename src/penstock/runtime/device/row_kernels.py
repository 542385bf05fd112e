"""The passes of `rows` as kernels in Triton, for matrices of float32, bfloat16 or float16. Imported only on a GPU."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from penstock.runtime.device.gpu import cuda

_BLOCK = 4096
"""Columns that a program looks at together."""
_WARPS = 8


def take_softmax(logits: Tensor) -> Tensor:
    rows, columns = logits.shape
    largest, sums = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    if rows:
        with cuda.device_of(logits):  # Triton launches on the current device, whichever the tensors are on
            _softmax_kernel[rows,](logits, largest, sums, logits.stride(0), columns, BLOCK=_BLOCK, num_warps=_WARPS)
    return largest.double() + sums.double().log()


def scale_rows(matrix: Tensor, factors: Tensor) -> None:
    rows, columns = matrix.shape
    if rows:
        with cuda.device_of(matrix):
            _scale_kernel[rows,](matrix, factors.contiguous(), matrix.stride(0), columns, BLOCK=_BLOCK, num_warps=_WARPS)


@triton.jit
def _softmax_kernel(logits, tops, sums, stride, columns, BLOCK: tl.constexpr):
    """One row. Each lane keeps the largest logit and the sum of its columns, so that one reading is enough for both."""
    row = tl.program_id(0).to(tl.int64)
    begin = logits + row * stride
    lanes = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -3.4e38, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        places = first + lanes
        values = tl.load(begin + places, mask=places < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, values)
        total = total * tl.exp(largest - higher) + tl.exp(values - higher)
        largest = higher
    top = tl.max(largest, axis=0)
    sum_of_row = tl.sum(total * tl.exp(largest - top), axis=0)
    tl.store(tops + row, top)
    tl.store(sums + row, sum_of_row)
    divisor = tl.where(sum_of_row == 0.0, 1.0, sum_of_row)
    for first in range(0, columns, BLOCK):
        places = first + lanes
        values = tl.load(begin + places, mask=places < columns, other=0.0).to(tl.float32)
        tl.store(begin + places, (tl.exp(values - top) / divisor).to(logits.dtype.element_ty), mask=places < columns)


@triton.jit
def _scale_kernel(matrix, factors, stride, columns, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    begin = matrix + row * stride
    factor = tl.load(factors + row).to(tl.float32)
    for first in range(0, columns, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(begin + places, mask=places < columns, other=0.0).to(tl.float32)
        tl.store(begin + places, (values * factor).to(matrix.dtype.element_ty), mask=places < columns)
