"""A drop-in for `torch.distributed.pipelining`: `from penstock.compat.torch import PipelineStage, Schedule1F1B`. Needs torch.

Modules with torch's names (`schedules`, `stage`, `microbatch`, `_backward`, `_IR`, ...) have torch's names in them. A batch comes in
through a schedule, whose `OrderRunner` runs its rank's order, built and proved in `orders`, on the stages of this rank. Import from the
modules with torch's names: the others are ours.
"""

# ruff: noqa: E402 - the version of torch and its private names are checked before the other modules are imported

from __future__ import annotations

from penstock.errors import MissingExtraError

try:
    import torch as _torch
except ImportError as error:
    raise MissingExtraError("penstock.compat.torch", "torch", "torch") from error

from penstock.runtime.torch_internals.lookup import check_names
from penstock.runtime.torch_internals.version import check_torch_version

check_torch_version(_torch.__version__)
check_names(
    "torch.distributed.pipelining._IR.Pipe.from_tracing",
    "torch.distributed.pipelining._IR.SplitPoint",
    "torch.distributed.pipelining._IR._modify_graph_op_device",
    "torch.distributed.pipelining._IR.pipe_split",
    "torch.distributed.pipelining._IR.pipeline",
    "torch.distributed.pipelining._backward",
    "torch.distributed.pipelining._debug.friendly_debug_info",
    "torch.distributed.pipelining._debug.map_debug_info",
    "torch.distributed.pipelining._schedule_visualizer._ComputationTypeVisual",
    "torch.distributed.pipelining._schedule_visualizer.action_type_to_color_mapping",
    "torch.distributed.pipelining._unflatten",
    "torch.distributed.pipelining._utils.PipeInfo",
    "torch.distributed.pipelining._utils.flatten_args",
    "torch.distributed.pipelining._utils.generate_stage_to_rank_mapping",
    "torch.distributed.pipelining.microbatch._CustomReducer",
    "torch.distributed.pipelining.microbatch._LossReducer",
    "torch.distributed.pipelining.microbatch._Replicate",
    "torch.distributed.pipelining.microbatch._split_block_mask",
    "torch.distributed.pipelining.schedules._PipelineSchedule.register",
    "torch.distributed.pipelining.stage._PipelineStage",
    "torch.distributed.pipelining.stage._PipelineStageBase",
    "torch.distributed.pipelining.stage._RecvInfo",
    "torch.distributed.pipelining.stage._normalize_model_output_as_tuple",
)

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
