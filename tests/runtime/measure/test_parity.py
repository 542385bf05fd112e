"""`parity` compares a step with the unpipelined model and lists every difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.graph import StageGraph
from penstock.runtime import Layers, Pipeline, add_loss, launch
from penstock.runtime.execution.executor import Executor
from penstock.runtime.measure.parity import Parity, compare_numbers
from penstock.runtime.model.module_state import ModuleState
from penstock.runtime.model.running_statistics import RunningStatistics
from runtime.models import GPT, assert_equal, blocks, count_forwards, gradients, token_loss


def run(model: Any, schedule: ps.Schedule, x: Any, y: Any, loss_fn: Any = functional.mse_loss, **options: Any) -> Parity:
    def compare() -> Parity:
        return Pipeline(model, schedule, loss_fn=loss_fn, **options).parity(x, target=y)

    results = launch(compare, schedule.ranks)
    assert len({str(result) for result in results}) == 1
    return results[0]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zbv", "interleaved-1f1b", "dualpipe-v"])
def test_equal_to_the_last_bit(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=3)
    model = blocks(schedule.stages)
    found = run(model, schedule, torch.randn(7, 6), torch.randn(7, 6))
    assert found.loop.exact
    assert found.loop.worst == 0
    assert found.batch is not None
    assert 0 < found.batch.worst < 1e-5
    assert str(found).startswith("microbatch loop: equal to the last bit\nwhole batch: ")
    exact = run(model.double(), schedule, torch.randn(7, 6).double(), torch.randn(7, 6).double())
    assert exact.batch is not None
    assert exact.batch.worst < 1e-12


@pytest.mark.parametrize("name", ["dualpipe", "looped-bfs"])
def test_other_orders_are_close(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    found = run(blocks(schedule.stages).double(), schedule, torch.randn(7, 6).double(), torch.randn(7, 6).double())
    assert found.batch is not None
    assert max(found.loop.worst, found.batch.worst) < 1e-12


def test_nothing_is_left_behind() -> None:
    """Earlier gradients, batch statistics, random state and train mode are restored, also on models that ranks share."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4)))
    model[3][0].weight = model[0][0].weight
    x, y = torch.randn(8, 6), torch.randn(8, 6)

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, seed=1)
        pipe.step(x, target=y)
        before, state = gradients(model), copy.deepcopy(model.state_dict())
        objects = {name: p.grad for name, p in pipe.named_parameters()}
        pipe.parity(x, target=y)
        pipe.gather("done", None)
        for name, grad in gradients(model).items():
            assert_equal(grad, before[name], name)
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is objects[name]
        for name, value in model.state_dict().items():
            assert_equal(value, state[name], name)

    launch(train, 4)


def test_no_random_stream_is_used_up() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)), torch.randn(4, 6)
    pipe, other = (Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, seed=1) for _ in range(2))
    assert pipe.parity(x, target=x).loop.exact
    assert_equal(pipe.step(x, target=x).loss, other.step(x, target=x).loss)


def test_seeded_dropout_is_equal() -> None:
    layers = Layers("blocks", head=["embed"], tail=["norm", "head"])
    tokens = torch.randint(11, (6, 8))
    schedule = ps.schedule("1f1b", ranks=2, microbatches=3)
    model = GPT(depth=2, dropout=0.3)
    assert run(model, schedule, tokens, tokens, token_loss, split=layers, seed=4).loop.exact
    assert not run(model, schedule, tokens, tokens, token_loss, split=layers).loop.exact


def test_batch_statistics_differ_from_the_whole_batch_and_it_says_so() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6))
    found = run(model, ps.schedule("1f1b", ranks=2, microbatches=3), torch.randn(12, 6), torch.randn(12, 6))
    assert found.loop.exact
    assert found.batch is not None
    assert found.batch.worst > 1e-3
    assert {difference.name for difference in found.batch.differences} >= {"loss", "norm", "0.weight"}


class Fickle(nn.Module):
    """A stage with a deliberate fault: its output depends on how often it was called."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        Fickle.calls += 1
        return self.map(x) * Fickle.calls


def test_wrong_stage_is_named() -> None:
    """The loss differs, and the gradients of the faulty stage and of all stages before it."""
    model = nn.Sequential(nn.Linear(6, 6), Fickle(), nn.Linear(6, 6))
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    found = launch(lambda: Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss).parity(x, target=y), 3)[0]
    assert not found.loop.exact
    names = [difference.name for difference in found.loop.differences]
    assert {"loss", "norm", "0.weight", "1.map.weight", "2.weight"} <= set(names)
    relative = [difference.relative for difference in found.loop.differences]
    assert relative == sorted(relative, reverse=True)
    text = str(found.loop)
    assert text.startswith(f"microbatch loop: {len(names)} differ, by up to ")
    assert names[0] in text


def test_dropped_work_is_found() -> None:
    """An overlap executor that skips the weight backward: exactly the weights of its stages differ."""

    def forgetful(action: Action, operations: list[Callable[[], None]]) -> None:
        for part, operation in zip(action.sub_actions, operations, strict=True):
            if not (part.stage == 1 and str(part).startswith("1W")):
                operation()

    placement = ps.Placement.custom([0, 0])
    rows = [["0F0", "1F0", "1I0", "(0B0;1W0)OVERLAP_F_B"]]
    model, x, y = blocks(2), torch.randn(3, 6), torch.randn(3, 6)
    schedule = ps.Schedule.from_actions(rows, placement)
    assert Pipeline(model, schedule, loss_fn=functional.mse_loss).parity(x, target=y).loop.exact
    found = Pipeline(model, schedule, loss_fn=functional.mse_loss, overlap=forgetful).parity(x, target=y).loop
    assert {difference.name for difference in found.differences} == {"1.map.weight", "1.map.bias", "norm"}
    assert all(difference.relative == float("inf") for difference in found.differences if difference.name != "norm")


def test_wrong_weights_differ_from_the_whole_batch() -> None:
    """A sum declared as a mean: the loop scales it in the same way, but the whole batch reveals it."""

    def summed(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().sum()

    schedule = ps.schedule("1f1b", ranks=2, microbatches=2)
    model, x, y = blocks(2).double(), torch.randn(4, 6).double(), torch.randn(4, 6).double()
    wrong = run(model, schedule, x, y, summed)
    assert wrong.loop.exact
    assert wrong.batch is not None
    assert wrong.batch.worst == pytest.approx(0.5)
    right = run(model, schedule, x, y, summed, loss_reduction="sum")
    assert right.batch is not None
    assert right.batch.worst < 1e-12


def test_trees_skips_side_losses_and_keyword_arguments() -> None:
    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            return self.map(batch["x"]), batch["table"]

    class Middle(Start):
        def forward(self, x: Tensor, table: Tensor, *, gate: Tensor) -> Tensor:  # type: ignore[override]
            add_loss(x.square().mean())
            return self.map(x) * table * gate

    class End(Start):
        def forward(self, x: Tensor, start: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
            return self.map(x) + start[0] * start[1]

    stages = [Start(), Middle(), End()]
    schedule = ps.schedule("1f1b", ranks=3, microbatches=3, graph=StageGraph.chain(3, [(0, 2)]))
    batch = {"x": torch.randn(7, 6), "table": torch.randn(6)}
    y, gate = torch.randn(7, 6), torch.rand(7, 6)

    def compare() -> Parity:
        pipe = Pipeline(stages, schedule, loss_fn=functional.mse_loss, batch_dims={"table": None})
        return pipe.parity(batch, target=y, stage_kwargs={1: {"gate": gate}})

    found = launch(compare, 3)[0]
    assert found.loop.worst < 1e-6
    assert found.batch is not None
    assert found.batch.worst < 1e-5


def test_whole_batch_is_skipped_with_weights() -> None:
    """With `weight=` the batch in one piece would have other weights, so it is not compared."""
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, weight=len)
    assert pipe.parity(torch.randn(4, 6), target=torch.randn(4, 6)).batch is None


def test_some_stages_only() -> None:
    schedule = ps.schedule("1f1b", ranks=2, microbatches=1)

    def compare() -> None:
        from penstock.runtime import rank

        Pipeline({rank(): blocks(1)}, schedule, loss_fn=functional.mse_loss).parity(torch.randn(1, 6), target=torch.randn(1, 6))

    with pytest.raises(ScheduleError, match="made of some of its stages only"):
        launch(compare, 2)


def test_every_rank_s_copy_is_compared() -> None:
    model, x, y = blocks(4).double(), torch.randn(8, 6).double(), torch.randn(8, 6).double()
    schedule = ps.schedule("dualpipe", ranks=4, microbatches=4)
    found = launch(lambda: Pipeline(copy.deepcopy(model), schedule, loss_fn=functional.mse_loss).parity(x, target=y), 4)
    assert max(each.loop.worst for each in found) < 1e-12


NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "wanted", "close"),
    [
        ([1.0, NAN], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0, NAN], False),
        ([1.0, float("inf")], [1.0, 2.0], False),
        ([1.0, float("-inf")], [1.0, float("inf")], False),
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, NAN], [1.1, NAN], False),
        ([NAN, float("inf")], [NAN, float("inf")], True),
    ],
)
def test_nan_equals_only_nan(found: list[float], wanted: list[float], close: bool) -> None:
    """NaN on one side only is a difference on any rank, even next to values that are equal up to rounding."""
    off, right, reference = torch.tensor([1.0 + 2e-7]), torch.tensor(wanted), torch.tensor([1.0])
    for ranks in ([found, wanted], [wanted, found]):
        held = [{"a": off, "b": torch.tensor(each)} for each in ranks]
        compared = compare_numbers("loop", held, {"a": reference, "b": right})
        assert compared.close is close
        assert not compared.exact
        assert ("equal up to rounding" in compared.in_words()) is close


# State, layout, random numbers and the batch ----------------------------------------------------------------------------


def names(found: Parity) -> set[str]:
    return {difference.name for difference in found.loop.differences}


def normed(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(layers))).double()


def batch_of(rows: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6).double(), torch.randn(rows, 6).double()


class Counter(nn.Module):
    """A module with all kinds of state."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.runs, self.rate, self.plain = nn.Linear(6, 6), 0, 1.0, torch.zeros(())
        self.history: list[float] = []
        self.register_buffer("hidden", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.runs, self.rate, self.plain = self.runs + 1, self.rate * 0.9, self.plain + 1
        self.hidden += 1
        self.history.append(self.rate)
        self.last = x.mean()
        return self.map(x) * self.rate


STATES = {"runs", "rate", "plain", "hidden", "history"}


def test_module_state_is_compared_and_restored() -> None:
    model, (x, y) = nn.Sequential(Counter(), Counter()).double(), batch_of()

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss)
        for _ in range(2):
            found = pipe.parity(x, target=y)
            assert found.loop.exact, str(found)
            pipe.step(x, target=y)
        pipe.gather("done", None)

    launch(train, 2)
    for layer in model:
        assert (layer.runs, float(layer.plain), float(layer.hidden), len(layer.history)) == (6, 6, 6, 6)


def test_state_that_advances_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recompute that starts from the current state instead of the captured one is noticed."""
    monkeypatch.setattr(ModuleState, "stand_in", lambda self: nullcontext())
    model, (x, y) = nn.Sequential(Counter(), normed(1)).double(), batch_of()
    assert run(copy.deepcopy(model), ps.schedule("1f1b", 2, 3), x, y).loop.exact
    found = run(model, ps.schedule("1f1b", 2, 3), x, y, recompute=True)
    assert {f"0.{name}" for name in STATES} <= names(found)
    assert {"1.0.1.running_mean", "1.0.1.running_var", "1.0.1.num_batches_tracked"} <= names(found)
    assert not found.loop.close


def test_recomputed_stages_are_compared_with_plain_ones() -> None:
    model, (x, y) = normed(), batch_of()
    runs = count_forwards(model)
    assert run(model, ps.schedule("gpipe", 2, 3), x, y, recompute=True).loop.exact
    # The step twice for each microbatch on one rank; on both ranks the loop once, and the whole batch.
    assert runs == [3 * 2 + 2 * (3 + 1)] * 2


@pytest.mark.parametrize("one_object", [True, False])
def test_statistics_of_separate_copies_are_found(monkeypatch: pytest.MonkeyPatch, one_object: bool) -> None:
    model, (x, y) = normed(), batch_of()

    def compare() -> Parity:
        mine = model if one_object else copy.deepcopy(model)
        return Pipeline(mine, schedule="dualpipe", microbatches=4, loss_fn=functional.mse_loss).parity(x, target=y)

    for found in launch(compare, 2):
        assert found.loop.worst < 1e-12
    monkeypatch.setattr(RunningStatistics, "find_scattered", lambda self, actions: set())
    for found in launch(compare, 2):
        assert {"0.1.running_mean", "1.1.running_var"} <= names(found)
        assert not found.loop.close


def test_layout_of_gradients_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6).double().t())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model, (x, y) = nn.Sequential(Transposed(), Transposed()), batch_of()
    schedule = ps.schedule("chimera", 2, 4)

    def compare() -> Parity:
        return Pipeline(copy.deepcopy(model), schedule, loss_fn=functional.mse_loss).parity(x, target=y)

    assert launch(compare, 2)[0].loop.worst < 1e-12
    monkeypatch.setattr("penstock.runtime.model.tied_parameters.round_gradient", lambda total, parameter: total.contiguous().clone())
    assert names(launch(compare, 2)[0]) >= {"0.weight (strides)", "1.weight (strides)"}


def test_sparse_gradients_are_compared() -> None:
    model = nn.Sequential(nn.Embedding(12, 6, sparse=True), nn.Linear(6, 6))
    tokens = torch.randint(12, (8,))
    assert run(model, ps.schedule("1f1b", 2, 4), tokens, torch.randn(8, 6)).loop.exact


def test_random_state_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))), torch.randn(8, 6)
    schedule = ps.schedule("1f1b", 2, 4)
    assert run(model, schedule, x, x, seed=3).loop.exact
    assert run(model, schedule, x, x).loop.exact  # one rank has all that draws, in the order of the loop
    assert run(model, schedule, x, x, recompute=True).loop.exact
    step = Executor.run
    monkeypatch.setattr(Executor, "run", lambda self, feed: (step(self, feed), torch.rand(()) if self.rank else None)[0])
    assert names(run(model, schedule, x, x)) == {"random state of rank 1"}
    assert names(run(nn.Sequential(model[0], model[1][0]), schedule, x, x)) == {"random state of rank 1"}
    assert run(model, schedule, x, x, seed=3).loop.exact  # drawn inside of what is put back
    monkeypatch.setattr("penstock.runtime.pipeline.preserve_random_state", nullcontext)
    assert names(run(model, schedule, x, x, seed=3)) >= {"random state of rank 1"}


def test_random_state_is_restored() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), torch.randn(8, 6)
    pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
    before = torch.get_rng_state()
    pipe.parity(x, target=x)
    assert torch.equal(torch.get_rng_state(), before)


class First(nn.Module):
    """Takes a list of one tensor, and computes something else from a bare tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, values: Any) -> Tensor:
        made = self.map(values[0])
        return made if made.dim() == 2 else made.expand(2, 6)


def test_wrongly_split_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)

    def compare(**options: Any) -> Parity:
        return Pipeline([First()], schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, **options).parity([x], target=y)

    def lost(value: Any, dims: Any, sizes: Any) -> list[Any]:
        """A faulty split: lists become their only element."""
        return [(piece,) for piece in value[0][0].split(sizes)] if isinstance(value, tuple) else list(value.split(sizes))

    def uncut(value: Any, dims: Any, sizes: Any) -> list[Any]:
        """A faulty split: every microbatch gets the whole batch."""
        return [value for _ in sizes]

    for wrong in (lost, uncut):
        with monkeypatch.context() as patch:
            patch.setattr("penstock.runtime.batch.step_input.mb.split_batch", wrong)
            found = compare()
        assert {"microbatch 0: structure", "microbatch 1: structure"} <= names(found)
        assert not found.loop.close
        assert found.batch is not None


def test_batch_changed_in_place_by_a_stage_is_preserved() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.map(x.mul_(2))

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    before = x.clone()
    found = Pipeline([Changing()], schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss).parity(x, target=y)
    assert found.loop.exact
    assert found.batch is not None
    assert found.batch.close
    assert_equal(x, before)


def test_reference_has_the_alignment_of_the_step() -> None:
    """Slices of an odd batch start anywhere in a cache line, which may change the rounding of a product."""
    torch.manual_seed(0)
    stages = [nn.Linear(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 3))]
    for rows in (7, 9, 11, 13):
        whole = torch.randn(rows + 1, 5)
        x, y = whole[1:], torch.randn(rows, 3)

        def check(x: torch.Tensor = x, y: torch.Tensor = y) -> bool:
            return Pipeline(stages, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss).parity(x, target=y).loop.exact

        assert launch(check, 2) == [True, True]
