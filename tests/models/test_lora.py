"""Models with PEFT's adapters: the gradients of the whole model where it trains, and none where it is frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from models.tiny import DEPTH, batch, by_stages, by_whole, gpt2, llama
from penstock.errors import PlacementError
from penstock.runtime import HuggingFace, Pipeline, launch
from runtime.models import assert_equal


def adapted(model: Any, **given: Any) -> Any:
    made = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, **given))
    with torch.no_grad():  # PEFT begins with zeros, which would give half of the adapters no gradient
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return made


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "zb-h1"])
@pytest.mark.parametrize("layers", [list(range(DEPTH)), [0], [DEPTH - 1]], ids=["all", "first", "last"])
def test_only_adapters_have_gradients(schedule, layers):
    """The gradients of the whole model, also if stages in front of them, or behind, have nothing to train."""
    model = adapted(llama(), target_modules=["q_proj", "v_proj", "up_proj"], layers_to_transform=layers)
    inputs = batch()
    found, wanted = by_stages(model, inputs, schedule, 3), by_whole(model, inputs, 3)
    assert_equal(found.loss, wanted.loss)
    assert found.grads.keys() == wanted.grads.keys()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 6 * len(layers)
    for name, grad in wanted.grads.items():
        assert (grad is not None) == (name in trained)
        assert_equal(found.grads[name], grad, name)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # PEFT sets it right for this model, and says so
def test_adapters_of_embeddings_and_heads():
    model = adapted(gpt2(), target_modules=["wte", "c_attn"])
    inputs = batch()
    found, wanted = by_stages(model, inputs, "1f1b", 3), by_whole(model, inputs, 3)
    for name, grad in wanted.grads.items():
        assert (found.grads[name] is None) == (grad is None)
        if grad is not None:
            torch.testing.assert_close(found.grads[name], grad, rtol=1e-5, atol=1e-7)


def test_recomputed_stages_pass_gradients_through_what_is_frozen():
    model, inputs = adapted(llama(), target_modules=["q_proj"], layers_to_transform=[0]), batch()
    found, wanted = by_stages(model, inputs, "zbv", 3, recompute=True), by_whole(model, inputs, 3)
    for name, grad in wanted.grads.items():
        assert_equal(found.grads[name], grad, name)


def test_names_are_peft_s():
    model = adapted(llama(), target_modules=["q_proj"])
    names = launch(lambda: [name for name, _ in Pipeline(model, schedule="1f1b", microbatches=2).named_parameters()], 2)
    assert sorted(names[0] + names[1]) == sorted(name for name, _ in model.named_parameters())


def test_prompts_in_front_of_the_tokens_are_refused():
    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(PlacementError, match="PROMPT_TUNING puts its own tokens in front"):
        HuggingFace().cut(model, 2)
