"""Run the benchmarks and write one report: `python benchmarks/run.py [suite ...] [--short] [--out FOLDER]`.

Ends with 1 if a row does not keep its limit or a case fails, and with 130 after Ctrl-C, which keeps what there is.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("penstock") is None:  # nothing is installed: measure the source tree, in the processes of the suites too
    sys.path.insert(1, str(ROOT / "src"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))

from benchmarks.machine import machine, moment  # noqa: E402 - found by the line above
from benchmarks.report import Report, cells  # noqa: E402
from benchmarks.rows import Case, Found  # noqa: E402

from penstock.errors import MissingExtraError  # noqa: E402

SUITES = (
    "generation",
    "lowering",
    "verification",
    "scale",
    "simulation",
    "planner",
    "batch_orders",
    "published_runs",
    "vocabulary",
    "uneven",
    "losses",
    "measured_gains",
    "overhead",
    "split_backward",
    "runtime",
    "compat",
    "studio",
)

Say = Callable[[str, int, int], None]
"""Takes what is done now, how much of the suite is done, and how much there is."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = _options(arguments)
    words = ["python benchmarks/run.py", *(sys.argv[1:] if arguments is None else arguments)]
    report = Report(" ".join(words), machine(), moment(), short=given.short)
    try:
        with _progress(len(given.suites)) as say:
            for name in given.suites:
                collect(name, report, say)
    except KeyboardInterrupt:
        report.interrupted = True
    report.ended = moment()
    path = report.write(Path(given.out))
    _show(report, path)
    return report.code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/run.py", description="Measure the speed as ratios to the installed torch.")
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"which to run, instead of all: {', '.join(SUITES)}")
    parser.add_argument(
        "--short", action="store_true", help="tiny sizes and few rounds, to see that everything runs; limits are not judged"
    )
    parser.add_argument("--out", default=str(ROOT / "bench"), help="the folder that the report goes into (default: bench)")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.suites if name not in SUITES]
    if unknown:
        parser.error(f"no suite {unknown[0]!r}; there are {', '.join(SUITES)}")
    given.suites = [name for name in SUITES if name in given.suites] or list(SUITES)
    return given


def collect(name: str, report: Report, say: Say) -> None:
    """Run one suite into the report; what fails is noted, and the rest goes on."""
    start = time.perf_counter()
    found = Found(name, "")
    report.suites.append(found)
    try:
        say(name, 0, 1)
        module = importlib.import_module(f"benchmarks.{name}")
        found.about = " ".join((module.__doc__ or "").split())
        with module.suite(report.short) as cases:
            _run(cases, found, say)
    except MissingExtraError as error:
        found.skipped.append(("the whole suite", str(error)))
    except Exception as error:
        found.errors.append(("the whole suite", _told(error)))
    finally:
        found.seconds = time.perf_counter() - start


def _run(cases: Sequence[Case], found: Found, say: Say) -> None:
    for done, case in enumerate(cases):
        say(f"{found.name}: {case.name}", done, len(cases))
        try:
            for row in case.work():
                found.rows.append(row)
        except MissingExtraError as error:  # an optional package that is not here, or a torch that is too old for a suite
            found.skipped.append((case.name, str(error)))
        except Exception as error:
            found.errors.append((case.name, _told(error)))


def _told(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def _progress(suites: int) -> Iterator[Say]:
    """Two bars on a terminal, else a line a suite: of all suites and of the present one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        every, present = bar.add_task("suites", total=suites), bar.add_task("", total=1)
        begun: list[str] = []

        def say(what: str, done: int, of: int) -> None:
            name = what.partition(":")[0]
            if name not in begun:
                begun.append(name)
                bar.update(every, completed=len(begun) - 1)
                if not console.is_terminal:
                    console.print(f"{name} ({len(begun)} of {suites})")
            bar.update(present, description=what, completed=done, total=of)

        yield say


def _show(report: Report, path: Path) -> None:
    """The rows as a table, how it went, and where the report is."""
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "against", "ratio", "spread", "at most", "ours", "other", "note")
    for row in (row for suite in report.suites for row in suite.rows):
        case, against, ratio, spread, limit, _, ours, peer, _, note = cells(row, judged=not report.short)
        table.add_row(case, against, ratio, spread, limit, ours, peer, note, style="red" if row in report.red else None)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for line in (*report.summary(), f"report: {path}"):
        console.print(line, markup=False, highlight=False)


if __name__ == "__main__":
    raise SystemExit(main())
