"""Schedules and programs as JSON."""

from __future__ import annotations

import json
import os
from os import PathLike
from typing import Any

from penstock.errors import FileFormatError
from penstock.ir.csv_form import parse_rows, write_whole
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.program import Buffers, Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table

FORMAT = "penstock"
VERSION = 1


def encode(table: Table) -> dict[str, Any]:
    """Plain data with everything a schedule or program is."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "type": "program" if table.lowered else "schedule",
        "name": table.name,
        "microbatches": table.microbatches,
        "placement": table.placement.to_json(),
        "skips": [list(edge) for edge in table.graph.skips],
        "rows": [[str(action) for action in row] for row in table],
    }
    if isinstance(table, Program):
        data["passes"] = table.passes
        data["buffers"] = None if table.buffers is None else table.buffers.to_json()
    return data


def decode(data: Any, file: str = "JSON") -> Table:
    """The reverse of `encode`."""
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("type") not in ("schedule", "program"):
        raise FileFormatError(file, "not a Penstock schedule or program: 'format' and 'type' say otherwise")
    if data.get("version") != VERSION:
        raise FileFormatError(file, f"version {data.get('version')!r}: this Penstock reads version {VERSION}")
    try:
        return _decode(data, file)
    except FileFormatError:
        raise
    except KeyError as error:
        raise FileFormatError(file, f"there is no {error.args[0]!r}") from None
    except (TypeError, AttributeError, IndexError, ValueError) as error:
        raise FileFormatError(file, str(error)) from None


def _decode(data: dict[str, Any], file: str) -> Table:
    rows = parse_rows(file, data["rows"]).rows
    placement = Placement.from_json(data["placement"])
    graph = StageGraph.chain(placement.stages, data["skips"])
    if len(rows) != placement.ranks:
        raise FileFormatError(file, f"there are {len(rows)} rows for {placement.ranks} ranks")
    if data["type"] == "schedule":
        return Schedule.from_rows(rows, placement, data["microbatches"], graph=graph, name=data["name"])
    buffers = None if data["buffers"] is None else Buffers.from_json(data["buffers"])
    return Program(rows, placement, data["microbatches"], graph=graph, name=data["name"], passes=data["passes"], buffers=buffers)


def write_json(table: Table, path: str | PathLike[str]) -> None:
    write_whole(path, json.dumps(encode(table), indent=1) + "\n")


def read_json(path: str | PathLike[str]) -> Table:
    file = os.fspath(path)
    with open(path, encoding="utf-8") as stream:
        try:
            data = json.load(stream)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise FileFormatError(file, f"not a JSON file: {error}") from None
    return decode(data, file)
