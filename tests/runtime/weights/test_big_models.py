"""Models built on the meta device: every rank has values only for its own stages, equal to the unpipelined model's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import WeightsError
from penstock.runtime import Built, Initial, Layers, Pipeline, launch, rank
from penstock.runtime.launch.workers import Workers
from runtime.models import GPT, Block, Embed, GPTBlock, token_loss

SPLIT = Layers("blocks", head=["embed"], tail=["norm", "head"])


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def small(name: str, module: nn.Module) -> None:
    """A custom initialisation that ignores the name."""
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter, std=0.02)


def builders(depth: int, width: int = 16) -> dict[str, Callable[[], nn.Module]]:
    """Return the layers of a GPT."""
    blocks = {f"blocks.{k}": partial(GPTBlock, width, 2, 0.0) for k in range(depth)}
    return {
        "embed": partial(Embed, 11, width, 8),
        **blocks,
        "norm": partial(nn.LayerNorm, width),
        "head": partial(nn.Linear, width, 11, bias=False),
    }


WAYS: dict[str, Callable[[int], Any]] = {
    "modules": lambda depth: Initial(seed=5),
    "own": lambda depth: Initial(seed=5, init=small),
    "layers": lambda depth: Built(builders(depth), seed=5),
}


def owned_values(make: Callable[[], nn.Module], weights: Any, schedule: str, split: Any = SPLIT) -> tuple[dict[str, Tensor], set[str]]:
    """Return this rank's values, and the names of all tensors that take memory here."""
    model = on_meta(make)
    pipe = Pipeline(model, schedule=schedule, microbatches=4, loss_fn=token_loss, split=split, weights=weights)
    real = {name for name, each in model.named_parameters(remove_duplicate=False) if not each.is_meta}
    return {name: each.detach().clone() for name, each in pipe.local_parameters()}, real


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8)
@given(depth=st.integers(4, 7), ranks=st.integers(1, 3), schedule=st.sampled_from(["1f1b", "interleaved-1f1b", "zbv"]))
def test_values_equal_the_unpipelined_model(way: str, tied: bool, depth: int, ranks: int, schedule: str) -> None:
    make = partial(GPT, depth, tied=tied)
    weights = WAYS[way](depth)
    plain = make()
    weights(plain)
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    state = torch.get_rng_state()
    found = launch(lambda: owned_values(make, weights, schedule), ranks)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name for values, _ in found for name in values} | ({"head.weight"} if tied else set()) == set(wanted)
    for values, real in found:
        assert all(torch.equal(value, wanted[name]) for name, value in values.items())
        shared = {"head.weight", "embed.tokens.weight"} if tied else set()
        assert real - shared == set(values) - shared


def backwards(depth: int) -> GPT:
    """A model whose head is its first submodule, but runs last."""
    model = GPT(depth, tied=True)
    model._modules = dict(reversed(model._modules.items()))
    return model


@pytest.mark.parametrize("way", ["modules", "own"])
def test_tied_values_when_modules_are_registered_in_another_order(way: str) -> None:
    weights, plain = WAYS[way](4), backwards(4)
    weights(plain)
    for values, _ in launch(lambda: owned_values(lambda: backwards(4), weights, "1f1b"), 3):
        assert all(torch.equal(value, plain.get_parameter(name)) for name, value in values.items())


def test_values_depend_only_on_seed_and_name() -> None:
    models = [GPT(4) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        torch.rand(seed)
        Initial(seed=seed)(model)
    same, other = ([torch.equal(a, b) for a, b in zip(models[0].parameters(), models[k].parameters(), strict=True)] for k in (1, 2))
    assert all(same)
    assert not all(other)
    assert not torch.equal(models[0].blocks[0].mlp[0].weight, models[0].blocks[1].mlp[0].weight)
    bounds = models[0].blocks[0].mlp[0].weight.abs().max(), 16**-0.5
    assert 0.5 * bounds[1] < bounds[0] <= bounds[1]  # torch's own distribution


@pytest.mark.slow
def test_training_from_the_meta_device(workers: Workers) -> None:
    """Processes that never hold the whole model compute the unpipelined model's loss."""
    tokens = torch.randint(0, 11, (8, 8))

    def train() -> tuple[float, int, int]:
        torch.set_num_threads(1)
        model = on_meta(lambda: GPT(6, tied=True))
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=token_loss, split=SPLIT, weights=Initial(seed=3))
        loss = pipe.step(tokens, target=tokens).loss
        assert loss is not None
        gc.collect()
        held = {each.untyped_storage().data_ptr(): each.nbytes for each in model.parameters() if not each.is_meta}
        return loss.item(), sum(held.values()), sum(each.nbytes for each in pipe.parameters())

    plain = GPT(6, tied=True)
    Initial(seed=3)(plain)
    with torch.no_grad():
        losses = [token_loss(plain(each), each) * 0.25 for each in tokens.tensor_split(4)]
    for loss, held, owned in workers.run(train, ranks=4):
        assert loss == sum(losses[1:], losses[0]).item()
        assert held == owned


class Rotary(nn.Module):
    """Has a non-persistent buffer that its constructor computes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)
        self.register_buffer("table", torch.arange(width) / width, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(x) * self.table


def test_buffers_computed_in_the_constructor() -> None:
    """`Built` gives values to such buffers; other sources refuse them instead of skipping them."""
    make = partial(nn.Sequential, Rotary(), Rotary())
    model = on_meta(lambda: nn.Sequential(Rotary(), Rotary()))
    options = {"schedule": "1f1b", "microbatches": 1, "loss_fn": functional.mse_loss}
    with pytest.raises(WeightsError, match=r"0, a Rotary, holds 0\.table and has no reset_parameters"):
        Pipeline(model, weights=Initial(seed=0), **options)
    pipe = Pipeline(model, weights=Built({"0": Rotary, "1": Rotary}, seed=1), **options)
    assert torch.equal(model[0].table, Rotary().table)
    plain = make()
    Built({"0": Rotary, "1": Rotary}, seed=1)(plain)
    assert torch.equal(pipe.infer(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    assert Initial(seed=0)(plain) is None  # its buffers are there


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.one)


def test_missing_values_are_errors() -> None:
    with pytest.raises(WeightsError, match=r"two was left without values by Forgetful\.reset_parameters\(\)"):
        Initial(seed=0)(on_meta(Forgetful))
    with pytest.raises(WeightsError, match=r"^map\.weight was left without values by init"):
        Initial(seed=0, init=lambda name, module: None)(on_meta(Rotary))
    with pytest.raises(WeightsError, match=r"0, a Block, holds 0\.factor and has no reset_parameters\(\): write one"):
        Initial(seed=0)(on_meta(lambda: nn.Sequential(Block(3))))
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    options = {"schedule": "1f1b", "microbatches": 1, "loss_fn": functional.mse_loss}
    with pytest.raises(WeightsError, match=r"0\.weight and 3 more of this rank's stages is on the meta device .* give Pipeline\(weights="):
        Pipeline(model, **options)
    with pytest.raises(WeightsError, match=r"1\.weight and 1 more .* weights= gave it none"):
        Pipeline(model, weights=Built({"0": lambda: nn.Linear(2, 2)}, seed=0), **options)
    with pytest.raises(WeightsError, match=r"the builder of 1 gives shape \[3, 2\] for weight, which has shape \[2, 2\]"):
        Pipeline(model, weights=Built({"1": lambda: nn.Linear(2, 3)}, seed=0), **options)
    with pytest.raises(WeightsError, match="the model has no part '2'"):
        Pipeline(model, weights=Built({"2": lambda: nn.Linear(2, 3)}, seed=0), **options)


def test_module_that_initialises_its_submodules() -> None:
    """torch's attention resets the bias of its projection after the projection has initialised it."""
    made = on_meta(lambda: nn.MultiheadAttention(4, 2))
    Initial(seed=0)(made)
    assert not made.out_proj.bias.any()
    assert made.in_proj_weight.any()
    assert made.out_proj.weight.any()


def test_attributes_of_parameters_are_kept() -> None:
    """Parameters stay the same objects, with their attributes, for optimizers and ties."""
    model = on_meta(lambda: nn.Linear(2, 2))
    weight = model.weight
    weight.decay = False
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Initial(seed=0)(model)
    assert model.weight is weight
    assert optimizer.param_groups[0]["params"][0] is weight
    assert weight.decay is False
    assert not weight.is_meta
    assert weight.requires_grad
    assert not model.bias.requires_grad
    assert type(model.weight) is nn.Parameter


def test_stages_by_list() -> None:
    """With one meta-device module per stage, each rank fills its own."""

    def run() -> list[bool]:
        modules = [on_meta(lambda: nn.Linear(3, 3)) for _ in range(4)]
        Pipeline(modules, schedule="1f1b-v", microbatches=2, loss_fn=functional.mse_loss, weights=Initial(seed=2))
        plain = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        Initial(seed=2)(plain)
        mine = [k for k, module in enumerate(modules) if not module.weight.is_meta]
        assert mine == [rank(), 3 - rank()]
        return [torch.equal(modules[k].weight, plain[k].weight) for k in mine]

    assert launch(run, 2) == [[True, True], [True, True]]
