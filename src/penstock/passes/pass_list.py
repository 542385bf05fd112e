"""Passes by name, and a list of them as data."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.errors import PassError, nearest
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.passes.base import Pass
from penstock.passes.buffers import Buffers
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.offload import Offload
from penstock.passes.receive import Receive
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard
from penstock.passes.split_backward import SplitBackward
from penstock.passes.vocabulary import Vocabulary
from penstock.passes.wait_send import WaitSend

_ONE = re.compile(r"\s*([a-z][a-z-]*)\s*(?:\{([^{}]*)\})?\s*")


@dataclass(frozen=True)
class PassList:
    """Passes in the order in which they run; prints and parses as text.

    >>> str(PassList.parse("merge-backward, shard{residency=2}, send-receive"))
    'merge-backward,shard{residency=2},send-receive'
    """

    passes: tuple[Pass, ...]

    @classmethod
    def of(cls, passes: Iterable[Pass]) -> PassList:
        return cls(tuple(passes))

    @classmethod
    def parse(cls, text: str) -> PassList:
        """Read `name,name{option=value,option=value},...`."""
        passes: list[Pass] = []
        position = 0
        while position < len(text):
            match = _ONE.match(text, position)
            if match is None or text[match.end() : match.end() + 1] not in ("", ","):
                raise PassError(f"{text!r} is not a list of passes, at {text[position:]!r}: write name,name{{option=value}}")
            passes.append(pass_class(match[1]).from_options(_read_options(match[1], match[2] or "")))
            position = match.end() + 1
        if text.endswith(","):
            raise PassError(f"{text!r} is not a list of passes: it ends in a comma")
        return cls(tuple(passes))

    def apply(self, table: Table) -> Program:
        """Run the passes one after the other."""
        program = Program.start(table)
        for one in self.passes:
            program = one.apply(program)
        return program

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))


def _read_options(name: str, text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value or key in options:
            raise PassError(f"{part!r} is not an option of pass {name}: write option=value, each option once")
        options[key] = value
    return options


_CLASSES: tuple[type[Pass], ...] = (
    SplitBackward,
    MergeBackward,
    Vocabulary,
    Offload,
    Shard,
    ReduceGrad,
    SendReceive,
    Receive,
    WaitSend,
    Buffers,
)
_BY_NAME = {kind.name: kind for kind in _CLASSES}


def passes() -> dict[str, str]:
    """Every pass's name and one-line summary, in the order in which lowering runs them."""
    return {name: (inspect.getdoc(cls) or "").splitlines()[0] for name, cls in _BY_NAME.items()}


def pass_class(name: str) -> type[Pass]:
    """The pass of this name."""
    if name not in _BY_NAME:
        raise PassError(f"there is no pass {name!r}: {nearest(name, _BY_NAME)}")
    return _BY_NAME[name]
