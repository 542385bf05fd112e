"""A schedule or program as a grid of steps and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.dependencies import Needs
from penstock.ir.steps import walk
from penstock.text.table import format_table

if TYPE_CHECKING:
    from penstock.ir.action import Action
    from penstock.ir.table import Table


@dataclass(frozen=True)
class Grid:
    """One column per rank, one cell per step; None is an idle slot. Columns may end early."""

    columns: tuple[tuple[Action | None, ...], ...]

    @classmethod
    def spaced(cls, table: Table) -> Grid:
        """Each action in the first step in which it could run if every action took one step; what never can run follows at the end."""
        links = table.links
        joint = links.meetings.list_waits(table.rows.rank)
        waits = Needs(*(np.concatenate(column) for column in zip(links.local, links.data, links.retired, joint, strict=True)))
        steps = walk(table.rows, waits).step.tolist()
        bounds = table.rows.group_offsets.tolist()
        return cls(tuple(_spread(table[rank], steps[bounds[rank] : bounds[rank + 1]]) for rank in range(table.ranks)))

    @classmethod
    def dense(cls, table: Table) -> Grid:
        """Each action at its index in its rank's row."""
        return cls(tuple(table))

    @property
    def steps(self) -> int:
        return max((len(column) for column in self.columns), default=0)

    def cell(self, rank: int, step: int) -> Action | None:
        column = self.columns[rank]
        return column[step] if step < len(column) else None

    def text(self, *, mark: int | None = None, steps: range | None = None, ranks: Sequence[int] | None = None) -> str:
        """Rows of text with a header; the marked step ends in an arrow."""
        shown = range(self.steps) if steps is None else steps
        columns = range(len(self.columns)) if ranks is None else ranks
        header = ["", *(f"rank {rank}" for rank in columns)]
        table = [header, *([str(step), *(_write_cell(self.cell(rank, step)) for rank in columns)] for step in shown)]
        lines = list(format_table(table, left=range(1, len(header))))
        if mark is not None and mark in shown:
            lines[1 + shown.index(mark)] += "  <-- here"
        return "\n".join(lines)


def _write_cell(cell: Action | None) -> str:
    return "" if cell is None else str(cell)


def _spread(actions: Sequence[Action], steps: Sequence[int]) -> tuple[Action | None, ...]:
    column: list[Action | None] = []
    for action, step in zip(actions, steps, strict=True):
        if step >= 0:
            column.extend([None] * (step - len(column)))
        column.append(action)
    return tuple(column)
