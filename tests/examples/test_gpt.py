"""The example of a GPT runs on slices of its sequences, with the numbers of whole ones."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch

import penstock as ps
from penstock.runtime import Pipeline, launch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt.py"


def test_slices() -> None:
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    layers, tokens, loss, target = example["build"](example["Shape"](vocabulary=16, context=11, width=8, heads=2, blocks=2), batch=4)
    model, schedule = torch.nn.Sequential(*layers).double(), ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=3)
    for parity in launch(lambda: Pipeline(model, schedule, loss_fn=loss).parity(tokens, target=target), 2):
        assert parity.loop.worst < 1e-12
