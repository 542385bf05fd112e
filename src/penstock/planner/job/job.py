"""A job: the model, the machines, the global batch and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.errors import CostsError, ScheduleError, nearest
from penstock.planner.job.machines import Machines
from penstock.planner.profile.transformer import Transformer
from penstock.text.units import check_count

HEADROOM = 0.05
"""The share of a GPU's memory that stays free, because sizes are estimates."""
OPTIMIZERS = {"adam": 12.0, "muon": 8.0}
"""Bytes of state per parameter: a copy of 4 bytes and, each of 4 bytes, two moments or one momentum."""
_SHAPE = ("layers", "hidden", "heads", "sequence", "vocabulary", "kv_heads", "ffn", "gated", "head_size", "query_rank", "key_rank", "rope")
_SIZES = (*_SHAPE, "flash", "causal", "dropout", "bytes", "gradient_bytes")
"""Fields of `Transformer` that describe the model itself."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Train a model of these sizes with this global batch on these machines.

    >>> sizes = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 1000}
    >>> Job(model=sizes, machines=Machines.of("a100", gpus=2), batch=8).tokens
    1024
    """

    model: Mapping[str, Any]
    """Fields of `penstock.planner.transformer.Transformer` that describe the model: layers, hidden, heads, sequence, vocabulary, ..."""
    machines: Machines
    batch: int
    """Samples per step, over all replicas."""
    optimizer: str = "adam"
    headroom: float = HEADROOM
    """The share of each GPU's memory that stays free."""

    def __post_init__(self) -> None:
        if not isinstance(self.machines, Machines):
            raise CostsError(f"machines must be penstock.Machines, got {type(self.machines).__name__}")
        check_count("batch", self.batch, error=ScheduleError)
        if self.optimizer not in OPTIMIZERS:
            raise CostsError(f"there is no optimizer {self.optimizer!r}: {nearest(str(self.optimizer), OPTIMIZERS)}")
        if not 0 <= self.headroom < 1:
            raise CostsError(f"headroom must be a number of at least 0 and below 1, got {self.headroom!r}")
        for name in self.model:
            if name not in _SIZES:
                raise CostsError(f"a job's model has no field {name!r}: {nearest(name, _SIZES)}; a job chooses degrees and links by itself")
        self.transformer  # noqa: B018 - checks the sizes

    @cached_property
    def transformer(self) -> Transformer:
        """The model; at one operation per second, so that the times in its profile count operations."""
        return Transformer.from_fields({**self.model, "flops": 1.0, "optimizer_bytes": OPTIMIZERS[self.optimizer]})

    @property
    def limit(self) -> float:
        """Bytes of a GPU that may be used."""
        return self.machines.memory * (1 - self.headroom)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.transformer.sequence

    @cached_property
    def operations(self) -> float:
        """Operations of one step without any recompute: what counts as useful. Causal attention counts the half that is not masked."""
        profile = self.transformer.profile()
        attention = sum(layer.f - layer.w for layer in profile.layers)
        return self.batch * 3 * (sum(layer.w for layer in profile.layers) + attention)

    def to_json(self) -> dict[str, Any]:
        rest = {"batch": self.batch, "optimizer": self.optimizer, "headroom": self.headroom}
        return {"model": dict(self.model), "machines": self.machines.to_json(), **rest}
