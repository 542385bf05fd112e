"""The mappings between stages and ranks, by our placements; the descriptions of tensors between stages are torch's own."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import _utils as _torch_utils

from penstock.compat.torch.installed import (  # noqa: F401 - torch 2.11 has none of them
    InferenceMode,
    PipeliningMetadataError,
    _DTensorMeta,
    _StageMeta,
    _TensorMeta,
    extract_tensor_meta,
    extract_tensor_metas,
    to_local_if_dtensor,
    validate_and_normalize_to_tuple,
)
from penstock.ir.placement import Placement


def __getattr__(name: str) -> Any:
    """Look up torch's names that are not defined here."""
    return getattr(_torch_utils, name)


def generate_stage_to_rank_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, int]:
    """Map each stage to its rank: in a loop over the ranks (`loop`), or down and up again (`v`)."""
    chunks = -(-num_stages // pp_size)
    if style == "loop":
        placement = Placement.looped(pp_size, chunks)
    elif style == "v":
        if num_stages % pp_size:
            raise ValueError(f"num_stages {num_stages} must be evenly divisible by pp_size {pp_size} for V schedules")
        placement = Placement.wave(pp_size, -(-chunks // 2))
    else:
        raise ValueError(f"Style {style} is not supported: use loop or v")
    return dict(enumerate(placement.copies[0][:num_stages]))


def generate_rank_to_stage_mapping(pp_size: int, num_stages: int, style: str = "loop") -> dict[int, list[int]]:
    """Map each rank to its stages, in order."""
    stages: dict[int, list[int]] = {}
    for stage, rank in generate_stage_to_rank_mapping(pp_size, num_stages, style).items():
        stages.setdefault(rank, []).append(stage)
    return stages
