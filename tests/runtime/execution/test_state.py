"""State carried from step to step: gradients, statistics, random numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.errors import PipelineError
from penstock.runtime import Layers, Pipeline, launch, rank
from runtime.models import GPT, assert_equal, blocks, gradients, loop_step, token_loss


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved-zb", "zbv", "dualpipe-v"])
def test_gradients_accumulate_over_steps(name: str) -> None:
    """Three steps before the optimizer are the sum of the three, to the last bit of the loop."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model = blocks(schedule.stages)
    again = copy.deepcopy(model)
    batches = [(torch.randn(9, 6), torch.randn(9, 6)) for _ in range(3)]

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        for x, y in batches:
            pipe.step(x, target=y)

    launch(train, 2)
    for x, y in batches:
        pieces = list(zip(x.tensor_split(4), y.tensor_split(4), strict=True))
        loop_step(again, pieces, [len(piece) / 9 for piece, _ in pieces], functional.mse_loss)
    for key, grad in gradients(again).items():
        assert_equal(gradients(model)[key], grad, key)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_two_steps_are_twice_the_gradient(name: str) -> None:
    model, x, y = blocks(2).double(), torch.randn(8, 6).double(), torch.randn(8, 6).double()

    def train() -> dict[str, Tensor]:
        pipe = Pipeline(model, schedule=name, microbatches=4, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        once = {key: p.grad.clone() for key, p in pipe.named_parameters() if p.grad is not None}
        pipe.step(x, target=y)
        for key, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, 2 * once[key], rtol=1e-13, atol=1e-15)
        return once

    assert sum(map(len, launch(train, 2))) == len(list(model.parameters()))


# Batch statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "zbv", "dualpipe-v"])
def test_batch_statistics_count_each_microbatch_once(name: str) -> None:
    """From the first step on, the only forwards are those of the microbatches, in their order."""
    schedule = ps.schedule(name, ranks=2, microbatches=3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(schedule.stages)))
    again = copy.deepcopy(model)
    x, y = torch.randn(9, 6), torch.randn(9, 6)

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        for _ in range(2):
            pipe.step(x, target=y)

    launch(train, 2)
    pieces = list(zip(x.tensor_split(3), y.tensor_split(3), strict=True))
    for _ in range(2):
        loop_step(again, pieces, [1 / 3] * 3, functional.mse_loss)
    assert int(model[0][1].num_batches_tracked) == 6
    for (key, value), wanted in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert_equal(value, wanted, key)
    for key, grad in gradients(again).items():
        assert_equal(gradients(model)[key], grad, key)


def test_building_a_pipeline_runs_nothing() -> None:
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("an unexpected forward")

    pipe = Pipeline(nn.Sequential(Never(), Never()), schedule="zbv", microbatches=4, loss_fn=functional.mse_loss)
    assert pipe.program().training
    pipe.program(7, training=False)


# Random numbers -------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(torch.tanh(self.map(x)), 0.4, self.training) + torch.randn(6) * 0.1


WAYS = [
    ("interleaved-1f1b", 1, {"chunks": 4}),
    ("looped-bfs", 1, {"chunks": 4}),
    ("interleaved-1f1b", 2, {"chunks": 2}),
    ("interleaved-zb", 2, {"chunks": 2}),
    ("zbv", 2, {}),
    ("dualpipe-v", 2, {}),
    ("1f1b", 4, {}),
    ("zb-h1", 4, {}),
    ("gpipe", 4, {}),
    ("dualpipe", 4, {}),
]


def _noisy(name: str, ranks: int, options: dict[str, Any], seed: int, steps: int = 2) -> tuple[list[float], dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Noisy() for _ in range(4))).double()
    x, y = torch.randn(7, 6).double(), torch.randn(7, 6).double()
    torch.manual_seed(ranks)  # torch's own numbers must not matter

    def train() -> list[float]:
        schedule = ps.schedule(name, ranks=ranks, microbatches=3, **options)
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, seed=seed)
        return [float(loss) for _ in range(steps) for loss in pipe.step(x, target=y).losses]

    return launch(train, ranks)[0], gradients(model)


def test_random_numbers_do_not_depend_on_ranks_or_schedule() -> None:
    losses, grads = _noisy(*WAYS[0], seed=5)
    assert len(set(losses)) == 6  # each microbatch and step has numbers of its own
    for way in WAYS[1:]:
        others, theirs = _noisy(*way, seed=5)
        assert others == losses, way
        for key, grad in grads.items():
            torch.testing.assert_close(theirs[key], grad, rtol=1e-12, atol=1e-15)
    assert _noisy(*WAYS[0], seed=6)[0] != losses


def test_streams_depend_on_stage_and_microbatch() -> None:
    """The unpipelined model over the same slices, told to draw the same numbers, gives the same losses."""
    losses: dict[int, list[Tensor]] = {}
    draws: dict[int, dict[int, Tensor]] = {}

    class Draw(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            self.stage, self.factor = stage, nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            drawn = torch.randn(3)
            draws.setdefault(self.stage, {})[int(x[0, 0])] = drawn
            return x * self.factor

    model = nn.Sequential(*(Draw(stage) for stage in range(4)))
    x = torch.arange(5.0)[:, None].expand(5, 2).contiguous()

    def train(name: str) -> None:
        losses[rank()] = Pipeline(model, schedule=name, microbatches=5, loss_fn=functional.mse_loss, seed=1).step(x, target=x).losses

    launch(train, 4, args=("1f1b",))
    first = copy.deepcopy(draws)
    every = [value for stage in first.values() for value in stage.values()]
    assert len(every) == 20
    assert len({tuple(value.tolist()) for value in every}) == 20
    launch(train, 4, args=("zb-h2",))
    for stage, values in draws.items():
        for microbatch, value in values.items():
            assert_equal(value, first[stage][microbatch])


def test_failed_step_does_not_use_up_a_stream() -> None:
    """A repeated step draws the numbers that the failed one would have drawn."""
    broken = True

    class Breaks(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            if broken:
                raise ValueError("broken")
            return super().forward(x)

    model, x = nn.Sequential(Noisy(), Breaks()), torch.randn(4, 6)
    pipe = Pipeline(model, schedule="1f1b-v", microbatches=2, loss_fn=functional.mse_loss, seed=3)
    with pytest.raises(PipelineError):
        pipe.step(x, target=x)
    broken = False
    fresh = Pipeline(model, schedule="1f1b-v", microbatches=2, loss_fn=functional.mse_loss, seed=3)
    assert_equal(pipe.step(x, target=x).loss, fresh.step(x, target=x).loss)


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Noisy(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["1f1b-v", "zbv"])
def test_recomputed_forwards_draw_the_same_numbers(name: str, reentrant: bool) -> None:
    plain = nn.Sequential(nn.Linear(6, 6), *(Noisy() for _ in range(3)))
    again = nn.Sequential(copy.deepcopy(plain[0]), *(Recomputed(reentrant) for _ in range(3)))
    for layer, other in zip(plain[1:], again[1:], strict=True):
        other.inner.load_state_dict(layer.state_dict())
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    for model in (plain, again):
        launch(lambda m=model: Pipeline(m, schedule=name, microbatches=3, loss_fn=functional.mse_loss, seed=2).step(x, target=y), 2)
    for (key, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert_equal(one.grad, other.grad, key)


def test_each_virtual_rank_has_its_own_random_state() -> None:
    """Without a seed, a rank draws as it would alone, whatever the others do in between."""

    def draw(many: int) -> list[float]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        pipe = Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
        found = []
        for _ in range(3):
            found.append(float(torch.rand(())))
            if rank() == 1:
                torch.rand(many)
            pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
        return found

    torch.manual_seed(11)
    one = launch(draw, 2, args=(3,))
    other = launch(draw, 2, args=(50,))
    assert one[0] == other[0]
    assert one[1][0] == other[1][0] == one[0][0]
    assert one[1][1:] != other[1][1:]


def test_launch_leaves_the_caller_s_random_state() -> None:
    before = torch.get_rng_state()
    launch(lambda: torch.rand(5), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_without_seed_follows_the_rank_s_own_state() -> None:
    """One rank, one stage: the unpipelined loop from the same random state gives the same numbers."""
    model, x, y = Noisy(), torch.randn(6, 6), torch.randn(6, 6)
    again = copy.deepcopy(model)
    torch.manual_seed(8)
    found = Pipeline([model], schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss).step(x, target=y)
    torch.manual_seed(8)
    pieces = list(zip(x.tensor_split(3), y.tensor_split(3), strict=True))
    assert_equal(found.loss, loop_step(again, pieces, [1 / 3] * 3, functional.mse_loss).loss)


def test_grad_mode_and_autocast_belong_to_the_rank() -> None:
    """A rank that has switched gradients off, or autocast on, does not do so for the others."""

    def modes() -> list[tuple[bool, bool]]:
        pipe = Pipeline(blocks(2), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
        x = torch.randn(2, 6)
        seen = []
        with torch.no_grad() if rank() else torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=rank() == 1):
            for _ in range(2):
                pipe.step(x, target=x)
                seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return seen

    assert launch(modes, 2) == [[(True, False)] * 2, [(False, True)] * 2]


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_gpt_with_dropout_equals_itself_on_one_rank(name: str) -> None:
    layers = Layers("blocks", head=["embed"], tail=["norm", "head"])
    tokens = torch.randint(11, (6, 8))
    results = []
    for way, ranks, options in (("interleaved-1f1b", 1, {"chunks": 4}), (name, 4 if name == "1f1b" else 2, {})):
        torch.manual_seed(4)
        model = GPT(depth=4, dropout=0.2)
        schedule = ps.schedule(way, ranks=ranks, microbatches=3, **options)
        losses = launch(
            lambda m=model, s=schedule: Pipeline(m, s, loss_fn=token_loss, split=layers, seed=9).step(tokens, target=tokens).losses, ranks
        )[0]
        results.append((losses, gradients(model)))
    (losses, grads), (others, theirs) = results
    for one, other in zip(losses, others, strict=True):
        assert_equal(one, other)
    for key, grad in grads.items():
        assert_equal(theirs[key], grad, key)
