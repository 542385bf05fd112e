"""Schedules: the order in which each rank computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Self

from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.rows import Ints, Rows
from penstock.ir.table import Table


class Schedule(Table):
    """For each rank the order of its compute actions, and the placement of stages; copies to the host may stand between them,
    and the actions of a spread vocabulary.

    `source` gives the packed row of a rank; it is called only for ranks that are read.
    """

    lowered: bool = False

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        source: Callable[[int], Ints],
        *,
        graph: StageGraph | None = None,
        name: str = "",
        options: Mapping[str, Any] | None = None,
        remake: Callable[[int], Schedule] | None = None,
        slices: int = 1,
    ) -> None:
        super().__init__(placement, microbatches, graph=graph, name=name, slices=slices)
        self._source = source
        self.remake = remake
        """The same schedule for another number of microbatches; None if it is known for this number only."""
        self.options = dict(options or {})

    @classmethod
    def from_rows(
        cls, rows: Rows, placement: Placement, microbatches: int, *, graph: StageGraph | None = None, name: str = "", slices: int = 1
    ) -> Self:
        schedule = cls(placement, microbatches, rows.row, graph=graph, name=name, slices=slices)
        schedule.__dict__["rows"] = rows.cut_into(slices)
        return schedule

    @cached_property
    def rows(self) -> Rows:
        return Rows.join([self._source(rank) for rank in range(self.ranks)]).cut_into(self.slices)

    def row(self, rank: int) -> Ints:
        rank = self._check_rank(rank)
        return self.rows.row(rank) if "rows" in self.__dict__ else self._source(rank)

    def with_graph(self, graph: StageGraph) -> Schedule:
        """Return the same order for a model with another stage graph, such as edges that skip stages."""
        again = self.remake
        remake = None if again is None else lambda microbatches: again(microbatches).with_graph(graph)
        return Schedule(
            self.placement,
            self.microbatches,
            self.row,
            graph=graph,
            name=self.name,
            options=self.options,
            remake=remake,
            slices=self.slices,
        )
