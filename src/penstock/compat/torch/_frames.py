"""What a stage and its neighbours on other ranks tell each other: values in frames, whose form is told once and whenever it changes.

Torch agrees on shapes before the first step by running every stage once on memory that nobody has written, and then holds
everyone to the shapes of the first microbatch. Here a message says itself what it is, so that nothing is run ahead of time,
microbatches may differ, and so may steps. The frames are those of the runtime; they go through `torch.distributed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from penstock.compat.torch._p2p import Op, _wait_batch_p2p
from penstock.compat.torch._utils import PipeliningMetadataError
from penstock.runtime.activity import clock
from penstock.runtime.frames import NUMBER, OVERFLOW, PROGRAM, SENT, TRAILER, Form, empty, pack_new, trailer, unpack_new

ACTIVATIONS, GRADIENTS = 0, 1
"""What goes up, and what comes back."""


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
    forms: dict[tuple[int, int, int, bool], Form] = field(default_factory=dict)
    """The form that was told last: by the other stage, what it is, its microbatch, and whether it was in training."""
    posted: dict[tuple[int, int], tuple[Tensor, Peer]] = field(default_factory=dict)
    """Frames that receives were posted for, by what they are and their microbatch, each with the stage it comes from."""

    def _op(self, function: Any, frame: Tensor, rank: int, tag: int) -> Op:
        return Op(function, frame, group=self.group, tag=tag, group_peer=rank)

    def send(self, what: int, microbatch: int, training: bool, other: Peer, value: Any) -> list[Any]:
        """What sends a value to another stage."""
        key, tag = (other.stage, what, microbatch, training), _tag(self.stage, what, microbatch)
        form = self.forms.get(key)
        frame, ops, overflow = empty(TRAILER if form is None else form.size), [], 0
        if form is not None and form.fits(value):
            form.pack(value, frame.data_ptr())
        else:
            self.forms[key], more = pack_new(value)
            ops, overflow = [self._op(dist.isend, more, other.rank, tag + 1)], len(more)
        words = trailer(frame)
        words[PROGRAM], words[NUMBER], words[SENT], words[OVERFLOW] = self.stage, self.steps, clock(), overflow
        return [self._op(dist.isend, frame, other.rank, tag), *ops]

    def receive(self, what: int, microbatch: int, training: bool, other: Peer) -> list[Any]:
        """What receives a value from another stage; `take` gives it once that is done."""
        form = self.forms.get((other.stage, what, microbatch, training))
        frame = empty(TRAILER) if form is None else form.frame()
        self.posted[what, microbatch] = frame, other
        return [self._op(dist.irecv, frame, other.rank, _tag(other.stage, what, microbatch))]

    def take(self, what: int, microbatch: int, training: bool) -> Any:
        """The value that was received; a new form follows apart and is waited for."""
        frame, other = self.posted.pop((what, microbatch))
        words = trailer(frame)
        if (words[PROGRAM], words[NUMBER]) != (other.stage, self.steps):
            raise PipeliningMetadataError(
                f"stage {self.stage} expected microbatch {microbatch} of stage {other.stage} in step {self.steps}, but what came is of "
                f"stage {words[PROGRAM]} in step {words[NUMBER]}: wait for a receive before its use, and after a failure make the "
                "stages anew on every rank"
            )
        if not words[OVERFLOW]:
            return self.forms[other.stage, what, microbatch, training].unpack(frame)
        more = empty(words[OVERFLOW])
        op = self._op(dist.irecv, more, other.rank, _tag(other.stage, what, microbatch) + 1)
        _wait_batch_p2p([op.op(more, group=op.group, tag=op.tag, group_src=op.group_peer)])
        self.forms[other.stage, what, microbatch, training], value = unpack_new(more)
        return value

    def clear(self) -> None:
        """Forget everything, after a failure."""
        self.forms.clear()
        self.posted.clear()
