"""Timelines of drawn cases, and how to look things up in them."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import reject

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.action import Action
from penstock.ir.costs import Costs
from penstock.ir.kind import JOINS, SHARES, Kind
from penstock.ir.table import Table
from penstock.simulator.timeline import Timeline

Interval = tuple[float, float]


def run(case: tuple[Table, Costs]) -> Timeline:
    """The timeline; a case with so few slots that it never ends is no case."""
    try:
        return ps.simulate(*case)
    except ScheduleError:
        reject()


def result(part: Action) -> tuple[str, int, int, int]:
    """What a part makes: B and I make the same gradient."""
    return {Kind.F: "F", Kind.W: "W"}.get(part.kind, "I"), part.stage, part.microbatch or 0, part.slice or 0


def made(timeline: Timeline) -> dict[tuple[str, int, int, int], tuple[float, int]]:
    """When each result is there, and on which rank."""
    parts = ((part, span.end, rank) for rank in range(timeline.ranks) for span in timeline.spans(rank) for part in span.action.parts)
    return {result(part): (end, rank) for part, end, rank in parts if part.kind not in SHARES}


def lanes(timeline: Timeline) -> dict[object, list[Interval]]:
    """What occupies each rank's compute lane, lane of its own collectives and lane of those of all ranks, and each link."""
    found: dict[object, list[Interval]] = defaultdict(list)
    bounds = timeline.table.rows.group_offsets.tolist()
    for rank in range(timeline.ranks):
        found["compute", rank] = [(span.start, span.end) for span in timeline.spans(rank)]
        own = slice(bounds[rank], bounds[rank + 1])
        collectives = zip(timeline.collective_start[own].tolist(), timeline.collective_end[own].tolist(), strict=True)
        for action, pair in zip(timeline.table[rank], collectives, strict=True):
            if pair[0] >= 0:
                found["joint" if action.kind in JOINS else "collective", rank].append(pair)
    for t in timeline.transfers():
        links: dict[str, list[object]] = {
            "independent": [(t.source, t.target, t.kind)],
            "pair": [(t.source, t.target)],
            "duplex": [(t.source, "out"), (t.target, "in")],
            "rank": [t.source, t.target],
            "links": [] if timeline.costs.lanes is None else [*set(timeline.costs.lanes[t.source][t.target])],
        }
        for link in links[timeline.costs.contention]:
            found["link", link].append((t.start, t.end))
    return found
