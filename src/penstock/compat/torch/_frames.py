"""What a stage and its neighbours on other ranks tell each other: values in frames, whose form is told once and whenever it changes.

Torch agrees on shapes before the first step by running every stage once on memory that nobody has written, and then holds
everyone to the shapes of the first microbatch. Here a message says itself what it is, so that nothing is run ahead of time,
microbatches may differ, and so may steps. The frames are those of the runtime; they go through `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from penstock.compat.torch._p2p import Op, _wait_batch_p2p
from penstock.compat.torch._utils import PipeliningMetadataError
from penstock.runtime.device.timing import clock
from penstock.runtime.transport.message_format import NUMBER, OVERFLOW, PROGRAM, SENT, TRAILER, Form, empty, pack_new, trailer, unpack_new

ACTIVATIONS, GRADIENTS = 0, 1
"""What goes up, and what comes back."""


_NOBODY = -1
"""Stands for the sender in the trailer of a frame that has not come, or not to its end."""
_MICROBATCHES, _STAGES = 1 << 16, 1 << 13


def _tag(source: int, what: int, microbatch: int) -> int:
    """The tag of a message, which no other has, so that messages may be sent and received in any order.

    A value whose form is new follows under the next one.
    """
    if microbatch >= _MICROBATCHES or source >= _STAGES:
        raise ValueError(f"microbatch {microbatch} of stage {source}: there may be {_MICROBATCHES} microbatches and {_STAGES} stages")
    return ((source * _MICROBATCHES + microbatch) * 2 + what) * 2


class Peer(NamedTuple):
    """Another stage, and its rank in the group."""

    stage: int
    rank: int


@dataclass
class Frames:
    """The messages of one stage."""

    stage: int
    group: Any
    steps: int = 0
    """How many steps have begun: both ends of a message must be in the same one."""
    talked: bool = False
    """Whether this step has begun to send or receive anything."""
    forms: dict[tuple[int, int, int], Form] = field(default_factory=dict)
    """The form that was told last: by the other stage, what it is, and its microbatch. It outlives a failed step: the messages of a
    tag come in order, so that each is of the size that the one before it has told."""
    posted: dict[tuple[int, int], tuple[Tensor, Peer]] = field(default_factory=dict)
    """Frames that receives were posted for, by what they are and their microbatch, each with the stage it comes from."""
    telling: dict[tuple[int, int, int], Any] = field(default_factory=dict)
    """New forms being sent, with their values. The receiver asks for one only after its frame has come, so that a program that waits
    for sends and receives together must not wait for these: the end of the step does."""
    abandoned: list[Any] = field(default_factory=list)
    """Those of them that a failed step has left: kept, so that they are not called back, and never waited for."""
    left: dict[tuple[int, int], Sequence[Any]] = field(default_factory=dict)
    """Those of them that a failed step has left, with what to wait for: they take what comes first in a later step."""

    def begin(self) -> None:
        """A step begins."""
        self.steps, self.talked = self.steps + 1, False

    def end(self, works: Mapping[tuple[int, int], Sequence[Any]], *, talked: bool) -> None:
        """A step has failed, these receives being under way. If nobody on this rank has talked, for the others it has not been."""
        self.left = {key: works.get(key, ()) for key in self.posted}
        self.abandoned += self.telling.values()
        self.telling.clear()
        self.steps -= not talked

    def finish_telling(self) -> None:
        """Wait until every new form of this step has been received."""
        _wait_batch_p2p(list(self.telling.values()))
        self.telling.clear()

    def _op(self, function: Any, frame: Tensor, rank: int, tag: int) -> Op:
        return Op(function, frame, group=self.group, tag=tag, group_peer=rank)

    def send(self, what: int, microbatch: int, other: Peer, value: Any) -> list[Any]:
        """What sends a value to another stage: one message, whatever its form. A new form is on its way when this returns."""
        self.talked = True
        key, tag = (other.stage, what, microbatch), _tag(self.stage, what, microbatch)
        form = self.forms.get(key)
        frame, overflow = empty(TRAILER if form is None else form.size), 0
        if form is not None and form.fits(value):
            form.pack(value, frame.data_ptr())
        else:
            self.forms[key], more = pack_new(value)
            _wait_batch_p2p([self.telling.pop(key)] if key in self.telling else [])
            self.telling[key] = dist.isend(more, group=self.group, tag=tag + 1, group_dst=other.rank)
            overflow = len(more)
        words = trailer(frame)
        words[PROGRAM], words[NUMBER], words[SENT], words[OVERFLOW] = self.stage, self.steps, clock(), overflow
        return [self._op(dist.isend, frame, other.rank, tag)]

    def receive(self, what: int, microbatch: int, other: Peer) -> list[Any]:
        """What receives a value from another stage; `take` gives it once that is done."""
        self.talked = True
        if (what, microbatch) in self.left:
            return []
        form = self.forms.get((other.stage, what, microbatch))
        frame = empty(TRAILER) if form is None else form.frame()
        trailer(frame)[PROGRAM] = _NOBODY
        self.posted[what, microbatch] = frame, other
        return [self._op(dist.irecv, frame, other.rank, _tag(other.stage, what, microbatch))]

    def take(self, what: int, microbatch: int) -> Any:
        """The value that was received; a new form follows apart and is waited for. What a failed step has left is passed over."""
        key = what, microbatch
        frame, other = self.posted.pop(key)
        _wait_batch_p2p(self.left.pop(key, ()))
        while self._step_of(frame, other, microbatch) < self.steps:
            self._value(frame, what, microbatch, other)
            self._wait(self.receive(what, microbatch, other)[0])
            frame, other = self.posted.pop(key)
        step = self._step_of(frame, other, microbatch)
        if step > self.steps:
            self.posted[key], self.left[key] = (frame, other), ()  # for the step that it is of
            raise self._refusal(microbatch, other, f"of stage {other.stage} in step {step}: that stage has given up a step half-way")
        return self._value(frame, what, microbatch, other)

    def _step_of(self, frame: Tensor, other: Peer, microbatch: int) -> int:
        words = trailer(frame)
        if words[PROGRAM] != other.stage:
            came = "shorter than what was told" if words[PROGRAM] == _NOBODY else f"of stage {words[PROGRAM]}"
            raise self._refusal(
                microbatch, other, f"{came}: wait for a receive before its use, and make stages anew on all ranks or on none"
            )
        return int(words[NUMBER])

    def _refusal(self, microbatch: int, other: Peer, came: str) -> PipeliningMetadataError:
        expected = f"stage {self.stage} expected microbatch {microbatch} of stage {other.stage} in step {self.steps}"
        return PipeliningMetadataError(f"{expected}, but what came is {came}")

    def _value(self, frame: Tensor, what: int, microbatch: int, other: Peer) -> Any:
        key, overflow = (other.stage, what, microbatch), trailer(frame)[OVERFLOW]
        if not overflow:
            return self.forms[key].unpack(frame)
        more = empty(overflow)
        self._wait(self._op(dist.irecv, more, other.rank, _tag(other.stage, what, microbatch) + 1))
        self.forms[key], value = unpack_new(more)
        return value

    def _wait(self, op: Op) -> None:
        """Receive now."""
        _wait_batch_p2p([op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer)])
