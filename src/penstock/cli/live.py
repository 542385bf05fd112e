"""How far planning is, and the best so far, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.planner.profile.units import Units
    from penstock.planner.request import Progress


@contextmanager
def live(units: Units) -> Iterator[Callable[[Progress], None]]:
    """Gives a function to be told of progress; shows a bar with the best so far, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda progress: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}", style="bold"),
        TextColumn("{task.fields[what]}", style="dim", table_column=Column(no_wrap=True, ratio=1)),
    )
    bar = Bar(*columns, console=Console(stderr=True), transient=True, expand=True)
    task = bar.add_task("", total=None, best="", what="")

    def tell(progress: Progress) -> None:
        best = "" if progress.best is None else f"best {units.time(progress.best)} ({progress.best_name})"
        bar.update(task, description=progress.phase, completed=progress.done, total=progress.total, best=best, what=progress.what)

    with bar:
        yield tell
