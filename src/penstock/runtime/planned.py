"""What a plan says of a model: where to cut it, and which stages to recompute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.runtime.partition import Partition


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


def recomputing(partition: Partition, plan: Any) -> Partition:
    """The partition with the plan's stages that run their forward again before their backward."""
    flags = getattr(plan, "recompute", None)
    if not flags or not any(flags):
        return partition
    parts = [
        replace(part, module=Recomputed(part.module)) if part is not None and again else part
        for part, again in zip(partition.parts, flags, strict=True)
    ]
    return Partition(tuple(parts))


class Recomputed(nn.Module):
    """A module that keeps its inputs alone, and runs its forward again when its backward comes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.module, *args, use_reentrant=False, **kwargs)
