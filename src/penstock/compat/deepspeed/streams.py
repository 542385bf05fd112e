"""Our schedules as streams of instructions, kept for the sizes that were asked for last."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from penstock.errors import ScheduleError
from penstock.passes.deepspeed import Stream, streams
from penstock.schedules.registry import schedule


@lru_cache(maxsize=16)
def all_stages(name: str, micro_batches: int, stages: int) -> Sequence[Stream]:
    """Every stage's stream of a schedule that is known by name."""
    return streams(schedule(name, stages, micro_batches))


def of_stage(found: Sequence[Stream], stage_id: int) -> Stream:
    """One stage's stream."""
    if not 0 <= stage_id < len(found):
        raise ScheduleError(f"stage_id {stage_id}: there are {len(found)} stages, 0 to {len(found) - 1}")
    return found[stage_id]


def num_buffers(stream: Stream, fewest: int) -> int:
    """How many buffers a stream uses, and at least so many."""
    used = [each.buffer_id for step in stream for each in step if each.buffer_id is not None]
    return max(fewest, max(used, default=-1) + 1)
