"""Give a schedule or program a timeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.costs import Costs, check_costs
from penstock.ir.rows import Floats
from penstock.ir.table import Table, check_table
from penstock.simulator.event_loops.flat import Flat
from penstock.simulator.event_loops.loops import Durations, Graph, run
from penstock.simulator.timeline import Timeline

_ADVICE = "verify the schedule to see everything that is wrong with it"


def simulate(table: Table, costs: Costs | None = None, *, engine: str = "auto") -> Timeline:
    """Time a schedule or program under these costs.

    A rank has one compute lane and one lane per channel. A send returns at once unless the channel's slots are all
    taken; a message leaves when its link is free and occupies it for latency + size / bandwidth. Copies of activations to host memory
    and back run beside everything else, one at a time in each direction of a link. `engine` is `auto`, `plain` or `compiled` (needs numba).
    """
    check_table(table, "simulate")
    return _time(_lay_flat(table), check_costs(costs), engine)


def retime(timeline: Timeline, costs: Costs, *, engine: str = "auto") -> Timeline:
    """Time the same order under other costs, without building anything anew."""
    return _time(timeline.flat, costs, engine)


def _lay_flat(table: Table) -> Flat:
    """Lay the table flat; refuse actions that do not come after everything they need of their own rank."""
    rows, (before, after), missing = table.rows, table.links.local, table.links.missing
    if len(missing.after):
        entry, needed = int(missing.after[0]), rows.action_for(int(missing.code[0]))
        raise ScheduleError(f"{rows.action_at(entry)} on rank {rows.rank[entry]} needs {needed}, which does not exist: {_ADVICE}")
    wrong = np.flatnonzero(rows.group[before] >= rows.group[after])
    if len(wrong):
        entry, needed = int(after[wrong[0]]), rows.part_at(int(before[wrong[0]]))
        raise ScheduleError(f"{rows.action_at(entry)} on rank {rows.rank[entry]} does not come after {needed}, which it needs: {_ADVICE}")
    return Flat(table)


def _time(flat: Flat, costs: Costs, engine: str, graph: Graph | None = None, takes: Durations | None = None) -> Timeline:
    """Run the event loop; by default on the graph and the durations that follow from the costs."""
    graph = flat.graph(costs) if graph is None else graph
    outcome = run(graph, flat.durations(costs) if takes is None else takes, costs.contention, engine)
    rows = flat.table.rows
    stopped = np.flatnonzero(outcome.reached != rows.group_offsets[1:])
    if len(stopped):
        rank = int(stopped[0])
        action = rows.action_of(int(outcome.reached[rank]))
        raise ScheduleError(f"{len(stopped)} of {flat.table.ranks} ranks never get to their end, rank {rank} stops at {action}: {_ADVICE}")
    timeline = Timeline(flat.table, costs, *outcome.times, held_by=outcome.held_by)
    timeline.__dict__["flat"] = flat
    return timeline


@dataclass(frozen=True, eq=False)
class Scenarios:
    """The makespan, bubble and longest rank span of one order under many costs."""

    makespans: Floats
    bubbles: Floats
    spans: Floats

    @property
    def mean(self) -> float:
        """The mean makespan."""
        return float(self.makespans.mean())

    @cached_property
    def p95(self) -> float:
        """The makespan that 95 in 100 scenarios stay under."""
        return float(np.quantile(self.makespans, 0.95))

    def __len__(self) -> int:
        return len(self.makespans)


def simulate_many(
    table: Table, costs: Costs | None = None, *, scenarios: int = 100, jitter: float = 0.05, seed: int = 0, engine: str = "auto"
) -> Scenarios:
    """Time one order under many scenarios: each time of each action and message is drawn anew.

    A factor that is lognormal with mean 1 and standard deviation `jitter` multiplies every duration; the same seed gives the
    same scenarios.
    """
    if scenarios < 1 or not 0 <= jitter < 1:
        raise ScheduleError(f"scenarios={scenarios}, jitter={jitter}: at least 1 scenario, and a jitter from 0 up to 1")
    check_table(table, "simulate_many")
    costs = check_costs(costs)
    flat = _lay_flat(table)
    graph, takes = flat.graph(costs), flat.durations(costs)
    chance = np.random.default_rng(seed)
    spread = np.sqrt(np.log1p(jitter**2))
    figures: list[tuple[float, float, float]] = []
    for _ in range(scenarios):
        drawn = Durations(*(column * np.exp(chance.normal(-(spread**2) / 2, spread, len(column))) for column in takes))
        timeline = _time(flat, costs, engine, graph, drawn)
        span = float((timeline.finished - timeline.begun).max(initial=0.0))
        figures.append((timeline.makespan, timeline.bubble, span))
    return Scenarios(*np.array(figures).T)
