"""One way to run a job: its degrees, microbatch size, sharding, vocabulary split and recomputed attention."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

ENDS, HEAD, SPREAD = "ends", "head", "spread"
VOCABULARIES = (ENDS, HEAD, SPREAD)
"""Where the vocabulary is: embedding and head on the first and last stage, the head alone or both shared among all pipeline ranks."""


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
