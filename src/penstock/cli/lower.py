"""`penstock lower`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import (
    AsJson,
    Chunks,
    Fsdp,
    MergeBackward,
    Microbatches,
    Options,
    Output,
    Ranks,
    Receive,
    Source,
    whole_number,
)
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.ir.program import Program
    from penstock.ir.table import Table
    from penstock.passes.pass_list import PassList


def lower(
    source: Source,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    option: Options = None,
    fsdp: Fsdp = False,
    merge_backward: MergeBackward = False,
    receive: Receive = None,
    passes: Annotated[
        str | None,
        typer.Option("--passes", metavar="LIST", help="The passes to run instead, as NAME,NAME{OPTION=VALUE},..."),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", parser=whole_number, help="Only this rank's actions.")] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Lower a schedule to a proved program.

    Adds sends, receives and gradient reduction, counts buffers, and proves that the result runs. 'penstock list --passes' names the steps.

    With -o, a .csv or .json FILE can be loaded again (the CSV by PyTorch too); any other suffix gets the picture.

    \b
    Examples:
      penstock lower zbv -p 4 -m 8
      penstock lower zbv.csv --fsdp --receive just-in-time -o program.csv
      penstock lower 1f1b -p 4 -m 8 --rank 2
      penstock lower 1f1b --passes "shard{lookahead=2,residency=1},reduce-grad,send-receive,buffers"
    """
    from penstock.cli.picture import present, present_rank
    from penstock.cli.source import Wanted

    recipe = Recipe(passes, fsdp, merge_backward, receive)
    recipe.check()
    table = Wanted(source, ranks, microbatches, chunks, option).table()
    _check(table, rank, passes, output)
    if rank is None:
        present(recipe.program(table), as_json=as_json, output=output)
    else:
        present_rank(table, rank, recipe.rank(table, rank), as_json=as_json, output=output)


@dataclass(frozen=True)
class Recipe:
    """The passes as given in full, or the usual ones as the options change them."""

    passes: str | None
    fsdp: bool
    merge_backward: bool
    receive: str | None

    def check(self) -> None:
        """Refuse what cannot be read before anything is built."""
        from penstock.errors import PassError

        if self.passes is not None and (self.fsdp or self.merge_backward or self.receive is not None):
            raise UsageError("--passes says all that is run: leave out --fsdp, --merge-backward and --receive")
        try:
            self._pass_list()
        except PassError as error:
            raise UsageError(f"{'--receive' if self.passes is None else '--passes'}: {error}") from None

    def program(self, table: Table) -> Program:
        return self._pass_list().apply(table)

    def rank(self, table: Table, rank: int) -> tuple[Action, ...]:
        """One rank's actions, without the other ranks where that can be."""
        from penstock.ir.schedule import Schedule
        from penstock.passes.lower import lower_rank

        if self.passes is None and isinstance(table, Schedule):
            return lower_rank(table, rank, fsdp=self.fsdp, merge_backward=self.merge_backward, receive=self._receive)
        return self.program(table)[rank]

    @property
    def _receive(self) -> str | int:
        where = "paired" if self.receive is None else self.receive
        return int(where) if where.isdecimal() else where

    def _pass_list(self) -> PassList:
        from penstock.passes.lower import lowering
        from penstock.passes.pass_list import PassList

        if self.passes is not None:
            return PassList.parse(self.passes)
        return lowering(fsdp=self.fsdp, merge_backward=self.merge_backward, receive=self._receive)


def _check(table: Table, rank: int | None, passes: str | None, output: Path | None) -> None:
    if table.lowered and passes is None:
        raise UsageError("the file is a program already: change it with --passes, or take its schedule with 'penstock convert --to csv'")
    if rank is None:
        return
    if not 0 <= rank < table.ranks:
        raise UsageError(f"there are {table.ranks} ranks, 0 to {table.ranks - 1}, got --rank {rank}")
    if output is not None and output.suffix.lower() == ".csv":
        raise UsageError("a .csv file holds every rank: leave out --rank, or write to another suffix")
