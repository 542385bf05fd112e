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
