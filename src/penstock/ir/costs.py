"""What an action takes: time, bytes held, bytes sent."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import CostsError

PerStage = float | tuple[float, ...]

_UNITS = {"": 1, "B": 1} | {f"{p}{u}": b**n for u, b in (("B", 1000), ("iB", 1024)) for n, p in enumerate("KMGTP", start=1)}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True)
class Costs:
    """Scalars, or one value a stage.

    `activation` is held from a microbatch's F to its I (or B), `weight_stash` from its I to its W.

    >>> Costs(f=1.0, activation=[1.0, 2.0]).of_stage("activation", 1)
    2.0
    """

    f: PerStage = 1.0
    i: PerStage = 1.0
    w: PerStage = 1.0
    b: PerStage | None = None
    """Full backward; i + w unless given."""
    latency: float = 0.0
    activation: PerStage = 1.0
    weight_stash: PerStage = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _checked(field.name, value))

    def of_stage(self, name: str, stage: int) -> float:
        """One stage's value of a field."""
        value = getattr(self, name)
        if isinstance(value, tuple):
            if stage >= len(value):
                raise CostsError(f"{name} has {len(value)} values, one a stage, but stage {stage} is asked for")
            return float(value[stage])
        return float(value)

    def per_stage(self, name: str, stages: int) -> tuple[float, ...]:
        """Every stage's value of a field."""
        value = getattr(self, name)
        if isinstance(value, tuple) and len(value) != stages:
            raise CostsError(f"{name} has {len(value)} values for {stages} stages: give one number or one a stage")
        return tuple(self.of_stage(name, stage) for stage in range(stages))


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if name == "latency":
            raise CostsError("latency is one number, not one a stage")
        return tuple(float(_number(f"{name}[{k}]", v)) for k, v in enumerate(value))
    return float(_number(name, value))


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CostsError(f"{name} must be a number, got {value!r}")
    if math.isnan(value) or math.isinf(value) or value < 0:
        raise CostsError(f"{name} must be a finite number of at least 0, got {value}")
    return float(value)


def parse_size(value: float | str) -> float:
    """A number as it is, or a text like "40GiB" in bytes.

    >>> parse_size("1.5KiB")
    1536.0
    """
    if not isinstance(value, str):
        return _number("a size", value)
    match = _SIZE.fullmatch(value)
    if match is None or match[2] not in _UNITS:
        raise CostsError(f"{value!r} is not a size: write a number and one of {', '.join(u for u in _UNITS if u)}, like 40GiB")
    return float(match[1]) * float(_UNITS[match[2]])
