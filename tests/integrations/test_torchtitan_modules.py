"""Module names and settings that we write, against torchtitan's own code.

These tests need torchtitan, which needs a torch of its own: `make titan` installs both apart.
"""

from __future__ import annotations

import json
from dataclasses import fields
from importlib.util import find_spec

import pytest

import penstock as ps
from penstock.integrations.layouts import TORCH_SCHEDULES, read_torchtitan, write_torchtitan

if find_spec("torchtitan") is None or find_spec("torchtitan.trainer") is None:
    pytest.skip("torchtitan is not installed: `make titan` installs it into an environment of its own", allow_module_level=True)

import torch
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import (
    _generate_llm_fqn_per_model_part,
    _get_pp_rank_to_stage_indices_mapping,
    _split_module,
)
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def estimate(blocks: int) -> ps.Profile:
    return ps.Profile.transformer(layers=blocks, hidden=64, heads=4, sequence=128, vocabulary=1000, flops=1e12)


@pytest.mark.parametrize("blocks", [9, 17])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_torchtitan_s_own_parts_are_read_and_written(blocks: int, ranks: int, chunks: int) -> None:
    parts = _generate_llm_fqn_per_model_part(ranks * chunks, blocks)
    plan = read_torchtitan(json.dumps(parts), estimate(blocks), ranks=ranks, microbatches=2 * ranks)
    assert json.loads(write_torchtitan(plan).text) == parts


@pytest.mark.parametrize("name", [*TORCH_SCHEDULES, "zb-h1", "v-half", "grouped-interleaved"])
def test_stages_are_on_the_ranks_of_the_plan_and_settings_exist(name: str) -> None:
    plan = ps.plan(estimate(14), ranks=4, microbatches=8, schedules=[name], seconds=0.0)
    settings = write_torchtitan(plan).settings
    for rank in range(4):
        schedule = settings["--parallelism.pipeline_parallel_schedule"]
        assert _get_pp_rank_to_stage_indices_mapping(rank, 4, schedule, plan.placement.stages) == plan.placement.stages_of(rank)
    known = {f"--parallelism.{field.name}" for field in fields(ParallelismConfig)} | {
        f"--training.{field.name}" for field in fields(TrainingConfig)
    }
    assert set(settings) <= known
    assert "--parallelism.module_fqns_per_model_part" in known


def test_the_parts_are_the_whole_model() -> None:
    """torchtitan's split keeps every parameter of its debug model in exactly one part."""
    with torch.device("meta"):
        model = llama3_debugmodel().model_spec.model.build()
    blocks = len(model.layers)
    plan = ps.plan(estimate(blocks), ranks=2, microbatches=4, schedules=["interleaved-1f1b"], seconds=0.0)
    kept = [name for part in json.loads(write_torchtitan(plan).text) for name, _ in _split_module(model, part).named_parameters()]
    assert sorted(kept) == sorted(name for name, _ in model.named_parameters())
