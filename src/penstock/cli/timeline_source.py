"""What `simulate` and `compare` time: a schedule by name, a file, or a saved timeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.costs import Per, divide_among_stages, read_costs
from penstock.cli.schedule_source import RANKS, ScheduleSource, read_json_object
from penstock.errors import FileFormatError, ScheduleError

if TYPE_CHECKING:
    from penstock.cli.lowering import LoweringOptions
    from penstock.ir.costs import Costs
    from penstock.ir.table import Table
    from penstock.simulator.timeline import Timeline

FEW = 100_000
"""Fewer actions than this are timed sooner than numba is loaded."""


@dataclass(frozen=True)
class TimelineSource:
    """One source, and how to time it."""

    source: ScheduleSource
    costs: Costs | None
    """None is the costs of a saved timeline, or else the default."""
    per: Per
    lowering: LoweringOptions | None
    """How to lower a schedule first; None is not at all."""

    @classmethod
    def read(cls, source: ScheduleSource, costs: str | None, per: Per, lowering: LoweringOptions | None) -> TimelineSource:
        return cls(source, None if costs is None else read_costs(costs), per, lowering)

    def measured(self) -> Timeline | None:
        """Give the timeline in the file if it was measured."""
        return None if self._saved is None or self._saved.source == "simulated" else self._saved

    def timeline(self) -> Timeline:
        """Give the saved timeline, or simulate one."""
        saved = self._saved
        if saved is not None and self.costs is None and self.lowering is None:
            return saved
        table = self._table() if saved is None else saved.table
        if self.lowering is not None and not table.lowered:
            table = self.lowering.lower(table)
        return self._simulate(table)

    @cached_property
    def _saved(self) -> Timeline | None:
        """The timeline in the file, or the prediction of the plan in it."""
        data = read_json_object(Path(self.source.source))
        if data is None or data.get("type") not in ("timeline", "plan"):
            return None
        self.source.refuse_shape()
        if data["type"] == "plan":
            from penstock.planner.plan_file import decode as decode_plan

            return decode_plan(data, self.source.source).predicted
        from penstock.simulator.timeline_json import decode

        return decode(data, self.source.source)

    def _table(self) -> Table:
        """The schedule or program; a schedule that depends on costs gets them."""
        from penstock.schedules.registry import algorithms

        source = self.source
        named = None if source.is_file else algorithms().get(source.source)
        if named is None or self.costs is None or "costs" not in named.options:
            return source.table()
        placement = named.layout.place(named.shape(source.ranks or RANKS, 1, source.chunks))
        return replace(source, extra={"costs": self._stage_costs(placement.stages, placement.ranks)}).table()

    def _stage_costs(self, stages: int, ranks: int) -> Costs:
        from penstock.ir.costs import Costs

        costs = self.costs or Costs()
        return divide_among_stages(costs, stages, ranks) if self.per is Per.RANK else costs

    def _simulate(self, table: Table) -> Timeline:
        from penstock.simulator.simulate import simulate

        engine = "plain" if len(table.rows.codes) < FEW else "auto"
        try:
            return simulate(table, self._stage_costs(table.stages, table.ranks), engine=engine)
        except ScheduleError as error:
            if self.source.is_file:
                raise FileFormatError(self.source.source, str(error)) from None
            raise
