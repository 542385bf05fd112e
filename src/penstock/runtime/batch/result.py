"""What a step gives back, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.errors import PipelineError

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


class StepResult:
    """Loss, losses, metrics and outputs of a step, microbatches in their own order.

    Every rank has every rank's share of them; they are put together when they are first asked for.
    """

    def __init__(
        self, shares: Sequence[ResultShare], merge: Callable[[list[Any]], Any], timeline: Callable[[], Timeline] | None = None
    ) -> None:
        self._shares, self._merge, self._timeline = shares, merge, timeline

    @cached_property
    def loss(self) -> Tensor | None:
        """The loss of the whole batch, side losses included; None where none was computed.

        Summed in the order of microbatches and stages, so that every rank gets the same.
        """
        side = _in_order({(m, s): v for share in self._shares for (s, m), v in share.side.items()})
        total: Tensor | None = None
        for value in (*(loss * scale for loss, scale in self._weighted if scale), *side):
            total = value if total is None else total + value
        return total

    @cached_property
    def losses(self) -> list[Tensor]:
        """Each microbatch's loss as the loss function gave it."""
        return [loss for loss, _ in self._weighted]

    @cached_property
    def _weighted(self) -> list[tuple[Tensor, float]]:
        return _in_order({k: v for share in self._shares for k, v in share.losses.items()})

    @cached_property
    def metrics(self) -> dict[str, list[Tensor]]:
        """Each metric's value for each microbatch that reported it."""
        found: dict[str, dict[tuple[int, int], Tensor]] = {}
        for share in self._shares:
            for name, values in share.metrics.items():
                found.setdefault(name, {}).update({(m, s): v for (s, m), v in values.items()})
        return {name: _in_order(found[name]) for name in sorted(found)}

    @cached_property
    def outputs(self) -> Any:
        """The last stage's outputs, joined along the batch dimension where that can be; None unless asked for."""
        outputs = _in_order({k: v for share in self._shares for k, v in share.outputs.items()})
        return self._merge(outputs) if outputs else None

    @cached_property
    def timeline(self) -> Timeline | None:
        """When everything ran on every rank; None unless the pipeline records."""
        return None if self._timeline is None else self._timeline()


@dataclass
class ResultShare:
    """What one rank adds to the result: values by microbatch."""

    microbatches: int = 0
    losses: dict[int, tuple[Tensor, float]] = field(default_factory=dict)
    """Each loss and how much it counts."""
    side: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Weighted side losses by stage and microbatch."""
    metrics: dict[str, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] | None = None
    """The batch sizes of the microbatches, each with how many in a row have it; None where this rank was given no batch."""
    call: int = 0
    """How many batches the rank was given before this one and with it."""
    records: bool = False
    whole: dict[int, str] = field(default_factory=dict)
    """The rank's stages that turned out to need their backward whole, each with what it does."""

    def __getstate__(self) -> dict[str, Any]:
        """For another process: losses of one kind as one tensor, which is quicker to send than many."""
        state = dict(self.__dict__)
        tensors = [loss for loss, _ in self.losses.values()]
        if len({(loss.dtype, loss.shape) for loss in tensors}) == 1:
            state["losses"] = list(self.losses), torch.stack(tensors), [scale for _, scale in self.losses.values()]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["losses"], tuple):
            numbers, tensors, scales = state["losses"]
            state["losses"] = dict(zip(numbers, zip(tensors.unbind(), scales, strict=True), strict=True))
        self.__dict__.update(state)


def _sizes(sizes: tuple[tuple[int, int], ...]) -> str:
    return "was given microbatches of " + ", ".join(f"{size} ({count} times)" if count > 1 else str(size) for size, count in sizes)


_SAME: dict[str, tuple[Callable[[Any], str], str]] = {
    "call": (
        "is at batch {} of this pipeline".format,
        "a call that failed or was left out has set them apart, so go back to the last checkpoint, with a pipeline made anew on all",
    ),
    "microbatches": ("ran {} microbatches".format, "give all ranks the same"),
    "records": (lambda records: "records" if records else "does not record", "set `record` alike on all ranks"),
    "sizes": (_sizes, "give all ranks the same batch, or none to those that need none"),
}
"""What of a share must be the same on all ranks, how to say it, and what to do where it is not."""


def check_same_step(shares: Sequence[ResultShare], called: Callable[[int], str]) -> None:
    """Refuse a step that was not the same on all ranks: its result would be of parts that do not belong together."""
    for name, (say, advice) in _SAME.items():
        known = [(rank, value) for rank, share in enumerate(shares) if (value := getattr(share, name)) is not None]
        for rank, value in known:
            if value != known[0][1]:
                first, expected = known[0]
                raise PipelineError(f"{called(first)} {say(expected)}, but {called(rank)} {say(value)}: {advice}")


def _in_order(values: dict[Any, Any]) -> list[Any]:
    return [values[key] for key in sorted(values)]
