"""Run every benchmark and print one table: `python benchmarks/run.py [name ...]`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SUITES = ("lowering", "scale", "simulation", "split_backward", "overhead", "runtime", "compat", "planner")


def main(chosen: list[str]) -> int:
    from rich.console import Console
    from rich.table import Table

    unknown = [name for name in chosen if name not in SUITES]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    table = Table("case", "Penstock", "other", "ratio", "wanted", "note")
    good = True
    for name in chosen or SUITES:
        for row in importlib.import_module(f"benchmarks.{name}").run():
            table.add_row(*row.cells(), style=None if row.good else "red")
            good = good and row.good
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
