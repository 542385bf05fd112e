"""Models that cannot be cut between their layers, and inputs that are none, are refused with what was seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from models.tiny import batch, llama, mixtral, nanochat, opt
from penstock.errors import PlacementError, ScheduleError
from penstock.runtime import HuggingFace, Pipeline


def cut(model: Any, **given: Any) -> Any:
    return HuggingFace(**given).cut(model, 2)


def test_sizes_must_fit():
    with pytest.raises(PlacementError, match=r"split \[3, 2\] for 2 stages of 6 units"):
        cut(llama(), sizes=[3, 2])


def test_other_models_are_refused():
    with pytest.raises(PlacementError, match="Linear is not a transformers model"):
        cut(nn.Linear(2, 2))
    with pytest.raises(PlacementError, match="LlamaModel has no head"):
        cut(llama().model)


def test_a_replaced_forward_is_refused():
    model = llama()
    model.model.forward = model.model.forward
    with pytest.raises(PlacementError, match="was replaced"):
        cut(model)


def test_parameters_beside_the_layers_are_refused():
    model = llama()
    model.model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(PlacementError, match="holds 'scale' itself"):
        cut(model)
    model = llama()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(PlacementError, match="extra of LlamaForCausalLM does not run on tokens alone"):
        cut(model)


def test_a_forward_that_does_more_between_its_layers_is_refused(monkeypatch):
    def watched(change: Any) -> None:
        model = llama()
        inner = type(model.model).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return change(self, inner, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(type(model.model), "forward", forward)
            cut(model)

    def between(self: Any, inner: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden) * 2
        return inner(self, inputs_embeds=hidden, **kwargs)

    def from_tokens(self: Any, inner: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        return inner(self, input_ids=input_ids, first=self.embed_tokens(input_ids) * 3, **kwargs)

    def of_tokens(self: Any, inner: Any, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return inner(self, inputs_embeds=hidden, first=hidden.detach() * 3, **kwargs)

    def reversed_(self: Any, inner: Any, *args: Any, **kwargs: Any) -> Any:
        self.layers = nn.ModuleList(reversed(self.layers))
        return inner(self, *args, **kwargs)

    with pytest.raises(PlacementError, match="changed between layers 0 and 1"):
        watched(between)
    with pytest.raises(PlacementError, match="something that was computed from the tokens"):
        watched(from_tokens)
    with pytest.raises(PlacementError, match="with input_ids they give another output than the whole model"):
        watched(of_tokens)
    with pytest.raises(PlacementError, match="in another order"):
        watched(reversed_)


def test_a_change_in_front_of_a_tail_without_parameters_is_refused(monkeypatch):
    """The stage before would hand on what has been changed, and the next one would change it again."""
    model = nanochat()

    def forward(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutputWithPast(self.norm(hidden * 2))

    monkeypatch.setattr(type(model.model), "forward", forward)
    with pytest.raises(PlacementError, match=r"changed between its last layer and model.norm"):
        cut(model)


def test_layers_that_are_left_out_at_random_are_refused():
    with pytest.raises(PlacementError, match=r"OPTDecoder leaves out layers at random, with layerdrop=0.1"):
        cut(opt(layerdrop=0.1).train())
    model = opt(layerdrop=0.1).eval()
    module = cut(model).parts[0].module
    tokens = torch.zeros(1, 2, dtype=torch.long)
    module(tokens)
    model.train()
    with pytest.raises(PlacementError, match="set its layerdrop to 0"):
        module(tokens)


def test_a_balance_of_its_own_is_refused(monkeypatch):
    from transformers.models.mixtral import modeling_mixtral

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda logits, *_: sum(each.square().mean() for each in logits))
    with pytest.raises(PlacementError, match="balances its routers in a way of its own"):
        cut(mixtral())
    cut(mixtral(output_router_logits=False))


def test_wrong_inputs_are_refused():
    module = cut(llama()).parts[0].module
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ScheduleError, match="2 arguments"):
        module(tokens, tokens)
    with pytest.raises(ScheduleError, match="a list as input"):
        module([tokens])
    with pytest.raises(ScheduleError, match="keeps no cache"):
        module({"input_ids": tokens, "past_key_values": None})
    with pytest.raises(ScheduleError, match="set it in the model's config"):
        module({"input_ids": tokens, "output_router_logits": True})


def test_batches_that_cannot_be_trained_on_are_refused():
    inputs = batch()
    tokens = {name: each for name, each in inputs.items() if name != "labels"}
    pipe = Pipeline(llama(), schedule="gpipe", microbatches=2)
    with pytest.raises(ScheduleError, match="give labels in it, or as target="):
        pipe.step(tokens)
    for count in (0, -1, float("nan"), "many"):
        with pytest.raises(ScheduleError, match="num_items_in_batch is"):
            pipe.step(inputs | {"num_items_in_batch": count})
    with pytest.raises(ScheduleError, match="different numbers of items"):
        pipe.step_list([inputs | {"num_items_in_batch": count} for count in (4, 5)])


def test_the_number_of_items_is_what_the_loss_is_divided_by():
    """As the model's own loss does: two steps with the number of both are one update over all labels."""
    inputs, model = batch(), llama()
    pipe = Pipeline(model, schedule="gpipe", microbatches=2)
    items = int((inputs["labels"][:, 1:] != -100).sum())
    plain = pipe.step(inputs).loss
    gradient = model.lm_head.weight.grad.clone()
    assert torch.equal(pipe.step(inputs | {"num_items_in_batch": None}).loss, plain)
    model.zero_grad()
    halves = [pipe.step(inputs | {"num_items_in_batch": count}).loss for count in (2 * items, torch.tensor(2 * items))]
    whole = model(**inputs, num_items_in_batch=2 * items).loss
    torch.testing.assert_close(halves[0], whole.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(sum(halves), plain, rtol=1e-5, atol=0)
    torch.testing.assert_close(model.lm_head.weight.grad, gradient, rtol=1e-5, atol=1e-8)
    model.zero_grad()
    listed = pipe.step_list(
        [{name: value[half] for name, value in inputs.items()} | {"num_items_in_batch": items} for half in (slice(2), slice(2, None))]
    )
    torch.testing.assert_close(listed.loss, plain, rtol=1e-5, atol=0)
