"""Where the result of a command goes: to a file, or to stdout, in colour if that is a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from penstock.draw.terminal.lines import Line
    from penstock.ir.action import Action
    from penstock.ir.grid import Grid
    from penstock.ir.table import Table

READER_GONE = 141
"""The exit code that a shell reports for a program whose reader has gone."""

Draw = Callable[[int | None], Iterable["Line | str"]]
"""Gives the lines of a picture of at most so many columns, as plain text or in colour; None is any width."""


def deliver(draw: Draw, data: Callable[[], Any], *, as_json: bool, output: Path | None) -> None:
    """Print the picture, or the data as JSON. With an output file, write it there, as JSON if that is its suffix."""
    wants_json = as_json or (output is not None and output.suffix.lower() == ".json")
    if output is not None:
        write(output, to_json(data()) if wants_json else "".join(_plain(draw(None))))
    elif wants_json:
        emit([to_json(data())])
    else:
        emit(_for_terminal(draw))


def can_print(text: str) -> bool:
    """Whether stdout's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def to_json(data: Any) -> str:
    """Write JSON that every reader accepts: NaN and infinity become `null`."""
    return json.dumps(_finite(data), indent=1, allow_nan=False) + "\n"


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    from penstock.ir.formats.csv_form import write_whole

    write_whole(path, text)


def emit(chunks: Iterable[str]) -> None:
    """Write to stdout; end quietly when the reader has gone, as after `| head`."""
    try:
        for chunk in chunks:
            sys.stdout.write(chunk)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_GONE) from None


def _for_terminal(draw: Draw) -> Iterator[str]:
    """On a terminal, fit the picture to its width and colour it unless NO_COLOR is set; elsewhere, do neither."""
    from rich.console import Console

    from penstock.draw.terminal.lines import paint

    console = Console(highlight=False)
    lines = draw(console.width if console.is_terminal else None)
    if console.no_color or console.color_system in (None, "windows"):
        yield from _plain(lines)
    else:
        yield from (f"{line}\n" for line in paint(_as_lines(lines), console.color_system))


def _plain(lines: Iterable[Line | str]) -> Iterator[str]:
    from penstock.draw.terminal.lines import plain_text

    return (f"{line}\n" for line in plain_text(_as_lines(lines)))


def _as_lines(lines: Iterable[Line | str]) -> Iterator[Line]:
    return ([(line, None)] if isinstance(line, str) else line for line in lines)


# Schedules and programs -----------------------------------------------------------------------------------------------


def present(table: Table, *, as_json: bool, output: Path | None) -> None:
    """Print a schedule or program, or write it to a file: `.csv` and `.json` can be loaded again, any other suffix gets the picture."""
    if output is not None and output.suffix.lower() in (".csv", ".json"):
        from penstock.ir.formats.files import save

        if output.suffix.lower() == ".csv":
            check_csv(table, output)
        save(table, output)
        return

    def draw(width: int | None) -> Iterator[Line | str]:
        from penstock.ir.grid import Grid
        from penstock.text.numbers import format_count

        grid = Grid.spaced(table)
        yield f"{describe_table(table)}, {format_count(grid.steps, 'step')}"
        yield from _grid_with_legend(grid, width)

    deliver(draw, table.to_json, as_json=as_json, output=output)


def present_rank(table: Table, rank: int, actions: Sequence[Action], *, as_json: bool, output: Path | None) -> None:
    """Print the actions of one rank, or write them to a file."""

    def draw(width: int | None) -> Iterator[Line | str]:
        from penstock.ir.grid import Grid
        from penstock.text.numbers import format_count

        yield f"{describe_table(table, 'program')}; rank {rank}: {format_count(len(actions), 'action')}"
        yield from _grid_with_legend(Grid((tuple(actions),)), width, ranks=[rank])

    def data() -> dict[str, Any]:
        shape = {"name": table.name, "microbatches": table.microbatches, "placement": table.placement.to_json()}
        return {**shape, "rank": rank, "actions": [str(action) for action in actions]}

    deliver(draw, data, as_json=as_json, output=output)


def _grid_with_legend(grid: Grid, width: int | None, ranks: Sequence[int] | None = None) -> Iterator[Line | str]:
    from penstock.draw.terminal.grid import grid_legend, grid_lines

    yield from grid_lines(grid, width=width, ranks=ranks)
    yield ""
    yield from grid_legend(grid, width=width)


def describe_table(table: Table, kind: str | None = None) -> str:
    """Describe a schedule or program in one line; `kind` replaces those two words."""
    from penstock.text.numbers import format_count

    counts = ((table.ranks, "rank"), (table.stages, "stage"), (table.microbatches, "microbatch"))
    shape = ", ".join(format_count(number, word) for number, word in counts)
    return f"{table.name or 'unnamed'} {kind or type(table).__name__.lower()}: {table.placement.kind} placement, {shape}"


def check_csv(table: Table, path: Path) -> None:
    """Refuse to write a CSV file that PyTorch would read as something else."""
    from penstock.errors import FileFormatError, ScheduleError
    from penstock.ir.formats.csv_form import refuse_for_torch

    try:
        refuse_for_torch(table)
    except ScheduleError as error:
        raise FileFormatError(str(path), str(error)) from None
