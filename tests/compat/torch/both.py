"""The installed torch's package and ours, side by side."""

from __future__ import annotations

import importlib
import re
from types import SimpleNamespace
from typing import Any, cast

import torch

MODULES = ("schedules", "stage", "microbatch", "_backward", "_utils", "_IR", "_schedule_visualizer")


class Package:
    """A package and its submodules as attributes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.top: Any = importlib.import_module(name)
        self.schedules, self.stage, self.microbatch, self._backward, self._utils, self._IR, self._schedule_visualizer = (
            cast(Any, importlib.import_module(f"{name}.{module}")) for module in MODULES
        )

    def __repr__(self) -> str:
        return self.name.split(".")[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Package, (self.name,)


VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
"""The installed torch's."""


def later(since: tuple[int, int], *values: Any) -> tuple[Any, ...]:
    """Return the arguments that torch takes since a version; none with an older torch."""
    return values if since <= VERSION else ()


def with_waits(row: str) -> str:
    """Add to a row the waits that torch demands since 2.15: for each reduction behind it, for each send at the row's end."""
    if VERSION < (2, 15):
        return row
    sends = [cell.replace("SEND", "WAIT_SEND") for cell in row.split() if "SEND" in cell]
    return " ".join([re.sub(r"(\d+)REDUCE_GRAD", r"\1REDUCE_GRAD \1WAIT_REDUCE_GRAD", row), *sends])


def prepare(package: Package, stage: Any, args: Any = None, kwargs: Any = None) -> None:
    """Set up a stage with static shapes for two microbatches, as torch's schedules do."""
    stage.has_backward = True
    if VERSION >= (2, 12):
        stage._inference_mode = package._utils.InferenceMode.STATIC
    stage._prepare_forward_infra(2, args, kwargs, *later((2, 12), True))
    stage._prepare_backward_infra(2)


def fill(info: Any, generator: torch.Generator | None = None) -> None:
    """Fill the buffer of a received tensor, as a message would; since 2.15 it is there once the receive is posted."""
    with torch.no_grad():
        info.buffer.normal_(generator=generator)


def forward_cache(stage: Any) -> dict[int, Any]:
    """Return what a stage keeps between a microbatch's forward and its backward."""
    cache: dict[int, Any] = stage._forward_chunk_states if VERSION >= (2, 15) else stage.fwd_cache
    return cache


def _leave_out_messages_to_itself(stage: Any) -> None:
    """Have torch 2.11 open no connection from a rank to itself, which gloo refuses; else it could run no rank with adjacent stages."""
    get_ops = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda self: [op for op in get_ops(self) if op.group_peer != self.group_rank]


TORCH, OURS = Package("torch.distributed.pipelining"), Package("penstock.compat.torch")
BOTH = [TORCH, OURS]
if VERSION < (2, 12):
    _leave_out_messages_to_itself(TORCH.stage._PipelineStageBase)

LOOPED = ["ScheduleLoopedBFS", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"]
ON_A_V = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
SINGLE = ["ScheduleGPipe", "Schedule1F1B"]


def mock_stages(ranks: int, chunks: int) -> list[Any]:
    """Build stages with only the attributes that a schedule's constructor reads."""
    return [SimpleNamespace(group_rank=0, group_size=ranks, num_stages=ranks * chunks, submod=None) for _ in range(chunks)]


def made(package: Package, name: str, ranks: int, chunks: int, microbatches: int, **options: Any) -> Any:
    """Build a schedule on mock stages, or return the type of the error that refuses the counts."""
    stages = mock_stages(ranks, chunks)
    try:
        return getattr(package.schedules, name)(stages[0] if name in SINGLE else stages, microbatches, **options)
    except (ValueError, AssertionError) as error:
        return type(error)


def parse(package: Package, *rows: str) -> dict[int, list[Any]]:
    """Parse an order from one string per rank: actions separated by spaces, a dot for an idle slot."""
    action = package.schedules._Action.from_str
    return {rank: [action("" if cell == "." else cell) for cell in row.split()] for rank, row in enumerate(rows)}


def texts(order: dict[int, list[Any]]) -> dict[int, list[str | None]]:
    return {rank: [None if action is None else str(action) for action in row] for rank, row in order.items()}
