"""Parameters that several stages or ranks hold: tied ones, and both copies of a bidirectional pipeline."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import PlacementError, ScheduleError, nearest
from penstock.runtime.tensors.dtensor import from_local_like, is_dtensor, redistribute_like, shard_coordinates, to_local
from penstock.runtime.tensors.layout import add_gradients, round_gradient

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline

Place = tuple[int, int]
"""A parameter's stage, and its number there: the model's own order."""
Ties = Sequence[Sequence[str]]
"""Groups of names of parameters that are to be one."""
_Term = tuple[Hashable, Tensor]
"""One term of a gradient's sum, and what tells it from others: ranks that share an object have the same."""


@dataclass(frozen=True)
class _Held:
    """One parameter on one rank."""

    place: Place
    ident: Hashable
    shape: tuple[int, ...]
    part: tuple[tuple[str, int], ...] = ()
    """Which part of it the rank holds, where it is kept in shards."""


@dataclass
class SharedParameters:
    """What every rank knows of the parameters of all.

    A parameter of which there are several copies has their gradients summed once at the end of a step, and starts from the
    values of the first. One object that several ranks hold, as virtual ranks may, sums by itself, and belongs to the first. With
    `accumulate_dtype` each rank keeps a sum of its own, so that these are summed like those of copies, and rounded once.
    """

    place: dict[str, Place]
    """For each of this rank's parameters, the first place of the one that it is or is a copy of."""
    copies: dict[Place, list[str]]
    """This rank's parameters whose gradients are summed over ranks."""
    owned: set[str]
    """This rank's parameters that it is the first to hold."""
    one_object: bool
    """Whether any parameter is the same object on several ranks, so that steps must begin together."""
    active: bool
    """Whether any rank has copies."""
    tied: set[str] = field(default_factory=set)
    """Parameters of this rank's model that several stages use."""
    before: dict[Place, list[Tensor | None]] = field(default_factory=dict)

    @classmethod
    def find(cls, pipeline: Pipeline, ties: Ties) -> SharedParameters:
        parts = pipeline.partition.parts
        known = {name: (stage, k) for stage, part in enumerate(parts) if part for k, (name, _) in enumerate(part.parameters)}
        mine = {
            name: _Held(known[name], pipeline.group.ident(p), tuple(p.shape), shard_coordinates(p))
            for name, p in pipeline.local_parameters()
        }
        tied = [[name for _, name, _ in holders] for holders in pipeline.partition.tied()]
        everyone = pipeline.gather("parameters", (mine, known, tied, pipeline.data.dtype is not None))
        groups = dict.fromkeys(tuple(group) for _, _, tied, _ in everyone for group in tied)
        places = _places([known for _, known, _, _ in everyone], [*groups, *ties])
        held = [(places[name], each, rank) for rank, (theirs, *_) in enumerate(everyone) for name, each in theirs.items()]
        _check_shapes(held)
        apart = any(apart for *_, apart in everyone)  # whether ranks keep sums of their own, of one object too
        owner: dict[Hashable, int] = {}
        idents: dict[Place, set[Hashable]] = {}
        for place, each, rank in held:
            owner.setdefault(each.ident, rank)
            idents.setdefault(place, set()).add((each.ident, rank) if apart else each.ident)
        several = {place for place, found in idents.items() if len(found) > 1}
        copies: dict[Place, list[str]] = {}
        for name in mine:
            if places[name] in several:
                copies.setdefault(places[name], []).append(name)
        one_object = any(owner[each.ident] != rank for _, each, rank in held)
        if one_object and pipeline.group.parallel:
            raise ScheduleError("ranks that run in parallel cannot share parameters: build a model on each rank")
        owned = {name for name, each in mine.items() if owner[each.ident] == pipeline.rank}
        users: dict[Place, set[int]] = {}
        for name, (stage, _) in ((name, at) for _, theirs, *_ in everyone for name, at in theirs.items()):
            users.setdefault(places[name], set()).add(stage)
        between = {name for name in known if len(users[places[name]]) > 1}
        found = cls({name: places[name] for name in mine}, copies, owned, one_object, bool(several), between)
        found._start_equal(pipeline)
        if len(pipeline.table.placement.copies) > 1:
            _start_buffers_equal(pipeline)
        return found

    def _held(self, pipeline: Pipeline) -> dict[Place, list[nn.Parameter]]:
        """This rank's parameters whose gradients are summed over ranks, as they are now."""
        named = dict(pipeline.local_parameters()) if self.copies else {}
        return {place: [named[name] for name in names] for place, names in self.copies.items()}

    def _start_equal(self, pipeline: Pipeline) -> None:
        """Copies begin with the values of the first."""
        if not self.active:
            return
        mine = self._held(pipeline)
        everyone = pipeline.gather("copies", {place: to_local(held[0].detach()) for place, held in mine.items()})
        for place, held in mine.items():
            first = next(theirs[place] for theirs in everyone if place in theirs)
            for parameter in held:
                own = to_local(parameter.detach())
                if own.data_ptr() != first.data_ptr():
                    own.copy_(first)
        pipeline.gather("copied", None)

    def ids(self, pipeline: Pipeline) -> set[int]:
        """The ids of this rank's parameters whose gradients are summed over ranks."""
        return {id(parameter) for held in self._held(pipeline).values() for parameter in held}

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
        """Sum the gradients in the order of ranks, the same on each, and round once to the parameter's own precision."""
        if not self.active:
            return
        mine = self._held(pipeline)
        everyone = pipeline.gather("sum", {place: self._terms(pipeline, held) for place, held in mine.items()})
        sums = {place: _sum(term for theirs in everyone for term in theirs.get(place, ())) for place in mine}
        pipeline.gather("summed", None)  # nobody changes a gradient that another has yet to add
        for place, held in mine.items():
            for parameter, before in zip(held, self.before[place], strict=True):
                total = sums[place]
                if total is None:
                    parameter.grad = before
                    continue
                grad = from_local_like(parameter, total.to(parameter.dtype)) if is_dtensor(parameter) else round_gradient(total, parameter)
                parameter.grad = (
                    grad if before is None else add_gradients(before, grad) if grad.is_sparse or is_dtensor(grad) else grad.add_(before)
                )
        self.before = {}

    @staticmethod
    def _terms(pipeline: Pipeline, held: Sequence[nn.Parameter]) -> list[_Term]:
        """What this rank adds to a parameter's gradient. What autograd has summed belongs to the object, not to a rank."""
        terms: dict[Hashable, Tensor] = {}
        for parameter in held:
            total = pipeline.data.take_sum(parameter)
            if total is not None:
                terms[pipeline.group.ident(parameter), pipeline.rank] = to_local(redistribute_like(total, parameter))
            elif parameter.grad is not None:
                terms[pipeline.group.ident(parameter)] = to_local(redistribute_like(parameter.grad, parameter))
        return list(terms.items())


def _start_buffers_equal(pipeline: Pipeline) -> None:
    """The buffers of all copies of a stage begin with the values of the first."""
    mine = {index: dict(stage.module.named_buffers()) for index, stage in pipeline.stages.items()}
    plain = {index: {name: to_local(buffer) for name, buffer in held.items() if not is_lazy(buffer)} for index, held in mine.items()}
    everyone = pipeline.gather("buffers", plain)
    for index, held in plain.items():
        first = next(theirs[index] for theirs in everyone if index in theirs)
        for name, buffer in held.items():
            other = first.get(name, buffer)
            if other.data_ptr() != buffer.data_ptr() and other.shape == buffer.shape:
                buffer.copy_(other)
    pipeline.gather("buffers copied", None)


def _sum(terms: Iterable[_Term]) -> Tensor | None:
    """Each term once."""
    seen: set[Hashable] = set()
    total: Tensor | None = None
    for key, grad in terms:
        if key not in seen:
            total = grad if total is None else add_gradients(total, grad)
        seen.add(key)
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
