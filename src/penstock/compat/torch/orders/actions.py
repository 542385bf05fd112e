"""Torch's `_Action` and its kinds, and their translation to and from the packed codes of `penstock.ir`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from penstock.errors import ActionError
from penstock.ir import codes
from penstock.ir.action import Action
from penstock.ir.kind import Kind


class _ComputationType(str, Enum):  # noqa: UP042 - torch's base classes: its members print by name
    """What an action does, under torch's names. The value is its text form and the name of our `Kind`."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"

    @staticmethod
    def from_str(action: str) -> _ComputationType:
        try:
            return _ComputationType(action)
        except ValueError as error:
            raise RuntimeError(f"Invalid computation type {action}") from error


FORWARD = F = _ComputationType.FORWARD
BACKWARD_INPUT = I = _ComputationType.BACKWARD_INPUT  # noqa: E741 - the letter that the field uses
BACKWARD_WEIGHT = W = _ComputationType.BACKWARD_WEIGHT
FULL_BACKWARD = B = _ComputationType.FULL_BACKWARD
UNSHARD = _ComputationType.UNSHARD
RESHARD = _ComputationType.RESHARD
SEND_F = _ComputationType.SEND_F
RECV_F = _ComputationType.RECV_F
SEND_B = _ComputationType.SEND_B
RECV_B = _ComputationType.RECV_B
OVERLAP_F_B = _ComputationType.OVERLAP_F_B
REDUCE_GRAD = _ComputationType.REDUCE_GRAD
WAIT_SEND_F = _ComputationType.WAIT_SEND_F
WAIT_SEND_B = _ComputationType.WAIT_SEND_B
WAIT_REDUCE_GRAD = _ComputationType.WAIT_REDUCE_GRAD
WAITS = frozenset((WAIT_SEND_F, WAIT_SEND_B, WAIT_REDUCE_GRAD))
"""Waits, which torch 2.15 writes into its orders. `penstock.ir` knows none: see `waits`."""

_action_regex = re.compile(
    rf"(\d+)({'|'.join(sorted((kind.value for kind in _ComputationType if kind != OVERLAP_F_B), key=len, reverse=True))})(\d*)"
)
"""Matches an action's stage, kind and microbatch. `_Action.from_str` is stricter."""
_wait_regex = re.compile(r"\s*(\d+)(?:(WAIT_SEND_[FB])(\d+)|(WAIT_REDUCE_GRAD))\s*")
_TYPES = {kind: _ComputationType(kind.name) for kind in Kind}
_KINDS = {kind.name: int(kind) for kind in Kind}
COMPUTE_TYPES = frozenset((F, B, I, W, OVERLAP_F_B))
_WITHOUT_MICROBATCH = frozenset((UNSHARD, RESHARD, REDUCE_GRAD, WAIT_REDUCE_GRAD))


class _Action(NamedTuple):
    """One thing that one rank does: a tuple as in torch, equal to torch's field by field."""

    stage_index: int
    computation_type: _ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[_Action, ...] | None = None

    def __str__(self) -> str:
        return self.__repr__()

    def __repr__(self) -> str:
        if self.sub_actions is not None:
            return f"({';'.join(map(repr, self.sub_actions))}){self.computation_type.value}"
        microbatch = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{microbatch}"

    @property
    def is_compute_op(self) -> bool:
        return self.computation_type in COMPUTE_TYPES

    @staticmethod
    def from_str(action_string: str) -> _Action | None:
        """Parse the text that `repr` prints; blank text gives `None`. Text behind an action, as in `1F0junk`, is refused."""
        if not action_string.strip():
            return None
        if match := _wait_regex.fullmatch(action_string):
            stage, send_wait, microbatch, _ = match.groups()
            if send_wait is None:
                return _Action(int(stage), WAIT_REDUCE_GRAD)
            return _Action(int(stage), _ComputationType(send_wait), int(microbatch))
        try:
            return _convert(Action.parse(action_string))
        except ActionError as error:
            raise RuntimeError(f"Invalid action string: {error}") from error


@lru_cache
def _get_profiler_function_name(action: _Action) -> str:
    return f"PP:{action}"


def _convert(action: Action) -> _Action:
    """Convert one of our actions to torch's."""
    parts = tuple(map(_convert, action.sub_actions)) or None
    return _Action(action.stage, _TYPES[action.kind], action.microbatch, parts)


def split_action(action: _Action) -> tuple[_Action, ...]:
    """Return the sub-actions of an action, or the action itself if it has none."""
    return (action,) if action.sub_actions is None else tuple(action.sub_actions)


def pack(action: _Action) -> tuple[int, ...]:
    """Pack an action into its codes, one per sub-action."""
    if action.sub_actions is None:
        return (_pack_one(action),)
    return codes.overlap(*map(_pack_one, action.sub_actions))


def _pack_one(action: _Action) -> int:
    stage, kind, microbatch, _ = action
    without_microbatch = kind in _WITHOUT_MICROBATCH
    if stage < 0 or (microbatch is None) != without_microbatch or kind == OVERLAP_F_B:
        needs = "no microbatch" if without_microbatch else "a microbatch"
        raise RuntimeError(f"{action} is not a valid action: it needs a stage of at least 0 and {needs}")
    return int(codes.pack(stage, _KINDS[kind.value], microbatch or 0))


def unpack(row: Iterable[int]) -> Iterator[_Action]:
    """Unpack a row of codes into actions; joined codes become one OVERLAP_F_B."""
    parts: list[_Action] = []
    for code in row:
        kind = _TYPES[Kind(codes.kind_of(code))]
        parts.append(_Action(codes.stage_of(code), kind, None if kind in _WITHOUT_MICROBATCH else codes.microbatch_of(code)))
        if not codes.is_joined(code):
            yield parts[0] if len(parts) == 1 else _Action(-1, OVERLAP_F_B, None, tuple(parts))
            parts.clear()
