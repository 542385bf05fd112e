"""The schedule of a case."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import penstock as ps
from fuzz.case import Case
from penstock.ir.formats.files import save
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.table import Table


def build_table(case: Case) -> Table:
    """The schedule or program of a case; raises if there is none of this shape."""
    schedule: Table = _load_order(case) if case.form == "order" else ps.schedule(case.schedule, **_shape(case))
    if case.form == "csv":
        schedule = _reload(schedule, ".csv")
    graph = StageGraph.chain(schedule.stages, [skip for skip in case.skips if skip[1] < schedule.stages])
    if not graph.is_chain:
        schedule = schedule.with_graph(graph)  # type: ignore[attr-defined]
    if case.form == "json":
        schedule = _reload(schedule, ".json")
    if case.form.startswith("program"):
        schedule = ps.lower(schedule, receive=("paired", "just-in-time", 2)[case.number % 3])  # type: ignore[arg-type]
    return _reload(schedule, ".csv" if graph.is_chain else ".json") if case.form == "program-csv" else schedule


def _shape(case: Case) -> dict[str, Any]:
    return {"ranks": case.ranks, "microbatches": case.microbatches, "chunks": case.chunks}


def _reload(table: Table, suffix: str) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"order{suffix}")
        save(table, path)
        return ps.load(path)


def _load_order(case: Case) -> Table:
    """Written-out rows, by way of a file as users keep them."""
    ranks = len(case.order)
    placement = {"kind": "custom", "ranks": ranks, "copies": case.placement}
    stages = len(case.placement[0])
    chain = [[stage, stage + 1] for stage in range(stages - 1)]
    rows = [row.split(",") for row in case.order]
    whole = {"format": "penstock", "version": 1, "type": "schedule", "name": case.schedule, "microbatches": case.microbatches}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "order.json")
        path.write_text(json.dumps(whole | {"placement": placement, "edges": chain, "rows": rows}))
        return ps.load(path)


def write_order(table: Table) -> dict[str, Any]:
    """The fields of a case that hold these rows."""
    order = tuple(",".join(map(str, row)) for row in table)
    copies = tuple(tuple(map(int, copy)) for copy in table.placement.copies)
    return {"form": "order", "order": order, "placement": copies, "ranks": table.ranks, "microbatches": table.microbatches, "chunks": None}


def keeps_order(table: Table, *kinds: Kind) -> bool:
    """Whether each stage runs its actions of these kinds in the order of microbatches."""
    for row in table:
        last: dict[int, int] = {}
        for action in row:
            for part in action.parts:
                if part.kind in kinds and part.microbatch is not None:
                    if part.microbatch < last.get(part.stage, -1):
                        return False
                    last[part.stage] = part.microbatch
    return True


def replace_count(table: Table, count: int) -> Table:
    """The schedule for another count of microbatches, if it can be had."""
    remake = getattr(table, "remake", None)
    return table if remake is None or count == table.microbatches else remake(count)


def sums_in_order(table: Table) -> bool:
    """Whether each stage's gradients are summed in the order of microbatches."""
    return len(table.placement.copies) == 1 and keeps_order(table, Kind.B, Kind.I) and keeps_order(table, Kind.B, Kind.W)
