"""What `simulate` and `compare` time: a schedule by name, a file, or a timeline that was saved."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.costs import Per, of_stages
from penstock.errors import FileFormatError, ScheduleError

if TYPE_CHECKING:
    from penstock.cli.lower import Recipe
    from penstock.cli.source import Wanted
    from penstock.ir.costs import Costs
    from penstock.ir.table import Table
    from penstock.simulator.timeline import Timeline

FEW = 100_000
"""Actions that are timed sooner than numba is loaded."""


@dataclass(frozen=True)
class Timed:
    """One thing to time, and how."""

    wanted: Wanted
    costs: Costs | None
    """None is what a saved timeline was timed with, and else the default."""
    per: Per
    recipe: Recipe | None
    """How a schedule is lowered first, if it is."""

    def timeline(self) -> Timeline:
        saved = self._saved()
        if saved is not None and self.costs is None and self.recipe is None:
            return saved
        return self._simulated(self._lowered(self._table() if saved is None else saved.table))

    def _saved(self) -> Timeline | None:
        """The timeline in the file, if it is one."""
        from penstock.simulator.timeline_json import decode

        path = Path(self.wanted.source)
        if path.suffix.lower() != ".json" or not path.is_file():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return None  # what is wrong is said when it is read as a schedule
        if not isinstance(data, dict) or data.get("type") != "timeline":
            return None
        self.wanted.refuse_shape()
        return decode(data, self.wanted.source)

    def _table(self) -> Table:
        from penstock.schedules.registry import algorithms

        wanted = self.wanted
        named = None if wanted.is_file else algorithms().get(wanted.source)
        if named is None or self.costs is None or "costs" not in named.options:
            return wanted.table()
        return wanted.table(costs=lambda stages, ranks: self._of(stages, ranks))

    def _of(self, stages: int, ranks: int) -> Costs:
        """The costs of the stages."""
        from penstock.ir.costs import Costs

        costs = self.costs or Costs()
        return of_stages(costs, stages, ranks) if self.per is Per.RANK else costs

    def _lowered(self, table: Table) -> Table:
        return table if self.recipe is None or table.lowered else self.recipe.program(table)

    def _simulated(self, table: Table) -> Timeline:
        from penstock.simulator.simulate import simulate

        engine = "plain" if len(table.rows.codes) < FEW else "auto"
        try:
            return simulate(table, self._of(table.stages, table.ranks), engine=engine)
        except ScheduleError as error:
            if self.wanted.is_file:
                raise FileFormatError(self.wanted.source, str(error)) from None
            raise
