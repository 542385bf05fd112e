"""What a step gives back, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


@dataclass(frozen=True)
class StepResult:
    """Loss, losses, metrics and outputs of a step, microbatches in their own order."""

    loss: Tensor | None
    """The loss of the whole batch, side losses included; None where none was computed."""
    losses: list[Tensor] = field(default_factory=list)
    """Each microbatch's loss as the loss function gave it."""
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    """Each metric's value for each microbatch that reported it."""
    outputs: Any = None
    """The last stage's outputs, joined along the batch dimension where that can be; None unless asked for."""
    timeline: Timeline | None = None


@dataclass
class Share:
    """What one rank adds to the result: values by microbatch."""

    microbatches: int = 0
    losses: dict[int, tuple[Tensor, float]] = field(default_factory=dict)
    """Each loss and how much it counts."""
    side: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Weighted side losses by stage and microbatch."""
    metrics: dict[str, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


def combine(shares: list[Share], merge: Callable[[list[Any]], Any]) -> StepResult:
    """The whole result, summed in the order of microbatches and stages so that every rank gets the same."""
    losses = _in_order({k: v for share in shares for k, v in share.losses.items()})
    side = _in_order({(m, s): v for share in shares for (s, m), v in share.side.items()})
    total: Tensor | None = None
    for value in (*(loss * scale for loss, scale in losses if scale), *side):
        total = value if total is None else total + value
    metrics: dict[str, dict[tuple[int, int], Tensor]] = {}
    for share in shares:
        for name, values in share.metrics.items():
            metrics.setdefault(name, {}).update({(m, s): v for (s, m), v in values.items()})
    outputs = _in_order({k: v for share in shares for k, v in share.outputs.items()})
    return StepResult(
        total,
        [loss for loss, _ in losses],
        {name: _in_order(metrics[name]) for name in sorted(metrics)},
        merge(outputs) if outputs else None,
    )


def _in_order(values: dict[Any, Any]) -> list[Any]:
    return [values[key] for key in sorted(values)]
