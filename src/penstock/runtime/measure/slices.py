"""Measure slices of a sequence: each layer with several lengths and prefixes, and the terms that are fitted to that.

A slice is measured as a stage runs it. What the layers keep of the tokens before it comes from a forward of these tokens, which is not
timed. Keys and values are kept for longer than an activation, so they are counted apart: each slice's share of them, and as many numbers
again for the gradients that later slices add to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.planner.profile import Layer, SliceCost, SliceCosts
from penstock.planner.profile.slices import SUM_BYTES, TERMS, TIME_TERMS, Point, fit_slice_cost
from penstock.runtime.batch.loss import Loss
from penstock.runtime.measure.layer import MeasuredLayer, bytes_of
from penstock.runtime.tensors.boundary import detach_tree
from penstock.runtime.torch_internals import pytree

SlicePlace = tuple[int, int]
"""The length of a slice, and the tokens before it."""


class PrefixMemory(Protocol):
    """The tensors that layers of stages keep of the slices of a microbatch."""

    def forward(self, stage: int, unit: int, *, share: float, training: bool) -> AbstractContextManager[None]:
        """Return a context for the forward of a slice."""

    def take_roots(self) -> list[Tensor]:
        """Take the tensors that the backward of the last slice starts from, besides its output."""

    def wrap_backward(self, stage: int, unit: int, operation: Callable[..., None]) -> Callable[..., None]:
        """Wrap the backward of a slice."""

    def list_kept(self) -> list[Tensor]:
        """Return the tensors that are kept of a microbatch's slices."""


MakeMemory = Callable[[int], PrefixMemory]
"""Makes the memory of a microbatch with so many slices."""


def list_places(tokens: int, slices: int) -> list[SlicePlace]:
    """List the slices to measure: halves of the sequence and as short ones as are wanted, at its start, in its middle and at its end.

    >>> list_places(4096, slices=8)
    [(2048, 0), (2048, 2048), (512, 0), (512, 2048), (512, 3584)]
    """
    if not 1 < slices <= tokens:
        raise ScheduleError(f"slices={slices} for sequences of {tokens} tokens: from 2 up to one per token")
    half, short = tokens // 2, tokens // slices
    return list(dict.fromkeys([(half, 0), (half, half), (short, 0), (short, half), (short, tokens - short)]))


def check_places(places: Any, tokens: int) -> list[SlicePlace]:
    """Refuse slices that do not lie in the sequence, and too few to tell the tokens from their pairs."""
    pairs = [] if isinstance(places, str) or not isinstance(places, Iterable) else list(places)
    if not pairs or not all(isinstance(pair, (tuple, list)) and [type(item) for item in pair] == [int, int] for pair in pairs):
        raise ScheduleError(f"slices must be a number of slices, or pairs of a length and the tokens before it, got {places!r}")
    for length, prefix in pairs:
        if length < 1 or prefix < 0 or length + prefix > tokens:
            raise ScheduleError(f"a slice of {length} tokens after {prefix} does not lie in a sequence of {tokens}")
    if len({*map(tuple, pairs)} | {(tokens, 0)}) < len(TIME_TERMS):
        raise ScheduleError(f"{len({*map(tuple, pairs)})} slices are too few for a fit: measure at least 2 besides the whole sequence")
    return list(dict.fromkeys((length, prefix) for length, prefix in pairs))


@dataclass
class MeasuredSlice(MeasuredLayer):
    """One layer on a slice of the sequence."""

    lengths: list[int] = field(default_factory=list)
    """The tokens before the slice, if there are any, and its own."""
    before: Any = None
    """The input of the tokens before it."""
    make_memory: MakeMemory | None = None
    output_before: Any = None
    """The output of the tokens before it."""
    keys: float = 0.0
    """Bytes of keys and values per token."""
    sums: float = 0.0
    """Bytes of their gradients per token."""
    _memory: PrefixMemory | None = None

    @property
    def _number(self) -> int:
        """The number of the slice among those of its microbatch."""
        return len(self.lengths) - 1

    def _prepare(self) -> None:
        assert self.make_memory is not None
        self._memory = self.make_memory(len(self.lengths))
        if self._number:
            with torch.no_grad(), self._memory.forward(self.stage.index, 0, share=1.0, training=True):
                self.output_before = detach_tree(self.stage.run([detach_tree(self.before)], {}))
            self._memory.take_roots()

    def _run_stage(self, leaves: Any) -> Any:
        assert self._memory is not None
        with self._memory.forward(self.stage.index, self._number, share=1.0, training=True):
            return super()._run_stage(leaves)

    def _list_further_ends(self) -> list[Tensor]:
        assert self._memory is not None
        return self._memory.take_roots()

    def _backward(self, run: Any, grads: list[Tensor | None]) -> None:
        assert self._memory is not None
        self._memory.wrap_backward(self.stage.index, self._number, super()._backward)(run, grads)

    def _list_shared(self) -> list[Tensor]:
        assert self._memory is not None
        tensors, tokens = self._memory.list_kept(), sum(self.lengths)
        self.keys = bytes_of(tensors) / tokens
        self.sums = sum(tensor.numel() * max(tensor.element_size(), SUM_BYTES) for tensor in tensors) / tokens
        return tensors

    def _measure_workspace(self, held: int) -> int:
        return super()._measure_workspace(held + round(self.keys * self.lengths[-1]))


# All layers -----------------------------------------------------------------------------------------------------------

CutSequence = Callable[[Any, Any, list[int]], tuple[list[Any], list[Any]]]
"""Cuts the arguments of the first layer and the target into slices of these lengths."""


@dataclass(frozen=True)
class SliceMeter:
    """Measures all layers of a model on slices."""

    places: list[SlicePlace]
    tokens: int
    cut: CutSequence
    make_memory: MakeMemory
    loss: Loss | None
    """The loss of a slice, which counts as part of the last layer."""
    can_slice: Callable[[MeasuredLayer], bool]
    """Whether a layer computes the same on slices as on whole sequences."""
    cut_input: Callable[[Any, list[int]], list[Any]]
    """Cuts the input of any layer, for those behind a layer that has no slices."""

    def measure(self, layers: Sequence[MeasuredLayer], warmup: int, repeats: int) -> list[SliceCosts | None]:
        """The costs of a slice on each layer, which was measured on the whole sequence before; None if it cannot run on slices."""
        able = [self.can_slice(layer) for layer in layers]
        measured = [self._measure_place(place, layers, able, warmup) for place in self.places]
        for _ in range(repeats):
            for layer in (layer for at_place in measured for layer in at_place if layer is not None):
                layer.times.append(layer.time())
        costs: list[SliceCosts | None] = []
        for whole, at_places in zip(layers, zip(*measured, strict=True), strict=True):
            slices = [(place, layer) for place, layer in zip(self.places, at_places, strict=True) if layer is not None]
            costs.append(fit_layer(whole.result(), self.tokens, slices) if slices else None)
        return costs

    def _measure_place(
        self, place: SlicePlace, layers: Sequence[MeasuredLayer], able: Sequence[bool], warmup: int
    ) -> list[MeasuredSlice | None]:
        """Measure the memory of every layer at one place, each on the output of the layer before."""
        length, prefix = place
        lengths = [prefix, length] if prefix else [length]
        parts = [*lengths, self.tokens - sum(lengths)] if sum(lengths) < self.tokens else lengths
        inputs, targets = map(_copy, self.cut(layers[0].inputs, layers[-1].target, parts))
        at = len(lengths) - 1
        before, own = inputs[0] if prefix else None, inputs[at]
        measured: list[MeasuredSlice | None] = []
        for number, whole in enumerate(layers):
            if not able[number]:
                measured.append(None)
                following = layers[number + 1 :]
                if following:
                    pieces = _copy(self.cut_input(following[0].inputs, parts))
                    before, own = pieces[0] if prefix else None, pieces[at]
                continue
            shape = whole.name, whole.stage, None if whole.loss is None else self.loss, targets[at], own
            layer = MeasuredSlice(*shape, lengths=lengths, before=before, make_memory=self.make_memory)
            own = layer.measure_memory(warmup, None)
            before = layer.output_before
            measured.append(layer)
        return measured


def _copy(slices: list[Any]) -> list[Any]:
    """Slices with memory of their own: that of a view is counted as a whole."""
    return [pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, part) for part in slices]


def fit_layer(whole: Layer, tokens: int, slices: Sequence[tuple[SlicePlace, MeasuredSlice]]) -> SliceCosts:
    """Fit the costs of slices to measured ones; times also to those of the whole sequence.

    Sizes without keys and values are known of slices only, and are fitted so that no measured one is larger. The error is that of F, I and
    W together.
    """
    results = [(place, layer.result()) for place, layer in slices]
    timed = [((tokens, 0), whole), *results]

    def fit_time(name: str) -> SliceCost:
        return fit_slice_cost([Point(*place, getattr(layer, name)) for place, layer in timed], TIME_TERMS)[0]

    def fit_size(name: str) -> SliceCost:
        points = [Point(*place, getattr(layer, name)) for place, layer in results]
        cost, _ = fit_slice_cost(points, TERMS)
        return cost.scaled(max([1.0, *(point.value / cost.at(point.length, point.prefix) for point in points if point.value)]))

    f, i, w = map(fit_time, ("f", "i", "w"))
    total = f + i + w
    error = max(abs(total.at(*place) - layer.time) / layer.time for place, layer in timed if layer.time)
    return SliceCosts(
        f=f,
        i=i,
        w=w,
        activation=fit_size("activation"),
        weight_stash=fit_size("weight_stash"),
        workspace=fit_size("workspace"),
        keys=max(layer.keys for _, layer in slices),
        key_gradients=max(layer.sums for _, layer in slices),
        error=error,
    )
