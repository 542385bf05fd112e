"""Parameters that several stages or ranks hold: tied ones, and both copies of a bidirectional pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import PlacementError, ScheduleError, nearest
from penstock.ir.placement import Placement
from penstock.runtime.model.partition import Partition
from penstock.runtime.tensors.dtensor import from_local_like, is_dtensor, redistribute_like, shard_coordinates, to_local
from penstock.runtime.tensors.layout import add_gradients, gradient_dtype, round_gradient

Gather = Callable[[str, Any], list[Any]]
"""Exchanges a value with all ranks of the pipeline, under a name: returns the values of all, by rank."""
NamedParameters = Iterable[tuple[str, nn.Parameter]]
"""This rank's parameters under the model's own names, each once."""
Place = tuple[int, int]
"""A parameter's stage and its index there, which order parameters as the model does."""
Ties = Sequence[Sequence[str]]
"""Groups of names of parameters that are to be one."""
_Term = tuple[Hashable, Tensor]
"""One term of a gradient's sum, and its identity: ranks that share an object have the same."""


@dataclass(frozen=True)
class _HeldParameter:
    """One parameter on one rank."""

    place: Place
    ident: Hashable
    shape: tuple[int, ...]
    shard: tuple[tuple[str, int], ...] = ()
    """The part of it that the rank holds, if it is sharded."""


class SharedParameters:
    """The parameters that several ranks hold. Every rank of the pipeline makes one, at the same time.

    If there are several copies of a parameter, all start from the values of the first, and their gradients are summed once at the end
    of a step. One object that several ranks hold, as virtual ranks may, sums its gradients by itself and belongs to the first of them.
    With `accumulate_dtype` each rank keeps a sum of its own (`sums_apart`), so those are summed like copies, and rounded once.

    `identify` gives an object's identity among all ranks; `parallel` says that ranks run at the same time; `outside` has the places of the
    rank's parameters that are in no stage.
    """

    def __init__(
        self,
        partition: Partition,
        ties: Ties,
        parameters: NamedParameters,
        gather: Gather,
        *,
        rank: int,
        identify: Callable[[object], Hashable],
        parallel: bool,
        sums_apart: bool,
        outside: Mapping[str, Place] | None = None,
    ) -> None:
        self._rank, self._identify = rank, identify
        named = dict(parameters)
        known = {name: (stage, k) for stage, part in enumerate(partition.parts) if part for k, (name, _) in enumerate(part.parameters)}
        known |= outside or {}
        own = {name: _HeldParameter(known[name], identify(p), tuple(p.shape), shard_coordinates(p)) for name, p in named.items()}
        tied = [[name for _, name, _ in holders] for holders in partition.list_tied()]
        everyone = gather("parameters", (own, known, tied, sums_apart))
        groups = dict.fromkeys(tuple(group) for _, _, tied_names, _ in everyone for group in tied_names)
        places = _find_places([places_of_rank for _, places_of_rank, _, _ in everyone], [*groups, *ties])
        placed = [
            (places[name], parameter, rank)
            for rank, (parameters_of_rank, *_) in enumerate(everyone)
            for name, parameter in parameters_of_rank.items()
        ]
        _check_shapes(placed)
        apart = any(apart for *_, apart in everyone)
        owner: dict[Hashable, int] = {}
        idents: dict[Place, set[Hashable]] = {}
        for place, parameter, holder in placed:
            owner.setdefault(parameter.ident, holder)
            idents.setdefault(place, set()).add((parameter.ident, holder) if apart else parameter.ident)
        several = {place for place, copies in idents.items() if len(copies) > 1}
        users: dict[Place, set[int]] = {}
        for name, (stage, _) in ((name, at) for _, places_of_rank, *_ in everyone for name, at in places_of_rank.items()):
            users.setdefault(places[name], set()).add(stage)

        self.place: dict[str, Place] = {name: places[name] for name in own}
        """For each of this rank's parameters, the place of the first copy of it."""
        self._copies = {name: place for name, place in self.place.items() if place in several}
        """This rank's parameters whose gradients are summed over ranks."""
        self.owned = {name for name, parameter in own.items() if owner[parameter.ident] == rank}
        """This rank's parameters that no earlier rank holds."""
        self.one_object = any(owner[parameter.ident] != holder for _, parameter, holder in placed)
        """Whether any parameter is the same object on several ranks, so that steps must begin together."""
        self.active = bool(several)
        """Whether any rank has copies."""
        self.tied = {name for name in known if len(users[places[name]]) > 1}
        """The parameters known to this rank that several stages use."""
        self._before: dict[str, Tensor | None] = {}
        """The gradients that were accumulated before the step, by name."""
        self._postponed: dict[str, Tensor | None] = {}
        """This rank's gradients of steps that were not finalized."""
        self._backup: dict[str, Tensor | None] | None = None
        """Copies of them, to be restored if the step fails; None between steps."""
        if self.one_object and parallel:
            raise ScheduleError("ranks that run in parallel cannot share parameters: build a model on each rank")
        if self.active:
            _start_equal(
                "copies", [(self._copies[name], to_local(p.detach())) for name, p in self._list_held(named.items()).items()], gather
            )

    def _list_held(self, parameters: NamedParameters) -> dict[str, nn.Parameter]:
        """Return this rank's parameters whose gradients are summed over ranks, as they are now."""
        return {name: parameter for name, parameter in parameters if name in self._copies} if self._copies else {}

    def ids(self, parameters: NamedParameters) -> set[int]:
        """Return the ids of this rank's parameters whose gradients are summed over ranks."""
        return set(map(id, self._list_held(parameters).values()))

    def begin(self, parameters: NamedParameters, gather: Gather) -> None:
        """Begin a step: set aside the gradients accumulated before, so that only those of steps that were not finalized are summed."""
        own = self._list_held(parameters)
        self._backup = {name: None if grad is None else grad.clone() for name, grad in self._postponed.items()}
        self._before = {name: parameter.grad for name, parameter in own.items()}
        if self.one_object:
            gather("begin", None)  # no rank adds to a gradient that another has yet to set aside
        for name, parameter in own.items():
            parameter.grad = self._postponed.pop(name, None)

    def postpone(self, parameters: NamedParameters, gather: Gather) -> None:
        """End a step that does not finalize its gradients: the next one goes on with this rank's, and sums them over ranks."""
        if not self.active:
            return
        own = self._list_held(parameters)
        self._postponed = {name: parameter.grad for name, parameter in own.items()}
        gather("postpone", None)  # no rank restores a gradient that another, which has the same object, has yet to keep
        for name, parameter in own.items():
            parameter.grad = self._before[name]
        self._before = {}

    def settle(self) -> None:
        """Note that a step has succeeded on all ranks."""
        self._backup = None

    def forget(self) -> None:
        """Drop the gradients of steps that were not finalized."""
        self._postponed = {}

    def reset(self) -> None:
        """Forget a step that has failed, and restore the gradients of the steps before it that were not finalized."""
        self._postponed = self._postponed if self._backup is None else self._backup
        self._before, self._backup = {}, None

    def sum_gradients(self, parameters: NamedParameters, gather: Gather, take_sum: Callable[[nn.Parameter], Tensor | None]) -> None:
        """End a step: sum the gradients in the order of ranks, the same on each, and round once to the parameter's own dtype.

        `take_sum` returns this rank's sum of a parameter's gradients in `accumulate_dtype`, if there is one.
        """
        if not self.active:
            return
        own = self._list_held(parameters)
        terms: dict[Place, list[_Term]] = {}
        for name, parameter in own.items():
            total = take_sum(parameter)
            # A sum that autograd has made belongs to the object, not to the rank.
            ident, grad = (self._identify(parameter), parameter.grad) if total is None else ((self._identify(parameter), self._rank), total)
            if grad is not None:
                terms.setdefault(self._copies[name], []).append((ident, to_local(redistribute_like(grad, parameter))))
        everyone = gather("sum", terms)
        sums = {place: _sum(term for share in everyone for term in share.get(place, ())) for place in {*self._copies.values()}}
        gather("summed", None)  # no rank changes a gradient that another has yet to add
        for name, parameter in own.items():
            before, total = self._before[name], sums[self._copies[name]]
            if total is None:
                parameter.grad = before
                continue
            grad = (
                from_local_like(parameter, total.to(gradient_dtype(parameter)))
                if is_dtensor(parameter)
                else round_gradient(total, parameter)
            )
            if before is not None:
                grad = add_gradients(before, grad) if grad.is_sparse or is_dtensor(grad) else grad.add_(before)
            parameter.grad = grad
        self._before = {}


def start_buffers_equal(modules: Mapping[int, nn.Module], placement: Placement, gather: Gather) -> None:
    """Give the buffers of all copies of a stage the values of the first; `modules` are this rank's, by stage."""
    if len(placement.copies) == 1:
        return
    named = [((stage, name), buffer) for stage, module in modules.items() for name, buffer in module.named_buffers()]
    _start_equal("buffers", [(key, to_local(buffer)) for key, buffer in named if not is_lazy(buffer)], gather)


def _start_equal(name: str, copies: Sequence[tuple[Hashable, Tensor]], gather: Gather) -> None:
    """Give all copies of each tensor, which have the same key, the values of the first."""
    everyone = gather(name, dict(reversed(copies)))
    for key, tensor in copies:
        first = next(share[key] for share in everyone if key in share)
        if first.data_ptr() != tensor.data_ptr() and first.shape == tensor.shape:
            tensor.copy_(first)
    gather(f"{name} copied", None)


def _sum(terms: Iterable[_Term]) -> Tensor | None:
    """Sum the terms, each identity once."""
    seen: dict[Hashable, Tensor] = {}
    for ident, grad in terms:
        seen.setdefault(ident, grad)
    return reduce(add_gradients, seen.values()) if seen else None


def _find_places(known: Sequence[dict[str, Place]], ties: Ties) -> dict[str, Place]:
    """Return the place of each name; tied names have that of the first of them."""
    places = {name: place for places_of_rank in known for name, place in places_of_rank.items()}
    for group in ties:
        for name in group:
            if name not in places:
                raise PlacementError(f"ties name {name!r}, which is not a parameter of the model: {nearest(name, places)}")
        for place in {places[name] for name in group}:
            first = min(places[name] for name in group)
            for name in [name for name, at in places.items() if at == place]:
                places[name] = first
    return places


def _check_shapes(parameters: Sequence[tuple[Place, _HeldParameter, int]]) -> None:
    first: dict[Place, tuple[_HeldParameter, int]] = {}
    for place, parameter, rank in parameters:
        other, other_rank = first.setdefault(place, (parameter, rank))
        if other.shard != parameter.shard:
            raise PlacementError(
                f"copies of a parameter are sharded in different ways: part {other.shard} of it in stage {other.place[0]} on rank "
                f"{other_rank}, {parameter.shard} in stage {parameter.place[0]} on rank {rank}; shard both or none"
            )
        if other.shape != parameter.shape:
            raise PlacementError(
                f"copies of a parameter differ: shape {list(other.shape)} in stage {other.place[0]} on rank {other_rank}, "
                f"{list(parameter.shape)} in stage {parameter.place[0]} on rank {rank}"
            )
