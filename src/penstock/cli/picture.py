"""A schedule or program as the commands show it: a line about it, its grid, a legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.output import deliver, save_table

if TYPE_CHECKING:
    from penstock.draw.terminal.lines import Line
    from penstock.ir.action import Action
    from penstock.ir.table import Table


def present(table: Table, *, as_json: bool, output: Path | None) -> None:
    """Print the table, or write it to a file: `.csv` and `.json` can be loaded again, any other suffix gets the picture."""
    if output is not None and output.suffix.lower() in (".csv", ".json"):
        save_table(table, output)
    else:
        deliver(lambda width: _lines(table, width), table.to_json, as_json=as_json, output=output)


def present_rank(table: Table, rank: int, actions: Sequence[Action], *, as_json: bool, output: Path | None) -> None:
    """Print one rank's actions, or write them to a file."""

    def draw(width: int | None) -> Iterator[Line]:
        from penstock.draw.terminal.grid import grid_legend, grid_lines
        from penstock.ir.grid import Grid

        grid = Grid((tuple(actions),))
        yield [(f"{about(table, 'program')}; rank {rank}: {len(actions)} {plural(len(actions), 'action')}", None)]
        yield from grid_lines(grid, width=width, ranks=[rank])
        yield []
        yield from grid_legend(grid, width=width)

    def data() -> dict[str, Any]:
        shape = {"name": table.name, "microbatches": table.microbatches, "placement": table.placement.to_json()}
        return {**shape, "rank": rank, "actions": [str(action) for action in actions]}

    deliver(draw, data, as_json=as_json, output=output)


def about(table: Table, what: str | None = None) -> str:
    """One line: what it is (a schedule or a program, unless said) and its shape."""
    counts = ((table.ranks, "rank"), (table.stages, "stage"), (table.microbatches, "microbatch"))
    shape = ", ".join(f"{number} {plural(number, word)}" for number, word in counts)
    return f"{table.name or 'unnamed'} {what or type(table).__name__.lower()}: {table.placement.kind} placement, {shape}"


def plural(number: int, word: str) -> str:
    return word if number == 1 else f"{word}es" if word.endswith("ch") else f"{word}s"


def _lines(table: Table, width: int | None) -> Iterator[Line]:
    from penstock.draw.terminal.grid import grid_legend, grid_lines
    from penstock.ir.grid import Grid

    grid = Grid.spaced(table)
    yield [(f"{about(table)}, {grid.steps} {plural(grid.steps, 'step')}", None)]
    yield from grid_lines(grid, width=width)
    yield []
    yield from grid_legend(grid, width=width)
