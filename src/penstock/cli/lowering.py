"""How a command lowers a schedule: the passes in full, or the default passes with the options that change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import PassError, UsageError

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.ir.program import Program
    from penstock.ir.table import Table
    from penstock.passes.pass_list import PassList


@dataclass(frozen=True)
class LoweringOptions:
    """The options --passes, --fsdp, --merge-backward and --receive."""

    passes: str | None
    fsdp: bool
    merge_backward: bool
    receive: str | None

    def check(self) -> None:
        """Refuse options that cannot be read before any work is done."""
        if self.passes is not None and (self.fsdp or self.merge_backward or self.receive is not None):
            raise UsageError("--passes lists all passes that run: leave out --fsdp, --merge-backward and --receive")
        try:
            self._pass_list()
        except PassError as error:
            raise UsageError(f"{'--receive' if self.passes is None else '--passes'}: {error}") from None

    def lower(self, table: Table) -> Program:
        return self._pass_list().apply(table)

    def lower_rank(self, table: Table, rank: int) -> tuple[Action, ...]:
        """Give the actions of one rank, without lowering the other ranks if that is possible."""
        from penstock.ir.schedule import Schedule
        from penstock.passes.lower import lower_rank

        if self.passes is None and isinstance(table, Schedule):
            return lower_rank(table, rank, fsdp=self.fsdp, merge_backward=self.merge_backward, receive=self._receive)
        return self.lower(table)[rank]

    @property
    def _receive(self) -> str | int:
        place = "paired" if self.receive is None else self.receive
        return int(place) if place.isdecimal() else place

    def _pass_list(self) -> PassList:
        from penstock.passes.lower import lowering
        from penstock.passes.pass_list import PassList

        if self.passes is not None:
            return PassList.parse(self.passes)
        return lowering(fsdp=self.fsdp, merge_backward=self.merge_backward, receive=self._receive)


def optional_lowering(lower: bool, fsdp: bool, merge_backward: bool, receive: str | None) -> LoweringOptions | None:
    """Give the options of commands that lower on request; None if they should not lower."""
    if not (lower or fsdp or merge_backward or receive is not None):
        return None
    options = LoweringOptions(None, fsdp, merge_backward, receive)
    options.check()
    return options
