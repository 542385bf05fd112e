"""All names of `torch.distributed.pipelining.stage`. A traced stage inherits its graph from torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import stage as _torch_stage
from torch.distributed.pipelining._utils import PipeInfo
from torch.distributed.pipelining.stage import _normalize_model_output_as_tuple, _RecvInfo

from penstock.compat.torch._backward import stage_backward, stage_backward_input, stage_backward_weight
from penstock.compat.torch.installed import (
    InferenceMode,
    PipelineStageInfo,
    PipeliningMetadataError,
    _DTensorMeta,
    _StageMeta,
    _TensorMeta,
)
from penstock.compat.torch.stage_classes.base import _PipelineStageBase
from penstock.compat.torch.stage_classes.manual import PipelineStage

__all__ = [
    "InferenceMode",
    "PipeInfo",
    "PipelineStage",
    "PipelineStageInfo",
    "PipeliningMetadataError",
    "_DTensorMeta",
    "_PipelineStage",
    "_PipelineStageBase",
    "_RecvInfo",
    "_StageMeta",
    "_TensorMeta",
    "_normalize_model_output_as_tuple",
    "build_stage",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]


def __getattr__(name: str) -> Any:
    """Look up torch's names that are not defined here."""
    return getattr(_torch_stage, name)


class _PipelineStage(_PipelineStageBase, _torch_stage._PipelineStage):
    """A stage of a traced model."""


def build_stage(
    stage_module: nn.Module, stage_index: int, pipe_info: PipeInfo, device: torch.device, group: dist.ProcessGroup | None = None
) -> _PipelineStage:
    """Build a stage of a traced model, for a schedule to run."""
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)
