"""Limits on one request, so that no client of the studio can overload the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.errors import UsageError
from penstock.ir.codes import MAX_STAGES
from penstock.ir.formats.reading import check_fields
from penstock.ir.table import Table
from penstock.schedules.registry import Shape

MOST_ACTIONS = 1_000_000
MOST_CELLS = 4 * MOST_ACTIONS
"""Stages times microbatches: tables are this large even with few actions."""
MOST_BYTES = 64 << 20
"""The largest request body."""
MOST_LAYERS = 10_000
MOST_DEVICES = 512
"""Devices of a cluster: its links are tables with a value for each pair of them."""
MOST_CLUSTER = 8 << 20
"""Characters of a cluster's file: such tables for that many devices."""
MOST_PLANNED = 200_000
"""Actions per schedule in a plan request: dozens of schedules are timed."""
MOST_SECONDS = 600.0
"""The longest search for a plan."""
ANSWER_SECONDS = 30.0
"""The longest time for any other request."""
LONGEST_NAME = 200
MOST_COST = 1e24
"""The largest cost; the smallest but 0 is its inverse. Others cannot be drawn to scale."""


def check_request(body: Any, fields: dict[str, tuple[type, ...]], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Refuse a request body that lacks a required field, or has an unknown one or one of the wrong type."""
    return check_fields(body, fields, error=UsageError, required=required, closed=True)


def check_costs(costs: dict[str, Any]) -> None:
    """Refuse costs (as `Costs.to_json` gives them) that cannot be drawn."""
    for name, value in costs.items():
        for number in _list_numbers(value):
            if number and not 1 / MOST_COST <= number <= MOST_COST:
                raise UsageError(f"{name} is {number:g}: the studio draws costs from {1 / MOST_COST:g} to {MOST_COST:g}, and 0")


def _list_numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _list_numbers(item)
    elif isinstance(value, (int, float)):
        yield float(value)


def check_actions(count: int, most: int = MOST_ACTIONS) -> None:
    if count > most:
        raise UsageError(f"{count:,} actions are more than the studio takes, {most:,}: choose fewer ranks, chunks or microbatches")


def check_shape(shape: Shape) -> None:
    """Refuse a schedule that is too large before it is built: every unit has at least two actions per stage."""
    check_actions(2 * shape.ranks * shape.chunks * shape.units)


def check_table(table: Table) -> None:
    """Refuse a table that is too large to be drawn."""
    cells = table.stages * table.units
    if cells > MOST_CELLS:
        slices = f" of {table.slices:,} slices" if table.slices > 1 else ""
        raise UsageError(f"{table.stages:,} stages of {table.microbatches:,} microbatches{slices} are more than the studio takes")
    check_actions(len(table.rows.codes))


def check_file(data: dict[str, Any]) -> None:
    """Refuse a file with too many ranks before anything is built from it."""
    placement = data.get("placement")
    ranks = placement.get("ranks") if isinstance(placement, dict) else None
    if isinstance(ranks, int) and ranks > MAX_STAGES:
        raise UsageError(f"{ranks:,} ranks are more than the studio takes, {MAX_STAGES:,}")
    for part in ("table", "schedule"):
        if isinstance(data.get(part), dict):
            check_file(data[part])
