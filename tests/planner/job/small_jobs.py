"""Jobs that are small enough to try everything."""

from __future__ import annotations

from typing import Any

import penstock as ps

SIZES = {"layers": 6, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 512}


def small_machines(gpus: int = 4, **values: Any) -> ps.Machines:
    rates = {"flops": 1e12, "memory": 64e6, "memory_bandwidth": 1e11, "node_bandwidth": 2e10, "bandwidth": 2e9}
    return ps.Machines(**{"gpus": gpus, "gpus_per_node": 4, **rates, **values})


def small_job(gpus: int = 4, batch: int = 16, *, model: dict[str, Any] | None = None, optimizer: str = "adam", **values: Any) -> ps.Job:
    """A model of about half a million parameters; `values` are fields of the machines."""
    return ps.Job(model={**SIZES, **(model or {})}, machines=small_machines(gpus, **values), batch=batch, optimizer=optimizer, headroom=0.0)


def profile_job(gpus: int = 4, batch: int = 8, *, profile: ps.Profile | None = None, **values: Any) -> ps.Job:
    """Six unequal layers in milliseconds; `values` are fields of the machines."""
    return ps.Job(model=profile or unequal_profile(), machines=small_machines(gpus, **values), batch=batch, headroom=0.0)


def unequal_profile(**fields: Any) -> ps.Profile:
    layers = [
        ps.Layer(
            name=f"layer {place}",
            f=f,
            i=1.2 * f,
            w=0.8 * f,
            activation=activation,
            weight_stash=0.3 * activation,
            workspace=2e3,
            output=1e4,
            parameters=4e4 * f,
            gradients=4e4 * f,
            optimizer=8e4 * f,
        )
        for place, (f, activation) in enumerate(((1.0, 3e4), (2.5, 9e4), (1.5, 5e4), (3.0, 4e4), (2.0, 8e4), (1.0, 6e4)))
    ]
    return ps.Profile(layers, **{"time_unit": "ms", "size_unit": "B", "input": 1e4, "microbatch": 1, **fields})
