"""The order in which the samples of a data set are read, and the position of a run in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError, ScheduleError


class DataOrder:
    """An endless iterator over the sample numbers of one batch after another.

    Samples are shuffled again in each epoch, by a stream of (seed, epoch), so that the order depends on nothing else: it is the same on
    every rank, whatever else draws random numbers. The state is a position in the order, from which a run with another number of ranks
    or another batch size continues. Samples at the end of an epoch that do not fill a batch are skipped.

    >>> order = DataOrder(samples=10, batch=4, shuffle=False)
    >>> [next(order).tolist() for _ in range(3)]
    [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    >>> order.state_dict()["epoch"], order.state_dict()["position"]
    (1, 4)
    """

    def __init__(self, samples: int, batch: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if not 1 <= batch <= samples:
            raise ScheduleError(f"batches of {batch} from {samples} samples: give a batch size from 1 to {samples}")
        self.samples, self.batch, self.seed, self.shuffle = samples, batch, seed, shuffle
        self.epoch, self.position = 0, 0
        self._drawn: tuple[int, Tensor] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.position + self.batch > self.samples:
            self.epoch, self.position = self.epoch + 1, 0
        start, self.position = self.position, self.position + self.batch
        return self._order()[start : self.position]

    def _order(self) -> Tensor:
        """The sample numbers of this epoch in order."""
        if self._drawn is None or self._drawn[0] != self.epoch:
            digest = hashlib.blake2b(f"{self.seed}/{self.epoch}".encode(), digest_size=8).digest()
            stream = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            self._drawn = self.epoch, torch.randperm(self.samples, generator=stream) if self.shuffle else torch.arange(self.samples)
        return self._drawn[1]

    def state_dict(self) -> dict[str, Any]:
        return self._describe_kind() | {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position; raises if it is a position in another order."""
        for what, own in self._describe_kind().items():
            if state[what] != own:
                raise CheckpointError(f"the data was read in an order with {what}={state[what]}, and this one has {what}={own}")
        self.epoch, self.position = state["epoch"], state["position"]

    def _describe_kind(self) -> dict[str, Any]:
        return {"samples": self.samples, "seed": self.seed, "shuffle": self.shuffle}
