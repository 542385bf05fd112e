"""Candidates: one schedule on one problem, with its verdict and figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np

from penstock.errors import FileFormatError
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.planner.partition.layer_runs import PeakMoment
from penstock.planner.problem import Problem
from penstock.simulator.simulate import retime
from penstock.simulator.timeline import Timeline
from penstock.verifier.rules.memory import held_in


class Verdict(StrEnum):
    """The outcome of a candidate."""

    FITS = "fits"
    OVER = "over its memory limit"
    TOO_LARGE = "too large for one microbatch"
    SLOW = "not timed: its work alone takes longer than the best"
    REFUSED = "cannot be had"


@dataclass(frozen=True)
class Candidate:
    """One schedule on one problem; figures are None if it was not timed."""

    name: str
    placement: str
    chunks: int
    microbatch: int
    """Samples per microbatch."""
    microbatches: int
    recompute: int
    """How many of its stages are recomputed."""
    verdict: str
    reason: str = ""
    sizes: tuple[int, ...] | None = None
    """Layers per stage."""
    objective: float | None = None
    bubble: float | None = None
    peak: float | None = None
    """Peak memory of the rank with the least room."""
    peak_rank: int | None = None
    excess: float | None = None
    """Memory of that rank over its limit; negative if it is below."""
    bound: float | None = None
    """No schedule of this problem that fits takes less; None if none fits at all."""
    p95: float | None = None
    """95 of 100 runs with jitter stay below this, if that was measured."""
    timed: tuple[Problem, Schedule, Timeline] | None = field(default=None, compare=False, repr=False)
    """The timed schedule, while a plan is being made."""

    @classmethod
    def untimed(cls, name: str, problem: Problem, verdict: Verdict, reason: str) -> Candidate:
        """A candidate that was ruled out before it was timed."""
        placement = problem.placement
        return cls(
            name, placement.kind, placement.chunks, problem.microbatch, problem.microbatches, sum(problem.recompute), verdict.value, reason
        )

    @classmethod
    def of_timeline(cls, name: str, problem: Problem, schedule: Schedule, timeline: Timeline) -> Candidate:
        verdict = Verdict.FITS if problem.fits(timeline) else Verdict.OVER
        peaks, limits = timeline.peak_memory, problem.memory_limit or (0.0,) * problem.ranks
        worst = max(range(len(peaks)), key=lambda rank: peaks[rank] - limits[rank])
        return replace(
            cls.untimed(name, problem, verdict, ""),
            sizes=problem.sizes,
            objective=problem.objective(timeline),
            bubble=timeline.bubble,
            peak=peaks[worst],
            peak_rank=worst,
            excess=None if problem.memory_limit is None else peaks[worst] - limits[worst],
            timed=(problem, schedule, timeline),
        )

    @classmethod
    def time(cls, name: str, problem: Problem, schedule: Schedule) -> Candidate:
        """Time a schedule."""
        return cls.of_timeline(name, problem, schedule, problem.evaluate(schedule))

    def retime(self, problem: Problem) -> Candidate:
        """The same order on another problem, without building anything again."""
        return Candidate.of_timeline(self.name, problem, self.schedule, retime(self.timeline, problem.costs))

    @property
    def fits(self) -> bool:
        return self.verdict == Verdict.FITS

    @property
    def time_or_inf(self) -> float:
        """The objective, infinite if it was not timed."""
        return float("inf") if self.objective is None else self.objective

    @property
    def problem(self) -> Problem:
        assert self.timed is not None
        return self.timed[0]

    @property
    def schedule(self) -> Schedule:
        assert self.timed is not None
        return self.timed[1]

    @property
    def timeline(self) -> Timeline:
        assert self.timed is not None
        return self.timed[2]

    def list_moments(self, ranks: Iterable[int] | None = None) -> tuple[PeakMoment, ...]:
        """The peaks of ranks, by default of those over their limits."""
        problem, _, timeline = self.problem, self.schedule, self.timeline
        if ranks is None:
            ranks = [rank for rank, limit in enumerate(problem.memory_limit or ()) if timeline.peak_memory[rank] > limit]
        held = held_in(timeline.table, problem.costs)
        return tuple(find_moment(timeline.table, problem.costs, rank, held) for rank in ranks)

    def describe(self) -> str:
        """Schedule, placement and microbatches in a few words."""
        stages = 0 if self.sizes is None else len(self.sizes)
        recomputed = f", {self.recompute} of {stages} stages recomputed" if self.recompute else ""
        return f"{self.name} ({self.placement}, {self.microbatches} microbatches of {self.microbatch}{recomputed})"

    def to_json(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "timed"}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, data: Any, file: str) -> Candidate:
        known = {item.name for item in fields(cls)} - {"timed"}
        if not isinstance(data, dict) or not set(data) <= known:
            raise FileFormatError(file, f"an alternative has other fields than {', '.join(sorted(known))}: {data!r}")
        sizes = data.get("sizes")
        try:
            return cls(**{**data, "sizes": None if sizes is None else tuple(sizes)})
        except TypeError as error:
            raise FileFormatError(file, f"an alternative: {error}") from None


def find_moment(table: Table, costs: Costs, rank: int, all_held: Floats) -> PeakMoment:
    """The moment at which a rank holds most, from the memory held while each action runs."""
    rows = table.rows
    begin, end = (int(group) for group in rows.group_offsets[rank : rank + 2])
    held = all_held[begin:end]
    peak = begin + int(np.argmax(held))
    stages = table.placement.stages_of(rank)
    first, at_peak, after = np.searchsorted(rows.group, (begin, peak, peak + 1))
    started, ended = slice(first, after), slice(first, at_peak)

    def count(entries: slice, stage: int, *kinds: Kind) -> int:
        return int((np.isin(rows.kind[entries], kinds) & (rows.stage[entries] == stage)).sum())

    activations = tuple(count(started, stage, Kind.F) - count(ended, stage, Kind.I, Kind.B) for stage in stages)
    stashes = tuple(count(ended, stage, Kind.I) - count(ended, stage, Kind.W) for stage in stages)
    known = sum(
        costs.of_stage("parameters", stage)
        + activation * costs.of_stage("activation", stage)
        + stash * costs.of_stage("weight_stash", stage)
        for stage, activation, stash in zip(stages, activations, stashes, strict=True)
    )
    return PeakMoment(rank, activations, stashes, max(float(held.max()) - known, 0.0))
