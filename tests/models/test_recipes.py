"""The recipes under `examples/` are short, and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.runtime import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ["hugging_face", "lora", "torchtitan/schedule_file"]


def recipe(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"recipe_{Path(name).name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 50


@pytest.mark.slow
def test_a_hugging_face_model_in_a_plain_loop(capsys):
    """The whole model in the same loop, without a pipeline, has the same losses."""
    made = recipe("hugging_face")
    losses = launch(lambda: made.train(4), made.RANKS)
    assert losses[0] == losses[1]
    assert "after 4 steps" in capsys.readouterr().out
    assert losses[0] == pytest.approx(unpipelined(made, 4), rel=1e-4)


def unpipelined(made: Any, steps: int) -> list[float]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made.CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in made.batches(steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_adapters_are_trained_through_a_frozen_base(capsys):
    made = recipe("lora")
    (losses, first), (_, second) = launch(lambda: made.train(6), made.RANKS)
    assert first == 2 * 3 * 2  # two matrices for each of three maps of two layers
    assert second == 0
    assert losses[-1] < losses[0]
    said = capsys.readouterr().out
    assert "rank 1 trains 0 parameters" in said
