"""The costs of one batch as arrays, of which a search needs no checked `Costs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.errors import CostsError
from penstock.ir.costs import Costs
from penstock.ir.rows import Floats, Ints
from penstock.planner.batches.flat_schedule import SIZES, TIMES
from penstock.planner.problem import Problem

FIELDS = (*TIMES, *SIZES, "kept")
"""The fields of `Costs` that depend on the microbatch."""


@dataclass(frozen=True, eq=False)
class BatchCosts:
    """What the microbatches of a batch take and hold: the fields that differ from those of `problem`, by stage and microbatch."""

    problem: Problem
    """The placement and limits, with as many microbatches."""
    tables: dict[str, Floats]
    """By the name of the field."""

    @classmethod
    def read(cls, problem: Problem) -> BatchCosts:
        """The costs of a problem that already has one value per microbatch."""
        names = [name for name in FIELDS if getattr(problem.costs, name) is not None]
        return cls(problem, {name: problem.costs.table(name, problem.stages, problem.microbatches) for name in names})

    def __post_init__(self) -> None:
        for name, table in self.tables.items():
            if not np.isfinite(table).all():
                raise CostsError(f"{name} of the longest microbatch is more than a number can be: give the costs in a larger unit")

    def build(self, order: Sequence[int] | None = None) -> Costs:
        """The costs with the microbatches in this order, or in their own."""
        chosen = slice(None) if order is None else np.array(order)
        tables: dict[str, Any] = {name: table[:, chosen] for name, table in self.tables.items()}
        return replace(self.problem.costs, **tables)

    def place(self, order: Sequence[int]) -> Problem:
        """The problem of the microbatches in this order."""
        return replace(self.problem, costs=self.build(order))

    @property
    def times(self) -> Floats:
        """The rows of `FlatSchedule` times: each table, each table for overlapped actions, and zeros."""
        f, i, w = (self.tables[name] for name in ("f", "i", "w"))
        tables = np.concatenate((f, i, w, self.tables.get("b", i + w)))
        return np.concatenate((tables, tables * self.problem.costs.overlap, np.zeros((1, self.problem.microbatches)))).ravel()

    @property
    def sizes(self) -> Floats:
        """The rows of `FlatSchedule` sizes."""
        held = self.tables | {"activation": self.tables["activation"] + self.tables["kept"]}
        return np.concatenate([held[name] for name in SIZES]).ravel()

    def find_travels(self, messages: tuple[Ints, Ints, Ints]) -> Floats:
        """The rows of `FlatSchedule` travels."""
        stage, source, target = messages
        return self.problem.costs.travel(self.tables["output"][stage], source[:, None], target[:, None]).ravel()
