"""The differences of two timelines as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.simulator.comparison.differences import Both, Differences, Parting
from penstock.simulator.comparison.lateness import Delay
from penstock.simulator.comparison.totals import totals


def encode(differences: Differences) -> dict[str, Any]:
    """Everything, each action of each rank included."""
    return {
        "scale": differences.scale,
        "tolerance": differences.tolerance,
        "other_unit": differences.unlike,
        "other_order": _order(differences),
        "makespan": _both(differences.makespan),
        "bubble": _both(differences.bubble),
        "communication": _both(differences.communication),
        "idle_by_cause": {cause: _both(idle) for cause, idle in differences.idle_by_cause.items()},
        "ranks": [{"busy": _both(busy), "idle": _both(idle)} for busy, idle in zip(differences.busy, differences.idle, strict=True)],
        "stages": list(_stages(differences)),
        "channels": list(_channels(differences)),
        "first": None if differences.first is None else _parting(differences.first),
        "delays": [{"what": t.what, "name": t.name, "count": len(t.delays), "added": t.added} for t in totals(differences.way)],
        "path": [_delay(delay) for delay in differences.way],
        "actions": list(_actions(differences)),
    }


def _both(both: Both) -> dict[str, float | None]:
    return {"predicted": both.predicted, "measured": both.measured, "ratio": both.ratio}


def _order(differences: Differences) -> dict[str, Any] | None:
    if differences.match.other_order is None:
        return None
    rank, predicted, measured = differences.match.other_order
    return {"rank": rank, "predicted": str(predicted), "measured": str(measured)}


def _stages(differences: Differences) -> Iterator[dict[str, Any]]:
    for lengths in differences.lengths:
        parts = [{"stage": stage, "kind": kind.name} for stage, kind in lengths.work]
        yield {"parts": parts, "count": lengths.count, "mean": _both(lengths.mean)}


def _channels(differences: Differences) -> Iterator[dict[str, Any]]:
    for channel in differences.channels:
        ends = {"source": channel.source, "target": channel.target, "kind": channel.kind.name}
        yield {**ends, "count": channel.count, "held": _both(channel.held), "travel": _both(channel.travel)}


def _parting(parting: Parting) -> dict[str, Any]:
    where = {"rank": parting.rank, "action": str(parting.action), "end": _both(parting.end), "late": parting.late}
    return {**where, "path": [_delay(delay) for delay in parting.way]}


def _delay(delay: Delay) -> dict[str, Any]:
    action = None if delay.action is None else str(delay.action)
    who = {"what": delay.what, "rank": delay.rank, "action": action, "source": delay.source}
    return {**who, "predicted": delay.predicted, "measured": delay.measured, "added": delay.added}


def _actions(differences: Differences) -> Iterator[dict[str, Any]]:
    """Each computation: its times, the computation that it waited for, and the parts of its lateness."""
    pair, lateness = differences.match, differences.lateness
    names = [str(action) for row in differences.measured.table for action in row if action.is_compute]
    columns = {
        "predicted_start": pair.predicted.start[pair.action],
        "predicted_end": pair.predicted.end[pair.action],
        "start": pair.measured.start,
        "end": pair.measured.end,
        "late": lateness.late,
        "inherited": np.append(lateness.late, 0.0)[lateness.cause],
        "message": lateness.transit,
        "between": lateness.between,
        "slack": lateness.slack,
        "own": lateness.own,
    }
    rank, cause = pair.measured.rank.tolist(), lateness.cause.tolist()
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    for place, row in enumerate(values):
        waited_for = None if cause[place] < 0 else {"rank": rank[cause[place]], "action": names[cause[place]]}
        yield {"rank": rank[place], "action": names[place], **dict(zip(columns, row, strict=True)), "waited_for": waited_for}
