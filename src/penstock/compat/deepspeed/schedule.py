"""The names of `deepspeed.runtime.pipe.schedule`.

`TrainSchedule` is our `1f1b`, `InferenceSchedule` our `inference`, `DataParallelSchedule` our `data-parallel`, each as the
pass to DeepSpeed's instructions writes it; `DualPipeVSchedule` is our `dualpipe-v` with full backwards. Needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.compat.deepspeed import instructions
from penstock.compat.deepspeed.base import PipeSchedule
from penstock.compat.deepspeed.dualpipe_v import DualPipeVSchedule
from penstock.compat.deepspeed.instructions import (
    BackwardPass,
    BufferOpInstruction,
    CommitP2P,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
    call_to_str,
)
from penstock.compat.deepspeed.stepwise import stepwise
from penstock.compat.deepspeed.streams import all_stages, num_buffers, of_stage
from penstock.passes.deepspeed import Instruction, Stream

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
    """Forwards only, through two buffers in turn."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The stage's stream of `inference`."""
        return _written(self._stream())

    def num_pipe_buffers(self) -> int:
        """One that is filled while the other is used."""
        return num_buffers(self._stream(), 2)

    def _stream(self) -> Stream:
        return of_stage(all_stages("inference", self.micro_batches, self.stages), self.stage_id)


class TrainSchedule(PipeSchedule):
    """One forward, one backward: a stage goes forward in the steps of its own parity, backward in the others."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The stage's stream of `1f1b`, or what a subclass makes of it by its own `_step_to_micro_batch`.

        Buffers are those of `_buffer_idx`, so that a subclass may have more of them.
        """
        if type(self)._step_to_micro_batch is not TrainSchedule._step_to_micro_batch:
            yield from stepwise(self)
            return
        seen: Counter[str] = Counter()
        for step in self._stream():
            yield [_instruction(each, self._buffer(each, seen)) for each in step]

    def num_pipe_buffers(self) -> int:
        """As many as microbatches are under way at once, and at least two."""
        return num_buffers(self._stream(), 2)

    def _buffer(self, each: Instruction, seen: Counter[str]) -> int | None:
        """Each kind of instruction takes the microbatches in order."""
        if each.buffer_id is None:
            return None
        seen[each.name] += 1
        return self._buffer_idx(seen[each.name] - 1)

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """The microbatch of a step, which is none of the batch in an idle one, and whether it goes forward."""
        if _is_even(step_id + self.stage_id):
            return (step_id - self.stage_id) // 2, True
        return (step_id + self.stage_id + 1) // 2 - self.stages, False

    def _stream(self) -> Stream:
        return of_stage(all_stages("1f1b", self.micro_batches, self.stages), self.stage_id)


class DataParallelSchedule(PipeSchedule):
    """No pipeline: each microbatch forward and backward in one buffer. Every stage is taken for the whole model."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The one stream of `data-parallel`."""
        return _written(all_stages("data-parallel", self.micro_batches, 1)[0])

    def num_pipe_buffers(self) -> int:
        """One: nothing overlaps."""
        return num_buffers(all_stages("data-parallel", self.micro_batches, 1)[0], 1)


def _written(stream: Stream) -> Iterator[list[PipeInstruction]]:
    return ([_instruction(each, each.buffer_id) for each in step] for step in stream)


def _instruction(each: Instruction, buffer_id: int | None) -> PipeInstruction:
    made: PipeInstruction = getattr(instructions, each.name)(**({} if buffer_id is None else {"buffer_id": buffer_id}))
    return made


def _is_even(x: int) -> bool:
    return x % 2 == 0


def _is_odd(x: int) -> bool:
    return x % 2 != 0
