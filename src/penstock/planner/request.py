"""The checked arguments of a plan, and the problems that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.errors import CostsError, ScheduleError, UnknownNameError, nearest
from penstock.ir.codes import MAX_MICROBATCHES, MAX_STAGES
from penstock.ir.placement import Placement
from penstock.planner.partition.cut import LayerCut, cut_layers
from penstock.planner.partition.layer_runs import PeakMoment
from penstock.planner.problem import Problem
from penstock.planner.profile import Profile
from penstock.schedules.registry import algorithms
from penstock.text.units import Units, has_byte_unit, parse_size

SEARCHED = "searched"
"""The name of an order that was searched for, among the names of schedules."""
SLACKS = (0.0, 0.02)
"""Shares of the least load that a more even partition may cost."""

Limit = float | str | Sequence[float | str] | None


@dataclass(frozen=True)
class Progress:
    """How far planning is: the current step, and the best candidate so far."""

    phase: str
    done: int
    total: int
    what: str = ""
    best: float | None = None
    best_name: str = ""


@dataclass(frozen=True)
class Request:
    """The checked arguments of a plan, and the partitions made for it."""

    profile: Profile
    ranks: int
    batch: int
    """Samples per step."""
    profiles: tuple[Profile, ...]
    """The model at each microbatch size to try."""
    limits: tuple[float, ...] | None
    names: tuple[str, ...]
    """The schedules to try, with SEARCHED if orders may be searched."""
    recompute: bool
    barrier: bool
    split: bool
    seconds: float
    seed: int
    jitter: float
    near: float
    rounds: float | None = None
    """How many orders the search times; by default as many as take about `seconds` of work."""
    in_bytes: bool = False
    """Whether sizes are bytes."""
    headroom: float = 0.0
    """The share of the user's limits that stays free; `limits` exclude it."""
    tell: Callable[[Progress], None] = lambda progress: None
    stop: Callable[[], bool] = lambda: False
    found: Callable[[Any], None] = lambda candidate: None
    """Called with each `Candidate` as it is made."""
    _partitions: dict[object, LayerCut] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def searches(self) -> bool:
        return SEARCHED in self.names

    @property
    def units(self) -> Units:
        return Units(self.profile.time_unit, self.in_bytes)

    def count_microbatches(self, profile: Profile) -> int:
        return self.batch // profile.microbatch

    def cut(
        self, profile: Profile, placement: Placement, recompute: tuple[bool, ...], moments: Sequence[PeakMoment] = (), slack: float = 0.0
    ) -> LayerCut:
        """The best partition of the layers, within the limits at these moments."""
        key = (profile.microbatch, placement.copies, recompute, tuple(moments), slack)
        if key not in self._partitions:
            self._partitions[key] = cut_layers(profile, placement, recompute=recompute, limits=self.limits, moments=moments, slack=slack)
        return self._partitions[key]

    def make_problem(self, profile: Profile, placement: Placement, sizes: tuple[int, ...], recompute: tuple[bool, ...]) -> Problem:
        count = self.count_microbatches(profile)
        return Problem.cut(profile, placement, count, sizes, recompute, self.limits, self.barrier, self.split)

    def make_problems(self, profile: Profile, placement: Placement, recompute: tuple[bool, ...]) -> list[Problem]:
        """One problem with the least load, and one with more even stages if there is one; none if no partition fits."""
        cuts = [self.cut(profile, placement, recompute, slack=slack) for slack in SLACKS]
        return [self.make_problem(profile, placement, sizes, recompute) for sizes in dict.fromkeys(cut.sizes for cut in cuts if cut.fits)]


def check_batch(
    profile: Profile, microbatches: int | None, batch: int | None, sizes: Sequence[int] | None
) -> tuple[int, tuple[Profile, ...]]:
    """Samples per step, and the profile at each microbatch size to try."""
    if (microbatches is None) == (batch is None):
        raise ScheduleError("give either microbatches= or batch=, the samples per step")
    if microbatches is not None:
        if sizes is not None:
            raise ScheduleError("microbatch_sizes= goes with batch=: with microbatches= the size is the profile's")
        count = check_count("microbatches", microbatches, MAX_MICROBATCHES)
        return count * profile.microbatch, (profile.at(profile.microbatch),)
    total = check_count("batch", batch, None)
    listed = profile.sizes if sizes is None else _check_list("microbatch_sizes= takes whole numbers", sizes)
    wanted = [check_count("a microbatch size", size, None) for size in listed]
    even = sorted({size for size in wanted if total % size == 0 and total // size <= MAX_MICROBATCHES})
    if not even:
        raise ScheduleError(
            f"a batch of {total} is not a multiple of a microbatch size of {' or '.join(map(str, wanted))}: choose another batch, or other "
            "sizes with microbatch_sizes="
        )
    return total, tuple(profile.at(size) for size in even)


def check_limits(memory_limit: Limit, ranks: int) -> tuple[float, ...] | None:
    """One limit per rank."""
    if memory_limit is None:
        return None
    one = isinstance(memory_limit, str) or not isinstance(memory_limit, Sequence | np.ndarray)
    sizes: Sequence[Any] = [memory_limit] * ranks if one else memory_limit  # type: ignore[assignment]
    if len(sizes) != ranks:
        raise CostsError(f"memory_limit has {len(sizes)} values for {ranks} ranks: give one size, or one per rank")
    return tuple(parse_size(size, "memory_limit") for size in sizes)


def is_in_bytes(profile: Profile, memory_limit: Limit) -> bool:
    """Whether sizes are bytes: the profile says so, or the limit has a unit."""
    sizes = [memory_limit] if isinstance(memory_limit, str) or not isinstance(memory_limit, Sequence) else memory_limit
    return profile.size_unit == "B" or any(map(has_byte_unit, sizes))


def check_names(schedules: Sequence[str] | str | None) -> tuple[str, ...]:
    """The schedules to try: by default all registered ones and searched orders."""
    known = [*algorithms(), SEARCHED]
    if schedules is None:
        return tuple(known)
    wanted = [schedules] if isinstance(schedules, str) else _check_list("schedules= takes names", schedules)
    for name in wanted:
        if not isinstance(name, str):
            raise ScheduleError(f"schedules= takes names of schedules, got {name!r}")
        if name not in known:
            raise UnknownNameError(f"there is no schedule {name!r}: {nearest(name, known)}")
    if not wanted:
        raise ScheduleError("schedules= is empty: name at least one, or leave it out for all")
    return tuple(dict.fromkeys(wanted))


def _check_list(what: str, value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ScheduleError(f"{what}: give a list of them, got {value!r}")
    return list(value)


def check_count(name: str, value: Any, most: int | None = MAX_STAGES, least: int = 1) -> int:
    """A whole number from `least` up to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least or (most is not None and value > most):
        until = "" if most is None else f" and at most {most}"
        raise ScheduleError(f"{name} must be a whole number of at least {least}{until}, got {value!r}")
    return int(value)


def check_share(name: str, value: Any, below: float = float("inf")) -> float:
    """A number from 0 up to, but not including, `below`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)) or not 0 <= value < below:
        until = f" and below {below:g}" if below < 1e300 else ""
        raise ScheduleError(f"{name} must be a number of at least 0{until}, got {value!r}")
    return float(value)
