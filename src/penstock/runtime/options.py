"""The keywords of `Pipeline`, checked and grouped by the room that reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import ScheduleError
from penstock.passes.shard import Shard
from penstock.runtime.batch.microbatch import Dims
from penstock.runtime.model.compiled import Compile
from penstock.runtime.model.recompute import Recompute
from penstock.runtime.model.tied_parameters import Ties
from penstock.runtime.parallel.fsdp import Sharding
from penstock.runtime.weights.source import Weights


@dataclass(frozen=True)
class ModelOptions:
    """How the model becomes this rank's stages."""

    split: Any
    ties: Ties
    weights: Weights
    recompute: Recompute
    compile: Compile | Sequence[Compile]


@dataclass(frozen=True)
class BatchOptions:
    """How a batch becomes microbatches, and how their losses are computed and weighted."""

    batch_dims: Dims
    target_dims: Dims
    kwarg_dims: Dims
    loss_fn: Callable[..., Any] | None
    loss_reduction: str
    weight: Callable[[Any], Any] | None


@dataclass(frozen=True)
class GroupOptions:
    """Which processes or threads are the ranks, and how they exchange messages."""

    group: Any
    mesh: Any
    transport: str
    deadline: float

    def __post_init__(self) -> None:
        deadline: Any = self.deadline
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 < deadline < math.inf:
            raise ScheduleError(f"deadline must be a number of seconds above 0, got {deadline!r}: a large one if ranks may be slow")
        object.__setattr__(self, "deadline", float(deadline))


@dataclass(frozen=True)
class DataOptions:
    """How stages are sharded over data ranks, and how gradients are summed."""

    shard: Sharding
    lookahead: int
    residency: int | None
    accumulate_dtype: torch.dtype | None

    @property
    def shard_pass(self) -> Shard:
        return Shard(self.lookahead, self.residency)


@dataclass(frozen=True)
class ExecutionOptions:
    """How a rank runs its program."""

    seed: int | None
    accumulate: str
    overlap: Callable[..., None] | str | None
    graphs: bool

    def __post_init__(self) -> None:
        if self.accumulate not in ("autograd", "fused"):
            raise ScheduleError(f"accumulate must be 'autograd' or 'fused', got {self.accumulate!r}")
