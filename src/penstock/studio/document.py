"""Documents that the page draws: a schedule or program with its timing graph, as plain data.

The page times the graph itself under any costs, so a document holds no times but measured ones. Columns of numbers are the base64 of
their bytes, which the page reads without parsing digits.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.cluster import Cluster, Device
from penstock.ir.costs import Costs
from penstock.ir.dependencies import Needs
from penstock.ir.formats.json_form import FORMAT
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.ir.table import Table
from penstock.simulator.event_loops.flat import Flat
from penstock.simulator.simulate import simulate
from penstock.simulator.timeline import Timeline
from penstock.studio.limits import check_costs
from penstock.text.numbers import format_count
from penstock.verifier.finding import Finding

VERSION = 1
MOST_FINDINGS = 1000
"""Findings per document: a table that is wrong everywhere is not shown cell by cell."""
FEW = 100_000
"""Fewer actions than this are timed sooner than numba is loaded."""

Document = dict[str, Any]
Limit = float | Sequence[float] | None
Column = dict[str, str]

_GRAPH = ("need_at", "need", "send_at", "gather_at", "gather", "received", "sender", "user", "receive", "slot", "retire")
_TIMES = ("start", "end", "depart", "arrive", "collective_start", "collective_end")


def document(
    table: Table,
    costs: Costs | None = None,
    *,
    source: dict[str, Any],
    memory_limit: Limit = None,
    findings: Iterable[Finding] = (),
    depends_on_costs: bool = False,
    units: tuple[str, str] = ("", ""),
    devices: Sequence[Device] | None = None,
    cluster: Cluster | None = None,
) -> Document:
    """Describe a table for the page; one that cannot run is drawn as a grid with the findings at their places.

    `devices` are those of the ranks, if they are known; `cluster` is the one that they are from, which the page can plan for.
    """
    costs = Costs() if costs is None else costs
    costs.check(table.stages, table.units, table.ranks)
    check_costs(costs.to_json())
    all_findings = list(findings)
    return {
        "format": FORMAT,
        "type": "view",
        "version": VERSION,
        "title": title_of(table),
        "source": source,
        "depends_on_costs": depends_on_costs,
        "ranks": table.ranks,
        "stages": table.stages,
        "microbatches": table.microbatches,
        "slices": table.slices,
        "copies": [list(copy) for copy in table.placement.copies],
        "lowered": table.lowered,
        "table": _describe_file(table),
        "kinds": [kind.name for kind in Kind],
        "entries": _pack_entries(table.rows),
        **_pack_structure(table, costs, any(all_findings)),
        "costs": costs.to_json(),
        "units": dict(zip(("time", "size"), units, strict=True)),
        "devices": None if devices is None else [_describe_device(device) for device in devices],
        "cluster": None if cluster is None else cluster.to_toml(),
        "memory_limit": list(memory_limit) if isinstance(memory_limit, Sequence) else memory_limit,
        "measured": None,
        **describe_findings(all_findings),
    }


def _describe_device(device: Device) -> dict[str, Any]:
    return {"name": device.name, "speed": device.speeds.describe(), "rate": device.speeds.rate, "node": device.node}


def describe_findings(findings: Sequence[Finding]) -> dict[str, Any]:
    """Describe findings for the page: the first of them, and how many there are."""
    return {"findings": [_write_finding(finding) for finding in findings[:MOST_FINDINGS]], "num_findings": len(findings)}


def timeline_document(timeline: Timeline, *, source: dict[str, Any], memory_limit: Limit = None, **options: Any) -> Document:
    """Describe a timeline for the page, with its times if they were measured."""
    view = document(timeline.table, timeline.costs, source=source, memory_limit=memory_limit, **options)
    if timeline.source != "simulated" and view["timed"]:
        view["measured"] = {"source": timeline.source, **{name: pack_floats(getattr(timeline, name)) for name in _TIMES}}
    return view


def title_of(table: Table) -> str:
    """Give the name, ranks, microbatches and slices in one line."""
    name, slices = table.name or type(table).__name__.lower(), f" of {table.slices} slices" if table.slices > 1 else ""
    return f"{name}, {format_count(table.ranks, 'rank')}, {format_count(table.microbatches, 'microbatch')}{slices}"


def _describe_file(table: Table) -> dict[str, Any]:
    """The content of a table's file besides its rows."""
    about: dict[str, Any] = {
        "type": "program" if isinstance(table, Program) else "schedule",
        "name": table.name,
        "placement": table.placement.kind,
        "edges": [list(edge) for edge in table.graph.edges],
    }
    if isinstance(table, Program):
        about |= {"passes": table.passes, "buffers": None if table.buffers is None else table.buffers.to_json()}
    return about


def _pack_entries(rows: Rows) -> dict[str, Any]:
    """Every part of every action; with slices, the microbatch is the number of the slice among those of all microbatches."""
    return {
        "kind": pack_small(rows.kind),
        "stage": pack_ints(rows.stage),
        "microbatch": pack_ints(rows.microbatch),
        "peer": pack_ints(rows.peer),
        "at": pack_ints(np.append(np.flatnonzero(rows.heads), len(rows.codes))),
    }


def _pack_structure(table: Table, costs: Costs, suspect: bool) -> dict[str, Any]:
    """The timing graph, or only the bounds of the rows if the table cannot be timed."""
    if suspect and not _runs(table, costs):
        return {"timed": False, "graph": {"bounds": pack_ints(table.rows.group_offsets)}, "local": None, "messages": None, "channels": []}
    flat = Flat(table)
    graph, messages, group = flat.graph(), flat.messages, table.rows.group
    before, after = (group[np.concatenate(ends)] for ends in zip(table.links.local, _find_further_needs(table, flat), strict=True))
    pairs = np.unique(np.stack((after, before)), axis=1)
    ends = {name: pack_ints(getattr(messages, name)) for name in ("before", "after", "maker", "source", "target", "channel")}
    ends |= {name: pack_ints(getattr(table.deliveries, name)) for name in ("begun", "last")}
    columns = {name: pack_ints(getattr(graph, name)) for name in (*_GRAPH, *(("meet",) if graph.any_meets else ()))}
    return {
        "timed": True,
        "graph": {"bounds": pack_ints(graph.bounds), **columns, "collective": pack_small(graph.collective >= 0)},
        "local": {"after": pack_ints(pairs[0]), "before": pack_ints(pairs[1])},
        "messages": ends,
        "channels": [[source, target, kind.name] for source, target, kind in messages.channels],
    }


def _find_further_needs(table: Table, flat: Flat) -> Needs:
    """Pairs across ranks that no message stands for: further readers of an output, and earlier parts of a sum of gradients."""
    data, messages, span = table.links.data, flat.messages, len(table.rows.codes)
    more = ~np.isin(data.before * span + data.after, messages.before * span + messages.after)
    return Needs(data.before[more], data.after[more])


def _runs(table: Table, costs: Costs) -> bool:
    """Whether every rank reaches its end."""
    inside = (table.rows.stage < table.stages) & (table.rows.microbatch < table.units)
    try:
        simulate(table, costs, engine="plain" if len(table.rows.codes) < FEW else "auto")
    except ScheduleError:
        return False
    return bool(inside.all())


def _write_finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": finding.severity.name.lower(),
        "rank": finding.rank,
        "step": finding.step,
        "action": finding.action,
        "message": finding.message,
        "remedy": finding.remedy,
        "cycle": [list(wait) for wait in finding.cycle],
    }


# Columns --------------------------------------------------------------------------------------------------------------


def pack_small(values: Any) -> Column:
    """Pack whole numbers from -128 to 127."""
    return _pack("i8", "<i1", values)


def pack_ints(values: Any) -> Column:
    """Pack whole numbers of 32 bits."""
    return _pack("i32", "<i4", values)


def pack_floats(values: Any) -> Column:
    """Pack floating-point numbers, to the last bit."""
    return _pack("f64", "<f8", values)


def _pack(name: str, dtype: str, values: Any) -> Column:
    return {name: base64.b64encode(np.asarray(values).astype(dtype).tobytes()).decode("ascii")}
