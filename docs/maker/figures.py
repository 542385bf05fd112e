"""What a schedule costs, by the simulator and by its formula."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import penstock as ps
from penstock.schedules.registry import algorithm


@dataclass(frozen=True)
class Times:
    """What a rank's whole share of the model takes for one microbatch."""

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0

    @property
    def b(self) -> float:
        return self.i + self.w

    @property
    def all(self) -> float:
        return self.f + self.b

    def __str__(self) -> str:
        return f"F = {_plain(self.f)}, I = {_plain(self.i)}, W = {_plain(self.w)}" if len({self.f, self.i, self.w}) > 1 else "F = I = W"


def _plain(value: float) -> str:
    return str(Fraction(value).limit_denominator(12))


@dataclass(frozen=True)
class Figures:
    """One step, as simulated. Times and sizes are in what a rank's share of the model takes and holds for one microbatch."""

    makespan: float
    idle: float
    """The makespan less the work of a rank."""
    span_idle: float
    """The longest time from a rank's first action to its last, less the work of a rank."""
    bubble: float
    peak: float
    messages: int


def costs_of(schedule: ps.Schedule, times: Times) -> ps.Costs:
    """The costs of an action: a rank's share, divided among its stages of one copy of the model and the slices of a microbatch."""
    share = schedule.ranks / schedule.stages / schedule.slices
    return ps.Costs(f=times.f * share, i=times.i * share, w=times.w * share, activation=share, weight_stash=share)


def ranks_of(name: str, ranks: int) -> int:
    """As many ranks as asked for, or one for what runs on one alone."""
    return 1 if "ranks = 1" in needs(name) else ranks


def needs(name: str) -> str:
    """What the schedule's docstring says that it needs."""
    lines = (algorithm(name).generate.__doc__ or "").splitlines()
    return next((line.partition("Needs:")[2].strip() for line in lines if "Needs:" in line), "")


def simulated(name: str, ranks: int, microbatches: int, **options: Any) -> ps.Timeline:
    """The timeline of a schedule with equal times."""
    schedule = ps.schedule(name, ranks=ranks_of(name, ranks), microbatches=microbatches, **options)
    return ps.simulate(schedule, costs_of(schedule, Times()), engine="plain")


def measured(name: str, ranks: int, microbatches: int, times: Times | None = None, **options: Any) -> Figures:
    """What the simulator says. What is held counts to the backward for the weights."""
    times = times or Times()
    schedule = ps.schedule(name, ranks=ranks_of(name, ranks), microbatches=microbatches, **options)
    found = ps.simulate(schedule, costs_of(schedule, times), engine="plain")
    work = float(found.busy[0])
    span = float((found.finished - found.begun).max())
    return Figures(found.makespan, found.makespan - work, span - work, found.bubble, max(found.peak_memory), found.num_messages)
