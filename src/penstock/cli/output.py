"""Where a command's result goes: a file, or stdout in colour where that is a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from penstock.draw.terminal.lines import Line
    from penstock.ir.table import Table

READER_GONE = 141
"""What the shell reports of a program that ends because nobody reads its output."""

Draw = Callable[[int | None], Iterable["Line"]]
"""Gives the lines of a picture that is at most so many columns wide; None is any width."""


def deliver(draw: Draw, data: Callable[[], Any], *, as_json: bool, output: Path | None) -> None:
    """Print the picture, or the data as JSON; into the file instead if there is one (JSON too if that is its suffix)."""
    wants_json = as_json or (output is not None and output.suffix.lower() == ".json")
    if output is not None:
        write(output, to_json(data()) if wants_json else "".join(_plain(draw(None))))
    elif wants_json:
        emit([to_json(data())])
    else:
        emit(_for_terminal(draw))


def can_print(text: str) -> bool:
    """Whether stdout's encoding has these signs."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def to_json(data: Any) -> str:
    """JSON that every reader takes: numbers that it has no sign for are null."""
    return json.dumps(_finite(data), indent=1, allow_nan=False) + "\n"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    from penstock.ir.csv_form import write_whole

    write_whole(path, text)


def save_table(table: Table, path: Path) -> None:
    """Write a schedule or program by its suffix; CSV files are PyTorch's, so what PyTorch cannot read is refused."""
    from penstock.ir.files import save

    if path.suffix.lower() == ".csv":
        check_csv(table, path)
    save(table, path)


def check_csv(table: Table, path: Path) -> None:
    """Refuse to write a CSV file that PyTorch would read as something else."""
    from penstock.errors import FileFormatError, ScheduleError
    from penstock.ir.csv_form import refuse_for_torch

    try:
        refuse_for_torch(table)
    except ScheduleError as error:
        raise FileFormatError(str(path), str(error)) from None


def emit(chunks: Iterable[str]) -> None:
    """Write to stdout; end quietly when the reader has gone, as after `| head`."""
    try:
        for chunk in chunks:
            sys.stdout.write(chunk)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_GONE) from None


def _for_terminal(draw: Draw) -> Iterator[str]:
    """Fitted to the terminal's width and in colour unless NO_COLOR says otherwise; plain and unfitted where it is none."""
    from rich.console import Console

    from penstock.draw.terminal.lines import paint

    console = Console(highlight=False)
    lines = draw(console.width if console.is_terminal else None)
    if console.no_color or console.color_system in (None, "windows"):
        yield from _plain(lines)
    else:
        yield from (f"{line}\n" for line in paint(lines, console.color_system))


def _plain(lines: Iterable[Line]) -> Iterator[str]:
    from penstock.draw.terminal.lines import plain_text

    return (f"{line}\n" for line in plain_text(lines))
