"""`penstock train --metrics`: what is written, compared with the losses that the command reports; and what is refused."""

from __future__ import annotations

import contextlib
import csv
import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.runtime.launch.workers import Workers
from penstock.runtime.train import ranks as rank_processes

SMALL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)]
    return layers, torch.randn(4, 12), nn.functional.mse_loss, torch.randn(4, 12)

def data():
    source = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(48, 12, generator=source), torch.randn(48, 12, generator=source))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


def test_every_step_is_written_also_after_a_restart(
    file: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_processes, "Workers", lambda ranks: contextlib.nullcontext(workers))
    table, folder = file.parent / "run.csv", file.parent / "checkpoints"
    command = ["train", str(file), "-p", "2", "--schedule", "1f1b", "-m", "4", "--batch", "16", "--json", "--metrics", str(table)]
    losses = []
    for steps in (3, 5):
        assert main([*command, "--checkpoints", str(folder), "--steps", str(steps)]) == 0
        losses += json.loads(capsys.readouterr().out)["losses"]
    with table.open(newline="", encoding="utf-8") as rows:
        written = list(csv.DictReader(rows))
    assert [int(row["step"]) for row in written] == [1, 2, 3, 4, 5]
    assert [float(row["loss"]) for row in written] == losses
    assert all(float(row["samples_per_second"]) == 16 / float(row["seconds"]) for row in written)
    assert all(0 <= float(row["bubble"]) < 1 for row in written)


@pytest.mark.parametrize("target", ["run.txt", "tensorbord:runs", "wandb:", "no/such/folder/run.csv"])
def test_a_bad_target_is_refused_before_anything_starts(file: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "-p", "2", "--metrics", target]) == 2
    assert "--metrics: metrics" in capsys.readouterr().err
