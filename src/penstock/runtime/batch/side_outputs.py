"""Losses and figures that a stage makes on the side."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class SideOutputs:
    """What one forward of one stage made beside its output."""

    losses: list[Tensor] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StageOutput:
    """What a stage may return in place of its output: the output, a side loss (a router's balance, say), and metrics."""

    value: Any
    side_loss: Tensor | None = None
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


class _ThreadState(threading.local):
    extras: SideOutputs | None = None


_here = _ThreadState()


def add_loss(loss: Tensor) -> None:
    """Add to the loss from anywhere inside a forward; it is weighted as the microbatch is. Outside a pipeline it does nothing."""
    if _here.extras is not None:
        _here.extras.losses.append(loss)


def add_metric(name: str, value: Tensor | float) -> None:
    """Report a figure of this microbatch from anywhere inside a forward. Outside a pipeline it does nothing."""
    if _here.extras is not None:
        _here.extras.metrics[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(value)


class collect:  # noqa: N801 - used like a function
    """Collect what forwards make on the side: `with collect() as extras: model(x)`."""

    def __enter__(self) -> SideOutputs:
        self.before, _here.extras = _here.extras, SideOutputs()
        return _here.extras

    def __exit__(self, *exc: object) -> None:
        _here.extras = self.before


def unwrap_stage_output(made: Any) -> Any:
    """A stage's plain output, once its extras are collected."""
    if not isinstance(made, StageOutput):
        return made
    if made.side_loss is not None:
        add_loss(made.side_loss)
    for name, value in made.metrics.items():
        add_metric(name, value)
    return made.value
