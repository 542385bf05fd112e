"""A job: the model, the machines, the global batch and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from penstock.errors import CostsError, ScheduleError, nearest
from penstock.ir.formats.reading import check_fields
from penstock.planner.job.machines import Machines
from penstock.planner.profile import Layer, Profile
from penstock.planner.profile.profile import ONCE, TIMES
from penstock.planner.profile.transformer import Transformer
from penstock.planner.request import HEADROOM, check_share
from penstock.text.numbers import format_count
from penstock.text.units import SECONDS, Units, check_count

OPTIMIZERS = {"adam": 12.0, "muon": 8.0}
"""Bytes of state per parameter: a copy of 4 bytes and, each of 4 bytes, two moments or one momentum."""
_SHAPE = ("layers", "hidden", "heads", "sequence", "vocabulary", "kv_heads", "ffn", "gated", "head_size", "query_rank", "key_rank", "rope")
_SIZES = (*_SHAPE, "flash", "causal", "dropout", "bytes", "gradient_bytes")
"""Fields of `Transformer` that describe the model itself."""
_LINKS = ("latency", "bandwidth", "memory_bandwidth", "flops")
_EXPERTS = ("experts", "shared_experts", "experts_per_token", "expert_ffn", "expert_parallel", "expert_bandwidth", "dense_layers")
_ELSEWHERE = (
    dict.fromkeys(_LINKS, "it is one of the machines")
    | dict.fromkeys(_EXPERTS, "mixtures of experts are not planned as a job, because it has no expert degree")
    | {"data": "the job chooses the data degree", "data_bandwidth": "the machines have one bandwidth for all messages"}
    | {"microbatch": "the job chooses the microbatch size", "optimizer_bytes": "the job's optimizer says how many these are"}
    | {"overhead": "times that a kernel takes to start are not counted"}
)
"""Further fields of `Transformer`, and why a job's model has none of them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Train a model of these sizes with this global batch on these machines.

    >>> sizes = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 1000}
    >>> Job(model=sizes, machines=Machines.of("a100", gpus=2), batch=8).tokens
    1024
    """

    model: Mapping[str, Any] | Profile
    """Fields of `penstock.planner.transformer.Transformer` that describe the model (layers, hidden, heads, sequence, vocabulary, ...), or a
    profile of its layers on one GPU of these machines, in bytes and in a unit of time."""
    machines: Machines
    batch: int
    """Samples per step, over all replicas."""
    optimizer: str = "adam"
    """`adam` or `muon`; a profile has the state of its own optimizer instead."""
    headroom: float = HEADROOM
    """The share of each GPU's memory that stays free."""

    def __post_init__(self) -> None:
        if not isinstance(self.machines, Machines):
            raise CostsError(f"machines must be penstock.Machines, got {type(self.machines).__name__}")
        object.__setattr__(self, "batch", check_count("batch", self.batch, error=ScheduleError))
        if self.optimizer not in list(OPTIMIZERS):
            raise CostsError(f"there is no optimizer {self.optimizer!r}: {nearest(str(self.optimizer), OPTIMIZERS)}")
        object.__setattr__(self, "headroom", check_share("headroom", self.headroom, below=1.0))
        if isinstance(self.model, Profile):
            self._check_profile(self.model)
            return
        if not isinstance(self.model, Mapping):
            raise CostsError(f"a job's model is a mapping of sizes or a penstock.Profile, got {type(self.model).__name__}")
        for name in self.model:
            if name not in _SIZES:
                raise CostsError(f"a job's model has no field {name!r}: {_ELSEWHERE.get(name) or nearest(name, _SIZES)}")
        self.transformer  # noqa: B018 - checks the sizes

    def _check_profile(self, profile: Profile) -> None:
        if profile.time_unit not in SECONDS or profile.size_unit != "B":
            raise CostsError(
                f"the profile of a job has time_unit={profile.time_unit!r} and size_unit={profile.size_unit!r}: the links of the machines "
                f"are in seconds and bytes, so give one of {', '.join(SECONDS)}, and 'B'"
            )
        if self.optimizer != "adam":
            raise CostsError(
                f"optimizer={self.optimizer!r} with a profile, which has the state of its own optimizer, and not the shapes of its "
                "matrices: leave optimizer out, and measure the profile with the optimizer that you use"
            )

    @cached_property
    def profile(self) -> Profile | None:
        """The profile that the job was given, in seconds; None for a model of sizes."""
        if not isinstance(self.model, Profile):
            return None
        scale = SECONDS[self.model.time_unit]

        def convert(layers: Sequence[Layer]) -> list[Layer]:
            return [replace(layer, **{name: scale * getattr(layer, name) for name in TIMES + ONCE}, slices=None) for layer in layers]

        variants = [replace(variant, layers=convert(variant.layers)) for variant in self.model.variants]
        return replace(self.model, layers=convert(self.model.layers), variants=variants, time_unit="s")

    @cached_property
    def transformer(self) -> Transformer:
        """The model of sizes; at one operation per second, so that the times in its profile count operations."""
        assert isinstance(self.model, Mapping), "a profile has no sizes"
        return Transformer.from_fields({**self.model, "flops": 1.0, "optimizer_bytes": OPTIMIZERS[self.optimizer]})

    @property
    def layers(self) -> int:
        """Layers that can be recomputed each by itself: blocks, or those of the profile."""
        return self.transformer.layers if self.profile is None else len(self.profile)

    @property
    def overlap(self) -> float:
        """The least share of their times that two overlapped actions take."""
        return 1.0 if self.profile is None else min(1.0, self.profile.overlap)

    @property
    def limit(self) -> float:
        """Bytes of a GPU that may be used."""
        return self.machines.memory * (1 - self.headroom)

    @property
    def tokens(self) -> int | None:
        """Tokens per step, if they are known."""
        tokens = self.transformer.sequence if self.profile is None else self.profile.tokens
        return None if tokens is None else self.batch * tokens

    @cached_property
    def operations(self) -> float | None:
        """Operations of one step without any recompute: what counts as useful. Causal attention counts the half that is not masked.

        None for a profile, which has times only.
        """
        if self.profile is not None:
            return None
        profile = self.transformer.profile()
        attention = sum(layer.f - layer.w for layer in profile.layers)
        return self.batch * 3 * (sum(layer.w for layer in profile.layers) + attention)

    def to_json(self) -> dict[str, Any]:
        model = {"profile": self.model.to_json()} if isinstance(self.model, Profile) else {"model": dict(self.model)}
        rest = {"batch": self.batch, "optimizer": self.optimizer, "headroom": self.headroom}
        return {**model, "machines": self.machines.to_json(), **rest}

    @classmethod
    def from_json(cls, data: Any) -> Job:
        """The reverse of `to_json`."""
        kinds: dict[str, tuple[type, ...]] = {"model": (dict,), "profile": (dict,), "machines": (dict,), "batch": (int,)}
        kinds |= {"optimizer": (str,), "headroom": (int, float)}
        check_fields(data, kinds, error=CostsError, required=("machines", "batch"), closed=True)
        values = dict(data)
        if ("model" in values) == ("profile" in values):
            raise CostsError("a job has either a model or a profile")
        if "profile" in values:
            values["model"] = Profile.from_json(values.pop("profile"))
        return cls(**{**values, "machines": Machines.from_fields(values["machines"])})

    def describe(self) -> str:
        """The model in a few words."""
        if self.profile is None:
            return f"{self.transformer.parameters / 1e9:.3g}G parameters"
        size = sum(layer.parameters for layer in self.profile.layers)
        return f"a profile of {format_count(len(self.profile), 'layer')} with {Units('s', True).size(size)} of parameters"
