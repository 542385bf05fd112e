"""Deferred operators with other dtypes, in function transforms and in custom autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.runtime.split_backward.deferrable import Deferrable
from penstock.runtime.split_backward.deferral import Deferral
from runtime.splitting import Using, assert_bitwise, check, in_two, names, twice, wants


def _autocast(model: nn.Module, *args: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(*args)


AUTOCAST: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "matrix": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), lambda: wants(7, 5)),
    "three dimensions": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), lambda: wants(2, 7, 5)),
    "on its side": (lambda: nn.Linear(5, 4), lambda: torch.randn(4, 3, 5).transpose(0, 1).requires_grad_()),
    "four dimensions": (lambda: nn.Linear(5, 4), lambda: wants(2, 3, 4, 5)),
    "convolution": (lambda: nn.Conv2d(2, 3, 3), lambda: wants(2, 2, 6, 6)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), lambda: torch.randint(0, 9, (5, 6))),
    "product": (lambda: Using(torch.matmul, (5, 3)), lambda: wants(4, 5)),
    "batched product": (lambda: Using(torch.bmm, (3, 5, 2)), lambda: wants(3, 4, 5)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 3, 3), lambda: wants(2, 2, 6, 6)),
    "vector": (lambda: nn.Linear(5, 4), lambda: wants(5)),
    "bag": (lambda: nn.EmbeddingBag(9, 4), lambda: torch.randint(0, 9, (5, 3))),
    "normalisation": (lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), lambda: wants(1024, 64)),
    "root mean square": (lambda: nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64)), lambda: wants(1024, 64)),
    "groups": (lambda: nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8)), lambda: wants(8, 2, 34, 34)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), lambda: wants(3, 4, 8)),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name: str) -> None:
    """Gradients have the parameters' dtype and autograd's values."""
    make, data = AUTOCAST[name]
    model = make()
    microbatches = twice(data)
    waited = check(model, *microbatches, forward=_autocast)
    assert {n for n, p in model.named_parameters() if p.dim() > 1} <= waited
    grads = in_two(model, *microbatches, forward=_autocast).grads
    assert all(grad is not None and grad.dtype == torch.float32 for grad in grads.values())


def test_half_precision_throughout() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3)).bfloat16()
    assert check(model, *twice(lambda: wants(2, 6, 5, dtype=torch.bfloat16))) == names(model)


def test_function_transforms_are_left_alone() -> None:
    def transformed(model: nn.Module, x: Tensor) -> Tensor:
        direct = model(x)
        mapped = torch.func.vmap(model)(x)
        inner = torch.func.grad(lambda row: model(row).sum())(x[0])
        return direct + mapped + inner.sum()

    assert check(nn.Linear(5, 5), *twice(lambda: wants(3, 4, 5)), forward=transformed, exact=False) == set()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.t() @ x


def test_a_function_with_a_backward_of_its_own_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(5, 5), Using(Doubled.apply, (5, 5)), nn.Linear(5, 5))
    assert check(model, *twice(lambda: wants(4, 5))) == names(model) - {"1.weights.0"}


def test_subclassed_parameters_are_left_alone() -> None:
    class Marked(nn.Parameter):
        pass

    model = nn.Linear(5, 3)
    model.weight = Marked(model.weight.detach())
    assert check(model, *twice(lambda: wants(4, 5))) == set()


def test_a_wrapper_that_is_called_outside_a_recording_is_the_operator() -> None:
    """A wrapper called without an active deferral, as from another thread, is torch's operator."""
    with Deferrable(nn.Linear(1, 1)).forward(Deferral()):
        wrapper = functional.linear
    model, x = nn.Linear(5, 3), torch.randn(4, 5)
    out = wrapper(x, model.weight, model.bias)
    out.sum().backward()
    assert_bitwise(model.weight.grad, torch.ones(4, 3).t() @ x)


def test_gradients_do_not_share_memory_with_what_was_held() -> None:
    """A gradient may be changed in place afterwards, as clipping does."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    deferrable, deferral = Deferrable(model), Deferral()
    with deferrable.forward(deferral):
        out = model(wants(1, 4))
    deferrable.backward_input(deferral, [out], [torch.ones_like(out)])
    held = {tensor.untyped_storage().data_ptr() for record in deferral.operators for tensor in (record.grad, record.value)}
    assert len(held) == 4
    keep = [(record.grad, record.value) for record in deferral.operators]
    deferral.run()
    assert keep
    assert not held & {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
