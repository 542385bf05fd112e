"""The names of `deepspeed.runtime.pipe.schedule`.

The streams of `TrainSchedule` are those of our `1f1b`, of `InferenceSchedule` those of `inference`, of `DataParallelSchedule` those
of `data-parallel`, and of `DualPipeVSchedule` those of `dualpipe-v` with full backwards. The first two call their hooks in every step,
so a subclass changes the stream by overriding one of them. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.compat.deepspeed.dualpipe_v import DualPipeVSchedule
from penstock.compat.deepspeed.instructions import (
    BackwardPass,
    BufferOpInstruction,
    CommitP2P,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    call_to_str,
)
from penstock.errors import ScheduleError

__all__ = [
    "BackwardPass",
    "BufferOpInstruction",
    "CommitP2P",
    "DataParallelSchedule",
    "DualPipeVSchedule",
    "ForwardPass",
    "InferenceSchedule",
    "LoadMicroBatch",
    "OptimizerStep",
    "PipeInstruction",
    "PipeSchedule",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "TrainSchedule",
    "call_to_str",
]


class InferenceSchedule(PipeSchedule):
    """Forwards only, through two buffers in turn.

    Hooks: `_valid_micro_batch` says whether a step has work, `_valid_stage` whether a neighbour exists.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The stage's stream of `inference`: microbatch m runs in step m + stage, and its output leaves in the step after."""
        _check_sizes(self)
        for step in range(self.micro_batches + self.stages - 1):
            now, before = step - self.stage_id, step - self.stage_id - 1
            runs = self._valid_micro_batch(now)
            exchange: list[PipeInstruction] = []
            if self._valid_stage(self.next_stage) and self._valid_micro_batch(before):
                exchange.append(SendActivation(before % 2))
            if self._valid_stage(self.prev_stage) and runs:
                exchange.append(RecvActivation(now % 2))
            if _is_odd(self.stage_id):  # so that neighbours do not both begin with a send
                exchange.reverse()
            loads = runs and (self.is_first_stage or self.is_last_stage)
            yield [*([LoadMicroBatch(now % 2)] if loads else []), *exchange, *([ForwardPass(now % 2)] if runs else [])]

    def num_pipe_buffers(self) -> int:
        """Two: one is filled while the other is used."""
        return 2


class TrainSchedule(PipeSchedule):
    """One forward, one backward: a stage goes forward in the steps of its own parity, backward in the others.

    Hooks: `_step_to_micro_batch` says what a step runs, by default through the four `_*_step_*_id`; `_valid_micro_batch` and
    `_valid_stage` say whether there is such a microbatch and such a neighbour; `_buffer_idx` gives a microbatch its buffer.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The stage's stream of `1f1b`. Each step exchanges the output of the step before it, and the input of its own."""
        _check_sizes(self)
        before, count = -1, 2 * (self.micro_batches + self.stages - 1)
        for step in range(count):
            now, forward = self._step_to_micro_batch(step)
            closing = [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()] if step == count - 1 else []
            yield [*self._exchange(before, now, forward), *self._compute(now, forward), *closing]
            before = now

    def num_pipe_buffers(self) -> int:
        """The number of microbatches in flight at once, at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _exchange(self, before: int, now: int, forward: bool) -> Iterator[PipeInstruction]:
        """The messages of a step: a forward step exchanges with the previous stage, a backward step with the next one."""
        if not self._valid_stage(self.prev_stage if forward else self.next_stage):
            return
        if not forward and self._valid_micro_batch(now):
            yield RecvGrad(self._buffer_idx(now))
        if self._valid_micro_batch(before):
            yield (SendGrad if forward else SendActivation)(self._buffer_idx(before))
        if forward and self._valid_micro_batch(now):
            yield RecvActivation(self._buffer_idx(now))

    def _compute(self, now: int, forward: bool) -> Iterator[PipeInstruction]:
        if not self._valid_micro_batch(now):
            return
        if forward and (self.is_first_stage or self.is_last_stage):
            yield LoadMicroBatch(self._buffer_idx(now))
        yield (ForwardPass if forward else BackwardPass)(self._buffer_idx(now))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """The microbatch of a step, which is none of the batch in an idle one, and whether it goes forward."""
        if _is_even(step_id + self.stage_id):
            return (self._even_step_forward_id if _is_even(step_id) else self._odd_step_forward_id)(step_id), True
        return (self._even_step_backward_id if _is_even(step_id) else self._odd_step_backward_id)(step_id), False

    def _even_step_forward_id(self, step_id: int) -> int:
        """The microbatch that an even stage takes forward in an even step."""
        return step_id // 2 - self.stage_id // 2

    def _odd_step_forward_id(self, step_id: int) -> int:
        """The microbatch that an odd stage takes forward in an odd step."""
        return (step_id - 1) // 2 - self.stage_id // 2

    def _even_step_backward_id(self, step_id: int) -> int:
        """The microbatch that an odd stage takes backward in an even step."""
        return step_id // 2 + (self.stage_id + 1) // 2 - self.stages

    def _odd_step_backward_id(self, step_id: int) -> int:
        """The microbatch that an even stage takes backward in an odd step."""
        return (step_id + 1) // 2 + self.stage_id // 2 - self.stages


class DataParallelSchedule(PipeSchedule):
    """No pipeline: each microbatch forward and backward in one buffer. Every stage is taken for the whole model."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The one stream of `data-parallel`."""
        _check_sizes(self)
        for step in range(self.micro_batches):
            closing = [ReduceGrads(), OptimizerStep()] if step == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *closing]

    def num_pipe_buffers(self) -> int:
        """One: nothing overlaps."""
        return 1


def _check_sizes(schedule: PipeSchedule) -> None:
    if schedule.micro_batches < 1:
        raise ScheduleError(f"microbatches must be from 1, got {schedule.micro_batches}")
    if not 0 <= schedule.stage_id < schedule.stages:
        raise ScheduleError(f"stage_id {schedule.stage_id}: there are {schedule.stages} stages, 0 to {schedule.stages - 1}")


def _is_even(x: int) -> bool:
    return x % 2 == 0


def _is_odd(x: int) -> bool:
    return x % 2 != 0
