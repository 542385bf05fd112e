"""Parameters that several stages share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from penstock.compat.deepspeed.transport import Transport
    from penstock.runtime.partition import Partition


class Ties:
    """What this stage shares with others. Copies start from the values of the first, and their gradients are summed."""

    def __init__(self, partition: Partition, transport: Transport) -> None:
        self._transport = transport
        groups = enumerate(partition.tied())
        self._mine = {number: p for number, holders in groups for stage, _, p in holders if stage == transport.rank}
        everyone = transport.gather("PipelineEngine", self._idents())
        self.active = any(everyone)
        before = [ident for theirs in everyone[: transport.rank] for ident in theirs.values()]
        self._others = {id(p) for p in self._mine.values() if transport.ident(p) in before}
        self._start_equal()

    def is_mine(self, parameter: nn.Parameter) -> bool:
        """Whether this stage is to update it: one object that virtual ranks share belongs to the first of them."""
        return id(parameter) not in self._others

    def _idents(self) -> dict[int, Hashable]:
        return {number: self._transport.ident(p) for number, p in self._mine.items()}

    def _start_equal(self) -> None:
        if not self.active:
            return
        everyone = self._transport.gather("tied values", {number: p.detach() for number, p in self._mine.items()})
        for number, parameter in self._mine.items():
            first = next(theirs[number] for theirs in everyone if number in theirs)
            if first.data_ptr() != parameter.data_ptr():
                parameter.detach().copy_(first)
        self._transport.gather("tied values copied", None)

    def sum_gradients(self) -> None:
        """Sum over the stages, the same on each of them; one object has summed by itself."""
        idents = self._idents()
        everyone = self._transport.gather("ReduceTiedGrads", {n: (idents[n], p.grad) for n, p in self._mine.items()})
        sums = {n: _sum(theirs[n] for theirs in everyone if n in theirs) for n in self._mine}
        self._transport.gather("ReduceTiedGrads summed", None)  # nobody changes a gradient that another has yet to add
        for number, parameter in self._mine.items():
            parameter.grad = sums[number] if self.is_mine(parameter) else parameter.grad
        self._transport.gather("ReduceTiedGrads done", None)  # one object has its sum before anybody goes on


def _sum(grads: Iterable[tuple[Hashable, Tensor | None]]) -> Tensor | None:
    """One gradient of each object, in the order of stages."""
    distinct = [grad for grad in dict(grads).values() if grad is not None]
    return sum(distinct[1:], start=distinct[0].clone()) if distinct else None
