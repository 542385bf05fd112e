"""The result of a step, the same on every rank."""

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
    """Loss, losses, metrics and outputs of a step, in the order of microbatches.

    Every rank has the shares of all ranks; each value is built from them on first access.
    """

    def __init__(
        self, shares: Sequence[ResultShare], merge: Callable[[list[Any]], Any], timeline: Callable[[], Timeline] | None = None
    ) -> None:
        self._shares, self._merge, self._timeline = shares, merge, timeline

    @cached_property
    def loss(self) -> Tensor | None:
        """The loss of the whole batch, side losses included; None if none was computed.

        Summed in the order of microbatches and stages, so that every rank gets the same.
        """
        side = _in_order({(m, s): v for share in self._shares for (s, m), v in share.side.items()})
        total: Tensor | None = None
        for value in (*(loss * scale for loss, scale in self._weighted if scale), *side):
            total = value if total is None else total + value
        return total

    @cached_property
    def losses(self) -> list[Tensor]:
        """Each microbatch's loss as the loss function returned it."""
        return [loss for loss, _ in self._weighted]

    @cached_property
    def _weighted(self) -> list[tuple[Tensor, float]]:
        return _in_order({k: v for share in self._shares for k, v in share.losses.items()})

    @cached_property
    def metrics(self) -> dict[str, list[Tensor]]:
        """Each metric's value for each microbatch that reported it."""
        by_name: dict[str, dict[tuple[int, int], Tensor]] = {}
        for share in self._shares:
            for name, values in share.metrics.items():
                by_name.setdefault(name, {}).update({(m, s): v for (s, m), v in values.items()})
        return {name: _in_order(by_name[name]) for name in sorted(by_name)}

    @cached_property
    def outputs(self) -> Any:
        """The last stage's outputs, joined along the batch dimension if they can be; None unless the step was given `outputs=True`."""
        outputs = _in_order({k: v for share in self._shares for k, v in share.outputs.items()})
        return self._merge(outputs) if outputs else None

    @cached_property
    def timeline(self) -> Timeline | None:
        """When each action ran on every rank; None unless the pipeline records."""
        return None if self._timeline is None else self._timeline()


@dataclass
class ResultShare:
    """One rank's part of the result: values by microbatch."""

    microbatches: int = 0
    losses: dict[int, tuple[Tensor, float]] = field(default_factory=dict)
    """Each loss and its scale."""
    side: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Weighted side losses by stage and microbatch."""
    metrics: dict[str, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] | None = None
    """The sizes of the microbatches, each with how many in a row have it; None if this rank was given no batch."""
    call: int = 0
    """How many batches the rank has been given, this one included."""
    records: bool = False
    finalizes: bool = True
    """Whether the step sums its gradients over the ranks, and those of earlier steps that did not."""
    whole: dict[int, str] = field(default_factory=dict)
    """The rank's stages whose backward cannot be split, each with the reason, as far as forwards have shown."""

    def __getstate__(self) -> dict[str, Any]:
        """Stack losses of one dtype and shape, because one tensor is quicker to send than many."""
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


def _describe_sizes(sizes: tuple[tuple[int, int], ...]) -> str:
    return "was given microbatches of " + ", ".join(f"{size} ({count} times)" if count > 1 else str(size) for size, count in sizes)


_SAME: dict[str, tuple[Callable[[Any], str], str]] = {
    "call": (
        "is at batch {} of this pipeline".format,
        "a call has failed or was left out on some ranks, so go back to the last checkpoint, with a new pipeline on all ranks",
    ),
    "microbatches": ("ran {} microbatches".format, "give all ranks the same number"),
    "records": (lambda records: "records" if records else "does not record", "set `record` to the same value on all ranks"),
    "finalizes": (
        lambda finalizes: "finalizes its gradients" if finalizes else "does not finalize its gradients",
        "give `finalize_gradients` the same value on all ranks",
    ),
    "sizes": (_describe_sizes, "give all ranks the same batch, or none to those that need none"),
}
"""The fields of a share that must be the same on all ranks, how to describe them, and what to do if they differ."""


def check_same_step(shares: Sequence[ResultShare], called: Callable[[int], str]) -> None:
    """Refuse a step that was not the same on all ranks."""
    for name, (describe, advice) in _SAME.items():
        known = [(rank, value) for rank, share in enumerate(shares) if (value := getattr(share, name)) is not None]
        for rank, value in known:
            if value != known[0][1]:
                first, expected = known[0]
                raise PipelineError(f"{called(first)} {describe(expected)}, but {called(rank)} {describe(value)}: {advice}")


def _in_order(values: dict[Any, Any]) -> list[Any]:
    return [values[key] for key in sorted(values)]
