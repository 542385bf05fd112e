"""One way to run a job: its degrees, microbatch size, sharding, vocabulary split and recomputed attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import PlanError, ScheduleError, nearest
from penstock.text.units import check_count

ENDS, HEAD, SPREAD = "ends", "head", "spread"
VOCABULARIES = (ENDS, HEAD, SPREAD)
"""Where the vocabulary is: embedding and head on the first and last stage, the head alone or both shared among all pipeline ranks."""
DEGREES = ("pipeline", "data", "tensor", "context")
"""The dimensions whose values multiply to the number of GPUs."""


def check_number_of(name: str, value: Any) -> int:
    """Give a degree, microbatch size or ZeRO stage as an int; refuse what no configuration can have."""
    least, most = (0, 3) if name == "sharding" else (1, None)
    return check_count(name, value, least, most, error=ScheduleError)


def check_vocabulary(word: Any) -> str:
    """Give the place of the vocabulary; refuse an unknown one."""
    if not isinstance(word, str) or word not in VOCABULARIES:
        raise PlanError(f"there is no vocabulary {word!r}: {nearest(str(word), VOCABULARIES)}")
    return word


@dataclass(frozen=True, kw_only=True, order=True)
class Configuration:
    """How many GPUs each dimension takes, and what follows for each of them.

    GPUs are numbered tensor first, then context, data and pipeline: those of a tensor group are neighbours.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    """GPUs that share each matrix, and between blocks the sequence."""
    context: int = 1
    """GPUs that share each sequence in attention."""
    microbatch: int = 1
    """Samples per microbatch."""
    sharding: int = 0
    """ZeRO stage: 1 shards the optimizer's state over data and context ranks, 2 also the gradients, 3 also the parameters."""
    vocabulary: str = ENDS
    selective: bool = False
    """Whether attention without flash runs its scores again in the backward and does not keep them."""

    def __post_init__(self) -> None:
        for name in (*DEGREES, "microbatch", "sharding"):
            object.__setattr__(self, name, check_number_of(name, getattr(self, name)))
        check_vocabulary(self.vocabulary)
        if not isinstance(self.selective, bool):
            raise PlanError(f"selective must be True or False, got {self.selective!r}")

    @property
    def gpus(self) -> int:
        return self.pipeline * self.data * self.tensor * self.context

    @property
    def replicas(self) -> int:
        """GPUs with the same parameters: data and context ranks."""
        return self.data * self.context

    @property
    def shared_ends(self) -> tuple[bool, bool]:
        """Whether the embedding and the head are shared among the pipeline ranks."""
        return self.vocabulary == SPREAD, self.vocabulary in (HEAD, SPREAD)

    def describe(self) -> str:
        words = [f"pipeline {self.pipeline}", f"data {self.data}", f"tensor {self.tensor}", f"context {self.context}"]
        words += [
            f"microbatch {self.microbatch}",
            f"ZeRO-{self.sharding}" if self.sharding else "no sharding",
            f"vocabulary {self.vocabulary}",
        ]
        return ", ".join(words + ["selective recompute"] * self.selective)

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


DIMENSIONS = tuple(field.name for field in fields(Configuration))
