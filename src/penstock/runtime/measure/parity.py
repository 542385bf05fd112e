"""Compare a step with the unpipelined model.

A step runs on the pipeline, then on copies of its stages one after the other: microbatch by microbatch, and on the whole batch. All
state is restored afterwards.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError
from penstock.ir.table import Table
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.result import collect, unwrap_stage_output
from penstock.runtime.batch.step_input import ABSENT, BatchSplitter, StepInput
from penstock.runtime.device.rng import get_rng_state
from penstock.runtime.model.module_state import ModuleState, is_same_value, preserve_state
from penstock.runtime.model.partition import Part, Partition
from penstock.runtime.model.random_streams import draw_from, preserve_random_state
from penstock.runtime.model.stage import Stage
from penstock.runtime.model.transforms import Recomputed
from penstock.runtime.parallel.data_parallel import DataParallel
from penstock.runtime.parallel.spread_vocabulary import SpreadVocabulary
from penstock.runtime.parallel.whole_ends import WholeEnds, preserve_gradients
from penstock.runtime.tensors.boundary import copy_tensor
from penstock.runtime.torch_internals import pytree

CLOSE = 1e-4
"""Relative to the largest value: how much 32-bit numbers may differ when they are summed in another order."""


@dataclass(frozen=True)
class Difference:
    """How far one value is from the reference: the largest difference, relative to the reference's largest value.

    The distance is infinite for things without one, such as the memory layout of a gradient.
    """

    name: str
    """A parameter's or buffer's name in the model, `loss` or `norm`; `<name> (strides)` for the layout of a gradient, `random state of
    rank 1`, `microbatch 2: structure` for a batch that was split wrongly. Attributes of modules are named like buffers."""
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
    """All differences, the worst first."""

    @property
    def worst(self) -> float:
        return self.differences[0].relative if self.differences else 0.0

    @property
    def close(self) -> bool:
        """Whether everything is equal up to rounding."""
        return self.worst <= CLOSE

    def in_words(self) -> str:
        """The result in one line."""
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
    """A step against the unpipelined model: the loss, every gradient and their norm.

    The loop over microbatches also compares what a step leaves behind: buffers and other state of every stage, on each rank that holds
    it, the layout of gradients, and the random state of every rank.
    """

    loop: Comparison
    batch: Comparison | None
    """None if microbatches have their own weights, because the batch in one piece has other weights."""

    @property
    def all(self) -> list[Comparison]:
        return [self.loop] if self.batch is None else [self.loop, self.batch]

    def __str__(self) -> str:
        return "\n".join(map(str, self.all))


@dataclass(frozen=True)
class StepArguments:
    """The arguments of a step, before the batch is split."""

    args: tuple[Any, ...]
    target: Any
    stage_kwargs: Mapping[int, Mapping[str, Any]]

    def copy(self) -> StepArguments:
        """Copy all tensors except those that require a gradient."""
        values = self.args, self.target, {stage: dict(kwargs) for stage, kwargs in self.stage_kwargs.items()}
        return StepArguments(*pytree.tree_map_only(Tensor, lambda leaf: leaf if leaf.requires_grad else copy_tensor(leaf), values))


class ComparedPipeline(Protocol):
    """The members of a `Pipeline` that `compare_step` reads."""

    rank: int
    table: Table
    partition: Partition
    stages: dict[int, Stage]
    batches: BatchSplitter
    loss: Loss
    data: DataParallel
    seed: int | None
    vocabulary: SpreadVocabulary | None

    def local_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def gather(self, name: str, value: Any, /) -> list[Any]: ...


@dataclass
class _StepOutcome:
    """The numbers and state after a step: on one rank, or in the reference."""

    numbers: dict[str, Tensor | None]
    """The loss, and the gradients by parameter."""
    layouts: dict[str, _Layout]
    states: dict[int, dict[str, Any]]
    """Buffers and attributes by stage."""
    mismatches: list[str] = field(default_factory=list)
    """The names of other things that are not as they should be."""

    @classmethod
    def collect(cls, loss: Tensor | None, gradients: Iterable[tuple[str, Tensor | None]], parts: Mapping[int, Part]) -> _StepOutcome:
        grads = dict(gradients)
        numbers = {"loss": loss, **{name: _make_dense(grad) for name, grad in grads.items()}}
        return cls(
            numbers,
            {name: _find_layout(grad) for name, grad in grads.items()},
            {stage: _collect_state(part) for stage, part in parts.items()},
        )


_Layout = tuple[int, ...] | str | None
"""The strides of a gradient, or the layout of one that is not strided; None without a gradient."""
_RandomState = tuple[Tensor, Tensor | None]
"""Of the host and of the device."""


def compare_step(pipeline: ComparedPipeline, run: Callable[[StepInput], Tensor | None], feed: StepInput, batch: StepArguments) -> Parity:
    """Run a step and both references on copies of the model; gradients, state and random streams are restored afterwards.

    `run` runs a training step of the pipeline on `feed`, which is `batch` split into microbatches, and returns its loss. The references
    run the pipeline's own stages one after the other, without recomputing any, on `batch`; so they cannot detect that the model was cut
    wrongly. Random states are compared if it is known what they should be: unchanged with a seed, or on a rank whose stages draw
    nothing; the loop's own on a rank that holds all stages that draw.
    """
    parts = [part for part in pipeline.partition.parts if part is not None]
    if len(parts) != pipeline.table.stages:
        raise ScheduleError("parity runs the whole model, but this pipeline was made of some of its stages only")
    if pipeline.data.scattered:
        raise ScheduleError("parity runs a copy of the whole model, but ranks hold only shards of some parameters: compare before sharding")
    args, target, _ = pipeline.batches.open(batch.args, batch.target)
    batch = replace(batch, args=args, target=target)
    pieces = _split(pipeline.batches, batch, feed.microbatches)
    wrong = []
    if feed.slices is None:  # slices are compared by what they compute
        wrong = [f"microbatch {k}: structure" for k in range(len(feed.args)) if not _is_same_piece(feed, pieces, k)]
    mine_parts = {stage: parts[stage] for stage in pipeline.stages}
    with preserve_gradients(pipeline.vocabulary), preserve_state([layer for part in mine_parts.values() for layer in part.modules]):
        pipeline.gather("kept", None)  # no rank changes a module that another has yet to capture
        pipeline.data.copy_buffers()
        references = _build_reference_parts(pipeline, parts, mine_parts)
        again = _copy_parts(references)
        ends = None if pipeline.vocabulary is None else WholeEnds.gather(pipeline.vocabulary, pipeline.gather)
        ends_again = None if ends is None else ends.copy()
        before = get_rng_state()
        own = _run_step(pipeline, mine_parts, run, feed)
        after = get_rng_state()
    loop = _Reference(pipeline, references, replace(pieces, scales=feed.microbatch_scales, seed=feed.seed, first=feed.first), ends)
    if not _is_random_state_right(pipeline, loop, before, after):
        own.mismatches.append(f"random state of rank {pipeline.rank}")
    own.mismatches += wrong
    outcomes = pipeline.gather("parity", own)
    others = [difference for outcome in outcomes for difference in _find_other_differences(outcome, loop.outcome)]
    numbers = [outcome.numbers for outcome in outcomes]
    compared = compare_numbers("microbatch loop", numbers, pipeline.data.sum_values(loop.outcome.numbers), others)
    if pipeline.batches.weight is not None:
        return Parity(compared, None)
    whole = _Reference(pipeline, again, _join_batch(pipeline.data.ranks, batch, feed), ends_again)
    return Parity(compared, compare_numbers("whole batch", numbers, pipeline.data.sum_values(whole.outcome.numbers)))


# The step ---------------------------------------------------------------------------------------------------------------


def _run_step(
    pipeline: ComparedPipeline, parts: Mapping[int, Part], run: Callable[[StepInput], Tensor | None], feed: StepInput
) -> _StepOutcome:
    """Run a step without gradients from before, and collect what it leaves."""
    for _, parameter in pipeline.local_parameters():
        parameter.grad = None
    pipeline.gather("cleared", None)  # no rank adds to a gradient that another has yet to clear
    loss = run(feed)
    outcome = _StepOutcome.collect(loss, _list_gradients(pipeline.local_parameters()), parts)
    pipeline.gather("noted", None)  # no rank restores a value that another has yet to collect
    return outcome


def _list_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor | None]]:
    return ((name, parameter.grad) for name, parameter in parameters)


def _make_dense(grad: Tensor | None) -> Tensor | None:
    """A copy of a gradient that can be compared element by element."""
    return None if grad is None else grad.to_dense() if grad.layout is not torch.strided else grad.clone()


def _find_layout(grad: Tensor | None) -> _Layout:
    """The memory layout of a gradient; strides along dimensions of size 1 do not matter."""
    if grad is None or grad.layout is not torch.strided:
        return None if grad is None else str(grad.layout)
    return tuple(0 if size == 1 else stride for size, stride in zip(grad.shape, grad.stride(), strict=True))


def _collect_state(part: Part) -> dict[str, Any]:
    """The buffers and attributes of a stage's layers, under their names in the model."""
    return {
        f"{prefix}.{name}": value
        for prefix, layer in zip(part.layers, part.modules, strict=True)
        for name, value in ModuleState.capture(layer).values().items()
    }


# The batch --------------------------------------------------------------------------------------------------------------


def _split(batches: BatchSplitter, batch: StepArguments, count: int) -> StepInput:
    """Split a batch into microbatches, without the code that a step uses."""
    batch = batch.copy()
    dims, target = batches.dims_of(batch.args), None if batch.target is ABSENT else batch.target
    values = [(batch.args, dims), (target, batches.targets), *((kwargs, batches.kwargs) for kwargs in batch.stage_kwargs.values())]
    sizes = [leaf.shape[dim] for value, dims in values for leaf, dim in _list_leaves(value, dims) if dim is not None]
    rows = torch.arange(sizes[0]).tensor_split(count) if sizes else ()

    def piece(leaf: Any, dim: int | None, number: int) -> Any:
        if dim is None:
            return leaf
        part = leaf.narrow(dim, int(rows[number][0]), len(rows[number]))
        return part if leaf.requires_grad else part.data  # a stage may change it in place, unlike a slice

    def pieces(value: Any, dims: Any) -> list[Any]:
        leaves, spec = _list_leaves(value, dims), pytree.tree_structure(value)
        return [pytree.tree_unflatten([piece(leaf, dim, number) for leaf, dim in leaves], spec) for number in range(count)]

    kwargs = {stage: pieces(values, batches.kwargs) for stage, values in batch.stage_kwargs.items()}
    return StepInput(pieces(batch.args, dims), kwargs, None if batch.target is ABSENT else pieces(target, batches.targets), [])


def _list_leaves(value: Any, dims: Any) -> list[tuple[Any, int | None]]:
    """The leaves of a value, each with its batch dimension; None for those that are not split."""
    if dims is None or isinstance(dims, int):
        return [(leaf, dims if isinstance(leaf, Tensor) and leaf.dim() > 0 else None) for leaf in pytree.tree_leaves(value)]
    pairs = [(value[key], dims.get(key, 0)) for key in value] if isinstance(dims, dict) else zip(value, dims, strict=True)
    return [leaf for part, dim in pairs for leaf in _list_leaves(part, dim)]


def _is_same_piece(feed: StepInput, pieces: StepInput, number: int) -> bool:
    """Whether a microbatch of the step equals that of the reference."""
    one, other = (
        (split.args[number], {stage: kwargs[number] for stage, kwargs in split.kwargs.items()}, split.targets and split.targets[number])
        for split in (feed, pieces)
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


def _join_batch(data_ranks: int, batch: StepArguments, feed: StepInput) -> StepInput:
    """The batch in one piece."""
    batch = batch.copy()
    kwargs = {stage: [dict(values)] for stage, values in batch.stage_kwargs.items()}
    alone = data_ranks == 1 or feed.weights is None
    targets = None if batch.target is ABSENT else [batch.target]
    return StepInput([batch.args], kwargs, targets, [1.0 if alone else sum(feed.scales)])


# The reference ----------------------------------------------------------------------------------------------------------


def _build_reference_parts(pipeline: ComparedPipeline, parts: Sequence[Part], trained: Mapping[int, Part]) -> list[Part]:
    """Copies of all stages, with the state of the ranks that train them, and without recomputation."""
    copies = _copy_parts(parts)
    own_states = {stage: (_unwrap(part.module).state_dict(), _collect_state(part)) for stage, part in trained.items()}
    for states in reversed(pipeline.gather("states", own_states)):  # a rank trains only its own stages
        for stage, (tensors, state) in states.items():
            copies[stage].module.load_state_dict(tensors)
            for prefix, layer in zip(copies[stage].layers, copies[stage].modules, strict=True):
                own = {name.removeprefix(f"{prefix}."): value for name, value in state.items() if name.startswith(f"{prefix}.")}
                ModuleState.capture(layer).assign(own)
    return copies


def _unwrap(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, Recomputed) else module


def _copy_parts(parts: Sequence[Part]) -> list[Part]:
    """Copy stages together with their layers."""
    modules = [_unwrap(part.module) for part in parts]
    with _detach_attributes(modules):
        copies, layers = copy.deepcopy((nn.ModuleList(modules), [part.modules for part in parts]))
    return [replace(part, module=module, modules=own) for part, module, own in zip(parts, copies, layers, strict=True)]


@contextmanager
def _detach_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Detach tensors that a forward has left in attributes, because torch does not copy tensors with a history."""
    parts = {id(part): part for module in modules for part in module.modules()}
    attributes = [(vars(part), *item) for part in parts.values() for item in vars(part).items()]
    attributes = [(holder, key, value) for holder, key, value in attributes if isinstance(value, Tensor) and value.grad_fn is not None]
    for holder, key, value in attributes:
        holder[key] = value.detach()
    try:
        yield
    finally:
        for holder, key, value in attributes:
            holder[key] = value


class _Reference:
    """Runs forward and backward of all stages, one microbatch after the other, and keeps what they compute and leave behind."""

    def __init__(self, pipeline: ComparedPipeline, parts: Sequence[Part], feed: StepInput, ends: WholeEnds | None) -> None:
        """`ends` are those that are spread over the ranks and so in no stage."""
        self.pipeline, self.parts, self.feed, self.ends = pipeline, parts, feed, ends
        self.draws: set[int] = set()
        """The stages that draw random numbers."""
        for part in parts:
            part.module.zero_grad(set_to_none=True)
        with preserve_random_state(), torch.enable_grad():
            loss = self._run()
            self.random_state = get_rng_state()
        gradients = _list_gradients(named for part in parts for named in part.parameters)
        if ends is not None:
            gradients = chain(gradients, ends.list_gradients())
        self.outcome = _StepOutcome.collect(loss, gradients, dict(enumerate(parts)))

    def _run(self) -> Tensor | None:
        """Run all microbatches and return the loss."""
        total: Tensor | None = None
        side: list[Tensor] = []
        for microbatch, scale in enumerate(self.feed.scales):
            with collect() as extras:
                output = self._forward(microbatch)
                with self._watch_random_state(len(self.parts) - 1):
                    loss = self.pipeline.loss(output, self.feed.targets, microbatch)
            more = [extra * scale for extra in extras.losses]
            ends = [end for end in (*([loss] if scale else []), *more) if end.requires_grad]
            if ends:
                torch.autograd.backward(ends, [torch.full_like(end, scale if end is loss else 1.0) for end in ends])
            if scale:
                total = loss.detach() * scale if total is None else total + loss.detach() * scale
            side += [extra.detach() for extra in more]
        for extra in side:
            total = extra if total is None else total + extra
        return total

    def _forward(self, microbatch: int) -> Any:
        """The model's output, stage by stage."""
        graph, feed = self.pipeline.table.graph, self.feed
        outputs: dict[int, Any] = {}
        for stage, part in enumerate(self.parts):
            inputs = [outputs[other] for other in sorted(graph.inputs_of(stage), reverse=True)]
            if stage == 0 and self.ends is not None and self.ends.embedding is not None:
                inputs = [self.ends.embed(feed.args[microbatch])]
            kwargs = feed.kwargs[stage][microbatch] if stage in feed.kwargs else {}
            staged = Stage(stage, part.module, unpack=part.unpack)
            if feed.seed is not None:
                draw_from(feed.seed, staged.stream, feed.first + microbatch)
            with self._watch_random_state(stage):
                outputs[stage] = unwrap_stage_output(
                    staged.run(inputs, kwargs) if inputs else part.module(*feed.args[microbatch], **kwargs)
                )
        output = outputs[len(self.parts) - 1]
        return output if self.ends is None or self.ends.head is None else self.ends.compute_logits(output)

    @contextmanager
    def _watch_random_state(self, stage: int) -> Iterator[None]:
        """Note whether a stage draws random numbers."""
        before = get_rng_state()
        yield
        if not _is_same_random_state(before, get_rng_state()):
            self.draws.add(stage)


def _is_same_random_state(one: _RandomState, other: _RandomState) -> bool:
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other, strict=True))


def _is_random_state_right(pipeline: ComparedPipeline, loop: _Reference, before: _RandomState, after: _RandomState) -> bool:
    """Whether a step has left this rank's random state as it should; True if that is not known."""
    if pipeline.seed is not None or not loop.draws & set(pipeline.stages):
        return _is_same_random_state(before, after)
    holders = {ranks[stage] for ranks in pipeline.table.placement.copies for stage in loop.draws}
    return holders != {pipeline.rank} or _is_same_random_state(after, loop.random_state)


# Differences ------------------------------------------------------------------------------------------------------------


def _find_other_differences(outcome: _StepOutcome, expected: _StepOutcome) -> Iterator[Difference | None]:
    """Yield how a rank differs from the loop in the layout of gradients, in buffers and attributes, and in its random state."""
    for name, layout in outcome.layouts.items():
        if layout is not None and expected.layouts.get(name) not in (None, layout):
            yield Difference(f"{name} (strides)", math.inf, math.inf)
    for stage, state in outcome.states.items():
        for name in {**state, **expected.states[stage]}:
            yield _measure_value_difference(name, state.get(name), expected.states[stage].get(name))
    for name in outcome.mismatches:
        yield Difference(name, math.inf, math.inf)


def _measure_value_difference(name: str, actual: Any, expected: Any) -> Difference | None:
    if is_same_value(actual, expected):
        return None
    if isinstance(actual, float) and isinstance(expected, float):
        actual, expected = torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    if isinstance(actual, Tensor) and isinstance(expected, Tensor) and actual.shape == expected.shape:
        return _measure_difference(name, actual, expected)
    return Difference(name, math.inf, math.inf)


def compare_numbers(
    reference: str, actual: list[dict[str, Tensor | None]], expected: dict[str, Tensor | None], others: Sequence[Difference | None] = ()
) -> Comparison:
    """Compare the numbers of every rank with the reference's, add `others`, and keep the worst difference of each name."""
    differences = [_measure_difference(name, value, expected.get(name)) for rank in actual for name, value in rank.items()]
    together = {name: value for rank in actual for name, value in rank.items()}
    norms = [_measure_norm(values) for values in (together, {name: expected[name] for name in together if name in expected})]
    differences += [_measure_difference("norm", *norms), *others]
    ordered = sorted((difference for difference in differences if difference is not None), key=lambda difference: difference.relative)
    worst = {difference.name: difference for difference in ordered}
    return Comparison(reference, not worst, sorted(worst.values(), key=lambda difference: -difference.relative))


def _measure_norm(values: dict[str, Tensor | None]) -> Tensor | None:
    grads = [value.double() for name, value in values.items() if name != "loss" and value is not None]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads])) if grads else None


def _measure_difference(name: str, actual: Tensor | None, expected: Tensor | None) -> Difference | None:
    if actual is None or expected is None:
        return None if actual is expected else Difference(name, math.inf, math.inf)
    if torch.equal(actual, expected):
        return None
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if bool(same.all()):
        return None
    apart = (actual.double() - expected.double()).abs().masked_fill(same, 0.0)
    absolute = float(apart.nan_to_num(nan=math.inf).max())  # NaN on one side only: infinitely far
    finite = expected.double().abs()[expected.isfinite()]
    largest = float(finite.max()) if len(finite) else 0.0
    return Difference(name, absolute, absolute / largest if largest else math.inf)
