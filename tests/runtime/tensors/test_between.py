"""What may pass between two stages, and what comes back."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline, launch
from runtime.between import CHAINS, Map, check, data
from runtime.models import assert_equal, gradients

# Trees ----------------------------------------------------------------------------------------------------------------


class ToDict(Map):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        h = super().forward(x)
        return {"h": h, "extra": {"square": h.square(), "mask": h > 0, "rows": [torch.arange(len(h)), "name", 3]}, "nothing": None}


class FromDict(Map):
    def forward(self, given: dict[str, Any]) -> Tensor:  # type: ignore[override]
        rows, name, number = given["extra"]["rows"]
        assert (name, number, given["nothing"]) == ("name", 3, None)
        assert not rows.requires_grad
        return super().forward(given["h"] * given["extra"]["mask"]) + given["extra"]["square"] * rows[:, None]


class ToTuple(Map):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, float]:  # type: ignore[override]
        h = super().forward(x)
        return h, h.sum(1, keepdim=True), 0.5


class FromTuple(Map):
    def forward(self, h: Tensor, total: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        return super().forward(h) * total * factor


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class ToPair(Map):
    def forward(self, x: Tensor) -> Pair:  # type: ignore[override]
        h = super().forward(x)
        return Pair(h, h * 2)


class FromPair(Map):
    def forward(self, pair: Pair) -> Tensor:  # type: ignore[override]
        return super().forward(pair.first) - pair.second


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("pair", [(ToDict, FromDict), (ToTuple, FromTuple), (ToPair, FromPair)])
def test_trees(name: str, pair: tuple[type[nn.Module], type[nn.Module]]) -> None:
    check([Map(), pair[0](), pair[1](), Map()], *data(), schedule=name)


def test_trees_on_one_rank() -> None:
    """The same between stages that a rank holds next to each other."""
    check([Map(), ToDict(), FromDict(), Map()], *data(), schedule=ps.schedule("zbv", ranks=2, microbatches=3))


def test_tuple_between_layers_of_a_whole_model_stays_a_tuple() -> None:
    """A sequence gives a layer the tuple that the one before returned, wherever it is cut."""

    class Takes(Map):
        def forward(self, both: tuple[Tensor, Tensor, float]) -> Tensor:  # type: ignore[override]
            return super().forward(both[0]) * both[1] * both[2]

    model = nn.Sequential(ToTuple(), Takes())
    x, y = data()
    wanted = functional.mse_loss(model(x), y)
    for ranks in (1, 2):
        schedule = ps.schedule("interleaved-1f1b" if ranks == 1 else "1f1b", ranks=ranks, microbatches=1)
        loss = launch(lambda s=schedule: Pipeline(model, s, loss_fn=functional.mse_loss).step(x, target=y).loss, ranks)[0]
        assert_equal(loss, wanted.detach())


class AnyOutput(nn.Module):
    """Passes its input on, next to an unused tensor and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.used(x), self.unused(x), x.detach() > 0


class First(Map):
    def forward(self, x: Tensor, unread: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask


@pytest.mark.parametrize("name", CHAINS)
def test_unused_outputs_have_no_gradient(name: str) -> None:
    found = check([Map(), AnyOutput(), First()], *data(), schedule=name)
    assert found.grads["1.unused.weight"] is None
    assert found.grads["1.used.weight"] is not None


@pytest.mark.parametrize("name", CHAINS)
def test_output_that_reaches_no_loss(name: str) -> None:
    """A stage that drops what it gets: nothing before it has a gradient, as in the unpipelined model."""

    class Drops(Map):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.ones_like(x))

    found = check([Map(), Map(), Drops()], *data(), schedule=name)
    assert found.grads["0.map.weight"] is None
    assert found.grads["2.map.weight"] is not None


def test_parameter_that_only_a_second_output_uses() -> None:
    """Under split backwards too its gradient comes through."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    class Joins(Map):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(a) + b

    found = check([Two(), Joins()], *data(), schedule="zb-h1")
    assert found.grads["0.b.weight"] is not None


# Frozen parts ---------------------------------------------------------------------------------------------------------


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (3,), (0, 1, 2, 3)])
def test_frozen_stages(name: str, which: tuple[int, ...]) -> None:
    """Frozen stages at the front, in the middle and at the end, with full and with split backwards."""
    stages = [frozen(Map()) if k in which else Map() for k in range(4)]
    found = check(stages, *data(), schedule=name)
    for k in range(4):
        assert (found.grads[f"{k}.map.weight"] is None) == (k in which)


@pytest.mark.parametrize("name", ["zbv", "interleaved-zb", "v-half", "dualpipe-v"])
def test_frozen_stages_with_several_stages_per_rank(name: str) -> None:
    stages = [frozen(Map()) if k in (0, 3) else Map() for k in range(4)]
    check(stages, *data(), schedule=ps.schedule(name, ranks=2, microbatches=3))


class Lora(nn.Module):
    """A frozen map with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@pytest.mark.parametrize("name", CHAINS)
def test_partly_frozen_stages(name: str) -> None:
    found = check([Lora(), Lora(), Lora()], *data(), schedule=name)
    assert found.grads["1.base.weight"] is None
    assert found.grads["0.down.weight"] is not None


@pytest.mark.parametrize("name", CHAINS)
def test_freezing_between_steps(name: str) -> None:
    stages = nn.ModuleList([Map(), Map(), Map()])
    again = copy.deepcopy(stages)
    x, y = data()

    def train() -> None:
        pipe = Pipeline(stages, schedule=name, microbatches=2, loss_fn=functional.mse_loss)
        for part in (0, 1, 0):
            for number, stage in enumerate(stages):
                stage.requires_grad_(number != part)
            pipe.step(x, target=y)

    launch(train, 3)
    for part in (0, 1, 0):
        for number, stage in enumerate(again):
            stage.requires_grad_(number != part)
        for xx, yy in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            (functional.mse_loss(again[2](again[1](again[0](xx))), yy) / 2).backward()
    for key, grad in gradients(again).items():
        assert_equal(gradients(stages)[key], grad, key)


# Shapes of outputs ----------------------------------------------------------------------------------------------------


class View(Map):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1, 2, 3).transpose(1, 2)


class Unview(Map):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2).reshape(-1, 6))[:, ::1]


@pytest.mark.parametrize("name", CHAINS)
def test_views_as_outputs(name: str) -> None:
    check([View(), Unview(), View(), Unview()], *data(), schedule=name)


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("name", CHAINS)
def test_output_that_is_the_input(name: str) -> None:
    """Nothing happens in the stage: at the front, in the middle, and twice in a row."""
    check([Same(), Map(), Same(), Same(), Map()], *data(), schedule=name)


def test_same_tensor_twice_in_an_output() -> None:
    class Twice(Map):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h = super().forward(x)
            return h, h

    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b

    check([Map(), Twice(), Product()], *data(), schedule="zb-h1")


def test_parameter_as_an_output() -> None:
    class Gives(Map):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.map.weight

    class Uses(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return x @ weight

    check([Gives(), Uses()], *data(), schedule="1f1b", exact=False)
    check([Gives(), Uses()], *data(), schedule="zb-h1", exact=False)
