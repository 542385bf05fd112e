"""The handlers of requests: from the body of a request to plain data, without files or network."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from penstock.errors import FileFormatError, UsageError
from penstock.ir.cluster import Device
from penstock.ir.costs import Costs
from penstock.ir.formats import json_form
from penstock.ir.formats.csv_form import parse_csv
from penstock.ir.formats.reading import parse_json
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.passes.lower import lower
from penstock.passes.offload import Offload
from penstock.planner.request import check_limits
from penstock.schedules.registry import Algorithm, algorithms, parse_name
from penstock.studio.cluster_text import check_cluster
from penstock.studio.document import Document, describe_findings, document, timeline_document
from penstock.studio.limits import LONGEST_NAME, check_file, check_request, check_shape, check_table
from penstock.studio.plan_request import check_plan
from penstock.text.units import parse_size
from penstock.verifier.verify import check, verify

_SIZE = (int, float, str, list, type(None))
_VIEW: dict[str, tuple[type, ...]] = {
    "schedule": (str,),
    "ranks": (int,),
    "microbatches": (int,),
    "chunks": (int, type(None)),
    "options": (dict, type(None)),
    "costs": (dict, type(None)),
    "memory_limit": _SIZE,
    "lower": (bool,),
    "fsdp": (bool,),
    "offload": (str, type(None)),
}
_KINDS = {"int": "int", "float": "number", "str": "text", "bool": "bool"}


def schedules() -> list[dict[str, Any]]:
    """List every schedule with its options."""
    return [_describe(named) for named in algorithms().values()]


def _describe(named: Algorithm) -> dict[str, Any]:
    layout = named.layout
    return {
        "name": named.name,
        "summary": named.summary,
        "bubble": named.bubble,
        "memory": named.memory,
        "options": [{"name": name, "type": _find_type(named, name), "default": value} for name, value in _list_options(named).items()],
        "chunks": {"default": layout.chunks, "fixed": layout.fixed, "step": layout.unit[1]},
        "depends_on_costs": "costs" in named.options,
    }


def _list_options(named: Algorithm) -> dict[str, Any]:
    """The options that have a plain value."""
    return {name: value for name, value in named.options.items() if name != "costs"}


def _find_type(named: Algorithm, option: str) -> str:
    if option == "slices":  # of the shape, not of the generator
        return _KINDS["int"]
    annotation = str(named.generate.__annotations__.get(option, "str"))
    return next((kind for python_type, kind in _KINDS.items() if python_type in annotation), "text")


# A schedule by name ---------------------------------------------------------------------------------------------------


def view(body: Any) -> Document:
    """Make the document of a schedule by name."""
    request = check_request(body, _VIEW, required=("schedule", "ranks", "microbatches"))
    named, request = _read_name(request)
    costs = Costs.from_json(request.get("costs") or {})
    table = _build(named, request, costs)
    limits = check_limits(request.get("memory_limit"), table.ranks)
    source = {"kind": "schedule", "name": named.name, "ranks": table.ranks, "microbatches": table.microbatches}
    source |= {"chunks": table.chunks, "options": request.get("options") or {}, "lower": table.lowered, "fsdp": request.get("fsdp", False)}
    source["offload"] = request.get("offload") or ""
    return document(table, costs, source=source, memory_limit=_simplify_limit(limits), depends_on_costs="costs" in named.options)


def _read_name(request: dict[str, Any]) -> tuple[Algorithm, dict[str, Any]]:
    """The schedule, and the request with the options that its name has in braces."""
    named, options = parse_name(request["schedule"][:LONGEST_NAME])
    chunks = named.take_chunks(options.pop("chunks", None), options)
    twice = [name for name in options if name in (request.get("options") or {})]
    if twice or (chunks is not None and request.get("chunks") not in (None, chunks)):
        raise UsageError(f"{twice[0] if twice else 'chunks'} is given twice: in the name of the schedule and beside it")
    return named, {**request, "chunks": request.get("chunks") or chunks, "options": {**(request.get("options") or {}), **options}}


def _simplify_limit(limits: tuple[float, ...] | None) -> Any:
    """One number if all ranks have the same limit."""
    return limits[0] if limits and len(set(limits)) == 1 else limits


def _build(named: Algorithm, request: dict[str, Any], costs: Costs) -> Table:
    options = _read_schedule_options(named, request, costs)
    shape = named.shape(request["ranks"], request["microbatches"], request.get("chunks"), options.get("slices"))
    check_shape(shape)
    schedule = named.build(shape.ranks, shape.microbatches, shape.chunks, **options)
    check_table(schedule)
    offload = request.get("offload") or None
    if not (request.get("lower") or request.get("fsdp") or offload):
        return schedule
    moved = None if offload is None else Offload.from_options({"share": offload[:LONGEST_NAME]})
    program = lower(schedule, fsdp=request.get("fsdp", False), offload=moved)
    check_table(program)
    return program


def _read_schedule_options(named: Algorithm, request: dict[str, Any], costs: Costs) -> dict[str, Any]:
    """The options of the schedule, with the costs and the memory limit if it depends on them."""
    options: dict[str, Any] = dict(request.get("options") or {})
    for name, value in options.items():
        if name not in _list_options(named):
            raise UsageError(
                f"{named.name} has no option {name[:LONGEST_NAME]!r}; its options: {', '.join(_list_options(named)) or 'none'}"
            )
        _check_option(named, name, value)
    if "costs" in named.options:
        options["costs"] = costs
    limit = request.get("memory_limit")
    if "memory_limit" in named.options and limit is not None:
        options.setdefault("memory_limit", min(map(parse_size, limit)) if isinstance(limit, list) and limit else limit)
    return options


def _check_option(named: Algorithm, name: str, value: Any) -> None:
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "number": (int, float, str), "text": (str,), "bool": (bool,)}
    check_request({name: value}, {name: (*kinds[_find_type(named, name)], type(None))})


# A file ---------------------------------------------------------------------------------------------------------------


def open_file(body: Any) -> Document:
    """Make the document of a file: CSV or one of our JSON forms."""
    request = check_request(body, {"name": (str,), "content": (str,)}, required=("name", "content"))
    return file_document(request["name"][:LONGEST_NAME], request["content"])


def file_document(name: str, text: str) -> Document:
    """Make the document of a file from its name and content."""
    content = text.removeprefix("\ufeff")
    if content.lstrip()[:1] in ("{", "["):
        return _read_json_document(parse_json(content, name, strict=True), name)
    return table_document(parse_csv(io.StringIO(content, newline=""), name, strict=False), name)


def _read_json_document(data: Any, name: str) -> Document:
    from penstock.simulator.timeline_json import decode

    kind = data.get("type") if isinstance(data, dict) else None
    readers: dict[Any, Callable[[], Document]] = {
        "plan": lambda: _plan_document(data, name),
        "job-plan": lambda: _job_plan_document(data, name),
        "timeline": lambda: _build_timeline_document(decode(data, name), name),
        "schedule": lambda: table_document(json_form.decode(data, name), name),
        "program": lambda: table_document(json_form.decode(data, name), name),
    }
    if not isinstance(kind, str) or kind not in readers:
        raise FileFormatError(name, f"not a Penstock schedule, program, timeline or plan: its 'type' is {str(kind)[:LONGEST_NAME]!r}")
    check_file(data)
    return readers[kind]()


def _build_timeline_document(timeline: Any, name: str) -> Document:
    check_table(timeline.table)
    is_measured = timeline.source != "simulated"
    units = ("s", "") if is_measured else ("", "")
    source = {"kind": "measured" if is_measured else "file", "name": name}
    return timeline_document(timeline, source=source, findings=check(timeline.table), units=units)


def _plan_document(data: Any, name: str) -> Document:
    from penstock.planner.plan_file import decode

    plan = decode(data, name)
    check_table(plan.program)
    source = {"kind": "plan", "name": plan.name, "file": name}
    units = (plan.profile.time_unit, "B" if plan.in_bytes else "")
    devices = None if plan.cluster is None else plan.cluster.assign(plan.devices).devices
    limit = _simplify_limit(plan.memory_limit)
    return document(plan.program, plan.costs, source=source, memory_limit=limit, units=units, devices=devices, cluster=plan.cluster)


def _job_plan_document(data: Any, name: str) -> Document:
    """The pipeline of one replica."""
    from penstock.planner.job.plan_file import decode

    plan = decode(data, name)
    program = lower(plan.schedule)
    check_table(program)
    source = {"kind": "plan", "name": plan.name, "file": name}
    return document(program, plan.costs, source=source, memory_limit=plan.job.limit, units=("s", "B"))


def table_document(table: Table, name: str) -> Document:
    """Make the document of a table from a file, with the findings on it."""
    check_table(table)
    return document(table, source={"kind": "file", "name": name}, findings=check(table))


# A schedule that was changed in the page ------------------------------------------------------------------------------

_VERIFY: dict[str, tuple[type, ...]] = {"table": (dict,), "costs": (dict, type(None)), "memory_limit": _SIZE}


def verify_table(body: Any) -> dict[str, Any]:
    """Prove a schedule, given as JSON, and the program that it is lowered to; or give the findings."""
    request = check_request(body, _VERIFY, required=("table",))
    check_file(request["table"])
    table = json_form.decode(request["table"], "the schedule")
    check_table(table)
    if not isinstance(table, Schedule):
        raise UsageError("a schedule is proved here, and lowered to a program afterwards: this is a program")
    costs = Costs.from_json(request.get("costs") or {})
    limits = check_limits(request.get("memory_limit"), table.ranks)
    findings = check(table, costs=costs, memory_limit=limits)
    if findings:
        return {"proof": None, "program": None, **describe_findings(findings)}
    program = lower(table)
    check_table(program)
    return {
        "proof": str(verify(table, costs=costs, memory_limit=limits)),
        "program": str(verify(program)),
        **describe_findings(findings),
    }


# A candidate of a plan ------------------------------------------------------------------------------------------------


def candidate(body: Any) -> Document:
    """Make the document of a candidate that the planner tried, from what `plan_jobs.pack_candidate` keeps."""
    table = json_form.decode(body["table"], body["name"])
    source = {"kind": "plan", "name": body["name"], "index": body["index"]}
    limit, devices = _simplify_limit(body["limits"]), [Device.from_json(device) for device in body["devices"]]
    view = document(table, Costs.from_json(body["costs"]), source=source, memory_limit=limit, units=body["units"], devices=devices or None)
    return {**view, "title": f"{body['name']}, candidate {body['index']}"}


HANDLERS: dict[str, Callable[[Any], Any]] = {
    "view": view,
    "open": open_file,
    "verify": verify_table,
    "candidate": candidate,
    "check-plan": check_plan,
    "cluster": check_cluster,
}
