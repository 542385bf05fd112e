"""Deferred weight gradients have the strides that autograd gives them, on which fused optimizers rely."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline, launch
from runtime.models import loop_step
from runtime.splitting import Using, check, in_one, in_two, names, twice, wants

ON_ITS_SIDE: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], Callable[[], Tensor]]] = {
    "linear": (functional.linear, (6, 4), lambda: wants(7, 4)),
    "linear, three dimensions": (functional.linear, (6, 4), lambda: wants(2, 7, 4)),
    "embedding": (functional.embedding, (9, 4), lambda: torch.randint(0, 9, (5, 6))),
    "conv1d": (functional.conv1d, (3, 2, 3), lambda: wants(2, 2, 8)),
    "conv2d": (functional.conv2d, (3, 2, 3, 2), lambda: wants(2, 2, 8, 7)),
    "conv3d": (functional.conv3d, (3, 2, 3, 2, 1), lambda: wants(2, 2, 5, 5, 5)),
    "product": (torch.matmul, (4, 6), lambda: wants(7, 4)),
    "product, three dimensions": (torch.matmul, (4, 6), lambda: wants(2, 7, 4)),
    "batched product": (torch.bmm, (3, 4, 6), lambda: wants(3, 7, 4)),
    "transposed convolution": (functional.conv_transpose2d, (2, 3, 3, 2), lambda: wants(2, 2, 6, 5)),
    "bilinear": (lambda x, w: functional.bilinear(x, x, w), (3, 4, 4), lambda: wants(7, 4)),
    "bag": (functional.embedding_bag, (9, 4), lambda: torch.randint(0, 9, (5, 6))),
    "vector": (functional.linear, (6, 4), lambda: wants(4)),
    "layer norm": (lambda x, w: functional.layer_norm(x, w.shape, w), (6, 4), lambda: wants(3000, 6, 4)),
    "root mean square": (lambda x, w: functional.rms_norm(x, w.shape, w), (6, 4), lambda: wants(3000, 6, 4)),
    "used twice": (lambda x, w: functional.linear(functional.linear(x, w), w), (4, 4), lambda: wants(7, 4)),
}


def reversed_dims(value: Tensor) -> Tensor:
    """Return the same values with the dimensions in opposite memory order."""
    dims = list(range(value.dim()))[::-1]
    return value.permute(dims).contiguous().permute(dims)


def with_gaps(value: Tensor) -> Tensor:
    return torch.stack([value, value], dim=-1)[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": reversed_dims,
    "last two": lambda value: value.transpose(-1, -2).contiguous().transpose(-1, -2),
    "first two": lambda value: value.transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": with_gaps,
    "repeated": lambda value: value[:1].expand(value.shape),
    "contiguous": lambda value: value,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ON_ITS_SIDE)
def test_strides_equal_autograd_s(name: str, layout: str) -> None:
    function, shape, data = ON_ITS_SIDE[name]
    model = Using(function, shape)
    model.weights[0] = nn.Parameter(LAYOUTS[layout](model.weights[0].detach()))
    assert_strides(model, data)


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(3, 4, 3), lambda: nn.Conv2d(4, 4, 3, groups=4), lambda: nn.Conv2d(3, 4, 1)])
@pytest.mark.parametrize("last", [True, False], ids=["input too", "weights only"])
def test_convolutions_with_channels_last(make: Callable[[], nn.Conv2d], last: bool) -> None:
    first = make()
    model = nn.Sequential(first, nn.Tanh()).to(memory_format=torch.channels_last)
    shape = (2, first.in_channels, 6, 6)
    assert_strides(model, lambda: wants(*shape).detach().to(memory_format=[torch.contiguous_format, torch.channels_last][last]))


def assert_strides(model: nn.Module, data: Callable[[], Tensor]) -> None:
    microbatches = twice(data)
    assert check(model, *microbatches) == names(model)
    one, two = strides(in_one, model, microbatches), strides(in_two, model, microbatches)
    assert one == two
    for name, parameter in model.named_parameters():
        if parameter.is_contiguous() or torch.empty_like(parameter).stride() == parameter.stride():
            assert two[name] == parameter.stride()


def strides(run: Callable[..., Any], model: nn.Module, microbatches: Any) -> dict[str, tuple[int, ...]]:
    """Return the strides of the gradients as hooks on a copy of the model see them."""
    kept: dict[str, Any] = {}

    def forward(module: nn.Module, *args: Any) -> Any:
        kept.update(module.named_parameters())
        return module(*args)

    run(model, *microbatches, forward=forward)
    return {name: parameter.grad.stride() for name, parameter in kept.items()}


class Sideways(nn.Module):
    """A linear map with a transposed weight, and a convolution in channels-last format."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.map.weight = nn.Parameter(torch.randn(6, 6).t())
        self.conv = nn.Conv2d(2, 2, (3, 3), padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(torch.tanh(self.map(x))))


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "dualpipe-v"])
def test_a_fused_optimizer_makes_the_step_of_the_plain_loop(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model = nn.Sequential(*(Sideways() for _ in range(schedule.stages)))
    plain, x = copy.deepcopy(model), torch.randn(8, 2, 5, 6)
    launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss).step(x, target=x.sin()), 2)
    loop_step(plain, [(piece, piece.sin()) for piece in x.tensor_split(4)], [0.25] * 4, functional.mse_loss)
    for each in (model, plain):
        torch.optim.AdamW(each.parameters(), lr=0.1, fused=True).step()
    for (parameter, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert found.grad.stride() == wanted.grad.stride() == found.stride(), parameter
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)  # a convolution rounds by the number of its thread's helpers
