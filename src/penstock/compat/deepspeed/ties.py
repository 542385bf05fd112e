"""Parameters that several stages share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from penstock.errors import PlacementError

if TYPE_CHECKING:
    from penstock.compat.deepspeed.transport import Transport


Place = tuple[int, int, int]
"""A parameter's stage, its number there, and the slice of the layer that it is of."""


class Ties:
    """What this stage shares with others. Copies start from the values of the first, and their gradients are summed.

    `candidates` are parameters by what every stage that has them calls them; those that several stages have are tied.
    """

    def __init__(self, candidates: Mapping[Hashable, nn.Parameter], transport: Transport) -> None:
        self._transport = transport
        mine = {called: (transport.ident(p), tuple(p.shape)) for called, p in candidates.items()}
        everyone = transport.gather_stages("PipelineEngine", mine)
        holders = Counter(called for theirs in everyone for called in theirs)
        self._mine = {called: p for called, p in candidates.items() if holders[called] > 1}
        self._tied = {id(p) for p in self._mine.values()}
        self.active = any(count > 1 for count in holders.values())
        before = {theirs[called][0] for theirs in everyone[: transport.stage] for called in self._mine if called in theirs}
        self._others = {id(p) for p in self._mine.values() if transport.ident(p) in before}
        self._before: dict[Hashable, Tensor | None] = {}
        _check_shapes(everyone)
        self._start_equal()

    def is_tied(self, parameter: nn.Parameter) -> bool:
        """Whether another stage has it too."""
        return id(parameter) in self._tied

    def is_mine(self, parameter: nn.Parameter) -> bool:
        """Whether this stage is to update it: one object that virtual ranks share belongs to the first of them."""
        return id(parameter) not in self._others

    def first_places(self, places: Mapping[int, Place]) -> dict[int, Place]:
        """For this stage's tied parameters, by their identity, the place on the first stage that has them, out of everyone's places."""
        mine = {called: places[id(parameter)] for called, parameter in self._mine.items()}
        everyone = self._transport.gather_stages("places of tied parameters", mine)
        return {id(p): next(theirs[called] for theirs in everyone if called in theirs) for called, p in self._mine.items()}

    def _idents(self) -> dict[Hashable, Hashable]:
        return {called: self._transport.ident(p) for called, p in self._mine.items()}

    def _start_equal(self) -> None:
        if not self.active:
            return
        everyone = self._transport.gather_stages("tied values", {called: p.detach() for called, p in self._mine.items()})
        for called, parameter in self._mine.items():
            first = next(theirs[called] for theirs in everyone if called in theirs)
            if first.data_ptr() != parameter.data_ptr():
                parameter.detach().copy_(first)
        self._transport.gather_stages("tied values copied", None)

    def begin(self) -> None:
        """Set aside what was accumulated before this batch, so that only its own gradients are summed over the stages."""
        if not self.active:
            return
        self._before = {called: p.grad for called, p in self._mine.items()}
        self._transport.gather_stages("gradients set aside", None)  # nobody adds to a gradient that another has yet to set aside
        for parameter in self._mine.values():
            parameter.grad = None

    def sum_gradients(self) -> None:
        """Sum over the stages, the same on each of them; one object has summed by itself."""
        idents = self._idents()
        mine = {called: (idents[called], p.grad) for called, p in self._mine.items()}
        everyone = self._transport.gather_stages("ReduceTiedGrads", mine)
        sums = {called: _sum(theirs[called] for theirs in everyone if called in theirs) for called in self._mine}
        self._transport.gather_stages("ReduceTiedGrads summed", None)  # nobody changes a gradient that another has yet to add
        for called, parameter in self._mine.items():
            before, total = self._before.get(called), sums[called]
            if self.is_mine(parameter):
                parameter.grad = total if before is None else before if total is None else before + total
        self._transport.gather_stages("ReduceTiedGrads done", None)  # one object has its sum before anybody goes on


def _check_shapes(everyone: list[dict[Hashable, tuple[Hashable, tuple[int, ...]]]]) -> None:
    first: dict[Hashable, tuple[int, tuple[int, ...]]] = {}
    for stage, theirs in enumerate(everyone):
        for called, (_, shape) in theirs.items():
            other, wanted = first.setdefault(called, (stage, shape))
            if shape != wanted:
                raise PlacementError(
                    f"tied parameter {called} has shape {list(wanted)} on stage {other} and {list(shape)} on stage {stage}: give layers of "
                    "one key the same arguments"
                )


def _sum(grads: Iterable[tuple[Hashable, Tensor | None]]) -> Tensor | None:
    """One gradient of each object, in the order of stages."""
    distinct = [grad for grad in dict(grads).values() if grad is not None]
    return sum(distinct[1:], start=distinct[0].clone()) if distinct else None
