"""Arguments and options that several commands take, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import CostsError, FileFormatError, UsageError

STDOUT = Path("-")


def whole_number(text: str) -> int:
    """Read an option that counts something."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def whole_numbers(option: str, text: str | None) -> list[int] | None:
    """Read an option with several counts, like 1,2,4."""
    try:
        return None if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a list of whole numbers, like 1,2,4") from None


def read_size(option: str, text: str | None) -> float | None:
    """Read an option that is a size, like 50GB."""
    from penstock.text.units import parse_size

    try:
        return None if text is None else parse_size(text, option)
    except CostsError as error:
        raise UsageError(str(error)) from None


def writable(path: Path | None) -> Path | None:
    """Refuse a path that no file can be written to before any work is done; `-` is stdout."""
    if path is None or path == STDOUT:
        return path
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into")
    return path


def file_or_stdout(path: Path | None) -> Path | None:
    """Read a path to write to; None is stdout."""
    return None if path == STDOUT else writable(path)


def check_suffix(output: Path | None, suffixes: Sequence[str]) -> str | None:
    """Find the suffix that says what to write; refuse an unknown one before any work is done."""
    from penstock.draw.save import suffix_of

    try:
        return None if output is None else suffix_of(output, suffixes)
    except FileFormatError as error:
        raise UsageError(str(error)) from None


def check_unit(unit: str | None) -> None:
    """Refuse an unknown unit of time before any work is done."""
    from penstock.text.units import seconds_per

    try:
        seconds_per("s" if unit is None else unit)
    except UsageError as error:
        raise UsageError(f"--unit: {error}") from None


Source = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A schedule's name (see 'penstock list'), or a .csv or .json file.")]
Ranks = Annotated[int | None, typer.Option("-p", "--ranks", metavar="N", parser=whole_number, help="Ranks, for a NAME.  [default: 4]")]
Microbatches = Annotated[
    int | None, typer.Option("-m", "--microbatches", metavar="N", parser=whole_number, help="Microbatches, for a NAME.  [default: 8]")
]
Chunks = Annotated[
    int | None, typer.Option("--chunks", metavar="N", parser=whole_number, help="Stages per rank, for a NAME that lets you choose.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("-O", "--option", metavar="KEY=VALUE", help="An option of the schedule, such as group_size=8; may be repeated."),
]
Lower = Annotated[bool, typer.Option("--lower", help="Lower schedules first, so that message slots and reductions count too.")]
Fsdp = Annotated[bool, typer.Option("--fsdp", help="Also gather and free sharded parameters.")]
MergeBackward = Annotated[bool, typer.Option("--merge-backward", help="Merge each I with its own W into B if they are neighbours.")]
Receive = Annotated[
    str | None,
    typer.Option(
        "--receive",
        metavar="WHERE",
        help="Where to place receives: paired (with their sends), just-in-time, or N compute actions ahead.  [default: paired]",
    ),
]
CostsText = Annotated[
    str | None,
    typer.Option(
        "--costs",
        metavar="COSTS",
        help='A .toml or .json file, or text like "f=1,i=1,w=1,latency=0.1".  [default: F, I and W take 1, messages nothing]',
    ),
]
Unit = Annotated[str | None, typer.Option("--unit", metavar="UNIT", help="The unit of the costs' times: s, ms, us or ns.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", callback=file_or_stdout, help="Write to FILE, whole or not at all, instead of printing."
    ),
]
