"""Where a plan cuts a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn


def planned_split(model: Any, plan: Any, split: Any) -> tuple[Any, Any]:
    """The model and its split, as the plan cuts it unless a split says otherwise. A list with one module a layer is cut too."""
    sizes = None if isinstance(plan, str) else getattr(plan, "partition", None)  # a text has a method of that name
    if sizes is None or isinstance(model, Mapping):
        return model, split
    if hasattr(split, "sizes") and split.sizes is None:
        return model, replace(split, sizes=sizes)
    if split is not None:
        return model, split
    if isinstance(model, (list, tuple)):
        return (nn.Sequential(*model), sizes) if len(model) == sum(sizes) > len(sizes) else (model, None)
    return model, sizes
