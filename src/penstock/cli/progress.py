"""Progress on stderr, if that is a terminal, and Ctrl-C as a request to stop."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.planner.request import Progress
    from penstock.text.units import Units

PATIENCE = 1.0
"""Seconds before the bar appears."""


@contextmanager
def show_steps(steps: int) -> Iterator[Callable[[str], None]]:
    """Give a function to call at the start of each step; a bar appears after a second."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=steps)
    begun = 0

    def begin(step: str) -> None:
        nonlocal begun
        bar.update(task, description=step, completed=begun)
        begun += 1

    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield begin
    finally:
        timer.cancel()
        timer.join()  # a bar that is just starting must have started before it is stopped
        bar.stop()


@contextmanager
def show_planning(units: Units) -> Iterator[Callable[[Progress], None]]:
    """Give a function to call with the planner's progress; shows a bar with the best time so far."""
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
