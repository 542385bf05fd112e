"""Cutting a model puts every layer into exactly one stage."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock as ps
from penstock.errors import PlacementError, ScheduleError
from penstock.runtime import Layers, Pipeline, launch, rank
from penstock.runtime.model.partition import balance_layers, partition
from runtime.models import GPT, assert_same, blocks, by_loop, by_pipeline, token_loss

GPT_LAYERS = Layers("blocks", head=["embed"], tail=["norm", "head"])


def _names(made: Any) -> list[tuple[str, ...]]:
    return [part.layers for part in made.parts]


def test_sequential_is_balanced_by_parameters() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10), nn.Linear(10, 30), nn.Linear(30, 10))
    made = partition(model, 3)
    assert _names(made) == [("0", "1", "2"), ("3",), ("4",)]
    assert [part.size for part in made.parts if part] == [220, 330, 310]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 8))
def test_balance_is_optimal(weights: list[int], stages: int) -> None:
    if stages > len(weights):
        with pytest.raises(PlacementError, match="too few"):
            balance_layers(weights, stages, "model")
        return
    sizes = balance_layers(weights, stages, "model")
    assert len(sizes) == stages
    assert sum(sizes) == len(weights)
    assert min(sizes) >= 1
    cuts = itertools.combinations(range(1, len(weights)), stages - 1)
    best = min(max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cut, len(weights)))) for cut in cuts)
    ends = list(itertools.accumulate(sizes, initial=0))
    assert max(sum(weights[a:b]) for a, b in itertools.pairwise(ends)) == best


def test_many_stages_are_balanced() -> None:
    """More than Python's stack has frames for."""
    assert balance_layers([2, *[1] * 1200], 1200, "model") == [1] * 1199 + [2]


def test_explicit_sizes() -> None:
    model = blocks(5)
    assert _names(partition(model, 2, [1, 4])) == [("0",), ("1", "2", "3", "4")]
    schedule = ps.schedule("1f1b", ranks=2, microbatches=3)
    x, y = torch.randn(7, 6), torch.randn(7, 6)
    assert_same(by_pipeline(model, schedule, x, y, split=[1, 4]), by_loop(model, x, y, 3))


@pytest.mark.parametrize("sizes", [[1, 3], [5], [0, 5], [2, 2, 1], [6, -1]])
def test_sizes_that_do_not_fit(sizes: list[int]) -> None:
    with pytest.raises(PlacementError, match="use every layer once"):
        partition(blocks(5), 2, sizes)


def test_layers_by_name() -> None:
    made = partition(GPT(depth=4), 3, GPT_LAYERS)
    flat = [name for part in made.parts if part for name in part.layers]
    assert flat == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
    sized = Layers("blocks", head=["embed"], tail=["norm", "head"], sizes=[3, 2, 2])
    assert _names(partition(GPT(depth=4), 3, sized)) == [("embed", "blocks.0", "blocks.1"), ("blocks.2", "blocks.3"), ("norm", "head")]


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_layers_by_name_train(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=3)
    tokens = torch.randint(11, (7, 8))
    model = GPT(depth=4)
    found = by_pipeline(model, schedule, tokens, tokens.roll(1, 1), token_loss, split=GPT_LAYERS)
    assert_same(found, by_loop(model, tokens, tokens.roll(1, 1), 3, token_loss))


def test_parameter_in_no_stage_is_named() -> None:
    model = GPT(depth=2)
    with pytest.raises(PlacementError, match=r"'norm.weight' of the model is in no stage"):
        partition(model, 2, Layers("blocks", head=["embed"], tail=["head"]))
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(PlacementError, match=r"'scale' of the model is in no stage"):
        partition(model, 2, GPT_LAYERS)


def test_buffer_in_no_stage_is_named() -> None:
    model = GPT(depth=2)
    model.register_buffer("table", torch.ones(3))
    with pytest.raises(PlacementError, match=r"'table' of the model is in no stage"):
        partition(model, 2, GPT_LAYERS)


def test_layer_without_parameters_is_not_dropped() -> None:
    """An activation that is not named would silently change the numbers."""
    model = GPT(depth=2)
    model.act = nn.GELU()
    with pytest.raises(PlacementError, match=r"'act' of the model is in no stage"):
        partition(model, 2, GPT_LAYERS)
    unused = Layers("blocks", head=["embed"], tail=["norm", "head"], unused=["act"])
    assert len(partition(model, 2, unused)) == 2


def test_layer_named_twice() -> None:
    with pytest.raises(PlacementError, match=r"'blocks.0' of the model would run twice"):
        partition(GPT(depth=2), 2, Layers("blocks", head=["embed", "blocks.0"], tail=["norm", "head"]))
    with pytest.raises(PlacementError, match=r"'embed.tokens' of the model would run twice"):
        partition(GPT(depth=2), 2, Layers("blocks", head=["embed.tokens", "embed"], tail=["norm", "head"]))


def test_unknown_part_has_a_suggestion() -> None:
    with pytest.raises(PlacementError, match=r"no part 'block': did you mean 'blocks'"):
        partition(GPT(depth=2), 2, Layers("block"))
    with pytest.raises(PlacementError, match="'embed' is a Embed, not a list of layers"):
        partition(GPT(depth=2), 2, Layers("embed"))


def test_layer_used_twice_runs_twice() -> None:
    """A layer that occurs twice in a sequence runs twice, although `named_children` lists it once."""
    twice = nn.Linear(6, 6)
    model = nn.Sequential(twice, nn.Tanh(), twice, nn.Linear(6, 6))
    assert _names(partition(model, 2, [2, 2])) == [("0", "1"), ("2", "3")]
    x, y = torch.randn(4, 6, dtype=torch.double), torch.randn(4, 6, dtype=torch.double)
    model = model.double()
    found = by_pipeline(model, ps.schedule("1f1b", ranks=2, microbatches=2), x, y, split=[2, 2])
    wanted = by_loop(model, x, y, 2)
    assert torch.equal(found.loss, wanted.loss)
    for name, grad in wanted.grads.items():
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-12, atol=1e-14)


class _OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


@pytest.mark.parametrize("model", [GPT(depth=2), _OwnForward(nn.Linear(3, 3), nn.Linear(3, 3))])
def test_model_without_an_order(model: nn.Module) -> None:
    with pytest.raises(PlacementError, match="does not say in which order its layers run"):
        partition(model, 2)


def test_too_few_layers() -> None:
    with pytest.raises(PlacementError, match="Sequential has 2 layers, too few for 3 stages"):
        partition(blocks(2), 3)


def test_not_a_model() -> None:
    with pytest.raises(PlacementError, match="got int"):
        partition(3, 2)
    with pytest.raises(PlacementError, match="got float"):
        partition(blocks(2), 2, 0.5)


def test_explicit_list() -> None:
    stages = list(blocks(4))
    assert _names(partition(stages, 4)) == [("0",), ("1",), ("2",), ("3",)]
    with pytest.raises(PlacementError, match="4 modules for 3 stages"):
        partition(stages, 3)


@pytest.mark.parametrize("wrap", [list, tuple, nn.ModuleList])
def test_list_trains_like_the_whole(wrap: Any) -> None:
    model = blocks(4)
    x, y = torch.randn(7, 6), torch.randn(7, 6)
    wanted = by_loop(model, x, y, 3)

    def train() -> tuple[Tensor | None, dict[str, Tensor]]:
        pipe = Pipeline(wrap(model), ps.schedule("zbv", ranks=2, microbatches=3), loss_fn=nn.MSELoss())
        loss = pipe.step(x, target=y).loss
        return loss, {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}

    results = launch(train, 2)
    grads = {name: grad for _, each in results for name, grad in each.items()}
    assert grads.keys() == wanted.grads.keys()
    assert all(torch.equal(grads[name], grad) for name, grad in wanted.grads.items() if grad is not None)
    assert torch.equal(results[1][0], wanted.loss)


def test_map_of_local_stages() -> None:
    """Each rank builds only its own stages."""
    model, x, y = blocks(4), torch.randn(7, 6), torch.randn(7, 6)
    wanted = by_loop(model, x, y, 3)
    schedule = ps.schedule("interleaved-1f1b", ranks=2, microbatches=3)

    def train() -> dict[str, Tensor | None]:
        mine = {stage: model[stage] for stage in schedule.placement.stages_of(rank())}
        pipe = Pipeline(mine, schedule, loss_fn=nn.MSELoss())
        assert "on another rank" in str(pipe.partition)
        pipe.step(x, target=y)
        return {name: p.grad for name, p in pipe.named_parameters()}

    grads = {name: grad for each in launch(train, 2) for name, grad in each.items()}
    assert grads.keys() == wanted.grads.keys()
    assert all(torch.equal(grads[name], grad) for name, grad in wanted.grads.items())


def test_map_without_a_stage_of_this_rank() -> None:
    schedule = ps.schedule("1f1b", ranks=1, microbatches=1)
    with pytest.raises(ScheduleError, match="rank 0 holds stage 0, but the mapping of modules has none for it"):
        Pipeline({}, schedule)
    with pytest.raises(PlacementError, match="stage 7 in the map of modules: there are stages 0 to 0"):
        Pipeline({7: nn.Linear(1, 1)}, schedule)


def test_partition_is_printable() -> None:
    text = str(partition(GPT(depth=4, width=16, vocabulary=11, length=8), 3, Layers("blocks", ["embed"], ["norm", "head"], [2, 3, 2])))
    block = 2 * 2 * 16 + (16 * 48 + 48) + (16 * 16 + 16) + (16 * 32 + 32) + (32 * 16 + 16)
    assert text.splitlines() == [
        f"stage 0: embed .. blocks.0 (2 layers), {11 * 16 + 8 * 16 + block:,} parameters",
        f"stage 1: blocks.1 .. blocks.3 (3 layers), {3 * block:,} parameters",
        f"stage 2: norm .. head (2 layers), {32 + 11 * 16} parameters",
    ]


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.map(x)
        return out if mask is None else out * mask


def test_keyword_argument_goes_to_every_layer_that_takes_it() -> None:
    model = nn.Sequential(_Masked(), nn.Tanh(), _Masked())
    x, y, mask = torch.randn(5, 6), torch.randn(5, 6), (torch.rand(5, 6) > 0.5).float()
    pipe = Pipeline(model, ps.schedule("1f1b", ranks=1, microbatches=2), loss_fn=nn.MSELoss())
    loss = pipe.step(x, target=y, stage_kwargs={0: {"mask": mask}}).loss
    wanted = nn.functional.mse_loss(model[2](model[1](model[0](x, mask)), mask), y)
    torch.testing.assert_close(loss, wanted.detach())
    with pytest.raises(ps.PenstockError, match="no layer of the stage takes the keyword argument 'musk'"):
        pipe.step(x, target=y, stage_kwargs={0: {"musk": mask}})
