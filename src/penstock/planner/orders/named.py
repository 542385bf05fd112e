"""Where a search begins: the named schedules of a placement, and the one that holds least."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.errors import PenstockError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.problem import Problem
from penstock.schedules.registry import Algorithm, algorithms


def named_schedules(problem: Problem) -> Iterator[Schedule]:
    """Every schedule of the zoo that has the problem's placement and trains; those fitted to costs are fitted to the problem's."""
    for algorithm in algorithms().values():
        made = _built(algorithm, problem)
        if made is not None and made.training and (problem.split or not made.rows.is_kind(Kind.I, Kind.W).any()):
            yield made


def _built(algorithm: Algorithm, problem: Problem) -> Schedule | None:
    chunks = algorithm.layout.chunks if algorithm.layout.fixed else problem.placement.chunks
    try:
        made = algorithm.build(problem.ranks, problem.microbatches, chunks, **_options(algorithm, problem))
        return made if made.placement.copies == problem.placement.copies and len(made.rows) else None
    except PenstockError:
        return None


def _options(algorithm: Algorithm, problem: Problem) -> dict[str, Any]:
    """What a schedule that is fitted to costs is told; it knows one limit for all ranks, and nothing of parameters."""
    options: dict[str, Any] = {}
    if "costs" in algorithm.options:
        options["costs"] = problem.costs
    if "memory_limit" in algorithm.options and problem.memory_limit is not None:
        options["memory_limit"] = min(limit - kept for limit, kept in zip(problem.limits, problem.static_memory, strict=True))
    return options


def one_at_a_time(placement: Placement, microbatches: int) -> Schedule:
    """Each microbatch forward through all stages and back before the next, with full backwards: no order holds less."""
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    stages = range(placement.stages)
    for microbatch in range(microbatches):
        for stage, kind in [*((stage, Kind.F) for stage in stages), *((stage, Kind.B) for stage in reversed(stages))]:
            rows[placement.rank_of(stage, microbatch)].append(Action(stage, kind, microbatch))
    return Schedule.from_actions(rows, placement, microbatches=microbatches, name="one-at-a-time")
