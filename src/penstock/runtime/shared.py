"""Parameters that several stages or ranks hold: tied ones, and both copies of a bidirectional pipeline."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn

from penstock.errors import PlacementError, ScheduleError, nearest
from penstock.runtime.parts import in_parts, laid_as, like_part, local, part_of

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

Place = tuple[int, int]
"""A parameter's stage, and its number there: the model's own order."""
Ties = Sequence[Sequence[str]]
"""Groups of names of parameters that are to be one."""


@dataclass(frozen=True)
class _Held:
    """One parameter on one rank."""

    place: Place
    ident: Hashable
    shape: tuple[int, ...]
    part: tuple[tuple[str, int], ...] = ()
    """Which part of it the rank holds, where it is kept in shards."""


@dataclass
class Shared:
    """What every rank knows of the parameters of all.

    A parameter of which there are several copies has their gradients summed once at the end of a step, and starts from the
    values of the first. One object that several ranks hold, as virtual ranks may, sums by itself, and belongs to the first.
    """

    place: dict[str, Place]
    """For each of this rank's parameters, the first place of the one that it is or is a copy of."""
    copies: dict[Place, list[str]]
    """This rank's parameters that have copies elsewhere."""
    owned: set[str]
    """This rank's parameters that it is the first to hold."""
    one_object: bool
    """Whether any parameter is the same object on several ranks, so that steps must begin together."""
    active: bool
    """Whether any rank has copies."""
    before: dict[Place, list[Tensor | None]] = field(default_factory=dict)

    @classmethod
    def find(cls, pipeline: Pipeline, ties: Ties) -> Shared:
        parts = pipeline.partition.parts
        known = {name: (stage, k) for stage, part in enumerate(parts) if part for k, (name, _) in enumerate(part.parameters)}
        mine = {name: _Held(known[name], pipeline.group.ident(p), tuple(p.shape), part_of(p)) for name, p in pipeline.local_parameters()}
        tied = [[name for _, name, _ in holders] for holders in pipeline.partition.tied()]
        everyone = pipeline.gather("parameters", (mine, known, tied))
        groups = dict.fromkeys(tuple(group) for _, _, tied in everyone for group in tied)
        places = _places([known for _, known, _ in everyone], [*groups, *ties])
        held = [(places[name], each, rank) for rank, (theirs, _, _) in enumerate(everyone) for name, each in theirs.items()]
        _check_shapes(held)
        owner: dict[Hashable, int] = {}
        idents: dict[Place, set[Hashable]] = {}
        for place, each, rank in held:
            owner.setdefault(each.ident, rank)
            idents.setdefault(place, set()).add(each.ident)
        several = {place for place, found in idents.items() if len(found) > 1}
        copies: dict[Place, list[str]] = {}
        for name in mine:
            if places[name] in several:
                copies.setdefault(places[name], []).append(name)
        one_object = any(owner[each.ident] != rank for _, each, rank in held)
        if one_object and pipeline.group.parallel:
            raise ScheduleError("ranks that run in parallel cannot share parameters: build a model on each rank")
        owned = {name for name, each in mine.items() if owner[each.ident] == pipeline.rank}
        found = cls({name: places[name] for name in mine}, copies, owned, one_object, bool(several))
        found._start_equal(pipeline)
        return found

    def _held(self, pipeline: Pipeline) -> dict[Place, list[nn.Parameter]]:
        """This rank's parameters that have copies elsewhere, as they are now."""
        named = dict(pipeline.local_parameters()) if self.copies else {}
        return {place: [named[name] for name in names] for place, names in self.copies.items()}

    def _start_equal(self, pipeline: Pipeline) -> None:
        """Copies begin with the values of the first."""
        if not self.active:
            return
        mine = self._held(pipeline)
        everyone = pipeline.gather("copies", {place: local(held[0].detach()) for place, held in mine.items()})
        for place, held in mine.items():
            first = next(theirs[place] for theirs in everyone if place in theirs)
            for parameter in held:
                own = local(parameter.detach())
                if own.data_ptr() != first.data_ptr():
                    own.copy_(first)
        pipeline.gather("copied", None)

    def begin(self, pipeline: Pipeline) -> None:
        """Set aside what was accumulated before, so that only this step's gradients are summed."""
        mine = self._held(pipeline)
        self.before = {place: [parameter.grad for parameter in held] for place, held in mine.items()}
        if self.one_object:
            pipeline.gather("begin", None)  # nobody adds to a gradient that another has yet to set aside
        for held in mine.values():
            for parameter in held:
                parameter.grad = None

    def sum(self, pipeline: Pipeline) -> None:
        """Sum the copies' gradients in the order of ranks, the same on each."""
        if not self.active:
            return
        mine = self._held(pipeline)
        grads = {place: [(pipeline.group.ident(parameter), _own(parameter)) for parameter in held] for place, held in mine.items()}
        everyone = pipeline.gather("sum", grads)
        sums = {place: _sum(grad for theirs in everyone for grad in theirs.get(place, ())) for place in mine}
        pipeline.gather("summed", None)  # nobody changes a gradient that another has yet to add
        for place, held in mine.items():
            for parameter, before in zip(held, self.before[place], strict=True):
                total = sums[place]
                if total is None or not in_parts(parameter):
                    parameter.grad = before if total is None else total.clone() if before is None else before + total
                else:
                    parameter.grad = like_part(parameter, total) if before is None else before + like_part(parameter, total)
        self.before = {}


def _own(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else local(laid_as(parameter.grad, parameter))


def _sum(grads: Iterable[tuple[Hashable, Tensor | None]]) -> Tensor | None:
    """One gradient of each object."""
    seen: set[Hashable] = set()
    total: Tensor | None = None
    for ident, grad in grads:
        if ident not in seen and grad is not None:
            total = grad if total is None else total + grad
        seen.add(ident)
    return total


def _places(known: Sequence[dict[str, Place]], ties: Sequence[Sequence[str]]) -> dict[str, Place]:
    """The first place of each name; tied names have that of the first of them."""
    places: dict[str, Place] = {}
    for theirs in known:
        places |= theirs
    for group in ties:
        for name in group:
            if name not in places:
                raise PlacementError(f"ties name {name!r}, which is no parameter of the model: {nearest(name, places)}")
        for place in {places[name] for name in group}:
            first = min(places[name] for name in group)
            for name in [name for name, at in places.items() if at == place]:
                places[name] = first
    return places


def _check_shapes(held: Sequence[tuple[Place, _Held, int]]) -> None:
    first: dict[Place, tuple[_Held, int]] = {}
    for place, each, rank in held:
        other, there = first.setdefault(place, (each, rank))
        if other.part != each.part:
            raise PlacementError(
                f"copies of a parameter are kept in shards in different ways: part {other.part} of it in stage {other.place[0]} on rank "
                f"{there}, {each.part} in stage {each.place[0]} on rank {rank}; shard both or none"
            )
        if other.shape != each.shape:
            raise PlacementError(
                f"copies of a parameter differ: shape {list(other.shape)} in stage {other.place[0]} on rank {there}, "
                f"{list(each.shape)} in stage {each.place[0]} on rank {rank}"
            )
