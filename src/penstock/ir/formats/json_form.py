"""Schedules and programs as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from operator import index
from os import PathLike
from typing import Any, TypeVar

from penstock.errors import FileFormatError, ScheduleError
from penstock.ir.formats import reading
from penstock.ir.formats.csv_form import parse_cells, write_whole
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.program import BufferCounts, Program
from penstock.ir.rows import Rows
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table

FORMAT = reading.FORMAT
VERSION = 1

_FIELDS: dict[str, tuple[type, ...]] = {"name": (str,), "microbatches": (int,), "placement": (dict,), "edges": (list,), "rows": (list,)}
_OPTIONAL_FIELDS: dict[str, tuple[type, ...]] = {"slices": (int,)}
"""Only written if sequences are cut."""
_PROGRAM_FIELDS: dict[str, tuple[type, ...]] = {"passes": (str,), "lowered": (bool,), "buffers": (dict, type(None))}
_Part = TypeVar("_Part")


def encode(table: Table) -> dict[str, Any]:
    """Return everything of a schedule or program as plain data."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "type": "program" if isinstance(table, Program) else "schedule",
        "name": table.name,
        "microbatches": table.microbatches,
        "placement": table.placement.to_json(),
        "edges": [list(edge) for edge in table.graph.edges],
        "rows": [[str(action) for action in row] for row in table],
    }
    if table.slices > 1:
        data["slices"] = table.slices
    if isinstance(table, Program):
        data["passes"] = table.passes
        data["lowered"] = table.lowered
        data["buffers"] = None if table.buffers is None else table.buffers.to_json()
    return data


def decode(data: Any, file: str = "JSON") -> Table:
    """The reverse of `encode`."""
    check_header(data, file, "schedule", "program")
    fields = _FIELDS | _PROGRAM_FIELDS if data["type"] == "program" else _FIELDS
    reading.check_fields(data, fields | _OPTIONAL_FIELDS, error=partial(FileFormatError, file), required=fields)
    try:
        return _decode(data, file)
    except ScheduleError as error:
        raise FileFormatError(file, str(error)) from None


def check_header(data: Any, file: str, *types: str) -> None:
    """Refuse data that is not a Penstock file of one of these types and of a known version."""
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("type") not in types:
        kind = data.get("type") if isinstance(data, dict) and data.get("format") == FORMAT else None
        reason = f"it is a {kind}" if isinstance(kind, str) else "'format' and 'type' say otherwise"
        raise FileFormatError(file, f"not a Penstock {' or '.join(types)}: {reason}")
    if data.get("version") != VERSION:
        raise FileFormatError(file, f"version {data.get('version')!r}: this Penstock reads version {VERSION}")


def _decode(data: dict[str, Any], file: str) -> Table:
    slices = data.get("slices", 1)
    if slices < 1:
        raise FileFormatError(file, f"'slices' must be at least 1, got {slices}")
    rows = _read_rows(file, data["rows"], slices)
    placement = _read(file, data, "placement", Placement.from_json)
    graph = _read(file, data, "edges", lambda edges: StageGraph(placement.stages, tuple((index(a), index(b)) for a, b in edges)))
    if len(rows) != placement.ranks:
        raise FileFormatError(file, f"there are {len(rows)} rows for {placement.ranks} ranks")
    if data["type"] == "schedule":
        return Schedule.from_rows(rows, placement, data["microbatches"], graph=graph, name=data["name"], slices=slices)
    buffers = _read(file, data, "buffers", lambda value: None if value is None else BufferCounts.from_json(value))
    return Program(
        rows,
        placement,
        data["microbatches"],
        graph=graph,
        name=data["name"],
        passes=data["passes"],
        buffers=buffers,
        lowered=data["lowered"],
        slices=slices,
    )


def _read(file: str, data: dict[str, Any], name: str, read: Callable[[Any], _Part]) -> _Part:
    """Read one field; an error in it is an error of the file."""
    try:
        return read(data[name])
    except KeyError as error:
        raise FileFormatError(file, f"{name!r}: there is no {error.args[0]!r}") from None
    except (TypeError, AttributeError, IndexError, ValueError) as error:
        raise FileFormatError(file, f"{name!r}: {error}") from None


def _read_rows(file: str, rows: list[Any], slices: int) -> Rows:
    for number, row in enumerate(rows):
        if not isinstance(row, list):
            raise FileFormatError(file, f"a row is a list of actions, got {row!r}", row=number)
        for place, cell in enumerate(row):
            if not isinstance(cell, str):
                raise FileFormatError(file, f"{cell!r} is not an action: it must be text", row=number, cell=place)
    return parse_cells(file, rows, slices).rows


def write_json(table: Table, path: str | PathLike[str]) -> None:
    write_whole(path, json.dumps(encode(table), indent=1) + "\n")


def read_json(path: str | PathLike[str]) -> Table:
    """The schedule or program in a file; of a plan, or of the plan of a whole job, its schedule."""
    data = reading.read_json(path)
    of_plan = isinstance(data, dict) and data.get("type") in ("plan", "job-plan")
    return decode(data.get("schedule") if of_plan else data, os.fspath(path))
