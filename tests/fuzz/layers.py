"""The layers that stages are made of: each takes and returns a tensor of shape (batch, WIDTH)."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fuzz.trees import WIDTH
from penstock.runtime import add_loss, add_metric


class _Side(threading.local):
    losses: list[Tensor] | None = None
    metrics: dict[str, Tensor] | None = None


_side = _Side()


@contextmanager
def collect_side() -> Iterator[tuple[list[Tensor], dict[str, Tensor]]]:
    """Collect side losses and metrics of the plain loop, which the library does not see."""
    _side.losses, _side.metrics = [], {}
    try:
        yield _side.losses, _side.metrics
    finally:
        _side.losses = _side.metrics = None


def _report_loss(loss: Tensor) -> None:
    add_loss(loss) if _side.losses is None else _side.losses.append(loss)


def _report_metric(name: str, value: Tensor) -> None:
    add_metric(name, value) if _side.metrics is None else _side.metrics.update({name: value.detach()})


class Layer(nn.Module):
    """A function of what `make` builds and the input."""

    def __init__(self, inner: nn.Module, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.body = inner, body

    def forward(self, h: Tensor) -> Tensor:
        return self.body(self.inner, h)


# Layers of torch ------------------------------------------------------------------------------------------------------


def _tokens(h: Tensor) -> Tensor:
    """Whole numbers from 0 to 8 that depend on the input."""
    return (h.detach() * 4).long().clamp(-4, 4) + 4


def _last(state: Any) -> Tensor:
    return state[0]


TORCH: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), lambda inner, h: inner(h)),
    "no_bias": (lambda: nn.Linear(WIDTH, WIDTH, bias=False), lambda inner, h: inner(h)),
    "wide": (lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)), lambda inner, h: inner(h)),
    "three_dims": (lambda: nn.Linear(2, 2), lambda inner, h: inner(h.reshape(-1, 3, 2)).reshape(-1, WIDTH)),
    "conv": (lambda: nn.Conv1d(2, 2, 3, padding=1), lambda inner, h: inner(h.reshape(-1, 2, 3)).flatten(1)),
    "conv_groups": (lambda: nn.Conv1d(6, 6, 1, groups=3), lambda inner, h: inner(h.unsqueeze(2)).squeeze(2)),
    "conv_transpose": (lambda: nn.ConvTranspose1d(2, 2, 3, padding=1), lambda inner, h: inner(h.reshape(-1, 2, 3)).flatten(1)),
    "embedding": (lambda: nn.Embedding(9, WIDTH), lambda inner, h: h + inner(_tokens(h)[:, 0])),
    "padding": (lambda: nn.Embedding(9, WIDTH, padding_idx=4), lambda inner, h: h + inner(_tokens(h)[:, :2]).sum(1)),
    "embedding_bag": (lambda: nn.EmbeddingBag(9, WIDTH), lambda inner, h: h + inner(_tokens(h))),
    "sparse_embedding": (lambda: nn.Embedding(9, WIDTH, sparse=True), lambda inner, h: h + inner(_tokens(h)[:, 1])),
    "layer_norm": (lambda: nn.LayerNorm(WIDTH), lambda inner, h: inner(h)),
    "rms_norm": (lambda: nn.RMSNorm(WIDTH), lambda inner, h: inner(h)),
    "group_norm": (lambda: nn.GroupNorm(2, WIDTH), lambda inner, h: inner(h)),
    "batch_norm": (lambda: nn.BatchNorm1d(WIDTH), lambda inner, h: inner(h)),
    "gru": (lambda: nn.GRU(2, 2, batch_first=True), lambda inner, h: _last(inner(h.reshape(-1, 3, 2))).flatten(1)),
    "lstm": (lambda: nn.LSTM(2, 2, batch_first=True), lambda inner, h: h + _last(inner(h.reshape(-1, 3, 2))).flatten(1)),
    "rnn_cell": (lambda: nn.RNNCell(WIDTH, WIDTH), lambda inner, h: inner(h, torch.tanh(h))),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda inner, h: h + 0.1 * inner(h, h)),
    "attention": (
        lambda: nn.MultiheadAttention(2, 1, batch_first=True),
        lambda inner, h: h + _last(inner(*[h.reshape(-1, 3, 2)] * 3)).flatten(1),
    ),
    "dropout": (lambda: nn.Dropout(0.3), lambda inner, h: inner(h)),
    "prelu": (nn.PReLU, lambda inner, h: inner(h)),
    "tanh": (nn.Tanh, lambda inner, h: inner(h)),
    "gelu": (nn.GELU, lambda inner, h: inner(h)),
    "relu_": (lambda: nn.ReLU(inplace=True), lambda inner, h: inner(h)),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), lambda inner, h: inner(h)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), lambda inner, h: inner(h)),
    "one_dim": (lambda: nn.Linear(WIDTH, WIDTH), lambda inner, h: h + inner(h.mean(0))),
    "twice": (lambda: nn.Linear(WIDTH, WIDTH), lambda inner, h: inner(torch.tanh(inner(h)))),
    "functional": (
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda inner, h: torch.einsum("bi,oi->bo", h, inner.weight) + h @ inner.weight * 0.5 + inner.bias.sum(),
    ),
    "slice": (lambda: nn.Linear(WIDTH, WIDTH), lambda inner, h: functional.linear(h, inner.weight[[1, 0, 2, 3, 5, 4]], inner.bias)),
    "unused": (lambda: nn.Linear(WIDTH, WIDTH), lambda inner, h: h + inner.bias),
    "detach": (lambda: nn.Linear(WIDTH, WIDTH), lambda inner, h: inner(h) + inner(h).detach()),
}
"""What to build, and how to use it."""


# Parameters -----------------------------------------------------------------------------------------------------------


def make_frozen() -> nn.Module:
    layer = Layer(*_made("linear"))
    layer.requires_grad_(False)
    return layer


def make_half_frozen() -> nn.Module:
    layer = Layer(*_made("wide"))
    next(layer.parameters()).requires_grad_(False)
    return layer


def make_strided() -> nn.Module:
    """A dense weight that is not contiguous: its gradient has its strides."""
    layer = Layer(*_made("linear"))
    layer.inner.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return layer


def make_channels_last() -> nn.Module:
    inner = nn.Conv2d(2, 2, (3, 2), padding=(1, 0)).to(memory_format=torch.channels_last)
    return Layer(inner, lambda inner, h: inner(torch.stack([h, h * 0.5], 1).reshape(-1, 2, 3, 2)).flatten(1))


class Factors(nn.Module):
    """Parameters of no layer: a vector and a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.shift = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.tensor(0.25))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.factor + self.shift


class Tied(nn.Module):
    """A linear map with the one weight that all layers of this class of a model share; `build_model` sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return functional.linear(h, self.weight, self.bias)


# State ----------------------------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """A Python number that counts forwards in training, on which the output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, h: Tensor) -> Tensor:
        self.runs += self.training
        return h * (1 + 0.01 * self.runs)


class RunningMean(nn.Module):
    """A buffer that forwards change, and that evaluation reads."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
            return h * 1.5
        return h * 1.5 - self.mean


# Gradients inside a forward -------------------------------------------------------------------------------------------


class InputGradient(nn.Module):
    """Asks autograd for the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        out = self.map(h)
        if torch.is_grad_enabled():
            start = h.detach().requires_grad_()
            (grad,) = torch.autograd.grad(self.map(start).square().sum(), start)
            out = out + 0.01 * grad
        return out


class Penalty(InputGradient):
    """A gradient penalty: the gradient of the input is itself differentiated."""

    def forward(self, h: Tensor) -> Tensor:
        out = self.map(h)
        if torch.is_grad_enabled():
            start = h.detach().requires_grad_()
            (grad,) = torch.autograd.grad(torch.tanh(self.map(start)).sum(), start, create_graph=True)
            out = out + 0.1 * grad.square().mean()
        return out


class WeightGradient(InputGradient):
    """Scales its output by the size of a weight's gradient, as an adaptive loss weight does."""

    allow_unused = True

    def forward(self, h: Tensor) -> Tensor:
        out = self.map(h)
        if torch.is_grad_enabled():
            options = {"retain_graph": True, "allow_unused": self.allow_unused}
            (grad,) = torch.autograd.grad(out.square().mean(), self.map.weight, **options)
            out = out * (2.0 if grad is None else 1 / (1 + grad.norm().detach()))
        return out


class StrictWeightGradient(WeightGradient):
    allow_unused = False


class FastWeights(InputGradient):
    """One step of gradient descent inside the forward, which is differentiated through."""

    def forward(self, h: Tensor) -> Tensor:
        weight: Tensor = self.map.weight
        if torch.is_grad_enabled():
            (grad,) = torch.autograd.grad(self.map(h.detach()).square().mean(), self.map.weight, create_graph=True)
            weight = weight - 0.1 * grad
        return functional.linear(h, weight, self.map.bias)


# Contexts -------------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, *layers: nn.Module) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(*layers), reentrant

    def forward(self, h: Tensor) -> Tensor:
        if self.reentrant and not h.requires_grad:
            return self.inner(h)
        return checkpoint(self.inner, h, use_reentrant=self.reentrant)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = self.inner(h)
        return h + out.to(h.dtype)


class Nested(nn.Module):
    """A linear map of a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nested = torch.nested.as_nested_tensor([h[:1], h[1:]], layout=torch.jagged)
            return torch.cat(list(self.map(nested).unbind()))


class SideLoss(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        _report_loss(0.1 * h.square().mean())
        return h


class Metric(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        _report_metric("size", h.abs().mean())
        return h


class InPlace(nn.Module):
    """Changes what it is given, and its own intermediate result."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h.mul_(0.5)
        out = self.map(h)
        out[:, :2] += 1
        return out.relu_()


class NoGradient(nn.Module):
    """Half of the work without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.map(h)
        return self.map(h) * torch.sigmoid(still)


def _made(name: str) -> tuple[nn.Module, Callable[[Any, Tensor], Tensor]]:
    make, body = TORCH[name]
    return make(), body


OWN: dict[str, Callable[[], nn.Module]] = {
    "frozen": make_frozen,
    "half_frozen": make_half_frozen,
    "strided": make_strided,
    "channels_last": make_channels_last,
    "factors": Factors,
    "tied": Tied,
    "counter": Counter,
    "running_mean": RunningMean,
    "input_gradient": InputGradient,
    "penalty": Penalty,
    "weight_gradient": WeightGradient,
    "strict_weight_gradient": StrictWeightGradient,
    "fast_weights": FastWeights,
    "checkpoint": lambda: Checkpointed(False, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "reentrant": lambda: Checkpointed(True, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "autocast": Autocast,
    "nested": Nested,
    "side_loss": SideLoss,
    "metric": Metric,
    "in_place": InPlace,
    "no_gradient": NoGradient,
}

LAYERS = (*TORCH, *OWN)
"""Every layer by name."""


def make_layer(name: str) -> nn.Module:
    return OWN[name]() if name in OWN else Layer(*_made(name))
