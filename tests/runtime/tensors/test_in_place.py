"""Values that a stage changes in place, and values that several stages read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PenstockError
from penstock.ir.graph import StageGraph
from penstock.runtime import Pipeline, launch
from runtime.between import CHAINS, Map, check, data
from runtime.branches import is_autograd_order
from runtime.models import assert_all_equal, assert_equal, gradients

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


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 2), ("interleaved-1f1b", 1), ("zb-h1", 2)])
def test_saved_value_may_be_changed_by_the_next_stage(name: str, ranks: int) -> None:
    """The sigmoid's backward needs the value that the next stage overwrites. Torch refuses that; a stage hands on a copy."""
    stages = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()), InPlace()])
    x, y = data()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        functional.mse_loss(stages[1](stages[0](x)), y).backward()
    stages.zero_grad()
    for xx, yy in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
        (functional.mse_loss(stages[1](stages[0](xx).clone()), yy) / 2).backward()
    wanted = gradients(stages)
    stages.zero_grad()
    schedule = ps.schedule(name, ranks=ranks, microbatches=2)
    launch(lambda: Pipeline(stages, schedule, loss_fn=functional.mse_loss).step(x, target=y), ranks)
    for each, grad in wanted.items():
        assert_equal(gradients(stages)[each], grad, each)


def test_in_place_change_that_first_happens_late() -> None:
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
    """Gradients of an output with up to three readers are summed from the farthest on, as autograd does.

    Those on one other rank are summed there first.
    """
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


# Readers on one rank share a message ----------------------------------------------------------------------------------

SHARING = StageGraph.chain(4, [(0, 2), (0, 3)])
"""Looped over two ranks, stages 1 and 3 read stage 0 of the other rank."""


@pytest.mark.parametrize("kinds", [("B",), ("I", "W")])
@pytest.mark.parametrize("backwards", [(1, 2, 3), (3, 2, 1), (2, 3, 1), (1, 3, 2)])
def test_the_order_of_a_sum_does_not_depend_on_the_order_of_backwards(backwards: tuple[int, ...], kinds: tuple[str, ...]) -> None:
    """Stages 1, 2 and 3 read stage 0 and nothing of each other. The farthest reader's gradient is the first, as in autograd."""
    graph = StageGraph(5, ((0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)))
    count = range(2)
    back = [f"{stage}{kind}{m}" for m in count for stage in backwards for kind in kinds]
    ends = [f"{stage}{kind}{m}" for m in count for stage in (4, 0) for kind in kinds]
    rows = [[*(f"0F{m}" for m in count), *(f"4F{m}" for m in count), *sorted(ends, key=lambda text: text[0] == "0")], []]
    rows[1] = [*(f"{stage}F{m}" for m in count for stage in (2, 1, 3)), *back]
    table = ps.Schedule.from_actions(rows, ps.Placement.custom([0, 1, 1, 1, 0]), graph=graph)
    assert is_autograd_order(table)
    sends = [str(action) for action in ps.lower(table)[1] if action.kind is ps.Kind.SEND_B]
    assert sends == ["3SEND_B0>0", "3SEND_B1>0"]
    torch.manual_seed(3)
    check([Join(count) for count in (1, 1, 1, 1, 3)], *data(16), schedule=table)


def test_readers_that_share_a_message_in_evaluation() -> None:
    stages, (x, _) = [Join(count) for count in (1, 1, 2, 2)], data(12)
    for name in ("interleaved-1f1b", "looped-bfs"):
        table = ps.schedule(name, ranks=2, microbatches=3, chunks=2, graph=SHARING)
        found = launch(lambda t=table: Pipeline(stages, t).infer(x, microbatches=12), 2)[0]
        a = stages[0](x)
        torch.testing.assert_close(found, stages[3](stages[2](stages[1](a), a), a).detach())


def test_each_reader_of_a_shared_message_has_its_own_objects() -> None:
    """Stage 1 empties a set and detaches the tensor that came with it; stage 3, which got both in the same message, has them whole."""
    seen = []

    class Gives(Map):
        def forward(self, x: Tensor) -> tuple[Tensor, set[int]]:  # type: ignore[override]
            return super().forward(x), {1, 2}

    class Spoils(Map):
        def forward(self, x: Tensor, numbers: set[int]) -> Tensor:  # type: ignore[override]
            numbers.clear()
            return super().forward(x.detach_() if x.is_leaf else x.detach())

    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, x: Tensor, given: tuple[Tensor, set[int]]) -> Tensor:
            seen.append(set(given[1]))
            return self.map(x) * given[0]

    stages = [Gives(), Spoils(), Map(), Ends()]
    table = ps.schedule("interleaved-1f1b", ranks=2, microbatches=3, chunks=2, graph=StageGraph.chain(4, [(0, 3)]))
    model, (x, y) = nn.ModuleList(stages), data()
    launch(lambda: Pipeline(model, table, loss_fn=functional.mse_loss).step(x, target=y), 2)
    assert seen == [{1, 2}] * 3
    found = gradients(model)
    model.zero_grad()
    for xx, yy in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        value, numbers = stages[0](xx)
        out = stages[3](stages[2](Map.forward(stages[1], value.detach())), (value, numbers))
        (functional.mse_loss(out, yy) * (len(xx) / len(x))).backward()
    assert_all_equal([found[name] for name in found], list(gradients(model).values()))


def test_shared_message_may_not_be_changed() -> None:
    """Stage 1 would change what stage 3 of the same rank reads from the same message."""
    table = ps.schedule("interleaved-1f1b", ranks=2, microbatches=2, chunks=2, graph=StageGraph.chain(4, [(0, 3)]))
    stages, (x, y) = [nn.Linear(6, 6), InPlace(), Map(), Join(2)], data()

    def run(training: bool) -> None:
        pipe = Pipeline(stages, table, loss_fn=functional.mse_loss)
        (pipe.step if training else pipe.eval_step)(x, target=y)

    for training in (True, False):
        with pytest.raises(PenstockError, match="stage 1 changes its input in place, but stage 3 reads the same value: clone it"):
            launch(run, 2, args=(training,))


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


def test_losses_of_equal_value_are_all_listed() -> None:
    """Two microbatches with the same numbers stay two."""
    x = torch.ones(4, 6)
    found = check([Map(), Map()], x, x, microbatches=4)
    assert len(found.losses) == 4
    assert_all_equal(found.losses[1:], found.losses[:-1])
