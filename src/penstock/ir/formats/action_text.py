"""The text form of an action: PyTorch's, with `>` and `<` for the peer of a message that skips stages.

`2F0`, `1UNSHARD`, `3SEND_F1`, `3WAIT_SEND_F1`, `(3F1;0B4)OVERLAP_F_B`; beyond PyTorch: `0SEND_F1>3` (to stage 3), `3RECV_F1<0`
(from stage 0).
"""

from __future__ import annotations

import re

from penstock.errors import ActionError, nearest
from penstock.ir.action import Action
from penstock.ir.kind import SEND_WAITS, SENDS, Kind

_SIMPLE = re.compile(r"([0-9]{1,18})([A-Z_]*[A-Z])([0-9]{0,18})(?:([<>])([0-9]{1,18}))?")  # longer numbers are out of range
_OVERLAP = re.compile(r"\(([^()]*)\)([A-Z_]+)")
_POINTING = (*SENDS, *SEND_WAITS)
"""The kinds that write their peer with `>`."""
_EXAMPLES = "an action is written as stage, kind, microbatch, like 2F0, 1UNSHARD, 3SEND_F1 or (3F1;0B4)OVERLAP_F_B"


def format_action(action: Action) -> str:
    """The text form; `parse_action` reads it back."""
    if action.sub_actions:
        return f"({';'.join(map(format_action, action.sub_actions))}){action.kind.name}"
    microbatch = "" if action.microbatch is None else action.microbatch
    peer = "" if action.peer is None else f"{'>' if action.kind in _POINTING else '<'}{action.peer}"
    return f"{action.stage}{action.kind.name}{microbatch}{peer}"


def parse_action(text: str) -> Action:
    """Read one action; anything before or after it is an error, spaces around it are not."""
    stripped = text.strip()
    if match := _OVERLAP.fullmatch(stripped):
        return _parse_overlap(stripped, match[1], match[2])
    match = _SIMPLE.fullmatch(stripped)
    if match is None:
        raise ActionError(f"{text!r} is not an action: {_EXAMPLES}")
    stage, kind, microbatch, arrow, peer = match.groups()
    action = _checked(stripped, int(stage), _kind(stripped, kind), int(microbatch) if microbatch else None, int(peer) if peer else None)
    if arrow and (arrow == ">") != (action.kind in _POINTING):
        raise ActionError(f"{text!r} is not an action: sends point to their peer with '>', receives from it with '<'")
    return action


def _checked(text: str, stage: int, kind: Kind, microbatch: int | None, peer: int | None) -> Action:
    try:
        return Action(stage, kind, microbatch, peer=peer)
    except ActionError as error:
        raise ActionError(f"{text!r} is not an action: {error}") from None


def _kind(text: str, name: str) -> Kind:
    try:
        return Kind[name]
    except KeyError:
        raise ActionError(f"{text!r} is not an action: there is no kind {name!r}; {nearest(name, Kind.__members__)}") from None


def _parse_overlap(text: str, inner: str, name: str) -> Action:
    if _kind(text, name) is not Kind.OVERLAP_F_B:
        raise ActionError(f"{text!r} is not an action: only OVERLAP_F_B holds sub-actions")
    try:
        return Action.overlap(*map(parse_action, inner.split(";")))
    except ActionError as error:
        raise ActionError(f"{text!r} is not an action: {error}") from None
