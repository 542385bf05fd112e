"""What every schedule of instructions is: its stage, the counts, and steps to iterate over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any


class PipeSchedule(ABC):
    """One stage's instructions for a batch, a list a step.

    Subclasses write `steps`. Between two steps all stages may meet at a barrier without a deadlock.
    Iterating begins anew each time.
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
        """How many buffers the stage needs: one for each microbatch, unless a subclass knows better."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """The stage that this is for."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """How many microbatches a batch has."""
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
        """The buffer of a microbatch: each in turn."""
        assert self._valid_micro_batch(micro_batch_id), f"microbatch {micro_batch_id} of {self.micro_batches}"
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.it = None
        return self

    def __next__(self) -> Sequence[Any]:
        if self.it is None:
            self.it = iter(self.steps())
        return next(self.it)
