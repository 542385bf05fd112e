"""Short ways to write tables for the verifier's tests."""

from __future__ import annotations

from typing import Any

from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import BufferCounts, Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.verifier.finding import Finding
from penstock.verifier.verify import check

Channels = dict[tuple[int, int, Kind], int]

FIRST = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
SECOND = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
"""Two ranks, two microbatches: a program in which nothing is wrong as long as messages wait by channel."""


def program(
    *rows: str,
    placement: Placement | None = None,
    graph: StageGraph | None = None,
    microbatches: int | None = None,
    channels: Channels | None = None,
) -> Program:
    """A program from rows of actions with spaces between them; linear unless a placement is given."""
    made = Program.from_actions(
        [row.split() for row in rows], placement or Placement.linear(len(rows)), graph=graph, microbatches=microbatches
    )
    return made if channels is None else made.changed(buffers=BufferCounts(channels=channels))


def schedule(*rows: str, placement: Placement | None = None, graph: StageGraph | None = None, microbatches: int | None = None) -> Schedule:
    """The same for a schedule."""
    return Schedule.from_actions(
        [row.split() for row in rows], placement or Placement.linear(len(rows)), graph=graph, microbatches=microbatches
    )


def only(table: Table, **options: Any) -> Finding:
    """The one finding of a table with one mistake."""
    found = check(table, **options)
    assert len(found) == 1, [str(finding) for finding in found]
    return found[0]


def rules(table: Table, **options: Any) -> list[str]:
    """The rule of each finding, in the order of the findings."""
    return [finding.rule for finding in check(table, **options)]
