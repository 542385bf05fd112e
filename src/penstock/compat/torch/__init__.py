"""A drop-in for `torch.distributed.pipelining`: `from penstock.compat.torch import PipelineStage, Schedule1F1B`. Needs torch.

Modules with torch's names (`schedules`, `stage`, `microbatch`, `_backward`, `_IR`, ...) have torch's names in them. A batch comes in
through a schedule, whose `OrderRunner` runs its rank's order, built and proved in `orders`, on the stages of this rank. Import from the
modules with torch's names: the others are ours.
"""

# ruff: noqa: E402 - the version of torch is checked before the other modules are imported

from __future__ import annotations

from penstock.errors import MissingExtraError

try:
    import torch as _torch
except ImportError as error:
    raise MissingExtraError("penstock.compat.torch", "torch", "torch") from error

_LEAST = (2, 11)


def check_version(version: str) -> None:
    """Refuse a torch whose pipelining package differs from the one that this package builds on."""
    if tuple(map(int, version.split(".")[:2])) < _LEAST:
        raise MissingExtraError("penstock.compat.torch", f"torch {_LEAST[0]}.{_LEAST[1]} or later (there is {version})", "torch")


check_version(_torch.__version__)

from penstock.compat.torch._IR import Pipe, SplitPoint, pipe_split, pipeline
from penstock.compat.torch.schedules import (
    PipelineActivationLiveness,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _ScheduleForwardOnly,
    analyze_pipeline_activation_liveness,
    as_torch,
)
from penstock.compat.torch.stage import PipelineStage, PipelineStageInfo, build_stage

__all__ = [
    "Pipe",
    "PipelineActivationLiveness",
    "PipelineStage",
    "PipelineStageInfo",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "_ScheduleForwardOnly",
    "analyze_pipeline_activation_liveness",
    "as_torch",
    "build_stage",
    "pipe_split",
    "pipeline",
]
