"""`penstock convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import STDOUT, Chunks, Microbatches, Options, Ranks, Source, writable
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.source import Wanted
    from penstock.ir.table import Table


class Format(StrEnum):
    """A form that a schedule or program can be written in."""

    CSV = "csv"
    LOWERED_CSV = "lowered-csv"
    JSON = "json"
    DEEPSPEED = "deepspeed"


def convert(
    source: Source,
    target: Annotated[Path | None, typer.Argument(metavar="OUT", callback=writable, help="The file to write; - is stdout.")] = None,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    chunks: Chunks = None,
    option: Options = None,
    from_: Annotated[Format | None, typer.Option("--from", help="The form of the input.  [default: by suffix]")] = None,
    to: Annotated[Format | None, typer.Option("--to", help="The form of the output.  [default: by suffix]")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", callback=writable, help="Another way to give OUT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON and nothing else.")] = False,
) -> None:
    """Convert files: PyTorch's CSV, JSON, DeepSpeed's stream.

    csv holds compute actions only, lowered-csv the whole program: a schedule is lowered for it, and a program loses all but its compute
    actions for csv. By suffix, .csv and .json keep the input as it is and .ds is deepspeed, an instruction stream.

    \b
    Examples:
      penstock convert zbv.csv zbv.json
      penstock convert zbv.csv program.csv --to lowered-csv
      penstock convert 1f1b -p 4 -m 8 - --to deepspeed
    """
    from penstock.cli.output import emit, write
    from penstock.cli.source import Wanted

    path = _target(target, output)
    if path == STDOUT and as_json:
        raise UsageError("--json prints what was written, but OUT is stdout already: name a file")
    form = to or _by_suffix(path)
    table = _fitted(_read(Wanted(source, ranks, microbatches, chunks, option), from_), to)
    text = _text(table, form, path)
    if path == STDOUT:
        emit([text])
    else:
        write(path, text)
        emit([_said(table, form, path, as_json)])


def _target(target: Path | None, output: Path | None) -> Path:
    """OUT or -o FILE."""
    if (target is None) == (output is None):
        raise UsageError("give one file to write: OUT or -o FILE" + (", not both" if target else ""))
    return target or output or STDOUT


def _by_suffix(path: Path) -> Format:
    known = {".csv": Format.CSV, ".json": Format.JSON, ".ds": Format.DEEPSPEED}
    form = known.get(path.suffix.lower())
    if form is None:
        where = "stdout has no suffix" if path == STDOUT else f"{path} ends in none of {', '.join(known)}"
        raise UsageError(f"{where}: say --to {'|'.join(Format)}")
    return form


def _read(wanted: Wanted, form: Format | None) -> Table:
    """The input, by its suffix or in the form that was said."""
    if form is None and Path(wanted.source).suffix.lower() != ".ds":
        return wanted.table()
    form = form or Format.DEEPSPEED
    from penstock.errors import FileFormatError
    from penstock.ir.csv_form import read_csv
    from penstock.ir.json_form import read_json
    from penstock.ir.reading import read_text
    from penstock.passes.deepspeed_text import parse_streams, schedule_of

    wanted.refuse_shape()
    path = wanted.path()
    if form is Format.DEEPSPEED:
        return schedule_of(parse_streams(read_text(path, "DeepSpeed"), wanted.source), wanted.source)
    table = read_json(path) if form is Format.JSON else read_csv(path)
    if form is not Format.JSON and table.lowered != (form is Format.LOWERED_CSV):
        raise FileFormatError(wanted.source, f"the file holds a {'lowered program' if table.lowered else 'schedule'}, not {form}")
    return table


def _fitted(table: Table, form: Format | None) -> Table:
    """Lowered, or without all that lowering added, where the form asks for it."""
    from penstock.ir.program import Program
    from penstock.passes.lower import lowering

    if form is Format.LOWERED_CSV and not table.lowered:
        return lowering().apply(table)
    if form is Format.CSV and isinstance(table, Program):
        return table.schedule()
    return table


def _text(table: Table, form: Format, path: Path) -> str:
    from penstock.cli.output import check_csv, to_json
    from penstock.ir.csv_form import csv_text
    from penstock.passes.deepspeed import streams
    from penstock.passes.deepspeed_text import format_streams

    if form is Format.JSON:
        return to_json(table.to_json())
    if form is Format.DEEPSPEED:
        return format_streams(streams(table))
    check_csv(table, path)
    return csv_text(table)


def _said(table: Table, form: Format, path: Path, as_json: bool) -> str:
    """What was written."""
    from penstock.cli.output import to_json
    from penstock.cli.picture import about

    if not as_json:
        return f"{path}: {about(table)}\n"
    if form is Format.CSV and table.lowered:
        form = Format.LOWERED_CSV
    what = {"file": str(path), "format": form.value, "type": type(table).__name__.lower(), "name": table.name}
    return to_json({**what, "ranks": table.ranks, "stages": table.stages, "microbatches": table.microbatches})
