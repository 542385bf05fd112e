"""One thing that one rank does."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ActionError
from penstock.ir import codes
from penstock.ir.kind import COMPUTE, Kind


class _Fields:
    """The fields of an action while `unpack_row` builds it: assigning them is not refused yet."""

    __slots__ = ("kind", "microbatch", "peer", "slice", "stage", "sub_actions")

    def __init__(  # noqa: PLR0917 - mapped over columns
        self,
        stage: int,
        kind: Kind,
        microbatch: int | None,
        sub_actions: tuple[Action, ...],
        peer: int | None,
        slice: int | None,  # noqa: A002 - the field's own word
    ) -> None:
        self.stage = stage
        self.kind = kind
        self.microbatch = microbatch
        self.sub_actions = sub_actions
        self.peer = peer
        self.slice = slice


@dataclass(frozen=True, slots=True)
class Action(_Fields):
    """`Action(3, Kind.F, 7)` is "stage 3, forward, microbatch 7", written `3F7`.

    An overlapped action holds `sub_actions` and no stage of its own (-1). `peer` names the stage at the other end
    of a message along an edge that skips stages; None is the neighbour in the chain. A wait for a send names the same peer as the send.
    In a schedule with sequence slices an action belongs to one `slice` of its microbatch; None means that sequences are not cut.

    >>> Action.parse("3F7")
    Action('3F7')
    >>> Action.parse("3F7.1").slice
    1
    >>> Action.overlap(Action(3, Kind.F, 1), Action(0, Kind.B, 4))
    Action('(3F1;0B4)OVERLAP_F_B')
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    sub_actions: tuple[Action, ...] = ()
    peer: int | None = None
    slice: int | None = None

    def __post_init__(self) -> None:
        if self.kind is Kind.OVERLAP_F_B:
            self._check_overlap()
            return
        if not 0 <= self.stage < codes.MAX_STAGES:
            raise ActionError(f"stage {self.stage} of a {self.kind.name} action: stages run from 0 to {codes.MAX_STAGES - 1}")
        if self.sub_actions:
            raise ActionError(f"a {self.kind.name} action has no sub-actions; only OVERLAP_F_B does")
        if self.kind.has_microbatch != (self.microbatch is not None):
            rule = "needs a microbatch" if self.kind.has_microbatch else "belongs to the whole stage and takes no microbatch"
            raise ActionError(f"{self.kind.name} of stage {self.stage} {rule}, got {self.microbatch}")
        if self.microbatch is not None and not 0 <= self.microbatch < codes.MAX_MICROBATCHES:
            raise ActionError(
                f"microbatch {self.microbatch} of stage {self.stage}: microbatches run from 0 to {codes.MAX_MICROBATCHES - 1}"
            )
        if self.slice is not None and (self.microbatch is None or not 0 <= self.slice < codes.MAX_MICROBATCHES):
            raise ActionError(f"slice {self.slice} of {self.kind.name}, stage {self.stage}: slices count from 0 and belong to a microbatch")
        if self.peer is not None:
            if not (self.kind.is_communication or self.kind.is_send_wait):
                raise ActionError(f"a {self.kind.name} action has no peer; only sends, receives and waits for sends do")
            if not 0 <= self.peer < codes.MAX_STAGES or self.peer == self.stage:
                raise ActionError(f"peer {self.peer} of stage {self.stage}: it must be another stage, from 0 to {codes.MAX_STAGES - 1}")

    def _check_overlap(self) -> None:
        if self.stage != -1 or self.microbatch is not None or self.peer is not None or self.slice is not None:
            raise ActionError("an OVERLAP_F_B action has no stage, microbatch, slice or peer of its own: its sub-actions have")
        if len(self.sub_actions) < 2:
            raise ActionError(f"OVERLAP_F_B holds two or more sub-actions, got {len(self.sub_actions)}")
        for part in self.sub_actions:
            if part.kind not in COMPUTE:
                raise ActionError(f"{part} cannot be overlapped: sub-actions are F, B, I or W")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form, strictly; the reverse of `str`."""
        from penstock.ir.formats.action_text import parse_action

        return parse_action(text)

    @classmethod
    def overlap(cls, *parts: Action) -> Action:
        """The parts as one action that runs them together."""
        return cls(-1, Kind.OVERLAP_F_B, None, parts)

    @property
    def parts(self) -> tuple[Action, ...]:
        """The sub-actions, or the action itself."""
        return self.sub_actions or (self,)

    @property
    def is_compute(self) -> bool:
        return self.kind.is_compute

    def unit(self, slices: int) -> int:
        """The number of the action's microbatch and slice among those of all microbatches, each cut into `slices`.

        An action that names no slice has that number as its microbatch: so PyTorch's files have it.

        >>> Action.parse("3F7.1").unit(4), Action.parse("3F29").unit(4)
        (29, 29)
        """
        number = self.microbatch or 0
        if self.slice is None:
            return number
        if self.slice >= slices:
            count = f"{slices} slices, 0 to {slices - 1}" if slices > 1 else "sequences that are not cut (slices=1)"
            raise ActionError(f"{self} names slice {self.slice}, but this schedule has {count}")
        if number * slices + self.slice >= codes.MAX_MICROBATCHES:
            raise ActionError(f"{self}: microbatches times slices are at most {codes.MAX_MICROBATCHES}")
        return number * slices + self.slice

    def __str__(self) -> str:
        from penstock.ir.formats.action_text import format_action

        return format_action(self)

    def __repr__(self) -> str:
        return f"Action({str(self)!r})"


def pack_action(action: Action, slices: int = 1) -> tuple[int, ...]:
    """The packed codes of an action, one for each part."""
    packed = [codes.pack(part.stage, int(part.kind), part.unit(slices), -1 if part.peer is None else part.peer) for part in action.parts]
    return codes.overlap(*packed)


def unpack_code(code: int, slices: int = 1) -> Action:
    """The action of one code, outside the group it runs in."""
    kind, peer = Kind(codes.kind_of(code)), codes.peer_of(code)
    microbatch, part = divmod(codes.microbatch_of(code), slices)
    return Action(
        codes.stage_of(code),
        kind,
        microbatch if kind.has_microbatch else None,
        peer=None if peer < 0 else peer,
        slice=part if kind.has_microbatch and slices > 1 else None,
    )


def unpack_actions(row: Iterable[int], slices: int = 1) -> Iterator[Action]:
    """The actions of a row of codes, joined entries as one."""
    parts: list[Action] = []
    for code in row:
        parts.append(unpack_code(code, slices))
        if not codes.is_joined(code):
            yield parts[0] if len(parts) == 1 else Action.overlap(*parts)
            parts.clear()


_KINDS = tuple(Kind)
_OF_STAGE = np.array([not kind.has_microbatch for kind in Kind] + [True] * (codes.MAX_KINDS - len(Kind)))
_NAMES_PEER = np.array([kind.is_communication or kind.is_send_wait for kind in Kind] + [False] * (codes.MAX_KINDS - len(Kind)))
"""By kind: whether it belongs to a whole stage, and whether it may name a peer."""


def unpack_row(row: NDArray[np.int64], slices: int = 1) -> tuple[Action, ...]:
    """The actions of a whole row of codes: `unpack_actions`, many times as fast.

    The fields are decoded and checked for the whole row at once. A row with an invalid code goes to `unpack_actions`,
    which names the fault.
    """
    kind, stage, peer, joined = codes.kind_of(row), codes.stage_of(row), codes.peer_of(row), codes.is_joined(row)
    has_peer, has_join = peer >= 0, bool(joined.any())
    sound = (kind != Kind.OVERLAP_F_B) & (kind < len(_KINDS)) & (stage < codes.MAX_STAGES)
    if has_peer.any():
        sound &= ~has_peer | _NAMES_PEER[kind] & (peer != stage) & (peer < codes.MAX_STAGES)
    if has_join:
        in_group = joined.copy()
        in_group[1:] |= joined[:-1]
        sound &= ~in_group | (kind <= Kind.W)
        sound[-1] &= not joined[-1]
    if not sound.all():
        return tuple(unpack_actions(row.tolist(), slices))
    microbatches: list[int | None] = (codes.microbatch_of(row) // slices).tolist()
    parts_of: list[int | None] = (codes.microbatch_of(row) % slices).tolist() if slices > 1 else [None] * len(row)
    for place in np.flatnonzero(_OF_STAGE[kind]).tolist():
        microbatches[place] = parts_of[place] = None
    peers = [None if number < 0 else number for number in peer.tolist()] if has_peer.any() else repeat(None)
    kinds = map(_KINDS.__getitem__, kind.tolist())
    with _pause_collector():
        parts = list(map(_Fields, stage.tolist(), kinds, microbatches, repeat(()), peers, parts_of))
        for part in parts:
            part.__class__ = Action  # the same fields, which from here on cannot be assigned
        actions: list[Action] = parts  # type: ignore[assignment]
        return tuple(_join_groups(actions, np.flatnonzero(~joined).tolist()) if has_join else actions)


@contextmanager
def _pause_collector() -> Iterator[None]:
    """Pause garbage collection while many actions are built: none can be garbage yet, and collecting would take most of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _join_groups(parts: list[Action], lasts: list[int]) -> Iterator[Action]:
    """One action for each group of parts; `lasts` holds the place of each group's last part."""
    first = 0
    for last in lasts:
        if last == first:
            yield parts[first]
        else:
            group = _Fields(-1, Kind.OVERLAP_F_B, None, tuple(parts[first : last + 1]), None, None)
            group.__class__ = Action
            yield group  # type: ignore[misc]
        first = last + 1
