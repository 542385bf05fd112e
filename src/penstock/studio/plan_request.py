"""Plan requests: from the body of a request to the arguments of `penstock.plan`, within the limits of the studio."""

from __future__ import annotations

import math
from typing import Any

from penstock.errors import UsageError
from penstock.ir.cluster import Cluster
from penstock.ir.formats.reading import check_fields
from penstock.planner.profile import Profile
from penstock.planner.request import check_batch, check_limits, check_names, check_ranks, check_share, choose_headroom
from penstock.studio.cluster_text import read_cluster
from penstock.studio.limits import MOST_LAYERS, MOST_PLANNED, MOST_SECONDS, check_actions, check_request
from penstock.text.numbers import format_count

_PLAN: dict[str, tuple[type, ...]] = {
    "profile": (dict, type(None)),
    "transformer": (dict, type(None)),
    "ranks": (int, type(None)),
    "cluster": (dict, str, type(None)),
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
"""Numbers of at least 0, and the limit that each must be below."""


def read_plan_request(body: Any) -> tuple[Profile, dict[str, Any]]:
    """Read the model and the arguments of `penstock.plan`."""
    request = dict(check_request(body, _PLAN))
    profile = _profile(request.pop("profile", None), request.pop("transformer", None))
    options = {name: value for name, value in request.items() if value is not None}
    if "cluster" in options:
        options["cluster"] = read_cluster(options["cluster"])
    elif "ranks" not in options:
        raise UsageError("'ranks' is missing: give the number of ranks, or a 'cluster'")
    ranks, seconds = check_ranks(profile, options.get("ranks"), options.get("cluster")), check_share("seconds", options.get("seconds", 7.0))
    if seconds > MOST_SECONDS:
        raise UsageError(f"seconds={seconds:g}: the studio searches for at most {MOST_SECONDS:g}")
    if len(profile) < ranks:
        raise UsageError(f"{format_count(len(profile), 'layer')} are too few for {format_count(ranks, 'rank')}: each needs at least one")
    total, profiles = check_batch(profile, options.get("microbatches"), options.get("batch"), options.get("microbatch_sizes"))
    check_actions(3 * ranks * (total // min(size.microbatch for size in profiles)), MOST_PLANNED)
    check_limits(_find_limit(options), ranks)
    for name, below in _SHARES.items():
        if name in options:
            check_share(name, options[name], below=below)
    check_names(options.get("schedules"))
    return profile, options


def check_plan(body: Any) -> dict[str, Any]:
    """Refuse a bad request before its job starts; give the seconds that it may search, and the limits that candidates must fit within."""
    profile, options = read_plan_request(body)
    return {"seconds": float(options.get("seconds", 7.0)), "limits": used_limits(profile, options)}


def used_limits(profile: Profile, options: dict[str, Any]) -> tuple[float, ...] | None:
    """What each rank may hold: its memory limit without the share that the planner keeps free."""
    cluster: Cluster | None = options.get("cluster")
    limits = check_limits(_find_limit(options), options["ranks"] if cluster is None else len(cluster))
    free = choose_headroom(profile, options.get("headroom"))
    return None if limits is None else tuple(limit * (1 - free) for limit in limits)


def _find_limit(options: dict[str, Any]) -> Any:
    """The limit of the request, else the memory of the cluster's devices."""
    cluster: Cluster | None = options.get("cluster")
    return cluster.memory_limit if cluster is not None and "memory_limit" not in options else options.get("memory_limit")


def _profile(profile: Any, transformer: Any) -> Profile:
    if (profile is None) == (transformer is None):
        raise UsageError("give one model: 'profile' or 'transformer'")
    if profile is not None:
        _check_layers(profile)
        for variant in profile.get("variants", ()):
            _check_layers(variant)
        return Profile.from_json(profile)
    _check_layers({"layers": [{"count": transformer.get("layers")}]})
    sizes = transformer.get("microbatch")
    return Profile.transformer(**{**transformer, **({"microbatch": tuple(sizes)} if isinstance(sizes, list) else {})})


def _check_layers(profile: Any) -> None:
    """Refuse too many layers before they are built."""
    layers = check_fields(profile, {"layers": (list,), "variants": (list,)}, error=UsageError, required=("layers",))["layers"]
    counts = [layer.get("count", 1) for layer in layers if isinstance(layer, dict)]
    total = sum(count for count in counts if isinstance(count, int))
    if total > MOST_LAYERS:
        raise UsageError(f"{total:,} layers are more than the studio takes, {MOST_LAYERS:,}")
