"""Our kernels for rows of logits, on a GPU, against torch's operations: `PYTHONPATH=src python tests/gpu/row_kernels.py`.

Without a GPU, Triton interprets them, wherever it is installed: the same command with `TRITON_INTERPRET=1` in front. It is not part of
the test suite, which needs neither.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from penstock.runtime.device import row_kernels
from penstock.runtime.device.rows import take_softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = ((5, 9001), (1, 1), (64, 4096), (0, 10), *([(9, 262_144 * 1024)] if DEVICE == "cuda" else []))
"""The last one has more elements than an int32 can count."""


def main() -> int:
    """Compare every type and shape; 1 if any differs by more than its last digits."""
    failed = 0
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
        for shape in SHAPES:
            if shape[1] > 1_000_000 and dtype != torch.bfloat16:
                continue
            good = all(_check(logits, tolerance) for logits in _draw_logits(shape, dtype))
            print(f"{dtype} {shape}: {'same' if good else 'DIFFERENT'}", flush=True)
            failed += not good
    return 1 if failed else 0


def _draw_logits(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Moderate ones, and if they are few, large ones and rows with -inf."""
    drawn = [torch.randn(shape, device=DEVICE, dtype=dtype)]
    if shape[0] > 4 and shape[1] < 1_000_000:
        odd = drawn[0] * 1000
        odd[2], odd[3, :-1] = -torch.inf, -torch.inf
        drawn.append(odd)
    return drawn


def _check(logits: Tensor, tolerance: float) -> bool:
    """Whether both passes give what torch's operations give, row by row, for the rows at both ends of large matrices."""
    softmax, factors = logits.clone(), torch.rand(len(logits), device=DEVICE)
    totals = row_kernels.take_softmax(softmax)
    scaled = softmax.clone()
    row_kernels.scale_rows(scaled, factors)
    good = totals.dtype == torch.float64
    for row in sorted({*range(min(len(logits), 4)), *range(max(len(logits) - 2, 0), len(logits))}):
        wanted = logits[row : row + 1].double()
        total = take_softmax(wanted)[0]
        good &= bool(torch.isclose(totals[row].double(), total, rtol=1e-6, atol=1e-6))
        good &= bool(torch.allclose(softmax[row].double(), wanted[0], rtol=tolerance, atol=1e-7))
        good &= bool(torch.allclose(scaled[row].double(), wanted[0] * factors[row], rtol=2 * tolerance, atol=1e-7))
    return good


if __name__ == "__main__":
    sys.exit(main())
