"""`penstock lower`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import TEXT, AsJson, ProgramOutput, count_option, text_option
from penstock.cli.output import present, present_rank, show_steps
from penstock.cli.sources import DeferReduceGradWait, LoweringOptions, MaxOutstandingSends, ScheduleSource
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.ir.table import Table


def lower(
    source: ScheduleSource,
    *,
    options: LoweringOptions,
    waits: Annotated[
        bool, typer.Option("--waits", help="Also add actions that wait for sends and gradient reductions, as PyTorch 2.15 does.")
    ] = False,
    max_outstanding_sends: MaxOutstandingSends = None,
    defer_reduce_grad_wait: DeferReduceGradWait = False,
    passes: Annotated[str | None, text_option("Run these passes instead: NAME,NAME{OPTION=VALUE},...", "LIST", "--passes")] = None,
    rank: Annotated[int | None, count_option("Print only the actions of this rank.", "--rank", metavar="R")] = None,
    as_json: AsJson = False,
    output: ProgramOutput = None,
) -> None:
    """Lower a schedule to a proved program.

    Adds sends, receives and gradient reductions, counts buffers, and proves that the result runs. 'penstock list --passes' lists the
    passes that do this.

    \b
    Examples:
      penstock lower zbv -p 4 -m 8
      penstock lower zbv.csv --fsdp --receive just-in-time -o program.csv
      penstock lower 1f1b -p 4 -m 8 --rank 2
      penstock lower zbv -p 4 -m 8 --max-outstanding-sends 2 --defer-reduce-grad-wait
      penstock lower 1f1b -p 8 -m 32 --offload 50 -o program.json
      penstock lower 1f1b --passes "shard{lookahead=2,residency=1},reduce-grad,send-receive,buffers"
    """
    sends, deferred = max_outstanding_sends, defer_reduce_grad_wait
    lowering = replace(options, passes=passes, waits=waits, max_outstanding_sends=sends, defer_reduce_grad_wait=deferred)
    lowering.check()
    table = source.table()
    _check(table, rank, passes, output)
    with show_steps(1) as step:
        step("lowering and proving")
        lowered = lowering.lower(table) if rank is None else lowering.lower_rank(table, rank)
    if isinstance(lowered, tuple):
        present_rank(table, rank or 0, lowered, as_json=as_json, output=output)
    else:
        present(lowered, as_json=as_json, output=output)


def _check(table: Table, rank: int | None, passes: str | None, output: Path | None) -> None:
    if table.lowered and passes is None:
        raise UsageError("the file is already a program: change it with --passes, or take its schedule with 'penstock convert --to csv'")
    if rank is None:
        return
    if not 0 <= rank < table.ranks:
        raise UsageError(f"there are {table.ranks} ranks, 0 to {table.ranks - 1}, got --rank {rank}")
    if output is not None and output.suffix.lower() not in (*TEXT, ".json"):
        raise UsageError(f"a {output.suffix.lower()} file holds all ranks: leave out --rank, or write .txt or .json")
