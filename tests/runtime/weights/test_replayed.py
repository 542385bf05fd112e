"""`Replayed` gives the values that torch draws for the unpipelined model, and holds only a rank's own in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import WeightsError
from penstock.runtime import Layers, Pipeline, Replayed, launch
from penstock.runtime.weights.source import OwnedTensors
from runtime.models import GPT, blocks, token_loss

SPLIT = Layers("blocks", head=["embed"], tail=["norm", "head"])


class Late(GPT):
    """Initialises all weights again at the end of its constructor, as many models do."""

    def __init__(self, depth: int, *, tied: bool = False) -> None:
        super().__init__(depth, tied=tied)
        torch.rand(3)
        self.apply(begin)


def begin(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.uniform_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.orthogonal_(module.weight)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: GPT(4),
    "tied": lambda: GPT(4, tied=True),
    "late": lambda: Late(4),
    "late and tied": lambda: Late(4, tied=True),
}


def unpipelined(build: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: each.detach() for name, each in build().named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (3, "zbv"), (1, "1f1b")])
def test_values_equal_those_of_building_with_the_seed(name: str, ranks: int, schedule: str) -> None:
    build = MODELS[name]

    def values() -> tuple[dict[str, Tensor], set[str]]:
        with torch.device("meta"):
            model = build()
        stream = torch.get_rng_state()
        pipe = Pipeline(model, schedule=schedule, microbatches=4, loss_fn=token_loss, split=SPLIT, weights=Replayed(build, seed=7))
        assert torch.equal(torch.get_rng_state(), stream)
        real = {key for key, each in model.named_parameters(remove_duplicate=False) if not each.is_meta}
        return {key: each.detach() for key, each in pipe.local_parameters()}, real

    wanted, found = unpipelined(build, 7), launch(values, ranks)
    for mine, real in found:
        assert mine
        assert all(torch.equal(value, wanted[key]) for key, value in mine.items())
        assert ranks == 1 or real < set(wanted)
    assert set().union(*(real for _, real in found)) == set(wanted)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(16))


def test_memory_of_other_ranks_values_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the model is built, memory holds this rank's values and those of one layer, never more."""
    with torch.device("meta"):
        model = Deep()
    made: list[nn.Linear] = []
    counts: list[int] = []
    reset = nn.Linear.reset_parameters

    def counted(linear: nn.Linear) -> None:
        reset(linear)
        made.append(linear)
        counts.append(sum(each.weight.untyped_storage().nbytes() > 0 for each in made if not each.weight.is_meta))

    monkeypatch.setattr(nn.Linear, "reset_parameters", counted)
    Replayed(Deep, seed=0)(OwnedTensors({"": model}, frozenset(id(parameter) for parameter in model.layers[5].parameters())))
    monkeypatch.undo()
    assert len(counts) == 64  # once on the meta device, to know the names, and once for real
    assert max(counts) == 4
    torch.manual_seed(0)
    assert torch.equal(model.layers[5][1].weight, Deep().layers[5][1].weight)
    assert all(parameter.is_meta for parameter in model.layers[6].parameters())


def test_training_equals_the_unpipelined_model() -> None:
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    torch.manual_seed(3)
    plain = blocks(4)
    functional.mse_loss(plain(x), y).backward()

    def train() -> dict[str, Tensor]:
        with torch.device("meta"):
            model = blocks(4)
        pipe = Pipeline(model, schedule="zbv", microbatches=2, loss_fn=functional.mse_loss, weights=Replayed(lambda: blocks(4), seed=3))
        pipe.step(x, target=y)
        return {name: parameter.grad for name, parameter in pipe.local_parameters()}

    for theirs in launch(train, ranks=2):
        for name, grad in theirs.items():
            torch.testing.assert_close(grad, plain.get_parameter(name).grad)


def test_another_model_is_rejected() -> None:
    with torch.device("meta"):
        model = blocks(2)
    with pytest.raises(WeightsError, match=r"building the model again gives shape \[4\] for 0\.factor, which has shape \[6\]"):
        Replayed(lambda: blocks(2, width=4), seed=0)(model)
    with pytest.raises(WeightsError, match=r"building the model again gives nothing for 1\.\w+"):
        Replayed(lambda: blocks(1), seed=0)(model)
    with pytest.raises(WeightsError, match="Replayed builds a whole model"):
        Pipeline([model], schedule="1f1b", microbatches=2, weights=Replayed(lambda: blocks(2), seed=0))
