"""Parameters, their names, and the norm of their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Layers, Pipeline, launch
from runtime.models import GPT, assert_equal, blocks, by_loop, token_loss

LAYERS = Layers("blocks", head=["embed"], tail=["norm", "head"])


def _unpipelined(model: nn.Module, x: Tensor, y: Tensor, count: int, loss_fn: object = functional.mse_loss) -> nn.Module:
    """Return a copy of the model with the gradients of the microbatch loop."""
    again = copy.deepcopy(model)
    for name, grad in by_loop(model, x, y, count, loss_fn).grads.items():  # type: ignore[arg-type]
        again.get_parameter(name).grad = grad
    return again


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_clip_grad_norm_equals_torch_to_the_last_bit(name: str, max_norm: float, norm_type: float) -> None:
    schedule = ps.schedule(name, ranks=4, microbatches=3)
    model, x, y = blocks(11), torch.randn(6, 6), torch.randn(6, 6)
    again = _unpipelined(model, x, y, 3)
    wanted = nn.utils.clip_grad_norm_(again.parameters(), max_norm, norm_type)

    def train() -> Tensor:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        return pipe.clip_grad_norm_(max_norm, norm_type)

    for norm in launch(train, 4):
        assert_equal(norm, wanted)
    for key, parameter in again.named_parameters():
        assert_equal(model.get_parameter(key).grad, parameter.grad, key)


def test_norm_does_not_depend_on_the_ranks() -> None:
    model, x, y = blocks(8), torch.randn(6, 6), torch.randn(6, 6)
    norms = []
    for ranks in (1, 2, 4, 8):
        schedule = ps.schedule("interleaved-1f1b", ranks=ranks, microbatches=3, chunks=8 // ranks)
        model.zero_grad()

        def train(schedule: ps.Schedule = schedule) -> Tensor:
            pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
            pipe.step(x, target=y)
            return pipe.clip_grad_norm_(0.1)

        norms += launch(train, ranks)
    assert all(torch.equal(norm, norms[0]) for norm in norms)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "dualpipe"])
def test_tied_parameters_count_once(name: str, separate: bool) -> None:
    """The norm equals the unpipelined model's, whether ranks share one model or build their own."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    torch.manual_seed(1)
    model = GPT(depth=4, tied=True).double()
    tokens = torch.randint(11, (6, 8))
    again = _unpipelined(model, tokens, tokens, 4, token_loss)
    wanted = nn.utils.clip_grad_norm_(again.parameters(), 0.5)

    def train() -> tuple[Tensor, dict[str, Tensor | None]]:
        mine = copy.deepcopy(model) if separate else model
        pipe = Pipeline(mine, schedule, loss_fn=token_loss, split=LAYERS)
        pipe.step(tokens, target=tokens)
        return pipe.clip_grad_norm_(0.5), {name: p.grad for name, p in pipe.named_parameters()}

    for norm, grads in launch(train, 2):
        torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)
        for key, grad in grads.items():
            torch.testing.assert_close(grad, again.get_parameter(key).grad, rtol=1e-10, atol=1e-13)


def test_names_are_those_of_the_model() -> None:
    model = GPT(depth=4)
    schedule = ps.schedule("interleaved-1f1b", ranks=2, microbatches=1)

    def names() -> list[str]:
        pipe = Pipeline(model, schedule, loss_fn=token_loss, split=LAYERS)
        for name, parameter in pipe.named_parameters():
            assert model.get_parameter(name) is parameter
        assert [id(p) for p in pipe.parameters()] == [id(p) for _, p in pipe.named_parameters()]
        return [name for name, _ in pipe.named_parameters()]

    found = [name for each in launch(names, 2) for name in each]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.filterwarnings("ignore:rank 1 has no parameters to update")
@pytest.mark.parametrize("name", ["1f1b", "dualpipe"])
def test_one_object_is_updated_once(name: str) -> None:
    """Of virtual ranks that share a model, only one lists a shared parameter, so that only one optimizer updates it."""
    model = GPT(depth=2, tied=True)
    schedule = ps.schedule(name, ranks=2, microbatches=2)
    found = launch(lambda: [id(p) for p in Pipeline(model, schedule, loss_fn=token_loss, split=LAYERS).parameters()], 2)
    every = [ident for each in found for ident in each]
    assert sorted(every) == sorted(id(p) for p in model.parameters())


def test_parameters_follow_a_replacement() -> None:
    """An existing pipeline sees new parameters from `load_state_dict(assign=True)`."""
    model = blocks(2)
    pipe = Pipeline(model, schedule="1f1b-v", microbatches=2, loss_fn=functional.mse_loss)
    model.load_state_dict(blocks(2).state_dict(), assign=True)
    assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}
    x = torch.randn(4, 6)
    before = by_loop(model, x, x, 2)
    pipe.step(x, target=x)
    for name, parameter in model.named_parameters():
        assert_equal(parameter.grad, before.grads[name])


def test_norm_without_gradients_is_zero() -> None:
    pipe = Pipeline(blocks(1), schedule="1f1b", microbatches=1)
    assert float(pipe.clip_grad_norm_(1.0)) == 0.0
