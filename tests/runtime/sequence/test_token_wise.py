"""Modules that may mix tokens are refused with the reason, unless they are declared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.errors import ScheduleError
from penstock.runtime import Pipeline, launch
from penstock.runtime.sequence.token_wise import check_sliceable
from runtime.sequences import WIDTH, mean_loss


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Declared(nn.Module):
    sliceable = True

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.GELU(), nn.Dropout(), nn.Softmax(-1)),
        nn.ModuleDict({"a": nn.Sequential(nn.Identity()), "b": nn.GLU()}),
        Declared(nn.MultiheadAttention(8, 2), nn.Conv1d(8, 8, 3), Unknown()),
        nn.Sequential(Declared(), nn.Linear(8, 8)),
    ],
)
def test_token_wise_and_declared_modules_are_accepted(module: nn.Module) -> None:
    check_sliceable("model", module)


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (Unknown(), r"\(Unknown\) may mix the tokens of a sequence, .* declare sliceable = True"),
        (nn.Sequential(nn.Linear(8, 8), Unknown()), r"module model\.1 \(Unknown\)"),
        (nn.MultiheadAttention(8, 2), r"\(MultiheadAttention\) attends to the slice alone, not to the prefix"),
        (nn.TransformerEncoderLayer(8, 2), r"\(TransformerEncoderLayer\) attends to the slice alone"),
        (nn.GRU(8, 8), r"\(GRU\) starts each slice without the state"),
        (nn.Conv1d(8, 8, 3), r"\(Conv1d\) convolves neighbouring tokens"),
        (nn.BatchNorm1d(8), r"\(BatchNorm1d\) normalises over all tokens .* replace it by a LayerNorm"),
        (nn.LayerNorm([10, 8]), r"\(LayerNorm\) may mix the tokens"),
        (nn.Softmax(1), r"\(Softmax\) may mix the tokens"),
        (nn.GroupNorm(2, 8), r"\(GroupNorm\) may mix the tokens"),
        (Declared(nn.Sequential(nn.BatchNorm1d(8))), r"module model\.inner\.0\.0 \(BatchNorm1d\) normalises over all tokens"),
    ],
)
def test_others_are_refused(module: nn.Module, match: str) -> None:
    with pytest.raises(ScheduleError, match=match):
        check_sliceable("model", module)


def test_subclasses_are_not_known() -> None:
    class Sums(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.cumsum(1))

    with pytest.raises(ScheduleError, match=r"\(Sums\) may mix the tokens"):
        check_sliceable("model", Sums(8, 8))


@pytest.mark.parametrize("schedule", ["seq1f1b", ps.schedule("slimpipe", ranks=2, microbatches=2, chunks=1, slices=2)])
def test_pipelines_refuse_before_anything_runs(schedule: str | ps.Schedule) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Unknown())
    with pytest.raises(ScheduleError, match=r"module 1 \(Unknown\) may mix the tokens of a sequence"):
        launch(lambda: Pipeline(model, schedule=schedule, microbatches=2, loss_fn=mean_loss), 2)


def test_full_graphs_are_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    options = {"compile": {"fullgraph": True}}
    with pytest.raises(ScheduleError, match="fullgraph=True, but with slices each layer"):
        launch(lambda: Pipeline(model, schedule="seq1f1b", microbatches=2, loss_fn=mean_loss, **options), 2)


def test_sharded_modules_keep_their_class() -> None:
    class FSDPModule:
        pass

    layer = nn.Linear(8, 8)
    layer.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    check_sliceable("model", layer)
    assert torch.equal(layer(torch.zeros(1, 8)), layer.bias[None])
