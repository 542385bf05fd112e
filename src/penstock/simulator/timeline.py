"""Timelines: when everything ran, simulated or measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.ir.action import Action
from penstock.ir.costs import Costs
from penstock.ir.kind import WORK, Kind
from penstock.ir.rows import Flags, Floats
from penstock.ir.table import Table
from penstock.simulator.event_loops.flat import Flat, Messages
from penstock.text.numbers import format_count
from penstock.text.units import SECONDS, Units

if TYPE_CHECKING:
    from penstock.simulator.critical import PathStep
    from penstock.simulator.gaps import Gap
    from penstock.simulator.memory import Curve
    from penstock.simulator.waits import WaitCauses


@dataclass(frozen=True)
class Span:
    """One action on its rank's compute lane: when it ran, and how long the rank stood idle before it."""

    action: Action
    start: float
    end: float
    wait: float


@dataclass(frozen=True)
class Transfer:
    """One message on its channel's lane."""

    source: int
    target: int
    kind: Kind
    """`SEND_F` or `SEND_B`."""
    sent: Action
    used: Action
    start: float
    end: float
    size: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every action and message, and the figures that follow from them.

    `start` and `end` have one value per action of `table.rows` (a group), `depart` and `arrive` one per message,
    `collective_start` and `collective_end` one per action, -1 for actions that start no collective.
    """

    table: Table
    costs: Costs
    start: Floats
    end: Floats
    depart: Floats
    arrive: Floats
    collective_start: Floats
    collective_end: Floats
    held_by: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """For each message that waited for a shared link, the message that held it, else -1; empty if no link is shared."""
    source: str = "simulated"
    units: Units = field(default_factory=Units)
    """The unit of the times, and whether sizes are bytes; by default neither is known."""

    @cached_property
    def flat(self) -> Flat:
        return Flat(self.table)

    @property
    def messages(self) -> Messages:
        return self.flat.messages

    @property
    def ranks(self) -> int:
        return self.table.ranks

    # Figures ----------------------------------------------------------------------------------------------------------

    @cached_property
    def computes(self) -> Flags:
        """The actions that are computation."""
        rows = self.table.rows
        return rows.is_kind(*WORK)[rows.heads]

    @cached_property
    def busy(self) -> Floats:
        """How long each rank computes, the optimizer's step included."""
        rank = self.flat.graph().rank[self.computes]
        return np.bincount(rank, weights=(self.end - self.start)[self.computes], minlength=self.ranks) + self.optimizer

    @cached_property
    def optimizer(self) -> Floats:
        """How long each rank's optimizer takes."""
        return self.costs.per_rank("optimizer", self.table.placement)

    @cached_property
    def finished(self) -> Floats:
        """When each rank has finished everything."""
        bounds = self.table.rows.group_offsets
        latest = np.maximum(self.end, self.collective_end)
        ends = [latest[low:high].max(initial=0.0) for low, high in pairwise(bounds.tolist())]
        return np.array(ends) + self.optimizer

    @cached_property
    def begun(self) -> Floats:
        """When each rank first computes."""
        first = np.full(self.ranks, np.inf)
        np.minimum.at(first, self.flat.graph().rank[self.computes], self.start[self.computes])
        return np.where(np.isinf(first), 0.0, first)

    @cached_property
    def makespan(self) -> float:
        """From the start to the end of the last rank."""
        return float(self.finished.max(initial=0.0))

    @property
    def bubble(self) -> float:
        """Idle time over ranks x makespan."""
        whole = self.ranks * self.makespan
        return float((whole - self.busy.sum()) / whole) if whole else 0.0

    @property
    def span_bubble(self) -> float:
        """(longest rank span - its work) / longest rank span: the figure that the zero-bubble papers print."""
        spans = self.finished - self.begun
        longest = int(np.argmax(spans))
        return float((spans[longest] - self.busy[longest]) / spans[longest]) if spans[longest] else 0.0

    @property
    def num_messages(self) -> int:
        return len(self.depart)

    @cached_property
    def waits(self) -> WaitCauses:
        """The cause of each computation's wait."""
        from penstock.simulator.waits import WaitCauses

        return WaitCauses(self)

    # Parts ------------------------------------------------------------------------------------------------------------

    def spans(self, rank: int) -> list[Span]:
        """The rank's compute actions in order."""
        spans: list[Span] = []
        before = 0.0
        low = int(self.table.rows.group_offsets[rank])
        for node, action in enumerate(self.table[rank], start=low):
            if self.computes[node]:
                start, end = float(self.start[node]), float(self.end[node])
                spans.append(Span(action, start, end, start - before))
                before = end
        return spans

    def transfers(self) -> Iterator[Transfer]:
        """Every message, in the order of the sending rank."""
        rows, messages, sizes = self.table.rows, self.messages, self.flat.sizes(self.costs)
        for index, (before, after) in enumerate(zip(messages.before.tolist(), messages.after.tolist(), strict=True)):
            source, target, kind = messages.channels[int(messages.channel[index])]
            times = float(self.depart[index]), float(self.arrive[index])
            yield Transfer(source, target, kind, rows.part_at(before), rows.part_at(after), *times, float(sizes[index]))

    @cached_property
    def _curves(self) -> list[Curve]:
        from penstock.simulator.memory import build_curves

        return build_curves(self)

    def memory(self, rank: int) -> Curve:
        """The memory of the rank over time, by category."""
        return self._curves[rank]

    @cached_property
    def _host_curves(self) -> list[Curve]:
        from penstock.simulator.memory import build_host_curves

        return build_host_curves(self)

    def host_memory(self, rank: int) -> Curve:
        """The host memory of the rank's activations over time; nothing unless a program moves some there."""
        return self._host_curves[rank]

    @cached_property
    def peak_memory(self) -> list[float]:
        """The most that each rank holds at once, the parameters it always keeps included."""
        return [curve.peak for curve in self._curves]

    def gaps(self, rank: int) -> list[Gap]:
        """The rank's idle times, each with its cause."""
        from penstock.simulator.gaps import find_measured_gaps, find_simulated_gaps

        return find_simulated_gaps(self, rank) if self.source == "simulated" else find_measured_gaps(self, rank)

    @cached_property
    def idle_by_cause(self) -> dict[str, float]:
        """Idle time over all ranks, by cause."""
        from penstock.simulator.gaps import CAUSES

        total = dict.fromkeys(CAUSES, 0.0)
        for rank in range(self.ranks):
            for gap in self.gaps(rank):
                total[gap.cause] = total.get(gap.cause, 0.0) + (gap.end - gap.start)
        return total

    @cached_property
    def critical_path(self) -> list[PathStep]:
        """A chain of actions and messages from the start to the makespan; without a pause if simulated."""
        from penstock.simulator.critical import find_measured_path, find_simulated_path

        return find_simulated_path(self) if self.source == "simulated" else find_measured_path(self)

    def scaled(self, factor: float) -> Timeline:
        """The same timeline in another unit of time: every time multiplied by the factor."""
        if factor == 1.0:
            return self
        columns = {name: getattr(self, name) * factor for name in ("start", "end", "depart", "arrive")}
        for name in ("collective_start", "collective_end"):
            times = getattr(self, name)
            columns[name] = np.where(times < 0, times, times * factor)  # -1 stands for no time
        unit = SECONDS.get(self.units.time_unit, math.nan) / factor
        name = next((name for name, seconds in SECONDS.items() if math.isclose(seconds, unit)), "")
        return self._copy_with(costs=self.costs.scaled(factor), units=replace(self.units, time_unit=name), **columns)

    def in_units(self, units: Units) -> Timeline:
        """The same timeline, whose numbers are in these units."""
        return self._copy_with(units=units)

    def _copy_with(self, **fields: Any) -> Timeline:
        changed = replace(self, **fields)
        changed.__dict__["flat"] = self.flat
        return changed

    # Files ------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        from penstock.simulator.timeline_json import encode

        return encode(self)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Timeline:
        """Read a timeline that was saved as `.json`."""
        from penstock.simulator.timeline_json import read

        return read(path)

    def save(self, path: str | PathLike[str], **options: Any) -> None:
        """Write by suffix: `.json` the timeline itself, `.trace.json` for Perfetto, `.svg`, `.png`, `.html` pictures."""
        from penstock.draw.save import save

        save(self, path, **options)

    def __repr__(self) -> str:
        name = f"{self.table.name!r}, " if self.table.name else ""
        figures = f"makespan {self.units.time(self.makespan)}, bubble {self.bubble:.2%}"
        peak = f", peak memory {self.units.size(max(self.peak_memory))}" if self.units.in_bytes else ""
        return f"<Timeline {name}{self.source}, {format_count(self.ranks, 'rank')}, {figures}{peak}>"
