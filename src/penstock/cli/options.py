"""The arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import UsageError

STDOUT = Path("-")


def whole_number(text: str) -> int:
    """Read an option that counts something."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def writable(path: Path | None) -> Path | None:
    """Refuse a path that no file can be written to, before any work is done for it; `-` is stdout."""
    if path is None or path == STDOUT:
        return path
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into")
    return path


def file_or_stdout(path: Path | None) -> Path | None:
    """A file to write to, or None to print."""
    return None if path == STDOUT else writable(path)


Source = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A schedule's name (see 'penstock list'), or a .csv or .json file.")]
Ranks = Annotated[int | None, typer.Option("-p", "--ranks", metavar="N", parser=whole_number, help="Ranks, for a NAME.  [default: 4]")]
Microbatches = Annotated[
    int | None, typer.Option("-m", "--microbatches", metavar="N", parser=whole_number, help="Microbatches, for a NAME.  [default: 8]")
]
Chunks = Annotated[
    int | None, typer.Option("--chunks", metavar="N", parser=whole_number, help="Stages a rank, for a NAME that lets you choose.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("-O", "--option", metavar="KEY=VALUE", help="An option of the schedule, such as group_size=8; may be repeated."),
]
Lower = Annotated[bool, typer.Option("--lower", help="Lower schedules first: slots for messages, and reductions, count then.")]
Fsdp = Annotated[bool, typer.Option("--fsdp", help="Gather and free sharded parameters too.")]
MergeBackward = Annotated[bool, typer.Option("--merge-backward", help="Join each I with a W of its own next to it into B.")]
Receive = Annotated[
    str | None,
    typer.Option(
        "--receive",
        metavar="WHERE",
        help="Where receives stand: paired (with their sends), just-in-time, or N compute actions ahead.  [default: paired]",
    ),
]
CostsText = Annotated[
    str | None,
    typer.Option(
        "--costs",
        metavar="COSTS",
        help='A .toml or .json file, or written out: "f=1,i=1,w=1,latency=0.1".  [default: F, I and W take 1, messages nothing]',
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
