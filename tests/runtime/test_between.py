"""What may pass between two stages, and what comes back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PenstockError
from penstock.ir.graph import StageGraph
from penstock.ir.table import Table
from penstock.runtime import Pipeline, StepResult, launch
from runtime.models import Numbers, assert_all_equal, assert_close, assert_equal, assert_same, gradients

CHAINS = ["gpipe", "1f1b", "zb-h1", "zb-h2"]
"""One stage a rank: full backwards, and split ones."""


def check(
    stages: Sequence[nn.Module],
    x: Any,
    y: Any = None,
    *,
    schedule: Table | str = "1f1b",
    microbatches: int = 3,
    loss_fn: Any = functional.mse_loss,
    exact: bool = True,
) -> Numbers:
    """A step of the stages on as many ranks, against the same modules called one after the other on the same slices."""
    table = ps.schedule(schedule, ranks=len(stages), microbatches=microbatches) if isinstance(schedule, str) else schedule
    model, again = copy.deepcopy(nn.ModuleList(stages)), copy.deepcopy(nn.ModuleList(stages))

    def train() -> StepResult:
        return Pipeline(model, table, loss_fn=loss_fn).step(x.clone(), target=y)

    results = launch(train, table.ranks)
    slices = zip(x.clone().tensor_split(table.microbatches), y.tensor_split(table.microbatches), strict=True)
    total = None
    losses = []
    for piece, yy in slices:
        xx = piece.detach()  # a stage may change it in place, unlike a slice
        made: dict[int, Any] = {}
        for number, stage in enumerate(again):
            inputs = [made[other] for other in sorted(table.graph.inputs_of(number), reverse=True)] or [xx]
            first = inputs[0] if type(inputs[0]) is tuple else (inputs[0],)
            made[number] = stage(*first, *inputs[1:])
        loss = loss_fn(made[len(again) - 1], yy)
        scale = len(xx) / len(x)
        if loss.requires_grad:
            (loss * scale).backward()
        losses.append(loss.detach())
        total = loss.detach() * scale if total is None else total + loss.detach() * scale
    found, wanted = Numbers(results[0].loss, results[0].losses, gradients(model)), Numbers(total, losses, gradients(again))
    if exact:
        assert_same(found, wanted)
    else:
        assert_close(found, wanted, 1e-5)
    return found


class Map(nn.Module):
    """A linear map that takes one tensor and gives one."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.map(x))


def data(batch: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 6), torch.randn(batch, 6)


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
    """Passes its input on, next to a tensor that nobody reads and one without a gradient."""

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


def test_parameter_that_a_second_output_alone_uses() -> None:
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
def test_frozen_stages_with_several_stages_a_rank(name: str) -> None:
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


# Changes in place -----------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Changes what it was given, as `nn.ReLU(inplace=True)` at the start of a stage does."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        x += self.shift
        return self.map(x.relu_())


@pytest.mark.parametrize("name", CHAINS)
def test_input_changed_in_place(name: str) -> None:
    """The unpipelined model allows it of what a linear map returns, so a stage may do it too."""
    stages = [nn.Linear(6, 6), InPlace(), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)), Map()]
    check(stages, *data(), schedule=name, microbatches=4)


def test_input_changed_in_place_in_trees_and_on_one_rank() -> None:
    class Changes(Map):
        def forward(self, h: Tensor, total: Tensor, factor: float) -> Tensor:  # type: ignore[override]
            total.add_(1)
            return super().forward(h.mul_(2)) * total * factor

    class Gives(Map):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, float]:  # type: ignore[override]
            h = self.map(x)
            return h, h.sum(1, keepdim=True), 0.5

    check([Map(), Gives(), Changes(), InPlace()], *data(), schedule=ps.schedule("zbv", ranks=2, microbatches=3))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_batch_changed_in_place_by_the_first_stage(name: str) -> None:
    """Each slice is a tensor of its own to the stage."""
    check([InPlace(), Map()], *data(), schedule=name)


def test_saved_value_changed_in_place_is_an_error_as_in_torch() -> None:
    """The sigmoid's backward needs the value that the next stage has overwritten; the unpipelined model fails in the same way."""
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()), InPlace()]
    x, y = data()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        functional.mse_loss(stages[1](stages[0](x)), y).backward()

    def train() -> None:
        Pipeline(stages, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss).step(x, target=y)

    with pytest.raises(PenstockError, match=r"0B0 \(stage 0, backward of microbatch 0\) failed on rank 0: .*modified by an inplace"):
        launch(train, 2)


def test_change_in_place_that_comes_late() -> None:
    """A stage that changes its input only at the third microbatch fails once, loudly, and works from then on."""
    again = 0

    class Late(Map):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal again
            again += 1
            return super().forward(x.mul_(2) if again >= 3 else x * 2)

    stages = nn.ModuleList([nn.Linear(6, 6), Late()])
    x, y = data()
    pipe = Pipeline(stages, ps.schedule("interleaved-1f1b", ranks=1, microbatches=4), loss_fn=functional.mse_loss)
    with pytest.raises(PenstockError, match="in-place operation"):
        pipe.step(x, target=y)
    assert all(p.grad is None for p in stages.parameters())
    pipe.step(x, target=y)
    found = gradients(stages)
    stages.zero_grad()
    for xx, yy in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        (functional.mse_loss(stages[1](stages[0](xx)), yy) / 4).backward()
    for name, grad in gradients(stages).items():
        assert_equal(found[name], grad)


# Edges that skip stages -----------------------------------------------------------------------------------------------


class Join(nn.Module):
    """Takes the neighbour's output first, then that of stages farther off."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(6, 6) for _ in range(inputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.tanh(sum(layer(x) for layer, x in zip(self.maps, inputs, strict=True)))


GRAPHS = [
    ([(0, 2)], [1, 1, 2, 1]),
    ([(0, 3)], [1, 1, 1, 2]),
    ([(0, 2), (0, 3)], [1, 1, 2, 2]),
    ([(0, 2), (1, 3), (0, 3)], [1, 1, 2, 3]),
]


@pytest.mark.parametrize(("skips", "inputs"), GRAPHS)
@pytest.mark.parametrize("name", [*CHAINS, "zbv", "interleaved-1f1b", "dualpipe-v"])
def test_edges_that_skip_stages(name: str, skips: list[tuple[int, int]], inputs: list[int]) -> None:
    """Gradients of an output with up to three readers are summed from the farthest on, as autograd does."""
    graph = StageGraph.chain(4, skips)
    ranks = 4 if name in CHAINS else 2
    table = ps.schedule(name, ranks=ranks, microbatches=3, graph=graph)
    check([Join(count) for count in inputs], *data(), schedule=table)


def test_edges_that_skip_stages_in_evaluation() -> None:
    graph = StageGraph.chain(4, [(0, 2), (0, 3)])
    stages, (x, _) = [Join(count) for count in (1, 1, 2, 2)], data(12)
    for name, ranks in (("1f1b", 4), ("zbv", 2)):
        table = ps.schedule(name, ranks=ranks, microbatches=3, graph=graph)
        found = launch(lambda t=table: Pipeline(stages, t).infer(x, microbatches=12), ranks)[0]
        a = stages[0](x)
        b = stages[1](a)
        torch.testing.assert_close(found, stages[3](stages[2](b, a), a).detach())


def test_value_read_twice_may_not_be_changed() -> None:
    """Two stages read it: changing it in place in one would change it for the other, so that is refused."""
    stages = [nn.Linear(6, 6), InPlace(), Join(2)]
    table = ps.schedule("1f1b", ranks=3, microbatches=2, graph=StageGraph.chain(3, [(0, 2)]))
    x, y = data()
    message = "stage 1 changes its input in place, but stage 2 reads the same value: clone it"

    def run(training: bool) -> None:
        pipe = Pipeline(stages, table, loss_fn=functional.mse_loss)
        (pipe.step if training else pipe.eval_step)(x, target=y)

    for training in (True, False):
        with pytest.raises(PenstockError, match=message):
            launch(run, 3, args=(training,))


def test_losses_of_equal_value_are_listed_each() -> None:
    """Two microbatches with the same numbers stay two."""
    x = torch.ones(4, 6)
    found = check([Map(), Map()], x, x, microbatches=4)
    assert len(found.losses) == 4
    assert_all_equal(found.losses[1:], found.losses[:-1])
