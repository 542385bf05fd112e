"""Plans as JSON. A plan that is read is timed and proved again: a file is not its own proof."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from penstock.errors import FileFormatError, PenstockError
from penstock.ir.cluster import Cluster
from penstock.ir.formats import json_form, reading
from penstock.ir.formats.csv_form import write_whole
from penstock.ir.schedule import Schedule
from penstock.planner.candidate import Candidate
from penstock.planner.profile import Profile
from penstock.planner.request import check_limits

if TYPE_CHECKING:
    from penstock.planner.plan import Plan

_FIELDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "barrier": (bool,),
    "split": (bool,),
    "partition": (list,),
    "recompute": (list,),
    "memory_limit": (list, type(None)),
    "bounds": (dict,),
    "overall_bound": (int, float),
    "p95": (int, float, type(None)),
    "jitter": (int, float),
    "chosen": (int,),
    "in_bytes": (bool,),
    "notes": (list,),
    "profile": (dict,),
    "schedule": (dict,),
    "alternatives": (list,),
}
"""The fields that a plan is read from, with their types."""


_OPTIONAL: dict[str, tuple[type, ...]] = {
    "host_memory_limit": (list, type(None)),
    "slice_lengths": (list,),
    "cluster": (dict,),
    "devices": (list,),
    "row_shares": (list,),
}
"""Fields that some files lack."""


def encode(plan: Plan) -> dict[str, Any]:
    """The plan as plain data; those up to the costs are there for readers."""
    values = {name: getattr(plan, name) for name in _FIELDS}
    sliced = {"slices": plan.slices, "slice_lengths": list(plan.slice_lengths)} if plan.slices > 1 else {}
    return {
        "format": json_form.FORMAT,
        "version": json_form.VERSION,
        "type": "plan",
        "objective": plan.objective,
        "makespan": plan.predicted.makespan,
        "bubble": plan.predicted.bubble,
        "peak_memory": plan.predicted.peak_memory,
        "bound": plan.bound,
        "gap": plan.gap,
        "overall_gap": plan.overall_gap,
        "tally": plan.tally,
        "runners_up": [
            {**candidate.to_json(), "compared": candidate.compare(plan.alternatives[plan.chosen])} for candidate in plan.runners_up
        ],
        "costs": plan.costs.to_json(),
        **{name: list(value) if isinstance(value, tuple) else value for name, value in values.items()},
        **({} if plan.host_memory_limit is None else {"host_memory_limit": list(plan.host_memory_limit)}),
        **sliced,
        **({} if plan.cluster is None else {"devices": list(plan.devices), "cluster": plan.cluster.to_json()}),
        **({"row_shares": list(plan.row_shares)} if plan.row_shares else {}),
        "profile": plan.profile.to_json(),
        "schedule": json_form.encode(plan.schedule),
        "alternatives": [candidate.to_json() for candidate in plan.alternatives],
    }


def decode(data: Any, file: str = "JSON") -> Plan:
    """The reverse of `encode`."""
    json_form.check_header(data, file, "plan")
    reading.check_fields(data, {**_FIELDS, **_OPTIONAL}, error=partial(FileFormatError, file), required=_FIELDS)
    schedule = json_form.decode(data["schedule"], file)
    if not isinstance(schedule, Schedule):
        raise FileFormatError(file, "'schedule' holds a lowered program: a plan has a schedule")
    try:
        plan = _decode(data, schedule, file)
        plan.proof  # noqa: B018 - refuses a schedule with mistakes
        objective = plan.objective
    except FileFormatError:
        raise
    except (PenstockError, AssertionError) as error:  # a false bound raises an AssertionError
        raise FileFormatError(file, str(error)) from None
    claimed = data.get("objective")
    if not isinstance(claimed, (int, float)) or not math.isclose(claimed, objective, rel_tol=1e-9, abs_tol=1e-12):
        raise FileFormatError(
            file, f"it says that it takes {claimed!r}, but its schedule takes {objective:.6g}: it was changed by hand, plan again"
        )
    _check_claims(plan, file)
    return plan


def _check_claims(plan: Plan, file: str) -> None:
    """Refuse false claims: bounds above the objective, a choice out of range, numbers that are not finite."""
    for name, bound in {**plan.bounds, "overall_bound": plan.overall_bound}.items():
        if not 0 <= bound <= plan.objective * (1 + 1e-9):
            raise FileFormatError(file, f"its bound {name!r} of {bound:.6g} is false: its schedule takes {plan.objective:.6g}; plan again")
    if not 0 <= plan.chosen < len(plan.alternatives):
        raise FileFormatError(file, f"'chosen' is {plan.chosen}, but there are {len(plan.alternatives)} alternatives")
    for name, value in (("p95", plan.p95), ("jitter", plan.jitter)):
        if value is not None and not 0 <= value < math.inf:
            raise FileFormatError(file, f"{name!r} must be a number of at least 0, got {value!r}")


def _decode(data: dict[str, Any], schedule: Schedule, file: str) -> Plan:
    from penstock.planner.plan import Plan

    profile = Profile.from_json(data["profile"])
    partition = tuple(data["partition"])
    whole = all(type(size) is int and size > 0 for size in partition)
    if not whole or len(partition) != schedule.stages or sum(partition) != len(profile):
        raise FileFormatError(file, f"'partition' {list(partition)} does not share {len(profile)} layers among {schedule.stages} stages")
    recompute = tuple(data["recompute"])
    if len(recompute) != schedule.stages or not all(isinstance(flag, bool) for flag in recompute):
        raise FileFormatError(file, f"'recompute' must be true or false for each of the {schedule.stages} stages")
    if not data["bounds"] or not all(type(value) in (int, float) for value in data["bounds"].values()):
        raise FileFormatError(file, f"'bounds' must be numbers by name, got {data['bounds']!r}")
    lengths = tuple(data.get("slice_lengths", ()))
    if len(lengths) != (schedule.slices if schedule.slices > 1 else 0):
        raise FileFormatError(file, f"'slice_lengths' {list(lengths)} are not the tokens of each of {schedule.slices} slices")
    cluster = None if "cluster" not in data else Cluster.from_json(data["cluster"])
    devices = tuple(data.get("devices", ()))
    wanted = set() if cluster is None else set(range(schedule.ranks))
    if len(devices) != len(wanted) or not all(type(device) is int for device in devices) or set(devices) != wanted:
        raise FileFormatError(file, f"'devices' {list(devices)} does not name the device of each of the {schedule.ranks} ranks once")
    return Plan(
        **{name: data[name] for name in ("name", "barrier", "split", "chosen", "in_bytes")},
        **{name: None if data[name] is None else float(data[name]) for name in ("overall_bound", "p95", "jitter")},  # type: ignore[arg-type]
        profile=profile,
        schedule=schedule,
        partition=partition,
        recompute=recompute,
        memory_limit=check_limits(data["memory_limit"], schedule.ranks),
        bounds={name: float(value) for name, value in data["bounds"].items()},
        alternatives=tuple(Candidate.from_json(entry, file) for entry in data["alternatives"]),
        notes=tuple(map(str, data["notes"])),
        host_memory_limit=check_limits(data.get("host_memory_limit"), schedule.ranks, "host_memory_limit"),
        slice_lengths=lengths,
        cluster=cluster,
        devices=devices,
        row_shares=_read_row_shares(data, profile, cluster, file),
    )


def _read_row_shares(data: dict[str, Any], profile: Profile, cluster: Cluster | None, file: str) -> tuple[float, ...]:
    """The part of the vocabulary's rows that each rank takes; nothing in files of plans with equal parts."""
    if "row_shares" not in data:
        return ()
    if cluster is None or not profile.shares:
        raise FileFormatError(file, "'row_shares' are for a vocabulary that is spread over the devices of a cluster: leave them out")
    shares = data["row_shares"]
    whole = all(type(share) in (int, float) and 0 <= share <= 1 for share in shares)
    if not whole or len(shares) != len(cluster) or not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
        total = f", in all {sum(shares):.6g}" if whole else ""
        raise FileFormatError(file, f"'row_shares' {shares} are not the parts of each of {len(cluster)} ranks, 1 in all{total}: plan again")
    return tuple(map(float, shares))


def write(plan: Plan, path: str | PathLike[str]) -> None:
    write_whole(path, json.dumps(encode(plan), indent=1) + "\n")


def read(path: str | PathLike[str]) -> Plan:
    return decode(reading.read_json(path), os.fspath(path))
