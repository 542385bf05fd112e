"""Plans of whole jobs as JSON. A plan that is read is timed and proved again: a file is not its own proof."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import FileFormatError, PenstockError
from penstock.ir.formats import json_form, reading
from penstock.ir.formats.csv_form import write_whole
from penstock.ir.schedule import Schedule
from penstock.planner.candidate import Candidate, Verdict
from penstock.planner.job.configuration import Configuration
from penstock.planner.job.costs import make_costs
from penstock.planner.job.job import Job
from penstock.planner.job.pipelines import ScheduleTrial
from penstock.planner.job.report import Alternative, SearchSummary, TriedSchedule
from penstock.planner.job.search import bound_seconds, list_configurations
from penstock.planner.problem import Problem

if TYPE_CHECKING:
    from penstock.planner.job.plan import JobPlan

_FIELDS: dict[str, tuple[type, ...]] = {
    "job": (dict,),
    "configuration": (dict,),
    "schedule_name": (str,),
    "partition": (list,),
    "recomputed_layers": (list,),
    "seconds": (int, float),
    "bound": (int, float),
    "verdicts": (dict,),
    "schedules": (list,),
    "alternatives": (list,),
    "schedule": (dict,),
}
"""The fields that a plan is read from, with their types; the others are there for readers."""


def encode(plan: JobPlan) -> dict[str, Any]:
    """The plan as plain data."""
    return {
        "format": json_form.FORMAT,
        "version": json_form.VERSION,
        "type": "job-plan",
        "job": plan.job.to_json(),
        "configuration": plan.configuration.to_json(),
        "schedule_name": plan.name,
        "microbatches": plan.microbatches,
        "partition": list(plan.partition),
        "recomputed": list(plan.recomputed),
        "recomputed_layers": list(plan.recomputed_layers),
        "seconds": plan.seconds,
        "samples_per_second": plan.samples_per_second,
        "tokens_per_second": plan.tokens_per_second,
        "flops_per_gpu": plan.flops_per_gpu,
        "utilization": plan.utilization,
        "bubble": plan.predicted.bubble,
        "peak_memory": list(plan.predicted.peak_memory),
        "memory_limit": plan.job.limit,
        "bound": plan.bound,
        "verdicts": dict(plan.search.verdicts),
        "schedules": [tried.to_json() for tried in plan.search.schedules],
        "alternatives": [alternative.to_json() for alternative in plan.search.alternatives],
        "schedule": json_form.encode(plan.schedule),
        "costs": plan.costs.to_json(),
    }


def decode(data: Any, file: str = "JSON") -> JobPlan:
    """The reverse of `encode`."""
    json_form.check_header(data, file, "job-plan")
    reading.check_fields(data, _FIELDS, error=partial(FileFormatError, file), required=_FIELDS)
    schedule = json_form.decode(data["schedule"], file)
    if not isinstance(schedule, Schedule):
        raise FileFormatError(file, "'schedule' holds a lowered program: a plan has a schedule")
    try:
        plan = _decode(data, schedule, file)
        if not plan.excess:  # a prediction may be over the limit
            plan.proof  # noqa: B018 - refuses a schedule with mistakes
    except FileFormatError:
        raise
    except PenstockError as error:
        raise FileFormatError(file, str(error)) from None
    if not math.isclose(data["seconds"], plan.seconds, rel_tol=1e-9):
        raise FileFormatError(
            file,
            f"it says that it takes {data['seconds']!r} s, but its schedule takes {plan.seconds:.6g} s: it was changed by hand, plan again",
        )
    if not 0 <= plan.bound <= plan.seconds * (1 + 1e-9):
        raise FileFormatError(file, f"its bound of {plan.bound:.6g} s is false: its schedule takes {plan.seconds:.6g} s; plan again")
    return plan


def _decode(data: dict[str, Any], schedule: Schedule, file: str) -> JobPlan:
    from penstock.planner.job.plan import JobPlan

    refuse = partial(FileFormatError, file)
    job, configuration = Job.from_json(data["job"]), _decode_configuration(data["configuration"], file)
    list_configurations(job, {name: (value,) for name, value in configuration.to_json().items()})  # refuses impossible degrees
    costs, partition, flags = make_costs(job, configuration), tuple(data["partition"]), data["recomputed_layers"]
    (first, last), layers = costs.ends, job.layers + sum(costs.ends)
    whole = all(type(size) is int and size > 0 for size in partition)
    if not whole or len(partition) != schedule.stages or sum(partition) != layers:
        raise refuse(f"'partition' {list(partition)} does not share {layers} layers among {schedule.stages} stages")
    inner = flags[first : layers - last]
    if len(flags) != layers or not all(isinstance(flag, bool) for flag in flags) or sum(inner) != sum(flags):
        raise refuse(f"'recomputed_layers' must be true or false for each of {layers} layers, and false for embedding and head")
    microbatches = job.batch // (configuration.data * configuration.microbatch)
    if (schedule.ranks, schedule.microbatches, schedule.slices) != (configuration.pipeline, microbatches, 1):
        raise refuse(
            f"'schedule' has {schedule.describe()}, but the configuration asks for {configuration.pipeline} ranks and {microbatches} "
            "microbatches of whole sequences"
        )
    shared = (0 in schedule.spread_stages, schedule.stages - 1 in schedule.spread_stages)
    if shared != configuration.shared_ends:
        raise refuse(
            f"'schedule' shares {_name_ends(shared)} among the pipeline ranks, but the configuration has vocabulary="
            f"{configuration.vocabulary!r}, which shares {_name_ends(configuration.shared_ends)}"
        )
    never, limits = (False,) * schedule.stages, (job.limit,) * schedule.ranks
    problem = Problem.cut(costs.profile(inner), schedule.placement, microbatches, partition, never, limits)
    candidate = Candidate.time(data["schedule_name"], problem, schedule)
    pipeline = ScheduleTrial(candidate.name, candidate, tuple(inner), bound_seconds(costs, microbatches))
    return JobPlan(job, configuration, pipeline, loaded=_decode_search(data, file))


def _name_ends(shared: tuple[bool, bool]) -> str:
    return " and ".join(name for name, is_shared in zip(("the embedding", "the head"), shared, strict=True) if is_shared) or "nothing"


def _decode_configuration(data: dict[str, Any], file: str) -> Configuration:
    def refuse(words: str) -> FileFormatError:
        return FileFormatError(file, f"'configuration': {words}")

    reading.check_fields(data, {field.name: None for field in fields(Configuration)}, error=refuse, closed=True)
    try:
        return Configuration(**data)
    except PenstockError as error:
        raise refuse(str(error)) from None


def _decode_search(data: dict[str, Any], file: str) -> SearchSummary:
    error = partial(FileFormatError, file)
    known = {verdict.value for verdict in Verdict}
    for name, count in data["verdicts"].items():
        if name not in known or type(count) is not int or count < 0:
            raise error(f"'verdicts' counts configurations by verdict, got {name!r}: {count!r}")
    number: tuple[type, ...] = (int, float)
    tried: dict[str, tuple[type, ...] | None] = {"name": (str,), "recomputed": (int,)}
    tried |= dict.fromkeys(("seconds", "bubble", "peak", "bound", "excess"), number)
    other: dict[str, tuple[type, ...] | None] = {"dimension": (str,), "value": None, "words": (str,)}
    other |= dict.fromkeys(("seconds", "bound", "excess"), number)
    for entry in data["schedules"]:
        reading.check_fields(entry, tried, error=error, required=("name",), closed=True)
    for entry in data["alternatives"]:
        reading.check_fields(entry, other, error=error, required=("dimension", "value", "bound", "words"), closed=True)
    alternatives = tuple(Alternative(**{"seconds": None, "excess": None, **entry}) for entry in data["alternatives"])
    schedules = tuple(TriedSchedule(**entry) for entry in data["schedules"])
    return SearchSummary(float(data["bound"]), schedules, alternatives, dict(data["verdicts"]))


def write(plan: JobPlan, path: str | PathLike[str]) -> None:
    if Path(path).suffix.lower() != ".json":
        raise FileFormatError(os.fspath(path), f"the suffix {Path(path).suffix!r} is not .json")
    write_whole(path, json.dumps(encode(plan), indent=1) + "\n")


def read(path: str | PathLike[str]) -> JobPlan:
    return decode(reading.read_json(path), os.fspath(path))
