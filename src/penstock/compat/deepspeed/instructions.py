"""The instructions of a stage, and the base class of schedules that yield them.

An instruction keeps its keyword arguments as attributes and prints as a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as text.

    >>> call_to_str("send", 1, to="a")
    "send(1, to='a')"
    """
    given = [repr(value) for value in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(given)})"


class PipeInstruction:
    """The base class: `name` is the name of the class, `kwargs` are the arguments that it was made with."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """Update the parameters and clear their gradients; after both reductions."""


class ReduceGrads(PipeInstruction):
    """Sum the gradients over the replicas of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of parameters that several stages share."""


class CommitP2P(PipeInstruction):
    """Start the messages queued since the last commit and wait for them; only DualPipeV queues messages."""


class BufferOpInstruction(PipeInstruction):
    """An instruction on one of the stage's buffers."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next microbatch of the data: its input on the first stage, its labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Compute the outputs from the inputs; on the last stage the loss too."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of the inputs, and add to those of the parameters."""


class SendActivation(BufferOpInstruction):
    """Send the outputs to the next stage, which receives them by `RecvActivation`."""


class RecvActivation(BufferOpInstruction):
    """Receive the inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the inputs to the previous stage, which receives them by `RecvGrad`."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the outputs from the next stage."""


class PipeSchedule(ABC):
    """The instructions of one stage for a batch: one list per step.

    Subclasses implement `steps`. A barrier of all stages between two steps does not deadlock. Each iteration starts at the first step.
    """

    it: Iterator[Sequence[Any]] | None = None

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__()
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[Sequence[Any]]:
        """Yield the instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """The number of buffers that the stage needs: one per microbatch unless a subclass overrides it."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """The stage that the instructions are for."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of microbatches per batch."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """The buffer of a microbatch: round-robin."""
        assert self._valid_micro_batch(micro_batch_id), f"microbatch {micro_batch_id} of {self.micro_batches}"
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.it = None
        return self

    def __next__(self) -> Sequence[Any]:
        if self.it is None:
            self.it = iter(self.steps())
        return next(self.it)
