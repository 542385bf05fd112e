"""Timelines as JSON."""

from __future__ import annotations

import json
import os
from os import PathLike
from typing import Any

import numpy as np

from penstock.errors import FileFormatError
from penstock.ir import json_form
from penstock.ir.costs import Costs
from penstock.simulator.timeline import Timeline

_COLUMNS = ("start", "end", "depart", "arrive", "collective_start", "collective_end")


def encode(timeline: Timeline) -> dict[str, Any]:
    """Plain data: what was run, the costs, and the times; the figures are there for readers and are not read back."""
    return {
        "format": json_form.FORMAT,
        "version": json_form.VERSION,
        "type": "timeline",
        "source": timeline.source,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "peak_memory": timeline.peak_memory,
        "costs": timeline.costs.to_json(),
        "table": json_form.encode(timeline.table),
        "held_by": timeline.held_by.tolist(),
        **{name: getattr(timeline, name).tolist() for name in _COLUMNS},
    }


def decode(data: Any, file: str = "JSON") -> Timeline:
    """The reverse of `encode`."""
    json_form.check_header(data, file, "timeline")
    try:
        table = json_form.decode(data["table"], file)
        columns = {name: np.array(data[name], dtype=np.float64) for name in _COLUMNS}
        held_by = np.array(data["held_by"], dtype=np.int32)
        timeline = Timeline(table, Costs.from_json(data["costs"]), held_by=held_by, source=data["source"], **columns)
    except KeyError as error:
        raise FileFormatError(file, f"there is no {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, FileFormatError) else FileFormatError(file, str(error)) from None
    nodes, messages = int(table.rows.group_offsets[-1]), len(timeline.messages.before)
    for name, wanted in zip(_COLUMNS, (nodes, nodes, messages, messages, nodes, nodes), strict=True):
        if getattr(timeline, name).shape != (wanted,):
            raise FileFormatError(file, f"{name} has {len(getattr(timeline, name))} times, but there are {wanted} to time")
    return timeline


def read(path: str | PathLike[str]) -> Timeline:
    file = os.fspath(path)
    with open(path, encoding="utf-8") as stream:
        try:
            data = json.load(stream)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise FileFormatError(file, f"not a JSON file: {error}") from None
    return decode(data, file)
