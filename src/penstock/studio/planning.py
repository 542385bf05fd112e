"""A plan as it is asked for by a request, and what is told of it while it is made."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

from penstock.errors import UsageError
from penstock.ir import json_form
from penstock.planner.candidate import Candidate
from penstock.planner.profile import Profile
from penstock.planner.request import check_batch, check_count, check_limits, check_names, check_share, is_in_bytes
from penstock.studio.limits import MOST_LAYERS, MOST_PLANNED, MOST_SECONDS, check_actions, check_fields

_PLAN: dict[str, tuple[type, ...]] = {
    "profile": (dict, type(None)),
    "transformer": (dict, type(None)),
    "ranks": (int,),
    "microbatches": (int, type(None)),
    "batch": (int, type(None)),
    "microbatch_sizes": (list, type(None)),
    "memory_limit": (int, float, str, list, type(None)),
    "headroom": (int, float, type(None)),
    "schedules": (list, type(None)),
    "recompute": (bool,),
    "barrier": (bool,),
    "split": (bool,),
    "seconds": (int, float),
    "rounds": (int, float, type(None)),
    "jitter": (int, float),
    "near": (int, float),
    "seed": (int,),
}

_SHARES = {"headroom": 1.0, "rounds": math.inf, "jitter": 1.0, "near": math.inf}
"""Numbers of at least 0, and what each must be below."""


def asked(body: Any) -> tuple[Profile, dict[str, Any]]:
    """The model and the arguments of `penstock.plan`, within the studio's limits."""
    given = dict(check_fields(body, _PLAN, needed=("ranks",)))
    profile = _profile(given.pop("profile", None), given.pop("transformer", None))
    given = {name: value for name, value in given.items() if value is not None}
    ranks, seconds = check_count("ranks", given["ranks"]), check_share("seconds", given.get("seconds", 7.0))
    if seconds > MOST_SECONDS:
        raise UsageError(f"seconds={seconds:g}: the studio searches for at most {MOST_SECONDS:g}")
    if len(profile) < ranks:
        raise UsageError(f"{len(profile)} layers are too few for {ranks} ranks: each needs at least one")
    total, profiles = check_batch(profile, given.get("microbatches"), given.get("batch"), given.get("microbatch_sizes"))
    check_actions(3 * ranks * (total // min(each.microbatch for each in profiles)), MOST_PLANNED)
    check_limits(given.get("memory_limit"), ranks)
    for name, below in _SHARES.items():
        if name in given:
            check_share(name, given[name], below=below)
    names = given.get("schedules")
    if names is not None and not all(isinstance(name, str) for name in names):
        raise UsageError("'schedules' must be a list of names")
    check_names(names)
    return profile, given


def check_plan(body: Any) -> dict[str, Any]:
    """Refuse a request before a job is started for it; gives how long it may search."""
    return {"seconds": float(asked(body)[1].get("seconds", 7.0))}


def _profile(profile: Any, transformer: Any) -> Profile:
    if (profile is None) == (transformer is None):
        raise UsageError("give one model: 'profile' or 'transformer'")
    if profile is not None:
        _check_layers(profile.get("layers"))
        variants = profile.get("variants") or []
        if not isinstance(variants, list):
            raise UsageError("'variants' of a profile must be a list of profiles")
        for variant in variants:
            _check_layers(variant.get("layers") if isinstance(variant, dict) else None)
        return Profile.from_json(profile)
    _check_layers([{"count": transformer.get("layers")}])
    sizes = transformer.get("microbatch")
    return Profile.transformer(**{**transformer, **({"microbatch": tuple(sizes)} if isinstance(sizes, list) else {})})


def _check_layers(layers: Any) -> None:
    """Refuse more layers than can be cut, before they are made."""
    counts = [each.get("count", 1) for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []
    total = sum(count for count in counts if isinstance(count, int))
    if total > MOST_LAYERS:
        raise UsageError(f"{total:,} layers are more than the studio takes, {MOST_LAYERS:,}")


# What is told ---------------------------------------------------------------------------------------------------------


def told(made: Candidate, index: int) -> dict[str, Any]:
    """One candidate as the page plots it."""
    return {
        "index": index,
        "name": made.name,
        "placement": made.placement,
        "chunks": made.chunks,
        "microbatch": made.microbatch,
        "microbatches": made.microbatches,
        "recompute": made.recompute,
        "verdict": made.verdict,
        "reason": made.reason,
        "fits": made.fits,
        "makespan": made.objective,
        "bubble": made.bubble,
        "memory": made.peak,
        "memory_rank": made.peak_rank,
        "document": made.timed is not None,
    }


def packed(candidate: Candidate, index: int, in_bytes: bool) -> bytes | None:
    """What a candidate's document is made of, small enough to be kept for all of them; None where nothing was timed."""
    if candidate.timed is None:
        return None
    problem, _, timeline = candidate.timed
    data = {
        "name": candidate.name,
        "index": index,
        "table": json_form.encode(timeline.table),
        "costs": problem.costs.to_json(),
        "limits": problem.memory_limit,
        "units": ("" if problem.profile is None else problem.profile.time_unit, "B" if in_bytes else ""),
    }
    return zlib.compress(json.dumps(data).encode(), level=1)


def unpacked(data: bytes) -> Any:
    """The reverse of `packed`."""
    return json.loads(zlib.decompress(data))


def sizes_are_bytes(profile: Profile, given: dict[str, Any]) -> bool:
    return is_in_bytes(profile, given.get("memory_limit"))
