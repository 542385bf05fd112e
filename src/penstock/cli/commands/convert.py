"""`penstock convert`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import STDOUT, Chunks, Microbatches, Options, Ranks, Source, writable
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.schedule_source import ScheduleSource
    from penstock.ir.table import Table


class Format(StrEnum):
    """A file format of schedules and programs."""

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
    from_: Annotated[Format | None, typer.Option("--from", help="The format of the input.  [default: by suffix]")] = None,
    to: Annotated[Format | None, typer.Option("--to", help="The format of the output.  [default: by suffix]")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", callback=writable, help="Another way to give OUT.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a description of the file as JSON and nothing else.")] = False,
) -> None:
    """Convert between CSV, JSON and DeepSpeed streams.

    The CSV files are PyTorch's. csv holds only compute actions, so a program loses all others; lowered-csv holds the whole program, so
    a schedule is lowered first. By suffix, .csv and .json keep the input as it is, and .ds is deepspeed.

    \b
    Examples:
      penstock convert zbv.csv zbv.json
      penstock convert zbv.csv program.csv --to lowered-csv
      penstock convert 1f1b -p 4 -m 8 - --to deepspeed
    """
    from penstock.cli.output import emit, write
    from penstock.cli.schedule_source import ScheduleSource

    path = _target(target, output)
    if path == STDOUT and as_json:
        raise UsageError("--json describes the file on stdout, but OUT is stdout already: name a file")
    form = to or _by_suffix(path)
    table = _fit(_read(ScheduleSource(source, ranks, microbatches, chunks, option), from_), to)
    text = _text(table, form, path)
    if path == STDOUT:
        emit([text])
    else:
        write(path, text)
        emit([_describe(table, form, path, as_json)])


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
        raise UsageError(f"{where}: give --to {'|'.join(Format)}")
    return form


def _read(source: ScheduleSource, form: Format | None) -> Table:
    """Read the input in this format, or by its suffix."""
    if form is None and Path(source.source).suffix.lower() != ".ds":
        return source.table()
    form = form or Format.DEEPSPEED
    from penstock.errors import FileFormatError
    from penstock.ir.formats.csv_form import read_csv
    from penstock.ir.formats.json_form import read_json
    from penstock.ir.formats.reading import read_text
    from penstock.passes.deepspeed.text import parse_streams, schedule_of

    source.refuse_shape()
    path = source.path()
    if form is Format.DEEPSPEED:
        return schedule_of(parse_streams(read_text(path, "DeepSpeed"), source.source), source.source)
    table = read_json(path) if form is Format.JSON else read_csv(path)
    if form is not Format.JSON and table.lowered != (form is Format.LOWERED_CSV):
        raise FileFormatError(source.source, f"the file holds a {'lowered program' if table.lowered else 'schedule'}, not {form}")
    return table


def _fit(table: Table, form: Format | None) -> Table:
    """Lower the table, or undo the lowering, if the format asks for it."""
    from penstock.ir.program import Program
    from penstock.passes.lower import lowering

    if form is Format.LOWERED_CSV and not table.lowered:
        return lowering().apply(table)
    if form is Format.CSV and isinstance(table, Program):
        return table.schedule()
    return table


def _text(table: Table, form: Format, path: Path) -> str:
    from penstock.cli.output import check_csv, to_json
    from penstock.ir.formats.csv_form import csv_text
    from penstock.passes.deepspeed.instructions import streams
    from penstock.passes.deepspeed.text import format_streams

    if form is Format.JSON:
        return to_json(table.to_json())
    if form is Format.DEEPSPEED:
        return format_streams(streams(table))
    check_csv(table, path)
    return csv_text(table)


def _describe(table: Table, form: Format, path: Path, as_json: bool) -> str:
    """Describe the file that was written."""
    from penstock.cli.output import describe_table, to_json

    if not as_json:
        return f"{path}: {describe_table(table)}\n"
    if form is Format.CSV and table.lowered:
        form = Format.LOWERED_CSV
    description = {"file": str(path), "format": form.value, "type": type(table).__name__.lower(), "name": table.name}
    return to_json({**description, "ranks": table.ranks, "stages": table.stages, "microbatches": table.microbatches})
