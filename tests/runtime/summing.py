"""Sums of gradients in another precision, term by term."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from runtime.models import assert_equal

HALF = torch.bfloat16
COUNT = 8
"""Microbatches."""


class Layer(nn.Module):
    """A linear map whose weight is dense but not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(6, 6) / 2).t())
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias)


def model_of(layers: int, dtype: torch.dtype, tied: bool) -> nn.Sequential:
    model = nn.Sequential(*(Layer() for _ in range(layers))).to(dtype)
    for layer in model:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    if tied:
        model[-1].weight = model[0].weight
    return model


def terms(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, list[Tensor]]:
    """Each microbatch's gradients; a tied parameter has one from each of its uses, as the stages compute them."""
    found: dict[str, list[Tensor]] = {}
    for one, other in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
        again = copy.deepcopy(model)
        for layer in again:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
        loss = functional.mse_loss(again(one), other)
        torch.autograd.backward(loss, torch.full_like(loss, 1 / COUNT))
        for name, parameter in again.named_parameters():
            assert parameter.grad is not None
            found.setdefault(name, []).append(parameter.grad)
    if model[-1].weight is model[0].weight:
        found["0.weight"] += found.pop(f"{len(model) - 1}.weight")
    return found


def assert_rounded_once(found: Tensor | None, wanted: list[Tensor], steps: int, name: str) -> None:
    """The sum in full precision, rounded once; then doubled, or so, in the parameter's own by the steps after."""
    total = torch.stack([each.double() for each in wanted]).sum(0).to(HALF)
    whole = total
    for _ in range(steps - 1):
        whole = whole + total
    assert_equal(found, whole, name)
