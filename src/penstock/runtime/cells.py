"""Where a rank keeps what it has made or received until it is used."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.result import Share


class _Empty:
    """What is in a cell that nothing has been put into."""

    def __repr__(self) -> str:
        return "empty"


EMPTY = _Empty()


@dataclass
class Feed:
    """What one step is fed with: inputs, keyword arguments and targets by microbatch, and how much each counts."""

    args: list[tuple[Any, ...]]
    kwargs: dict[int, list[dict[str, Any]]]
    targets: list[Any] | None
    scales: list[float]
    """What each microbatch's loss is multiplied by, so that the sum is the loss of the whole batch."""
    weights: list[float] | None = None
    """How much each counts against the others; None where losses are added as they are."""
    factor: float = 1.0
    """What gradients are scaled by on top, as a gradient scaler asks for."""
    seed: str | None = None
    """What the random streams of this step are derived from; None leaves random numbers to torch."""
    first: int = 0
    """The number of the first microbatch among those of all data ranks: streams are by that."""
    outputs: bool = False
    losses: bool = True
    share: Share = field(default_factory=Share)
    guards: list[list[tuple[Tensor, int, str]]] = field(default_factory=list)
    """For each microbatch the tensors that no stage may change in place, each with its version and the reason; empty if there are none."""

    @property
    def total(self) -> float:
        return 0.0 if self.weights is None else sum(self.weights)

    def check_unchanged(self, stage: int, microbatch: int, copies: Collection[int]) -> None:
        """Refuse a change in place of an input that is read elsewhere too; `copies` are inputs by id whose copies were changed."""
        for tensor, version, reason in self.guards[microbatch]:
            if tensor._version != version or id(tensor) in copies:
                raise ScheduleError(
                    f"stage {stage} changes in place a tensor of the batch that {reason}: clone it in stage {stage} before changing it"
                )

    def guarded(self, microbatch: int) -> dict[int, str]:
        """Why inputs must not be changed in place, by the address of their memory."""
        guards = self.guards[microbatch]
        return {tensor.untyped_storage().data_ptr(): f"a tensor of the batch that {reason}" for tensor, _, reason in guards}

    def normalise(self, total: float) -> None:
        """Set the scales, out of the weights of all microbatches, those of other data ranks included."""
        if self.weights is None:
            self.scales = [1.0] * len(self.args)
            return
        if total <= 0 or min(self.weights) < 0:
            raise ScheduleError(f"the weights of the microbatches are {self.weights}: they must not be negative, and not all be zero")
        self.scales = [each / total for each in self.weights]


NOTHING = Feed([], {}, None, [])
