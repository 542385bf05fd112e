"""Weight gradients that wait, on a GPU, against autograd's: `PYTHONPATH=src:tests python tests/gpu/split_operators.py`.

It is not part of the test suite, which needs no GPU. Most are equal to the last bit; kernels that add in no fixed order are compared
closely.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from runtime.splitting import check


class Bags(nn.Module):
    """Sums of embeddings; the indices come with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.map = nn.EmbeddingBag(50, 64, mode="mean"), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        indices = torch.arange(len(x) * 3, device=x.device).remainder(50).view(-1, 3)
        return self.map(self.bag(indices) + x)


class Pair(nn.Module):
    """A bilinear map of an input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(64, 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.tanh())


CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(64, 64), (1024, 64)),
    "linear on vectors": (nn.Linear(64, 64), (64,)),
    "layer norm": (nn.LayerNorm(64), (2048, 64)),
    "rms norm": (nn.RMSNorm(64), (2048, 64)),
    "group norm": (nn.GroupNorm(4, 64), (128, 64, 32)),
    "convolution": (nn.Conv2d(8, 16, 3), (4, 8, 16, 16)),
    "transposed convolution": (nn.ConvTranspose2d(8, 16, 3, stride=2, output_padding=1), (4, 8, 16, 16)),
    "bilinear": (Pair(), (128, 64)),
    "embedding bag": (Bags(), (128, 64)),
}


def main() -> int:
    """Check every operator in float32 and bfloat16; 1 if any differs."""
    failed = 0
    for dtype in (torch.float32, torch.bfloat16):
        for name, (made, shape) in CASES.items():
            torch.manual_seed(0)
            module = made.to("cuda", dtype)
            inputs: list[Any] = [(torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True),) for _ in range(2)]
            try:
                waited = check(module, *inputs)
                print(f"{name}, {dtype}: equal to the last bit, waited: {sorted(waited)}")
            except AssertionError as error:
                try:
                    check(module, *inputs, exact=False)
                    print(f"{name}, {dtype}: close ({error})")
                except AssertionError as other:
                    failed += 1
                    print(f"{name}, {dtype}: DIFFERS: {str(other).splitlines()[0]}")
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
