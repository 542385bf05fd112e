# ruff: noqa: F401, PLC0414 - torch's module defines more names than it exports
"""All names of `torch.distributed.pipelining.schedules`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules as _torch_schedules

from penstock.compat.torch._debug import schedule_log as logger
from penstock.compat.torch._utils import generate_rank_to_stage_mapping, generate_stage_to_rank_mapping
from penstock.compat.torch.installed import InferenceMode
from penstock.compat.torch.microbatch import TensorChunkSpec, _split_tensor, merge_chunks, split_args_kwargs_into_chunks
from penstock.compat.torch.orders.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    WAIT_REDUCE_GRAD,
    WAIT_SEND_B,
    WAIT_SEND_F,
    B,
    F,
    I,
    W,
    _Action,
    _action_regex,
    _ComputationType,
    _get_profiler_function_name,
)
from penstock.compat.torch.orders.generation import _get_1f1b_rank_ops, _get_warmup_ops
from penstock.compat.torch.orders.liveness import (
    PipelineActivationLiveness,
    analyze_pipeline_activation_liveness,
)
from penstock.compat.torch.orders.liveness import assign_slots as _assign_pipeline_activation_slots
from penstock.compat.torch.orders.lowering import (
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _defer_recv_ops,
    _merge_bw,
    _requires_reduce_grad,
)
from penstock.compat.torch.orders.lowering import resolve_unshard_lookahead as _resolve_unshard_lookahead
from penstock.compat.torch.orders.tables import _format_pipeline_order
from penstock.compat.torch.orders.validation import _dump_chrometrace, _simulate_comms_compute, _validate_schedule
from penstock.compat.torch.orders.waits import add_send_waits as _add_wait_send
from penstock.compat.torch.orders.waits import limit_sends as _add_wait_send_budget
from penstock.compat.torch.orders.waits import validate_send_waits as _validate_send_waits
from penstock.compat.torch.schedule_classes.base import _TARGET_CHUNK_SPEC, _PipelineSchedule
from penstock.compat.torch.schedule_classes.multi import PipelineScheduleMulti
from penstock.compat.torch.schedule_classes.named import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _check_torch_compile_compatibility,
)
from penstock.compat.torch.schedule_classes.p2p import _batch_p2p as _batch_p2p
from penstock.compat.torch.schedule_classes.p2p import _sorted_batch_p2p as _sorted_batch_p2p
from penstock.compat.torch.schedule_classes.p2p import _wait_batch_p2p as _wait_batch_p2p
from penstock.compat.torch.schedule_classes.runner import _PipelineContext
from penstock.compat.torch.schedule_classes.runtime import _CustomFunctionProtocol, _PipelineScheduleRuntime
from penstock.compat.torch.schedule_classes.single import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe, _ScheduleForwardOnly
from penstock.compat.torch.stage import PipelineStage, _PipelineStageBase, _RecvInfo
from penstock.errors import nearest

__all__ = [
    "PipelineActivationLiveness",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "analyze_pipeline_activation_liveness",
    "get_schedule_class",
]


def __getattr__(name: str) -> Any:
    """Look up torch's names that are not defined here."""
    return getattr(_torch_schedules, name)


_CLASSES: dict[str, Any] = {
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "GPipe": ScheduleGPipe,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def get_schedule_class(schedule_name: str) -> Any:
    """Return a schedule's class by its name, in upper or lower case."""
    for name, schedule_class in _CLASSES.items():
        if name.lower() == schedule_name.lower():
            return schedule_class
    raise ValueError(f"Unknown schedule name '{schedule_name}': {nearest(schedule_name.removeprefix('Schedule'), _CLASSES)}")
