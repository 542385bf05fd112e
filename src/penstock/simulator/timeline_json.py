"""Timelines as JSON."""

from __future__ import annotations

import os
import sys
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CostsError, FileFormatError
from penstock.ir.costs import Costs
from penstock.ir.formats import json_form, reading
from penstock.ir.table import Table
from penstock.simulator.event_loops.flat import Flat
from penstock.simulator.timeline import Timeline
from penstock.text.units import Units

_MOST = sys.float_info.max
_COLUMNS = ("start", "end", "depart", "arrive", "collective_start", "collective_end")
_FIELDS: dict[str, tuple[type, ...]] = {
    "source": (str,),
    "costs": (dict,),
    "table": (dict,),
    **dict.fromkeys(("held_by", *_COLUMNS), (list,)),
}


def encode(timeline: Timeline) -> dict[str, Any]:
    """Plain data: what was run, the costs, and the times; the figures are there for readers and are not read back."""
    return {
        "format": json_form.FORMAT,
        "version": json_form.VERSION,
        "type": "timeline",
        "source": timeline.source,
        "units": {"time": timeline.units.time_unit, "bytes": timeline.units.in_bytes},
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
    error = partial(FileFormatError, file)
    reading.check_fields(data, _FIELDS | {"units": (dict,)}, error=error, required=_FIELDS)
    measured = {"time": "" if data["source"] == "simulated" else "s", "bytes": False}
    units = reading.check_fields(
        data.get("units", measured), {"time": (str,), "bytes": (bool,)}, error=lambda text: error(f"'units': {text}")
    )
    table = json_form.decode(data["table"], file)
    flat = Flat(table)
    nodes, messages = flat.num_nodes, len(flat.messages.before)
    counts = (nodes, nodes, messages, messages, nodes, nodes)
    columns = {name: _read_times(data[name], name, count, file) for name, count in zip(_COLUMNS, counts, strict=True)}
    for start, end in zip(_COLUMNS[::2], _COLUMNS[1::2], strict=True):
        if (columns[end] < columns[start]).any():
            raise FileFormatError(file, f"{end!r} has a time before its {start!r}")
    held_by = _read_held_by(data["held_by"], messages, file)
    costs, source = _read_costs(data["costs"], table, file), data["source"]
    return Timeline(table, costs, **columns, held_by=held_by, source=source, units=Units(units["time"], units["bytes"]))


def _read_times(values: list[Any], name: str, count: int, file: str) -> NDArray[np.float64]:
    if not all(type(value) in (int, float) and abs(value) <= _MOST for value in values):
        raise FileFormatError(file, f"{name!r} must be a list of times, finite numbers")
    if len(values) != count:
        raise FileFormatError(file, f"{name} has {len(values)} times, but there are {count} to time")
    return np.array(values, dtype=np.float64)


def _read_held_by(values: list[Any], messages: int, file: str) -> NDArray[np.int32]:
    if not all(type(value) is int and -1 <= value < messages for value in values):
        raise FileFormatError(file, f"'held_by' must be a list of messages, -1 to {messages - 1}")
    if len(values) not in (0, messages):
        raise FileFormatError(file, f"'held_by' has {len(values)} values for {messages} messages: give none or one each")
    return np.array(values, dtype=np.int32)


def _read_costs(data: Any, table: Table, file: str) -> Costs:
    try:
        costs = Costs.from_json(data)
        costs.check(table.stages, table.units, table.ranks)
    except CostsError as error:
        raise FileFormatError(file, f"'costs': {error}") from None
    return costs


def read(path: str | PathLike[str]) -> Timeline:
    return decode(reading.read_json(path), os.fspath(path))
