"""Work of a forward around its layers, which cutting the model keeps: modules that run twice, dropout by the model's mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from models.tiny import DEPTH, batch, by_stages, by_whole, gpt2, llama, modernbert, nanochat, opt, xglm
from penstock.errors import PlacementError
from penstock.runtime import HuggingFace, Pipeline, launch
from penstock.runtime.model.hugging_face.split import digest_tensor
from penstock.runtime.model.hugging_face.stage_module import HuggingFaceStage
from runtime.models import assert_close, assert_equal

CUTS = [[DEPTH + 2], [3, 3], [1] * (DEPTH + 2)]


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("make", [nanochat, modernbert])
def test_models_with_a_head_of_their_own_kind(make, sizes):
    model, inputs = make(), batch(rows=4)
    found = by_stages(model, inputs, "1f1b", 2, ranks=len(sizes), split=HuggingFace(sizes=sizes))
    assert_close(found, by_whole(model, inputs, 2), 1e-5)


class Dropped(nn.Dropout):
    """Runs twice, and draws numbers of its own each time."""


def test_a_module_that_runs_twice_draws_anew(monkeypatch):
    """Whatever the cuts: by streams of its own, one for each time."""
    model = nanochat()
    model.model.norm = Dropped(0.5)
    found = [by_stages(model, batch(rows=4), "1f1b", 2, ranks=len(sizes), split=HuggingFace(sizes=sizes), seed=3) for sizes in CUTS]
    for other in found[1:]:
        assert_close(other, found[0], 1e-6)
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(Dropped, "forward", lambda self, x: drawn.append(functional_mask(x)) or x)
    by_stages(model, batch(rows=4), "1f1b", 1, ranks=1, seed=3)
    assert not torch.equal(*drawn[-2:])


def functional_mask(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(torch.ones_like(x), 0.5)


@pytest.mark.parametrize("make", [gpt2, opt, xglm])
def test_a_model_in_eval_mode_is_trained_without_dropout(make):
    """As `from_pretrained` gives it."""
    rates = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5} if make is gpt2 else {"dropout": 0.5}
    model, inputs = make(**rates).eval(), batch()
    assert_close(by_stages(model, inputs, "1f1b", 3), by_whole(model, inputs, 3), 1e-6)


def test_dropout_follows_the_mode_of_the_model():
    """Also if it changes after the pipeline was made; in one stage the very numbers of the whole model are drawn."""
    inputs, model = batch(), xglm(dropout=0.5).eval()
    whole = copy.deepcopy(model)

    def run() -> list[Any]:
        pipe = Pipeline(model, schedule="gpipe", microbatches=1)
        found = []
        for training in (False, True, False):
            model.train(training)
            torch.manual_seed(7)
            found.append(pipe.step(inputs).loss)
        return [*found, pipe.eval_step(inputs).loss]

    wanted = []
    for training in (False, True, False, False):
        torch.manual_seed(7)
        wanted.append(whole.train(training)(**inputs, use_cache=False).loss.detach())
    assert not torch.allclose(wanted[0], wanted[1])
    for found, each in zip(launch(run, 1)[0], wanted, strict=True):
        torch.testing.assert_close(found, each, rtol=1e-6, atol=0)


def test_a_cut_that_gives_other_numbers_is_refused(monkeypatch):
    """Tried without parameters, so on the meta device too; nothing is drawn, and the model's mode stays."""
    with torch.device("meta"):
        model = llama().train()
    state = torch.get_rng_state()
    HuggingFace().cut(model, 2)
    assert_equal(torch.get_rng_state(), state)
    assert all(each.training for each in model.modules())
    forward = HuggingFaceStage.forward

    def without_mask(self: Any, given: Any, **kwargs: Any) -> Any:
        return forward(self, given if self.first else given["hidden_states"] if isinstance(given, dict) else given, **kwargs)

    monkeypatch.setattr(HuggingFaceStage, "forward", without_mask)
    with pytest.raises(PlacementError, match="with input_ids and attention_mask they give another output than the whole model"):
        HuggingFace().cut(model, 2)
    monkeypatch.setattr(HuggingFaceStage, "forward", lambda self, given: {}["lost"])
    with pytest.raises(PlacementError, match=r"they fail on 5 tokens \(KeyError: 'lost'\)"):
        HuggingFace().cut(model, 2)


def test_every_kind_of_tensor_has_a_digest():
    """By its values and by their order."""
    values = [torch.tensor([1, 2, 3]), torch.tensor([True, False]), torch.tensor([1 + 2j, 3j]), torch.tensor([0.0, -torch.inf, 5.0])]
    for value in values:
        assert torch.isfinite(digest_tensor(value))
        assert digest_tensor(value) != digest_tensor(value.flip(0))
