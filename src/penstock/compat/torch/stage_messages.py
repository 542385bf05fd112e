"""The messages between a stage and its neighbours on other ranks: values in frames of bytes that describe their own shapes.

Torch agrees on shapes before the first step by running every stage once on uninitialized memory, and then holds every microbatch to
the shapes of the first. Here a message carries its shapes when they are new, so nothing runs ahead of time, and shapes may
differ between microbatches and between steps. The frames are those of the runtime; they go through `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch.distributed as dist
from torch import Tensor

from penstock.compat.torch.installed import metadata
from penstock.runtime.transport import message_format as frames

ACTIVATIONS, GRADIENTS = 0, 1
"""The two kinds of messages."""
_STAGE, _STEP, _ROWS, _BATCH_ROWS = frames.PROGRAM, frames.NUMBER, frames.SENT, frames.LENGTH
"""The words of a trailer as they are used here: the sender's stage, its step, and the rows of the microbatch and of the whole batch. The
runtime's own channels keep a time and a length in the last two."""
_NO_STAGE = -1
"""Marks the trailer of a frame that was not received, or not to its end."""
_MICROBATCHES, _STAGES = 1 << 16, 1 << 13


def _compute_tag(source: int, kind: int, microbatch: int) -> int:
    """Return the tag of a message, unique in a step, so that messages may be sent and received in any order.

    A value of a new form follows under the next tag.
    """
    if microbatch >= _MICROBATCHES or source >= _STAGES:
        raise ValueError(
            f"microbatch {microbatch} of stage {source}: at most {_MICROBATCHES} microbatches and {_STAGES} stages are supported"
        )
    return ((source * _MICROBATCHES + microbatch) * 2 + kind) * 2


class MessageOp(dist.P2POp):
    """One end of a message. Torch's own class refuses functions that a program has put in the place of torch's."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return object.__new__(cls)


class Neighbour(NamedTuple):
    """Another stage, and its rank in the group."""

    stage: int
    rank: int


class BatchShare(NamedTuple):
    """A microbatch's part of the batch."""

    rows: int
    batch_rows: int


@dataclass
class StageMessages:
    """Sends and receives the messages of one stage."""

    stage: int
    group: Any
    step: int = 0
    """The number of steps begun. Both ends of a message must be in the same step."""
    communicated: bool = False
    """Whether this step has begun to send or receive anything."""
    shares: dict[int, BatchShare] = field(default_factory=dict)
    """By microbatch, its share of the batch as far as this rank knows: sent along with activations, and filled in by them."""
    forms: dict[tuple[int, int, int], frames.Form] = field(default_factory=dict)
    """The form sent or received last, by other stage, kind and microbatch. It survives a failed step: messages of one tag arrive in
    order, so each has the size that the one before it has announced."""
    posted: dict[tuple[int, int], tuple[Tensor, Neighbour]] = field(default_factory=dict)
    """Frames with a posted receive, by kind and microbatch, each with its sender."""
    new_forms: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    """New forms being sent with their values. The receiver asks for one only after its frame has arrived, so a program that waits for
    sends and receives together must not wait for these: the end of the step does."""
    abandoned: list[Any] = field(default_factory=list)
    """New forms that a failed step was sending: referenced so that they are not cancelled, and never waited for."""
    left_over: dict[tuple[int, int], Sequence[Any]] = field(default_factory=dict)
    """Posted receives that a failed step left, with their works: a later step takes the first message that arrives in them."""

    def begin_step(self, shares: dict[int, BatchShare]) -> None:
        self.step, self.communicated, self.shares = self.step + 1, False, shares

    def abandon_step(self, receives: Mapping[tuple[int, int], Sequence[Any]], *, communicated: bool) -> None:
        """Give up a failed step with these receives posted. If no stage of this rank has communicated, the step does not count."""
        self.left_over = {key: receives.get(key, ()) for key in self.posted}
        self.abandoned += self.new_forms.values()
        self.new_forms.clear()
        self.step -= not communicated

    def finish_sending(self) -> None:
        """Wait until every new form of this step has been received."""
        for work in self.new_forms.values():
            work.wait()
        self.new_forms.clear()

    def send(self, kind: int, microbatch: int, other: Neighbour, value: Any) -> list[Any]:
        """Return the operation that sends a value to another stage. If its form is new, that is on its way when this returns."""
        self.communicated = True
        key, tag = (other.stage, kind, microbatch), _compute_tag(self.stage, kind, microbatch)
        form = self.forms.get(key)
        frame, overflow = frames.allocate_bytes(frames.TRAILER if form is None else form.size), 0
        if form is not None and form.fits(value):
            form.pack(value, frame.data_ptr())
        else:
            self.forms[key], more = frames.pack_new(value)
            if key in self.new_forms:
                self.new_forms.pop(key).wait()
            self.new_forms[key] = dist.isend(more, group=self.group, tag=tag + 1, group_dst=other.rank)
            overflow = len(more)
        words = frames.trailer(frame)
        words[_STAGE], words[_STEP], words[frames.OVERFLOW] = self.stage, self.step, overflow
        words[_ROWS], words[_BATCH_ROWS] = self.shares.get(microbatch, (0, 0))
        return [MessageOp(dist.isend, frame, group=self.group, tag=tag, group_peer=other.rank)]

    def receive(self, kind: int, microbatch: int, other: Neighbour) -> list[Any]:
        """Return the operation that receives a value from another stage; call `take` once it is done."""
        self.communicated = True
        if (kind, microbatch) in self.left_over:
            return []
        form = self.forms.get((other.stage, kind, microbatch))
        frame = frames.allocate_bytes(frames.TRAILER) if form is None else form.frame()
        frames.trailer(frame)[_STAGE] = _NO_STAGE
        self.posted[kind, microbatch] = frame, other
        tag = _compute_tag(other.stage, kind, microbatch)
        return [MessageOp(dist.irecv, frame, group=self.group, tag=tag, group_peer=other.rank)]

    def take(self, kind: int, microbatch: int) -> Any:
        """Return the received value, waiting for its form if that is new. Messages of failed steps are skipped."""
        key = kind, microbatch
        frame, other = self.posted.pop(key)
        for work in self.left_over.pop(key, ()):
            work.wait()
        while self._read_step(frame, other, microbatch) < self.step:
            self._unpack(frame, kind, microbatch, other)
            (op,) = self.receive(kind, microbatch, other)
            self._receive_now(op.tensor, other, op.tag)
            frame, other = self.posted.pop(key)
        step = self._read_step(frame, other, microbatch)
        if step > self.step:
            self.posted[key], self.left_over[key] = (frame, other), ()  # for the step that it belongs to
            raise self._build_error(
                microbatch, other, f"a message of stage {other.stage} in step {step}: that stage has given up a step half-way"
            )
        words = frames.trailer(frame)
        if words[_BATCH_ROWS]:
            self.shares[microbatch] = BatchShare(words[_ROWS], words[_BATCH_ROWS])
        return self._unpack(frame, kind, microbatch, other)

    def _receive_now(self, frame: Tensor, other: Neighbour, tag: int) -> None:
        work: Any = dist.irecv(frame, group=self.group, tag=tag, group_src=other.rank)
        work.wait()

    def _read_step(self, frame: Tensor, other: Neighbour, microbatch: int) -> int:
        words = frames.trailer(frame)
        if words[_STAGE] != other.stage:
            received = "a message shorter than announced" if words[_STAGE] == _NO_STAGE else f"a message of stage {words[_STAGE]}"
            raise self._build_error(
                microbatch, other, f"{received}: wait for each receive before using it, and rebuild stages on all ranks or on none"
            )
        return int(words[_STEP])

    def _build_error(self, microbatch: int, other: Neighbour, received: str) -> Exception:
        expected = f"stage {self.stage} expected microbatch {microbatch} of stage {other.stage} in step {self.step}"
        error: Exception = metadata.PipeliningMetadataError(f"{expected}, but received {received}")
        return error

    def _unpack(self, frame: Tensor, kind: int, microbatch: int, other: Neighbour) -> Any:
        key, overflow = (other.stage, kind, microbatch), frames.trailer(frame)[frames.OVERFLOW]
        if not overflow:
            return self.forms[key].unpack(frame)
        more = frames.allocate_bytes(overflow)
        self._receive_now(more, other, _compute_tag(other.stage, kind, microbatch) + 1)
        self.forms[key], value = frames.unpack_new(more)
        return value
