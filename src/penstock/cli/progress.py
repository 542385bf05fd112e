"""A bar on stderr for what takes longer than a moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 1.0
"""Seconds without a bar."""


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Gives a function to call when each of the steps begins; shows how far it is after a second, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=steps)
    begun = 0

    def step(what: str) -> None:
        nonlocal begun
        bar.update(task, description=what, completed=begun)
        begun += 1

    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield step
    finally:
        timer.cancel()
        timer.join()  # a bar that is just being started must be there to be stopped
        bar.stop()
