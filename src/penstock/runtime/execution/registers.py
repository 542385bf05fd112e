"""The registers of one rank's program: where an operation leaves a value for a later one."""

from __future__ import annotations

from typing import Any

from penstock.runtime.transport.group import EMPTY


class Registers:
    """Numbered registers, allocated by name while the operations are built and addressed by number while a step runs.

    A name is a tuple whose first word says what the register holds: `context` (a forward's saved state), `stash` (weight gradients
    that wait for W), `received`, `sending`, `part` (of a gradient sum), or `handed` (a value for another stage of this rank). An
    operation that takes a value leaves `EMPTY` behind, so that nothing stays referenced longer than the program needs it.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number(self, *name: Any) -> int:
        """The number of a register, which is allocated when it is first asked for."""
        if name not in self._numbers:
            self._numbers[name] = len(self.values)
            self.values.append(EMPTY)
        return self._numbers[name]

    def count_full(self, sort: str) -> int:
        """How many registers of this sort hold a value."""
        return sum(name[0] == sort and self.values[number] is not EMPTY for name, number in self._numbers.items())

    def clear(self) -> None:
        """Empty all registers."""
        self.values[:] = [EMPTY] * len(self.values)
