"""The recipe for torchtitan: our file in torch's own runtime, on processes."""

from __future__ import annotations

import shlex

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from models.test_recipes import recipe


@pytest.mark.slow
@pytest.mark.parametrize(("name", "places"), [("grouped-interleaved", "PipelineScheduleMulti"), ("1f1b-v", "ZBVZeroBubble")])
def test_our_file_runs_in_torch_s_runtime(tmp_path, capsys, name, places):
    made, path = recipe("torchtitan/schedule_file"), str(tmp_path / "schedule.csv")
    losses = made.main(path, name)
    words = shlex.split(capsys.readouterr().out, comments=True)
    arguments = dict(zip(words[::2], words[1::2], strict=True))
    assert arguments["--parallelism.pipeline_parallel_schedule_csv"] == path
    assert arguments["--parallelism.pipeline_parallel_schedule"] == places
    size = int(arguments["--parallelism.pipeline_parallel_microbatch_size"])
    assert int(arguments["--training.local_batch_size"]) // size == made.MICROBATCHES
    schedule = ps.load(path)
    assert schedule.ranks == int(arguments["--parallelism.pipeline_parallel_degree"])
    assert losses == pytest.approx(by_hand(schedule.stages, made.MICROBATCHES))


def by_hand(stages: int, microbatches: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(stages)))
    with torch.no_grad():
        return [float(functional.mse_loss(model(x), x)) for x in torch.randn(32, 16).chunk(microbatches)]
