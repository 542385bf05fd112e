"""Losses and metrics that a stage computes on the side."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class SideOutputs:
    """The side losses and metrics of one forward of one stage."""

    losses: list[Tensor] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StageOutput:
    """A return value of a stage: its output with a side loss (a router's balance, for example) and metrics."""

    value: Any
    side_loss: Tensor | None = None
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


class _Collecting(threading.local):
    target: SideOutputs | None = None


_collecting = _Collecting()


def add_loss(loss: Tensor) -> None:
    """Add to the loss from anywhere inside a forward, weighted as the microbatch is. Does nothing outside a pipeline."""
    if _collecting.target is not None:
        _collecting.target.losses.append(loss)


def add_metric(name: str, value: Tensor | float) -> None:
    """Report a metric of this microbatch from anywhere inside a forward. Does nothing outside a pipeline."""
    if _collecting.target is not None:
        _collecting.target.metrics[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(value)


class collect:  # noqa: N801 - used like a function
    """Collect the side outputs of forwards: `with collect() as side: model(x)`."""

    def __enter__(self) -> SideOutputs:
        self.before, _collecting.target = _collecting.target, SideOutputs()
        return _collecting.target

    def __exit__(self, *exc: object) -> None:
        _collecting.target = self.before


def unwrap_stage_output(output: Any) -> Any:
    """Return a stage's plain output; the side outputs of a `StageOutput` are collected."""
    if not isinstance(output, StageOutput):
        return output
    if output.side_loss is not None:
        add_loss(output.side_loss)
    for name, value in output.metrics.items():
        add_metric(name, value)
    return output.value
