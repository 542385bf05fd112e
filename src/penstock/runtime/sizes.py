"""The table of what a rank sends, for the debug log: written in steps in which anything of it is new."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from penstock.ir.action import Action
from penstock.runtime.group import Outbox, Route


def new_sizes(sends: Mapping[Route, Sequence[Action]], outboxes: Mapping[Route, Outbox]) -> str:
    """A line for each run of messages of one stage that look the same; empty where all look as they did."""
    rows = [row for route, outbox in outboxes.items() for row in _rows(route, sends[route], outbox)]
    if not rows:
        return ""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows)


def _rows(route: Route, sends: Sequence[Action], outbox: Outbox) -> Iterator[tuple[str, ...]]:
    told = [(sends[number], form) for number, form in outbox.learned()]
    for (_, said, size), run in groupby(told, key=lambda one: (one[0].stage, str(one[1]), one[1].size)):
        actions = [action for action, _ in run]
        last = f" to {actions[-1]}" if len(actions) > 1 else ""
        yield f"{actions[0]}{last}", f"{route[2]} to rank {route[1]}", said, f"{size} bytes", f"{len(actions)} times"
