"""Output of commands: the result to a file or to stdout, in colour if that is a terminal, and its progress on stderr; Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.options import TEXT
from penstock.draw.palette import Line, paint, plain_text
from penstock.errors import FileFormatError, ScheduleError, UsageError
from penstock.text.numbers import format_count

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.ir.grid import Grid
    from penstock.ir.table import Table
    from penstock.planner.request import Progress
    from penstock.text.units import Units


READER_GONE = 141
"""The exit code that a shell reports for a program whose reader has gone."""

Draw = Callable[[int | None], Iterable["Line"]]
"""Gives the lines of a picture of at most so many columns, as plain text or in colour; None is any width."""


def deliver(draw: Draw, data: Callable[[], Any], *, as_json: bool, output: Path | None) -> None:
    """Print the picture, or the data as JSON. With an output file, write it there, as JSON if that is its suffix."""
    wants_json = as_json or (output is not None and output.suffix.lower() == ".json")
    if output is not None:
        from penstock.ir.formats.csv_form import write_whole

        write_whole(output, to_json(data()) if wants_json else "".join(_write_plain(draw(None))))
    elif wants_json:
        emit([to_json(data())])
    else:
        emit(_fit_terminal(draw))


def can_print(text: str) -> bool:
    """Whether stdout's encoding has these characters."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def to_json(data: Any) -> str:
    """Write JSON that every reader accepts: NaN and infinity become `null`."""
    return json.dumps(_drop_nonfinite(data), indent=1, allow_nan=False) + "\n"


def _drop_nonfinite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _drop_nonfinite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_drop_nonfinite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


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


def _fit_terminal(draw: Draw) -> Iterator[str]:
    """On a terminal, fit the picture to its width and colour it unless NO_COLOR is set; elsewhere, do neither."""
    from rich.console import Console

    console = Console(highlight=False)
    lines = draw(console.width if console.is_terminal else None)
    if console.no_color or console.color_system in (None, "windows"):
        yield from _write_plain(lines)
    else:
        yield from (f"{line}\n" for line in paint(lines, console.color_system))


def _write_plain(lines: Iterable[Line]) -> Iterator[str]:
    return (f"{line}\n" for line in plain_text(lines))


# Schedules and programs -----------------------------------------------------------------------------------------------


def present(table: Table, *, as_json: bool, output: Path | None) -> None:
    """Print a schedule or program, or write it to a file by suffix: `.csv` and `.json` can be loaded again, pictures, or the text."""
    suffix = "" if output is None else output.suffix.lower()
    if output is not None and suffix not in TEXT:
        if as_json and suffix != ".json":
            raise UsageError(f"--json does not go with {output}: write a .json file")
        _save_table(table, output, suffix)
        return

    def draw(width: int | None) -> Iterator[Line]:
        from penstock.ir.grid import Grid

        grid = Grid.spaced(table)
        yield f"{describe_table(table)}, {format_count(grid.steps, 'step')}"
        yield from _write_grid(grid, width)

    deliver(draw, table.to_json, as_json=as_json, output=output)


def _save_table(table: Table, output: Path, suffix: str) -> None:
    if suffix in (".csv", ".json"):
        from penstock.ir.formats.files import save

        if suffix == ".csv":
            check_csv(table, output)
        save(table, output)
        return
    from penstock.draw.save import save_picture
    from penstock.ir.costs import Costs
    from penstock.simulator.simulate import simulate

    every_action_takes_a_step = Costs(f=1.0, b=1.0, i=1.0, w=1.0)
    what = f"{table.name or 'unnamed'}{', computation only' if table.lowered else ''}"
    name = f"{what}: each action takes one step"
    save_picture([simulate(table, every_action_takes_a_step)], output, names=[name])


def present_rank(table: Table, rank: int, actions: Sequence[Action], *, as_json: bool, output: Path | None) -> None:
    """Print the actions of one rank, or write them to a file."""

    def draw(width: int | None) -> Iterator[Line]:
        from penstock.ir.grid import Grid

        yield f"{describe_table(table, 'program')}; rank {rank}: {format_count(len(actions), 'action')}"
        yield from _write_grid(Grid((tuple(actions),)), width, ranks=[rank])

    def data() -> dict[str, Any]:
        shape = {"name": table.name, "microbatches": table.microbatches, "placement": table.placement.to_json()}
        shape |= {"slices": table.slices} if table.slices > 1 else {}
        return {**shape, "rank": rank, "actions": [str(action) for action in actions]}

    deliver(draw, data, as_json=as_json, output=output)


def _write_grid(grid: Grid, width: int | None, ranks: Sequence[int] | None = None) -> Iterator[Line]:
    from penstock.draw.terminal import grid_legend, grid_lines

    yield from grid_lines(grid, width=width, ranks=ranks)
    yield ""
    yield from grid_legend(grid, width=width)


def describe_table(table: Table, kind: str | None = None) -> str:
    """Describe a schedule or program in one line; `kind` replaces those two words."""
    counts = ((table.ranks, "rank"), (table.stages, "stage"), (table.microbatches, "microbatch"))
    shape = ", ".join(format_count(number, word) for number, word in counts) + (f" of {table.slices} slices" if table.slices > 1 else "")
    return f"{table.name or 'unnamed'} {kind or type(table).__name__.lower()}: {table.placement.kind} placement, {shape}"


def check_csv(table: Table, path: Path) -> None:
    """Refuse to write a CSV file that PyTorch would read as something else."""
    from penstock.ir.formats.csv_form import refuse_for_torch

    try:
        refuse_for_torch(table)
    except ScheduleError as error:
        raise FileFormatError(str(path), str(error)) from None


# Progress on stderr, if that is a terminal, and Ctrl-C as a request to stop -------------------------------------------


INTERRUPTED = 130
"""The exit code after Ctrl-C."""
PATIENCE = 1.0
"""Seconds before the bar appears."""


@contextmanager
def show_bar(total: int | None = None, patience: float = 0.0) -> Iterator[Callable[..., None]]:
    """Give a function that updates a bar, which appears after so many seconds: its `description`, `completed`, `total`, a `figure`
    in bold and a `note` behind it."""
    if not sys.stderr.isatty():
        yield lambda **fields: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    note = TextColumn("{task.fields[note]}", "dim", table_column=Column(no_wrap=True, ratio=1))
    figure = TextColumn("{task.fields[figure]}", "bold", table_column=Column(no_wrap=True))
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn(), figure, note)
    bar = Bar(*columns, console=Console(stderr=True), transient=True, expand=True)
    task = bar.add_task("", total=total, figure="", note="")
    timer = threading.Timer(patience, bar.start)
    timer.daemon = True
    timer.start()
    if not patience:
        timer.join()
    try:
        yield partial(bar.update, task)
    finally:
        timer.cancel()
        timer.join()  # a bar that is just starting must have started before it is stopped
        bar.stop()


@contextmanager
def show_steps(steps: int) -> Iterator[Callable[[str], None]]:
    """Give a function to call at the start of each step; a bar appears after a second."""
    begun = count()
    with show_bar(steps, PATIENCE) as update:
        yield lambda step: update(description=step, completed=next(begun))


@contextmanager
def show_planning(units: Units) -> Iterator[Callable[[Progress], None]]:
    """Give a function to call with the planner's progress; shows a bar with the best time so far."""
    with show_bar() as update:

        def tell(progress: Progress) -> None:
            best = "" if progress.best is None else f"best {units.time(progress.best)} ({progress.best_name})"
            update(description=progress.phase, completed=progress.done, total=progress.total, figure=best, note=progress.what)

        yield tell


@contextmanager
def catch_interrupt() -> Iterator[Callable[[], bool]]:
    """Give a function that says whether Ctrl-C was pressed; pressed a second time, it ends the program as usual."""
    pressed = threading.Event()

    def handle(number: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield pressed.is_set
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
