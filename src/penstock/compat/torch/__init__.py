"""`torch.distributed.pipelining` over our parts: `from penstock.compat.torch import PipelineStage, Schedule1F1B`. Needs torch."""

# ruff: noqa: E402 - what is imported needs the right torch

from __future__ import annotations

try:
    import torch as _torch
except ImportError as error:
    from penstock.errors import MissingExtraError

    raise MissingExtraError("penstock.compat.torch", "torch", "torch") from error

from penstock.compat.torch._installed import check_version

check_version(_torch.__version__)

from penstock.compat.torch._IR import Pipe, SplitPoint, pipe_split, pipeline
from penstock.compat.torch.schedule_classes.runtime import as_torch
from penstock.compat.torch.schedule_classes.single import _ScheduleForwardOnly
from penstock.compat.torch.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from penstock.compat.torch.stage import PipelineStage, build_stage

__all__ = [
    "Pipe",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "SplitPoint",
    "_ScheduleForwardOnly",
    "as_torch",
    "build_stage",
    "pipe_split",
    "pipeline",
]
