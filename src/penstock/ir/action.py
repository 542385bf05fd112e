"""One thing that one rank does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.errors import ActionError
from penstock.ir import codes
from penstock.ir.kind import COMPUTE, Kind


@dataclass(frozen=True, slots=True)
class Action:
    """`Action(3, Kind.F, 7)` is "stage 3, forward, microbatch 7", written `3F7`.

    An overlapped action holds `sub_actions` and no stage of its own (-1). `peer` names the stage at the other end
    of a message along an edge that skips stages; None is the neighbour in the chain.

    >>> Action.parse("3F7")
    Action('3F7')
    >>> Action.overlap(Action(3, Kind.F, 1), Action(0, Kind.B, 4))
    Action('(3F1;0B4)OVERLAP_F_B')
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    sub_actions: tuple[Action, ...] = ()
    peer: int | None = None

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
        if self.peer is not None:
            if not self.kind.is_communication:
                raise ActionError(f"a {self.kind.name} action has no peer; only sends and receives do")
            if not 0 <= self.peer < codes.MAX_STAGES or self.peer == self.stage:
                raise ActionError(f"peer {self.peer} of stage {self.stage}: it must be another stage, from 0 to {codes.MAX_STAGES - 1}")

    def _check_overlap(self) -> None:
        if self.stage != -1 or self.microbatch is not None or self.peer is not None:
            raise ActionError("an OVERLAP_F_B action has no stage, microbatch or peer of its own: its sub-actions have")
        if len(self.sub_actions) < 2:
            raise ActionError(f"OVERLAP_F_B holds two or more sub-actions, got {len(self.sub_actions)}")
        for part in self.sub_actions:
            if part.kind not in COMPUTE:
                raise ActionError(f"{part} cannot be overlapped: sub-actions are F, B, I or W")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form, strictly; the reverse of `str`."""
        from penstock.ir.text import parse_action

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

    def __str__(self) -> str:
        from penstock.ir.text import format_action

        return format_action(self)

    def __repr__(self) -> str:
        return f"Action({str(self)!r})"


def pack_action(action: Action) -> tuple[int, ...]:
    """The packed codes of an action, one for each part."""
    packed = [codes.pack(part.stage, int(part.kind), part.microbatch or 0, -1 if part.peer is None else part.peer) for part in action.parts]
    return codes.overlap(*packed)


def _unpack_one(code: int) -> Action:
    kind, peer = Kind(codes.kind_of(code)), codes.peer_of(code)
    return Action(
        codes.stage_of(code),
        kind,
        codes.microbatch_of(code) if kind.has_microbatch else None,
        peer=None if peer < 0 else peer,
    )


def unpack_actions(row: Iterable[int]) -> Iterator[Action]:
    """The actions of a row of codes, joined entries as one."""
    parts: list[Action] = []
    for code in row:
        parts.append(_unpack_one(code))
        if not codes.is_joined(code):
            yield parts[0] if len(parts) == 1 else Action.overlap(*parts)
            parts.clear()
