"""What a plan is asked for, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import CostsError, ScheduleError, UnknownNameError, nearest
from penstock.ir.codes import MAX_MICROBATCHES, MAX_STAGES
from penstock.ir.costs import parse_size
from penstock.planner.profile import Profile
from penstock.schedules.registry import algorithms

SEARCHED = "searched"
"""The name of an order that was searched for, among those of schedules."""

Limit = float | str | Sequence[float | str] | None


@dataclass(frozen=True)
class Progress:
    """How far planning is: the step it is at, and the best so far."""

    phase: str
    done: int
    total: int
    what: str = ""
    best: float | None = None
    best_name: str = ""


@dataclass(frozen=True)
class Case:
    """One microbatch size: the profile for it, and how many microbatches there are."""

    profile: Profile
    microbatches: int


@dataclass(frozen=True)
class Request:
    """Everything that a search for a plan is told."""

    profile: Profile
    ranks: int
    cases: tuple[Case, ...]
    limits: tuple[float, ...] | None
    names: tuple[str, ...]
    """The schedules to try, SEARCHED among them where orders may be searched for."""
    recompute: bool
    barrier: bool
    split: bool
    seconds: float
    seed: int
    jitter: float
    near: float
    rounds: float | None = None
    """How many orders the search times; as many as take about `seconds` of work by default."""
    in_bytes: bool = False
    """Whether sizes are bytes."""
    headroom: float = 0.0
    """The share of the limits as they were given that stays free; `limits` are without it."""
    tell: Callable[[Progress], None] = lambda progress: None
    stop: Callable[[], bool] = lambda: False
    found: Callable[[Any], None] = lambda attempt: None
    """Told of each `Attempt` when it is made."""

    @property
    def searches(self) -> bool:
        return SEARCHED in self.names


def checked_cases(profile: Profile, microbatches: int | None, batch: int | None, sizes: Sequence[int] | None) -> tuple[Case, ...]:
    """The microbatch sizes to try."""
    if (microbatches is None) == (batch is None):
        raise ScheduleError("give either microbatches= or batch=, the samples of a whole step")
    if microbatches is not None:
        if sizes is not None:
            raise ScheduleError("microbatch_sizes= goes with batch=: with microbatches= the size is the profile's")
        return (Case(profile.at(profile.microbatch), check_count("microbatches", microbatches, MAX_MICROBATCHES)),)
    total = check_count("batch", batch, None)
    given = profile.sizes if sizes is None else _listed("microbatch_sizes= takes whole numbers", sizes)
    wanted = [check_count("a microbatch size", size, None) for size in given]
    even = sorted({size for size in wanted if total % size == 0 and total // size <= MAX_MICROBATCHES})
    if not even:
        raise ScheduleError(
            f"a batch of {total} is no multiple of a microbatch size of {' or '.join(map(str, wanted))}: choose another batch, or other "
            "sizes with microbatch_sizes="
        )
    return tuple(Case(profile.at(size), total // size) for size in even)


def left_out(cases: Sequence[Case], batch: int | None, sizes: Sequence[int]) -> list[str]:
    """What is said of the microbatch sizes that are not tried."""
    missing = sorted(set(sizes) - {case.profile.microbatch for case in cases})
    return [f"microbatches of {size} are left out: a batch of {batch} cannot be cut into them" for size in missing] if batch else []


def checked_limits(memory_limit: Limit, ranks: int) -> tuple[float, ...] | None:
    """One limit a rank."""
    if memory_limit is None:
        return None
    one = isinstance(memory_limit, str) or not isinstance(memory_limit, Sequence | np.ndarray)
    given: Sequence[Any] = [memory_limit] * ranks if one else memory_limit  # type: ignore[assignment]
    if len(given) != ranks:
        raise CostsError(f"memory_limit has {len(given)} values for {ranks} ranks: give one size or one a rank")
    try:
        return tuple(parse_size(size) for size in given)
    except CostsError as error:
        raise CostsError(f"memory_limit: {error}") from None


def is_in_bytes(profile: Profile, memory_limit: Limit) -> bool:
    """Whether sizes are bytes: the profile says so, or the limit has a unit."""
    sizes = [memory_limit] if isinstance(memory_limit, str) or not isinstance(memory_limit, Sequence) else memory_limit
    return profile.size_unit == "B" or any(isinstance(size, str) and size.rstrip().endswith("B") for size in sizes)


def checked_names(schedules: Sequence[str] | str | None) -> tuple[str, ...]:
    """The schedules to try: all that are registered and searched orders, unless some are named."""
    known = [*algorithms(), SEARCHED]
    if schedules is None:
        return tuple(known)
    wanted = [schedules] if isinstance(schedules, str) else _listed("schedules= takes names", schedules)
    for name in wanted:
        if not isinstance(name, str):
            raise ScheduleError(f"schedules= takes names of schedules, got {name!r}")
        if name not in known:
            raise UnknownNameError(f"there is no schedule {name!r}: {nearest(name, known)}")
    if not wanted:
        raise ScheduleError("schedules= names none: name at least one, or leave it out for all")
    return tuple(dict.fromkeys(wanted))


def _listed(what: str, value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ScheduleError(f"{what}: give a list of them, got {value!r}")
    return list(value)


def check_count(name: str, value: Any, most: int | None = MAX_STAGES) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1 or (most is not None and value > most):
        until = "" if most is None else f" and at most {most}"
        raise ScheduleError(f"{name} must be a whole number of at least 1{until}, got {value!r}")
    return int(value)


def check_share(name: str, value: Any, least: float = 0.0, below: float = float("inf")) -> float:
    """A number from `least` up to, and not reaching, `below`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)) or not least <= value < below:
        raise ScheduleError(
            f"{name} must be a number of at least {least:g}{f' and below {below:g}' if below < 1e300 else ''}, got {value!r}"
        )
    return float(value)


def check_seed(value: Any) -> int:
    """A whole number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ScheduleError(f"seed must be a whole number of at least 0, got {value!r}")
    return int(value)
