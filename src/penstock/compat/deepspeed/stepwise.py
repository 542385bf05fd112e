"""A stage's stream from what it does in each step, for subclasses that say so themselves in `_step_to_micro_batch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.compat.deepspeed import instructions
from penstock.compat.deepspeed.instructions import PipeInstruction


def stepwise(schedule: Any) -> Iterator[list[PipeInstruction]]:
    """Each step runs its microbatch forward or backward; what the step before it has made is sent in it, before or after its receive."""
    before, count = -1, 2 * (schedule.micro_batches + schedule.stages - 1)
    for step in range(count):
        now, forward = schedule._step_to_micro_batch(step)
        made = [getattr(instructions, name)(schedule._buffer_idx(which)) for name, which in _names(schedule, before, now, forward)]
        if step == count - 1:
            made += [instructions.ReduceTiedGrads(), instructions.ReduceGrads(), instructions.OptimizerStep()]
        yield made
        before = now


def _names(schedule: Any, before: int, now: int, forward: bool) -> Iterator[tuple[str, int]]:
    """The instructions of a step, each with its microbatch."""
    ran, runs = schedule._valid_micro_batch(before), schedule._valid_micro_batch(now)
    down, up = schedule._valid_stage(schedule.prev_stage), schedule._valid_stage(schedule.next_stage)
    wanted = (
        ("SendGrad", before, forward and ran and down),
        ("RecvActivation", now, forward and runs and down),
        ("RecvGrad", now, not forward and runs and up),
        ("SendActivation", before, not forward and ran and up),
        ("LoadMicroBatch", now, forward and runs and (schedule.is_first_stage or schedule.is_last_stage)),
        ("ForwardPass" if forward else "BackwardPass", now, runs),
    )
    return ((name, which) for name, which, is_wanted in wanted if is_wanted)
