"""What `simulate` and `compare` time: a schedule by name, a file, or a timeline that was saved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.costs import Per, of_stages, read_costs
from penstock.errors import FileFormatError, ScheduleError, UsageError

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

    @classmethod
    def read(cls, wanted: Wanted, costs: str | None, per: Per, recipe: Recipe | None) -> Timed:
        return cls(wanted, None if costs is None else read_costs(costs), per, recipe)

    def measured(self) -> Timeline | None:
        """The timeline in the file, if it was measured."""
        return None if self._saved is None or self._saved.source == "simulated" else self._saved

    def timeline(self) -> Timeline:
        saved = self._saved
        if saved is not None and self.costs is None and self.recipe is None:
            return saved
        return self._simulated(self._lowered(self._table() if saved is None else saved.table))

    @cached_property
    def _saved(self) -> Timeline | None:
        """The timeline in the file, if it is one, or what a plan predicts."""
        from penstock.simulator.timeline_json import decode

        path = Path(self.wanted.source)
        if path.suffix.lower() != ".json" or not path.is_file():
            return None
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return None  # what is wrong is said when it is read as a schedule
        if not isinstance(data, dict) or data.get("type") not in ("timeline", "plan"):
            return None
        self.wanted.refuse_shape()
        if data["type"] == "plan":
            from penstock.planner.plan_file import decode as decode_plan

            return decode_plan(data, self.wanted.source).predicted
        return decode(data, self.wanted.source)

    def _table(self) -> Table:
        """The schedule or program; a schedule that is made for costs is told them."""
        from penstock.cli.source import RANKS
        from penstock.schedules.registry import algorithms

        wanted = self.wanted
        named = None if wanted.is_file else algorithms().get(wanted.source)
        if named is None or self.costs is None or "costs" not in named.options:
            return wanted.table()
        placement = named.layout.place(named.shape(wanted.ranks or RANKS, 1, wanted.chunks))
        return replace(wanted, extra={"costs": self._of(placement.stages, placement.ranks)}).table()

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


def recipe(lower: bool, fsdp: bool, merge_backward: bool, receive: str | None) -> Recipe | None:
    """How to lower, or None for not at all."""
    from penstock.cli.lower import Recipe

    if not (lower or fsdp or merge_backward or receive is not None):
        return None
    made = Recipe(None, fsdp, merge_backward, receive)
    made.check()
    return made


def check_unit(unit: str | None) -> None:
    """Refuse what is no unit before anything is built."""
    from penstock.text.units import seconds_per

    if unit is not None:
        try:
            seconds_per(unit)
        except UsageError as error:
            raise UsageError(f"--unit: {error}") from None


def check_output(output: Path | None, suffixes: Sequence[str]) -> str | None:
    """The suffix that says what to write; refuse one that says nothing before anything is built."""
    from penstock.draw.save import suffix_of

    if output is None:
        return None
    try:
        return suffix_of(output, suffixes)
    except FileFormatError as error:
        raise UsageError(str(error)) from None
