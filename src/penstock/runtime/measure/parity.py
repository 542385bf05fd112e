"""Compare a step with the unpipelined model."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError
from penstock.runtime.batch.side_outputs import collect, unwrap_stage_output
from penstock.runtime.batch.step_input import ABSENT, StepInput
from penstock.runtime.device import device
from penstock.runtime.model.module_state import ModuleState, is_same_value
from penstock.runtime.model.partition import Part
from penstock.runtime.model.random_streams import draw_from, preserve_random_state
from penstock.runtime.model.recompute import Recomputed
from penstock.runtime.model.stage import Stage
from penstock.runtime.tensors.boundary import copy_tensor

if TYPE_CHECKING:
    from penstock.runtime.pipeline import Pipeline


CLOSE = 1e-4
"""Of the largest value: what numbers of 32 bits may differ by when they are summed in another order."""


@dataclass(frozen=True)
class Difference:
    """How far one value is from the reference: the largest difference, relative to the reference's largest value.

    What has no distance, such as the layout of a gradient in memory, is infinitely far if it differs.
    """

    name: str
    """A parameter's or buffer's name in the model, `loss` or `norm`; `<name> (strides)` for the layout of a gradient, `random state of
    rank 1`, `microbatch 2: structure` for a batch that was cut wrongly. Attributes of modules have names like those of buffers."""
    absolute: float
    relative: float


@dataclass(frozen=True)
class Comparison:
    """A step against one reference."""

    reference: str
    """`microbatch loop`: the same slices in the same order; `whole batch`: the batch in one piece."""
    exact: bool
    """Whether every bit is the same."""
    differences: list[Difference] = field(default_factory=list)
    """What differs, the worst first."""

    @property
    def worst(self) -> float:
        return self.differences[0].relative if self.differences else 0.0

    @property
    def close(self) -> bool:
        """Whether everything is equal up to rounding."""
        return self.worst <= CLOSE

    def in_words(self) -> str:
        """How near it is."""
        if self.exact or not self.close:
            return str(self)
        return f"{self.reference}: equal up to rounding, {self.worst:.1e} of the largest value"

    def __str__(self) -> str:
        if self.exact:
            return f"{self.reference}: equal to the last bit"
        shown = ", ".join(f"{d.name} {d.relative:.2g}" for d in self.differences[:5])
        return f"{self.reference}: {len(self.differences)} differ, by up to {self.worst:.2g} of the largest value ({shown})"


@dataclass(frozen=True)
class Parity:
    """What a step gives against the unpipelined model: the loss, every gradient and their norm.

    Against the loop over microbatches also what a step leaves behind: buffers and other state of every stage, on each rank that holds
    it, the layout of gradients, and the random state of every rank.
    """

    loop: Comparison
    batch: Comparison | None
    """None if microbatches have weights of their own, so that the batch in one piece has others."""

    @property
    def all(self) -> list[Comparison]:
        return [self.loop] if self.batch is None else [self.loop, self.batch]

    def __str__(self) -> str:
        return "\n".join(map(str, self.all))


@dataclass(frozen=True)
class Batch:
    """A batch as it was given to a step."""

    args: tuple[Any, ...]
    target: Any
    stage_kwargs: Mapping[int, Mapping[str, Any]]

    def copy(self) -> Batch:
        """One whose tensors have memory of their own, except those that want a gradient."""
        given = self.args, self.target, {stage: dict(each) for stage, each in self.stage_kwargs.items()}
        return Batch(*pytree.tree_map_only(Tensor, lambda leaf: leaf if leaf.requires_grad else copy_tensor(leaf), given))


@dataclass
class _Found:
    """What a step has left on one rank."""

    numbers: dict[str, Tensor | None]
    """The loss, and the gradients of the rank's parameters."""
    layouts: dict[str, _Layout]
    states: dict[int, dict[str, Any]]
    """Buffers and attributes by stage."""
    differs: list[str]
    """What else is not as it should be."""


_Layout = tuple[int, ...] | str | None
"""The strides of a gradient, or the kind of one that has none; None without a gradient."""
_RandomState = tuple[Tensor, Tensor | None]
"""That of the host and that of the device."""


def parity(pipeline: Pipeline, feed: StepInput, batch: Batch) -> Parity:
    """Run a step and both references on copies of the model; gradients, state and random streams are put back afterwards.

    The references run the pipeline's own stages one after the other, without recomputing any, on the batch as it was given. They
    cannot tell whether the model was cut rightly. Random states are compared if it is known what they should be: unchanged with a
    seed, or on a rank whose stages draw nothing; the loop's own on a rank that holds all stages that draw.
    """
    parts = [part for part in pipeline.partition.parts if part is not None]
    if len(parts) != pipeline.table.stages:
        raise ScheduleError("parity runs the whole model, but this pipeline was made of some of its stages only")
    if pipeline.data.scattered:
        raise ScheduleError("parity runs a copy of the whole model, but of some parameters ranks hold a part only: compare before sharding")
    args, target = pipeline.batches.open(batch.args, batch.target)
    batch = replace(batch, args=args, target=target)
    pieces = _cut(pipeline, batch, len(feed.args))
    wrong = [f"microbatch {k}: structure" for k in range(len(feed.args)) if not _is_same_piece(feed, pieces, k)]
    with _kept(pipeline):
        pipeline.data.copy_buffers()
        references = _reference_parts(pipeline, parts)
        again = _copied(references)
        before = device.random_state()
        mine = _step(pipeline, feed)
        after = device.random_state()
    loop = _Reference(pipeline, references, replace(pieces, scales=feed.scales, seed=feed.seed, first=feed.first))
    if not _is_random_state_right(pipeline, loop, before, after):
        mine.differs.append(f"random state of rank {pipeline.rank}")
    mine.differs += wrong
    found = pipeline.gather("parity", mine)
    others = [*_layout_differences(found, loop.layouts), *_state_differences(found, loop.states)]
    others += [Difference(name, math.inf, math.inf) for name in dict.fromkeys(name for theirs in found for name in theirs.differs)]
    numbers = [theirs.numbers for theirs in found]
    compared = _compare("microbatch loop", numbers, pipeline.data.sum_values(loop.numbers), others)
    if pipeline.batches.weight is not None:
        return Parity(compared, None)
    whole = _Reference(pipeline, again, _whole(pipeline, batch, feed))
    return Parity(compared, _compare("whole batch", numbers, pipeline.data.sum_values(whole.numbers)))


# The step ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _kept(pipeline: Pipeline) -> Iterator[None]:
    """Leave gradients, parameters with hooks, all state of this rank's stages, and the random state as they are."""
    held = [parameter for _, parameter in pipeline.local_parameters()]
    grads, steps, random = [parameter.grad for parameter in held], pipeline._steps, device.random_state()
    hooked = [(parameter, parameter.detach().clone()) for parameter in held if parameter._post_accumulate_grad_hooks]
    layers = [layer for index in pipeline.stages for layer in _part(pipeline, index).modules]
    states = [ModuleState.capture(layer) for layer in layers]
    pipeline.gather("kept", None)  # nobody changes what another has yet to set aside
    try:
        yield
    finally:
        pipeline._steps = steps
        device.set_random_state(random)
        for parameter, grad in zip(held, grads, strict=True):
            parameter.grad = grad
        for parameter, value in hooked:
            parameter.data.copy_(value)
        for state in states:
            state.restore()


def _part(pipeline: Pipeline, stage: int) -> Part:
    part = pipeline.partition.parts[stage]
    assert part is not None
    return part


def _step(pipeline: Pipeline, feed: StepInput) -> _Found:
    """Run a step from no gradients at all, and note what it leaves."""
    for _, parameter in pipeline.local_parameters():
        parameter.grad = None
    pipeline.gather("cleared", None)  # nobody adds to a gradient that another has yet to clear
    loss = pipeline._run(feed, training=True).loss
    grads = {name: parameter.grad for name, parameter in pipeline.local_parameters()}
    layouts = {name: _layout(grad) for name, grad in grads.items()}
    states = {stage: _state(_part(pipeline, stage)) for stage in pipeline.stages}
    found = _Found({"loss": loss, **{name: _dense(grad) for name, grad in grads.items()}}, layouts, states, [])
    pipeline.gather("noted", None)  # nobody puts back what another has yet to note
    return found


def _dense(grad: Tensor | None) -> Tensor | None:
    """A copy of a gradient that can be compared element by element."""
    return None if grad is None else grad.to_dense() if grad.layout is not torch.strided else grad.clone()


def _layout(grad: Tensor | None) -> _Layout:
    """How a gradient lies in memory; strides along dimensions of size 1 say nothing."""
    if grad is None or grad.layout is not torch.strided:
        return None if grad is None else str(grad.layout)
    return tuple(0 if size == 1 else stride for size, stride in zip(grad.shape, grad.stride(), strict=True))


def _state(part: Part) -> dict[str, Any]:
    """The buffers and attributes of a stage's layers, under the model's own names."""
    return {
        f"{prefix}.{name}": value
        for prefix, layer in zip(part.layers, part.modules, strict=True)
        for name, value in ModuleState.capture(layer).values().items()
    }


# The batch --------------------------------------------------------------------------------------------------------------


def _cut(pipeline: Pipeline, batch: Batch, count: int) -> StepInput:
    """The microbatches of a batch, cut without the code that a step uses."""
    batches, batch = pipeline.batches, batch.copy()
    dims, target = batches.dims_of(batch.args), None if batch.target is ABSENT else batch.target
    given = [(batch.args, dims), (target, batches.targets), *((each, batches.kwargs) for each in batch.stage_kwargs.values())]
    sizes = [leaf.shape[dim] for value, dims in given for leaf, dim in _leaves(value, dims) if dim is not None]
    rows = torch.arange(sizes[0]).tensor_split(count) if sizes else ()

    def piece(leaf: Any, dim: int | None, number: int) -> Any:
        if dim is None:
            return leaf
        part = leaf.narrow(dim, int(rows[number][0]), len(rows[number]))
        return part if leaf.requires_grad else part.data  # a stage may change it in place, unlike a slice

    def pieces(value: Any, dims: Any) -> list[Any]:
        leaves, spec = _leaves(value, dims), pytree.tree_structure(value)
        return [pytree.tree_unflatten([piece(leaf, dim, number) for leaf, dim in leaves], spec) for number in range(count)]

    kwargs = {stage: pieces(each, batches.kwargs) for stage, each in batch.stage_kwargs.items()}
    return StepInput(pieces(batch.args, dims), kwargs, None if batch.target is ABSENT else pieces(target, batches.targets), [])


def _leaves(value: Any, dims: Any) -> list[tuple[Any, int | None]]:
    """The leaves of a value, each with its batch dimension; None for what is not cut."""
    if dims is None or isinstance(dims, int):
        return [(leaf, dims if isinstance(leaf, Tensor) and leaf.dim() > 0 else None) for leaf in pytree.tree_leaves(value)]
    pairs = [(value[key], dims.get(key, 0)) for key in value] if isinstance(dims, dict) else zip(value, dims, strict=True)
    return [each for part, dim in pairs for each in _leaves(part, dim)]


def _is_same_piece(feed: StepInput, pieces: StepInput, number: int) -> bool:
    """Whether a step's microbatch is that of the reference."""
    one, other = (
        (each.args[number], {stage: given[number] for stage, given in each.kwargs.items()}, each.targets and each.targets[number])
        for each in (feed, pieces)
    )
    if pytree.tree_structure(one) != pytree.tree_structure(other):
        return False
    return all(map(_is_same_leaf, pytree.tree_leaves(one), pytree.tree_leaves(other)))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other)
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.layout is not torch.strided or is_same_value(one.detach(), other.detach())


def _whole(pipeline: Pipeline, batch: Batch, feed: StepInput) -> StepInput:
    """The batch in one piece."""
    batch = batch.copy()
    kwargs = {stage: [dict(each)] for stage, each in batch.stage_kwargs.items()}
    alone = pipeline.data.ranks == 1 or feed.weights is None
    targets = None if batch.target is ABSENT else [batch.target]
    return StepInput([batch.args], kwargs, targets, [1.0 if alone else sum(feed.scales)])


# The reference ----------------------------------------------------------------------------------------------------------


def _reference_parts(pipeline: Pipeline, parts: Sequence[Part]) -> list[Part]:
    """Copies of all stages as the ranks that train them have them, without what recomputes them."""
    made = _copied(parts)
    held = {stage: (_plain(_part(pipeline, stage).module).state_dict(), _state(_part(pipeline, stage))) for stage in pipeline.stages}
    for theirs in reversed(pipeline.gather("states", held)):  # a rank trains its own stages, and its model's others stay as they were
        for stage, (tensors, state) in theirs.items():
            made[stage].module.load_state_dict(tensors)
            for prefix, layer in zip(made[stage].layers, made[stage].modules, strict=True):
                own = {name.removeprefix(f"{prefix}."): value for name, value in state.items() if name.startswith(f"{prefix}.")}
                ModuleState.capture(layer).assign(own)
    return made


def _plain(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, Recomputed) else module


def _copied(parts: Sequence[Part]) -> list[Part]:
    """Copies of stages together with their layers."""
    modules = [_plain(part.module) for part in parts]
    with _detached_attributes(modules):
        copies, layers = copy.deepcopy((nn.ModuleList(modules), [part.modules for part in parts]))
    return [replace(part, module=module, modules=own) for part, module, own in zip(parts, copies, layers, strict=True)]


@contextmanager
def _detached_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Without the history of tensors that a forward has left in attributes, which torch copies none of."""
    parts = {id(part): part for module in modules for part in module.modules()}
    left = [(vars(part), key, value) for part in parts.values() for key, value in vars(part).items() if _has_history(value)]
    for holder, key, value in left:
        holder[key] = value.detach()
    try:
        yield
    finally:
        for holder, key, value in left:
            holder[key] = value


def _has_history(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


class _Reference:
    """Forward and backward of the stages one after the other, a microbatch at a time, and what is left of them."""

    def __init__(self, pipeline: Pipeline, parts: Sequence[Part], feed: StepInput) -> None:
        self.pipeline, self.parts, self.feed = pipeline, parts, feed
        self.draws: set[int] = set()
        """The stages that draw random numbers."""
        for part in parts:
            part.module.zero_grad(set_to_none=True)
        with preserve_random_state(), torch.enable_grad():
            loss = self._run()
            self.random_state = device.random_state()
        grads = {name: parameter.grad for part in parts for name, parameter in part.parameters}
        self.layouts = {name: _layout(grad) for name, grad in grads.items()}
        self.numbers = {"loss": loss, **{name: _dense(grad) for name, grad in grads.items()}}
        self.states = {stage: _state(part) for stage, part in enumerate(parts)}

    def _run(self) -> Tensor | None:
        """All microbatches; the loss."""
        total: Tensor | None = None
        side: list[Tensor] = []
        for microbatch, scale in enumerate(self.feed.scales):
            with collect() as extras:
                output = self._forward(microbatch)
                with self._watched(len(self.parts) - 1):
                    loss = self.pipeline.loss(output, self.feed.targets, microbatch)
            more = [each * scale for each in extras.losses]
            ends = [each for each in (*([loss] if scale else []), *more) if each.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.full_like(each, scale if each is loss else 1.0) for each in ends])
            if scale:
                total = loss.detach() * scale if total is None else total + loss.detach() * scale
            side += [each.detach() for each in more]
        for each in side:
            total = each if total is None else total + each
        return total

    def _forward(self, microbatch: int) -> Any:
        """The model's output, stage by stage."""
        graph, feed = self.pipeline.table.graph, self.feed
        made: dict[int, Any] = {}
        for stage, part in enumerate(self.parts):
            inputs = [made[other] for other in sorted(graph.inputs_of(stage), reverse=True)]
            given = feed.kwargs[stage][microbatch] if stage in feed.kwargs else {}
            staged = Stage(stage, part.module, unpack=part.unpack)
            if feed.seed is not None:
                draw_from(feed.seed, staged.stream, feed.first + microbatch)
            with self._watched(stage):
                made[stage] = unwrap_stage_output(staged.run(inputs, given) if inputs else part.module(*feed.args[microbatch], **given))
        return made[len(self.parts) - 1]

    @contextmanager
    def _watched(self, stage: int) -> Iterator[None]:
        """Note whether a stage draws random numbers."""
        before = device.random_state()
        yield
        if not _is_same_random_state(before, device.random_state()):
            self.draws.add(stage)


def _is_same_random_state(one: _RandomState, other: _RandomState) -> bool:
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other, strict=True))


def _is_random_state_right(pipeline: Pipeline, loop: _Reference, before: _RandomState, after: _RandomState) -> bool:
    """Whether a step has left this rank's random state as it should, where that is known."""
    if pipeline.seed is not None or not loop.draws & set(pipeline.stages):
        return _is_same_random_state(before, after)
    holders = {ranks[stage] for ranks in pipeline.table.placement.copies for stage in loop.draws}
    return holders != {pipeline.rank} or _is_same_random_state(after, loop.random_state)


# Differences ------------------------------------------------------------------------------------------------------------


def _layout_differences(found: Sequence[_Found], wanted: Mapping[str, _Layout]) -> list[Difference]:
    names = [
        name
        for theirs in found
        for name, layout in theirs.layouts.items()
        if layout is not None and wanted.get(name) is not None and layout != wanted[name]
    ]
    return [Difference(f"{name} (strides)", math.inf, math.inf) for name in dict.fromkeys(names)]


def _state_differences(found: Sequence[_Found], wanted: Mapping[int, Mapping[str, Any]]) -> list[Difference]:
    """The worst difference of each buffer and attribute over the ranks that hold it."""
    worst: dict[str, Difference] = {}
    for theirs in found:
        for stage, state in theirs.states.items():
            for name in {**state, **wanted[stage]}:
                seen = _value_difference(name, state.get(name), wanted[stage].get(name))
                if seen is not None and (name not in worst or worst[name].relative < seen.relative):
                    worst[name] = seen
    return list(worst.values())


def _value_difference(name: str, found: Any, wanted: Any) -> Difference | None:
    if is_same_value(found, wanted):
        return None
    if isinstance(found, float) and isinstance(wanted, float):
        found, wanted = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    if isinstance(found, Tensor) and isinstance(wanted, Tensor) and found.shape == wanted.shape:
        return _difference(name, found, wanted)
    return Difference(name, math.inf, math.inf)


def _compare(
    reference: str, found: list[dict[str, Tensor | None]], wanted: dict[str, Tensor | None], others: Sequence[Difference] = ()
) -> Comparison:
    """Every rank's figures against the reference's, the worst of those that several ranks have; and other differences."""
    worst: dict[str, Difference] = {}
    for rank in found:
        for name, value in rank.items():
            seen = _difference(name, value, wanted.get(name))
            if seen is not None and (name not in worst or worst[name].relative < seen.relative):
                worst[name] = seen
    together = {name: value for rank in found for name, value in rank.items()}
    norms = [_norm(each) for each in (together, {name: wanted[name] for name in together if name in wanted})]
    norm = _difference("norm", *norms)
    if norm is not None:
        worst["norm"] = norm
    differences = [*worst.values(), *others]
    return Comparison(reference, not differences, sorted(differences, key=lambda d: -d.relative))


def _norm(values: dict[str, Tensor | None]) -> Tensor | None:
    grads = [value.double() for name, value in values.items() if name != "loss" and value is not None]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])) if grads else None


def _difference(name: str, found: Tensor | None, wanted: Tensor | None) -> Difference | None:
    if found is None or wanted is None:
        return None if found is wanted else Difference(name, float("inf"), float("inf"))
    if torch.equal(found, wanted):
        return None
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    if bool(same.all()):
        return None
    apart = (found.double() - wanted.double()).abs().masked_fill(same, 0.0)
    absolute = float(apart.nan_to_num(nan=float("inf")).max())  # not a number on one side only: as far off as can be
    usual = wanted.double().abs()[wanted.isfinite()]
    largest = float(usual.max()) if len(usual) else 0.0
    return Difference(name, absolute, absolute / largest if largest else float("inf"))
