"""An action in one integer, and the helpers that schedule generators yield.

From the lowest bit: 24 bits microbatch, 16 bits stage, 16 bits peer stage plus one (0: the neighbour in the chain),
5 bits kind, 1 bit JOIN. An overlapped action is a run of codes in which all but the last carry JOIN, so that
whole-pipeline work sees one entry for each part and never a special case. The functions take integers and NumPy arrays alike.
"""

from __future__ import annotations

from typing import Any

from penstock.ir.kind import Kind

MAX_MICROBATCHES = 1 << 24
MAX_STAGES = (1 << 16) - 1

_STAGE, _PEER, _KIND = 24, 40, 56
_LOW24, _LOW16 = (1 << 24) - 1, (1 << 16) - 1
MAX_KINDS = 32
JOIN = 1 << 61
STAGE_FIELD = _LOW16 << _STAGE


def pack(stage: Any, kind: Any, microbatch: Any = 0, peer: Any = -1) -> Any:
    """One code; `peer` is the stage at the other end of a message that is not to or from the neighbour."""
    return microbatch | stage << _STAGE | (peer + 1) << _PEER | kind << _KIND


def microbatch_of(code: Any) -> Any:
    return code & _LOW24


def stage_of(code: Any) -> Any:
    return code >> _STAGE & _LOW16


def peer_of(code: Any) -> Any:
    """The peer stage named by the code, or -1 for the neighbour."""
    return (code >> _PEER & _LOW16) - 1


def kind_of(code: Any) -> Any:
    return code >> _KIND & MAX_KINDS - 1


def is_joined(code: Any) -> Any:
    """Whether the entry runs together with the one after it."""
    return (code & JOIN) != 0


_B_CODE, _I_CODE, _W_CODE = Kind.B << _KIND, Kind.I << _KIND, Kind.W << _KIND


def F(chunk: int, microbatch: int) -> int:
    """Forward of a microbatch on the rank's chunk."""
    return chunk << _STAGE | microbatch


def B(chunk: int, microbatch: int) -> int:
    """Full backward."""
    return _B_CODE | chunk << _STAGE | microbatch


def I(chunk: int, microbatch: int) -> int:  # noqa: E743 - the field's own letter
    """Backward for the input."""
    return _I_CODE | chunk << _STAGE | microbatch


def W(chunk: int, microbatch: int) -> int:
    """Backward for the weights."""
    return _W_CODE | chunk << _STAGE | microbatch


def overlap(*parts: int) -> tuple[int, ...]:
    """The parts as one action that runs them together."""
    return (*(part | JOIN for part in parts[:-1]), parts[-1])
