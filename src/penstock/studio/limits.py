"""How much the studio does for one request: whoever reaches it must not be able to fill the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.errors import UsageError, nearest
from penstock.ir.codes import MAX_STAGES
from penstock.ir.table import Table
from penstock.schedules.registry import Shape

MOST_ACTIONS = 1_000_000
MOST_CELLS = 4 * MOST_ACTIONS
"""Stages times microbatches, which tables are made of even where there are few actions."""
MOST_BYTES = 64 << 20
"""Of a request's body."""
MOST_LAYERS = 10_000
MOST_PLANNED = 200_000
"""Actions of a schedule that is planned for: dozens of such are timed."""
MOST_SECONDS = 600.0
"""That a plan may be searched for."""
ANSWER_SECONDS = 30.0
"""That any other request may take."""
LONGEST_NAME = 200
MOST_COST = 1e24
"""Of any cost, and one over it the least but 0: beyond, nothing can be drawn to scale."""


def check_costs(costs: dict[str, Any]) -> None:
    """Refuse costs, as `Costs.to_json` gives them, that cannot be drawn."""
    for name, value in costs.items():
        for number in _numbers(value):
            if number and not 1 / MOST_COST <= number <= MOST_COST:
                raise UsageError(f"{name} is {number:g}: the studio draws costs from {1 / MOST_COST:g} to {MOST_COST:g}, and 0")


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, (int, float)):
        yield float(value)


def check_actions(count: int, most: int = MOST_ACTIONS) -> None:
    if count > most:
        raise UsageError(f"{count:,} actions are more than the studio takes, {most:,}: choose fewer ranks, chunks or microbatches")


def check_shape(shape: Shape) -> None:
    """Refuse a schedule that is too large before it is built: every microbatch has two actions a stage at least."""
    check_actions(2 * shape.ranks * shape.chunks * shape.microbatches)


def check_table(table: Table) -> None:
    """Refuse a table that is too large to be drawn."""
    cells = table.stages * table.microbatches
    if cells > MOST_CELLS:
        raise UsageError(f"{table.stages:,} stages of {table.microbatches:,} microbatches are more than the studio takes")
    check_actions(len(table.rows.codes))


def check_file(data: dict[str, Any]) -> None:
    """Refuse counts in a file that are too large to be read, before anything is made of them."""
    placement = data.get("placement")
    ranks = placement.get("ranks") if isinstance(placement, dict) else None
    if isinstance(ranks, int) and ranks > MAX_STAGES:
        raise UsageError(f"{ranks:,} ranks are more than the studio takes, {MAX_STAGES:,}")
    for part in ("table", "schedule"):
        if isinstance(data.get(part), dict):
            check_file(data[part])


def check_fields(body: Any, known: dict[str, tuple[type, ...]], needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """The body of a request: an object with these fields and no others, each of one of its types."""
    if not isinstance(body, dict):
        raise UsageError(f"the request must be an object, got {_name(body)}")
    for name, value in body.items():
        if name not in known:
            raise UsageError(f"there is no field {name!r}: {nearest(name[:LONGEST_NAME], known)}")
        if type(value) not in known[name]:
            raise UsageError(f"{name!r} must be {' or '.join(_NAMES[kind] for kind in known[name])}, got {_name(value)}")
    for name in needed:
        if body.get(name) is None:
            raise UsageError(f"{name!r} is missing")
    return body


_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _name(value: Any) -> str:
    return _NAMES.get(type(value), type(value).__name__)
