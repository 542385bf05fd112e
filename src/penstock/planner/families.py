"""The schedules of the zoo, each with the chunks it can have here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.errors import PenstockError
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.planner.request import SEARCHED
from penstock.planner.setting import Setting
from penstock.schedules.registry import Algorithm, algorithm

CHUNKS = (1, 2, 3, 4, 6, 8)
"""Stages per rank that are tried where a schedule leaves the number open."""
_MOST_RANKS = 8
"""Ranks of the pipelines that are built to see what a schedule is like."""


@dataclass(frozen=True)
class Family:
    """A named schedule with so many chunks a rank."""

    algorithm: Algorithm
    placement: Placement

    @property
    def name(self) -> str:
        layout = self.algorithm.layout
        return self.algorithm.name if layout.fixed else f"{self.algorithm.name}{{chunks={self.placement.chunks}}}"

    @property
    def is_fixed(self) -> bool:
        """Whether the order is the same whatever the costs and limits are."""
        return not {"costs", "memory_limit"} & set(self.algorithm.options)

    def schedules(self, setting: Setting) -> Iterator[Schedule]:
        """The schedule for a setting; several where it is made for a memory limit, of which the simulator then has the last word."""
        made = self.algorithm
        chunks = None if made.layout.fixed else self.placement.chunks
        given: dict[str, Any] = {"costs": setting.costs} if "costs" in made.options else {}
        limits: list[dict[str, Any]] = _limits(setting) if "memory_limit" in made.options else [{}]
        for limit in limits:
            try:
                yield made.build(setting.placement.ranks, setting.microbatches, chunks, **given, **limit)
            except PenstockError:  # a limit too low for it
                if not limit:
                    raise


def _limits(setting: Setting) -> list[dict[str, Any]]:
    """What a schedule for a memory limit may hold in activations and stashes on any rank: its own default, all that is left, and
    that less two messages."""
    problem = setting.problem
    highest = max(problem.costs.per_stage("activation", problem.stages))
    left = min(limit - static for limit, static in zip(problem.limits, problem.static_memory, strict=True))
    left = min(left, 2 * problem.ranks * highest)
    messages = 2 * max(problem.costs.per_stage("output", problem.stages))
    return [{}, *({"memory_limit": size} for size in dict.fromkeys((left, left - messages)) if size > 0)]


def families(names: Sequence[str], ranks: int, layers: int) -> tuple[list[Family], dict[str, str]]:
    """The schedules to try, and why the others cannot be."""
    found: list[Family] = []
    refused: dict[str, str] = {}
    for name in names:
        if name == SEARCHED:
            continue
        made = algorithm(name)
        placements, reason = _placements(made, ranks, layers)
        found += [Family(made, placement) for placement in placements]
        if not placements:
            refused[name] = reason
    return found, refused


def _placements(made: Algorithm, ranks: int, layers: int) -> tuple[list[Placement], str]:
    layout = made.layout
    placements: list[Placement] = []
    reason = ""
    for chunks in [layout.chunks] if layout.fixed else [count for count in CHUNKS if count >= layout.chunks]:
        try:
            placement = layout.place(made.shape(ranks, 1, chunks))
            made.build(ranks, 1, None if layout.fixed else chunks)  # refuses a shape without generating any row
        except PenstockError as error:
            reason = reason or str(error)
            continue
        if not is_training(made):
            reason = reason or "it has no backward"
        elif placement.stages > layers:
            reason = reason or f"{layers} layers are too few for its {placement.stages} stages"
        else:
            placements.append(placement)
    return placements, reason


@cache
def is_training(made: Algorithm) -> bool:
    """Whether the schedule has backwards, as seen on the smallest pipeline that it accepts: that does not depend on the ranks."""
    for ranks in range(1, _MOST_RANKS + 1):
        try:
            return made.build(ranks, ranks).training
        except PenstockError:
            continue
    return True  # the schedule itself says what it needs when it is timed


def searchable_placements(ranks: int, layers: int) -> list[Placement]:
    """The placements that orders are searched for."""
    made = [Placement.linear(ranks)]
    if ranks > 1:
        made += [Placement.v(ranks), *(Placement.looped(ranks, chunks) for chunks in CHUNKS[1:4]), Placement.wave(ranks, 2)]
    return [placement for placement in made if placement.stages <= layers]
