"""`penstock lower`."""

from __future__ import annotations

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
    from penstock.ir.table import Table


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
        typer.Option("--passes", metavar="LIST", help="Run these passes instead: NAME,NAME{OPTION=VALUE},..."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", parser=whole_number, help="Print only the actions of this rank.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Lower a schedule to a proved program.

    Adds sends, receives and gradient reductions, counts buffers, and proves that the result runs. 'penstock list --passes' lists the
    passes that do this.

    With -o, a .csv or .json FILE can be loaded again (the CSV by PyTorch too); any other suffix gets the picture.

    \b
    Examples:
      penstock lower zbv -p 4 -m 8
      penstock lower zbv.csv --fsdp --receive just-in-time -o program.csv
      penstock lower 1f1b -p 4 -m 8 --rank 2
      penstock lower 1f1b --passes "shard{lookahead=2,residency=1},reduce-grad,send-receive,buffers"
    """
    from penstock.cli.lowering import LoweringOptions
    from penstock.cli.output import present, present_rank
    from penstock.cli.schedule_source import ScheduleSource

    lowering = LoweringOptions(passes, fsdp, merge_backward, receive)
    lowering.check()
    table = ScheduleSource(source, ranks, microbatches, chunks, option).table()
    _check(table, rank, passes, output)
    if rank is None:
        present(lowering.lower(table), as_json=as_json, output=output)
    else:
        present_rank(table, rank, lowering.lower_rank(table, rank), as_json=as_json, output=output)


def _check(table: Table, rank: int | None, passes: str | None, output: Path | None) -> None:
    if table.lowered and passes is None:
        raise UsageError("the file is already a program: change it with --passes, or take its schedule with 'penstock convert --to csv'")
    if rank is None:
        return
    if not 0 <= rank < table.ranks:
        raise UsageError(f"there are {table.ranks} ranks, 0 to {table.ranks - 1}, got --rank {rank}")
    if output is not None and output.suffix.lower() == ".csv":
        raise UsageError("a .csv file holds all ranks: leave out --rank, or use another suffix")
