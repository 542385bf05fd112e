"""Candidates: one schedule on one problem, with its verdict and figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import FileFormatError
from penstock.ir.costs import Costs
from penstock.ir.dependencies import find_releases
from penstock.ir.formats.reading import check_record
from penstock.ir.kind import Kind
from penstock.ir.rows import Floats, Ints
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.planner.partition.layer_runs import PeakMoment
from penstock.planner.problem import Problem
from penstock.simulator.simulate import retime
from penstock.simulator.timeline import Timeline
from penstock.text.numbers import format_count
from penstock.verifier.rules.memory import sum_held

_IN_THE_MAKING = {"timed", "place"}
_LISTS: dict[str, tuple[type, ...]] = {"sizes": (list,), "slice_lengths": (list,), "devices": (list,)}
"""Tuples, in files."""
_NO_DIFFERENCE = 5e-5
"""Relative differences below this are not worth a word."""


class Verdict(StrEnum):
    """The outcome of a candidate."""

    FITS = "fits"
    OVER = "over its memory limit"
    TOO_LARGE = "too large for one microbatch"
    SLOW = "not timed: its work alone takes longer than the best"
    REFUSED = "cannot be had"


IN_WORDS = {
    Verdict.FITS: "fit",
    Verdict.OVER: "over the memory limit",
    Verdict.TOO_LARGE: "too large for one microbatch at a time",
    Verdict.SLOW: "not timed, because the work alone takes longer than the best plan",
    Verdict.REFUSED: "not possible here",
}
"""The verdicts of several candidates, after their number."""


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
    offloaded: int | None = None
    """How many activations it moves to host memory, if any."""
    slices: int = 1
    """Slices that each sequence is cut into."""
    slice_lengths: tuple[int, ...] = ()
    """Tokens of each slice, if there are several."""
    vocabulary: bool = False
    """Whether embedding and head are spread over all ranks."""
    devices: tuple[int, ...] = ()
    """The device of a cluster that each rank is, if they differ."""
    timed: tuple[Problem, Schedule, Timeline] | None = field(default=None, compare=False, repr=False)
    """The timed schedule, while a plan is being made."""
    place: int = field(default=-1, compare=False, repr=False)
    """Its index in `Plan.alternatives`; a better version of a candidate, on other cuts or in a better order, takes over its place."""

    @classmethod
    def untimed(cls, name: str, problem: Problem, verdict: Verdict, reason: str) -> Candidate:
        """A candidate that was ruled out before it was timed."""
        shape = problem.placement.kind, problem.placement.chunks, problem.microbatch, problem.microbatches, sum(problem.recompute)
        options: dict[str, Any] = {"slices": problem.slices, "slice_lengths": problem.lengths, "devices": problem.devices}
        return cls(name, *shape, verdict.value, reason, **options, vocabulary=problem.is_spread)

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
            offloaded=count_moves(schedule) or None,
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
    def shape(self) -> tuple[str, str, int, bool]:
        """The schedule, its placement and where the vocabulary is: runners-up of a plan differ in it."""
        return self.name, self.placement, self.chunks, self.vocabulary

    @property
    def time_or_inf(self) -> float:
        """The objective, infinite if it was not timed."""
        return float("inf") if self.objective is None else self.objective

    @property
    def problem(self) -> Problem:
        return self._timed[0]

    @property
    def schedule(self) -> Schedule:
        return self._timed[1]

    @property
    def timeline(self) -> Timeline:
        return self._timed[2]

    @property
    def _timed(self) -> tuple[Problem, Schedule, Timeline]:
        assert self.timed is not None
        return self.timed

    def list_moments(self, ranks: Iterable[int] | None = None) -> tuple[PeakMoment, ...]:
        """The peaks of ranks, by default of those over their limits."""
        problem, timeline = self.problem, self.timeline
        if ranks is None:
            ranks = [rank for rank, limit in enumerate(problem.memory_limit or ()) if timeline.peak_memory[rank] > limit]
        held = sum_held(timeline.table, problem.costs)
        return tuple(find_moment(timeline.table, problem.costs, rank, held) for rank in ranks)

    def compare(self, other: Candidate) -> str:
        """How this one's time, p95 and memory differ from another's, in a few words: "1.4% slower, 42% less memory"."""
        pairs = (
            (self.objective, other.objective, "as fast", "slower", "faster"),
            (self.p95, other.p95, "", "higher p95", "lower p95"),
            (self.peak, other.peak, "the same memory", "more memory", "less memory"),
        )
        words = []
        for own, reference, same, more, less in pairs:
            if own is not None and reference:
                change = own / reference - 1
                words.append(same if abs(change) < _NO_DIFFERENCE else f"{_format_percent(abs(change))} {more if change > 0 else less}")
        return ", ".join(filter(None, words))

    def is_like(self, other: Candidate) -> bool:
        """Whether another candidate has the same shape and the same figures, so that only the name tells them apart."""
        if self.objective is None or self.peak is None or other.objective is None or other.peak is None:
            return False
        fields = ("placement", "chunks", "microbatch", "recompute", "slices", "fits", "vocabulary")
        close = math.isclose(self.objective, other.objective) and math.isclose(self.peak, other.peak)
        return close and all(getattr(self, name) == getattr(other, name) for name in fields)

    def describe_placement(self) -> str:
        """The kind of placement, and its chunks if there may be others and the name does not say how many."""
        is_open = self.placement in ("looped", "wave") and "{" not in self.name
        return f"{self.placement}, {self.chunks} chunks" if is_open else self.placement

    def describe(self) -> str:
        """Schedule, placement and microbatches in a few words."""
        stages = 0 if self.sizes is None else len(self.sizes)
        recomputed = f", {self.recompute} of {stages} stages recomputed" if self.recompute else ""
        recomputed += f", {self.offloaded} activations moved to the host" if self.offloaded else ""
        recomputed += ", vocabulary on all ranks" if self.vocabulary else ""
        sliced = f" in {self.slices} slices" if self.slices > 1 else ""
        return f"{self.name} ({self.placement}, {format_count(self.microbatches, 'microbatch')} of {self.microbatch}{sliced}{recomputed})"

    def to_json(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _IN_THE_MAKING}
        if self.slices == 1:
            del values["slices"], values["slice_lengths"]
        if not self.vocabulary:
            del values["vocabulary"]
        if not self.devices:
            del values["devices"]
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_json(cls, data: Any, file: str) -> Candidate:
        check_record(data, cls, "an alternative", error=partial(FileFormatError, file), types=_LISTS, omit=_IN_THE_MAKING)
        return cls(**{**data, **{name: tuple(data[name]) for name in _LISTS if name in data}})


def count_moves(schedule: Schedule) -> int:
    """How many activations a schedule moves to the host."""
    return int(schedule.rows.is_kind(Kind.OFFLOAD).sum())


def summarize_verdicts(candidates: Sequence[Candidate]) -> str:
    """How many candidates there are, and how many of them have which verdict: "28 candidates: 12 fit; 16 over the memory limit"."""
    counts = Counter(candidate.verdict for candidate in candidates)
    return f"{format_count(len(candidates), 'candidate')}: " + "; ".join(
        f"{counts[verdict]} {text}" for verdict, text in IN_WORDS.items() if counts[verdict]
    )


def _format_percent(share: float) -> str:
    """Two digits: 0.34%, 1.4%, 42%."""
    return f"{float(f'{100 * share:.2g}'):g}%"


def find_moment(table: Table, costs: Costs, rank: int, all_held: Floats) -> PeakMoment:
    """The moment at which a rank holds most, from the memory held while each action runs."""
    rows = table.rows
    begin, end = (int(group) for group in rows.group_offsets[rank : rank + 2])
    held = all_held[begin:end]
    peak = begin + int(np.argmax(held))
    stages = table.placement.stages_of(rank)
    first, at_peak, after = np.searchsorted(rows.group, (begin, peak, peak + 1))
    started, ended = slice(first, after), slice(first, at_peak)
    if table.slices == 1 and not rows.is_kind(Kind.OFFLOAD).any():
        return _find_whole_moment(table, costs, rank, float(held.max()), (started, ended))

    def count(name: str, entries: slice, stage: int, *kinds: Kind, ends: int | None = None) -> float:
        """How many microbatches' sizes these actions stand for: each for its slice's share, or the slice at one end for all of it."""
        chosen = np.isin(rows.kind[entries], kinds) & (rows.stage[entries] == stage)
        units = rows.microbatch[entries][chosen]
        return add_up(name, stage, units) if ends is None else int((units % table.slices == ends).sum())

    def add_up(name: str, stage: int, units: Ints) -> float:
        if table.slices == 1:
            return len(units)
        whole = sums[name][stage]
        return float(sizes[name][stage, units].sum() / whole) if whole else 0.0

    def count_moved(stage: int) -> float:
        """The activations that are on the host."""
        left = moved[(first <= released) & (released < after) & (rows.stage[moved] == stage)]
        return add_up("activation", stage, rows.microbatch[left]) - count("activation", started, stage, Kind.RELOAD)

    names = "activation", "weight_stash", "kept", "kept_gradients"
    sizes = {name: costs.table(name, table.stages, table.units) for name in names}
    sizes["kept_gradients"][:, table.slices - 1 :: table.slices] = 0.0  # the last slice of a microbatch has no sum
    sums = {name: size[:, : table.slices].sum(axis=1) for name, size in sizes.items()}
    backwards, last = (Kind.I, Kind.B), table.slices - 1
    moved, released = find_releases(rows)
    counts = {
        "activation": [
            count("activation", started, at, Kind.F) - count("activation", ended, at, *backwards) - count_moved(at) for at in stages
        ],
        "weight_stash": [count("weight_stash", ended, at, Kind.I) - count("weight_stash", ended, at, Kind.W) for at in stages],
        "kept": [count("kept", started, at, Kind.F) - count("kept", ended, at, *backwards, ends=0) for at in stages],
        "kept_gradients": [
            count("kept_gradients", started, at, *backwards, ends=last) - count("kept_gradients", ended, at, *backwards) for at in stages
        ],
    }
    known = sum(costs.of_stage("parameters", stage) for stage in stages)
    known += sum(held * sums[name][stage] for name, by_stage in counts.items() for stage, held in zip(stages, by_stage, strict=True))
    activations, stashes, kept, gradients = (tuple(counts[name]) for name in names)
    return PeakMoment(rank, activations, stashes, max(float(held.max() - known), 0.0), kept, gradients)


def _find_whole_moment(table: Table, costs: Costs, rank: int, most: float, entries: tuple[slice, slice]) -> PeakMoment:
    """The same for whole microbatches that nothing moves: `entries` are those that started up to the peak, and those that ended before."""
    rows, stages = table.rows, list(table.placement.stages_of(rank))
    begun, done = (
        np.bincount(rows.kind[part] * table.stages + rows.stage[part], minlength=(max(Kind) + 1) * table.stages)
        .reshape(-1, table.stages)[:, stages]
        .tolist()
        for part in entries
    )
    backwards = [i + b for i, b in zip(done[Kind.I], done[Kind.B], strict=True)]
    activations = tuple(f - back for f, back in zip(begun[Kind.F], backwards, strict=True))
    stashes = tuple(i - w for i, w in zip(done[Kind.I], done[Kind.W], strict=True))
    known = 0.0
    for stage, held, stashed in zip(stages, activations, stashes, strict=True):
        per_activation = costs.of_stage("activation", stage) + costs.of_stage("kept", stage)
        known += costs.of_stage("parameters", stage) + held * per_activation + stashed * costs.of_stage("weight_stash", stage)
    return PeakMoment(rank, activations, stashes, max(most - known, 0.0), activations, (0,) * len(stages))
