"""The text form of an action: PyTorch's, with `>` and `<` for the peer of a message that skips stages.

`2F0`, `1UNSHARD`, `3SEND_F1`, `3WAIT_SEND_F1`, `(3F1;0B4)OVERLAP_F_B`; beyond PyTorch: `0SEND_F1>3` (to stage 3), `3RECV_F1<0`
(from stage 0), `2F3.1` (slice 1 of microbatch 3), `2OFFLOAD3` and `2RELOAD3`; `7S3`, `7T3`, `7BROADCAST3` and `7COMBINE3` of a spread
vocabulary, which stand on every rank.
PyTorch has no slices: for it an action carries one number for both.
"""

from __future__ import annotations

import re

from penstock.errors import ActionError, nearest
from penstock.ir.action import Action
from penstock.ir.kind import SEND_WAITS, SENDS, Kind

_SIMPLE = re.compile(
    r"([0-9]{1,18})([A-Z_]*[A-Z])([0-9]{0,18})(?:\.([0-9]{1,18}))?(?:([<>])([0-9]{1,18}))?"
)  # longer numbers are out of range
_OVERLAP = re.compile(r"\(([^()]*)\)([A-Z_]+)")
_POINTING = (*SENDS, *SEND_WAITS)
"""The kinds that write their peer with `>`."""
_EXAMPLES = "an action is written as stage, kind, microbatch, like 2F0, 1UNSHARD, 3SEND_F1 or (3F1;0B4)OVERLAP_F_B"


def format_action(action: Action, slices: int | None = None) -> str:
    """The text form; `parse_action` reads it back. With `slices`, one number stands for microbatch and slice, as PyTorch needs it.

    >>> action = Action.parse("2F3.1")
    >>> format_action(action), format_action(action, slices=4)
    ('2F3.1', '2F13')
    """
    if action.sub_actions:
        return f"({';'.join(format_action(part, slices) for part in action.sub_actions)}){action.kind.name}"
    if action.slice is None:
        microbatch = "" if action.microbatch is None else str(action.microbatch)
    else:
        microbatch = f"{action.microbatch}.{action.slice}" if slices is None else str(action.unit(slices))
    peer = "" if action.peer is None else f"{'>' if action.kind in _POINTING else '<'}{action.peer}"
    return f"{action.stage}{action.kind.name}{microbatch}{peer}"


def parse_action(text: str) -> Action:
    """Read one action; anything before or after it is an error, spaces around it are not."""
    try:
        return _parse(text.strip())
    except ActionError as error:
        raise ActionError(f"{text!r} is not an action: {error}") from None


def _parse(text: str) -> Action:
    if match := _OVERLAP.fullmatch(text):
        if _kind(match[2]) is not Kind.OVERLAP_F_B:
            raise ActionError("only OVERLAP_F_B holds sub-actions")
        return Action.overlap(*map(parse_action, match[1].split(";")))
    match = _SIMPLE.fullmatch(text)
    if match is None:
        raise ActionError(_EXAMPLES)
    stage, kind, microbatch, part, arrow, peer = match.groups()
    number, other, of_microbatch = (int(digits) if digits else None for digits in (microbatch, peer, part))
    action = Action(int(stage), _kind(kind), number, peer=other, slice=of_microbatch)
    if arrow and (arrow == ">") != (action.kind in _POINTING):
        raise ActionError("sends point to their peer with '>', receives from it with '<'")
    return action


def _kind(name: str) -> Kind:
    try:
        return Kind[name]
    except KeyError:
        raise ActionError(f"there is no kind {name!r}; {nearest(name, Kind.__members__)}") from None
