"""Cutting the sequences of a microbatch into slices, and how much each slice counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.batch.loss import Loss, read_numbers
from penstock.runtime.torch_internals import pytree

SliceLengths = Sequence[int] | Callable[[int], Sequence[int]] | None
"""The length of each slice, or a function that returns them for a sequence's length; None for lengths as equal as possible."""
IGNORED = -100
"""The target of a token that does not count, by torch's convention."""


@dataclass(frozen=True)
class SequenceDims:
    """The sequence dimension of the inputs, the target and the stages' keyword arguments: an int, or a tree as in `microbatch.Dims`.

    None leaves a tensor whole: every slice gets all of it.
    """

    inputs: mb.Dims = 1
    target: mb.Dims = 1
    kwargs: mb.Dims = 1


@dataclass(frozen=True)
class SlicedMicrobatch:
    """The slices of one microbatch."""

    args: list[tuple[Any, ...]]
    kwargs: dict[int, list[dict[str, Any]]]
    targets: list[Any] | None
    target: Any
    """The whole target that `targets` was cut from."""
    lengths: list[int] | None
    """None if this rank was given nothing of the batch."""


class ModelInputs(Protocol):
    """Cuts the inputs of models that Penstock knows: their arguments, with the keyword arguments of the first stage."""

    def find_length(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Return the number of tokens in a sequence."""

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], lengths: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return the arguments of each slice, with the keyword arguments in them."""


@dataclass(frozen=True)
class SequenceCutter:
    """Cuts microbatches into slices along the sequence."""

    count: int
    loss: Loss
    """The loss of a slice."""
    lengths: SliceLengths = None
    scales: bool = False
    """Whether sequences of other lengths than the sum of `lengths` are cut in the same proportions, rather than refused."""
    dims: SequenceDims = field(default_factory=SequenceDims)
    model_inputs: ModelInputs | None = None
    model_target: Callable[[Any], Any] | None = None
    """Turns the target of a whole microbatch into one that can be cut, as the loss of slices takes it."""

    def __post_init__(self) -> None:
        fixed = self.fixed_lengths
        if fixed is not None and (len(fixed) != self.count or min(fixed) < 1):
            raise ScheduleError(
                f"slice_lengths={fixed} for a schedule with {self.count} slices: give {self.count} lengths of at least 1 that sum to the "
                "sequence's"
            )

    @property
    def fixed_lengths(self) -> list[int] | None:
        """The lengths, if they are the same for every sequence."""
        return None if self.lengths is None or callable(self.lengths) else list(self.lengths)

    @property
    def out_dim(self) -> int:
        """The sequence dimension of outputs."""
        return self.dims.inputs if isinstance(self.dims.inputs, int) else 1

    def choose_lengths(self, total: int) -> list[int]:
        """Return the lengths of the slices of a sequence: those that were asked for, else as even as possible, the longer ones first."""
        if total < self.count:
            raise ScheduleError(
                f"a sequence of {total} tokens cannot be cut into {self.count} slices: use a schedule with at most {total}, or longer "
                "sequences"
            )
        if self.lengths is None:
            return mb.microbatch_sizes(total, self.count)
        lengths = list(self.lengths(total) if callable(self.lengths) else self.lengths)
        if self.scales and sum(lengths) != total:
            return _scale_lengths(lengths, total)
        if sum(lengths) != total or len(lengths) != self.count or min(lengths) < 1:
            raise ScheduleError(
                f"slice_lengths {lengths} sum to {sum(lengths)}, but the sequences have {total} tokens: give {self.count} lengths of at "
                f"least 1 that sum to {total}, or a function of the sequence's length"
            )
        return lengths

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[int, dict[str, Any]], target: Any, dims: mb.Dims) -> SlicedMicrobatch:
        """Cut one microbatch; `dims` are the sequence dimensions of its arguments, and a target of None is cut into Nones."""
        total = self._find_length(args, kwargs, target, dims)
        target = target if self.model_target is None or target is None else self.model_target(target)
        if total is None:
            return SlicedMicrobatch(
                [args] * self.count,
                {stage: [dict(values)] * self.count for stage, values in kwargs.items()},
                [target] * self.count,
                target,
                None,
            )
        lengths = self.choose_lengths(total)
        if self.model_inputs is not None and args:
            cut_args = self.model_inputs.cut(args, kwargs.get(0, {}), lengths)
            kwargs = {stage: values for stage, values in kwargs.items() if stage}
        else:
            cut_args = mb.split_batch(args, dims, lengths)
        cut_kwargs = {stage: mb.split_batch(values, self.dims.kwargs, lengths) for stage, values in kwargs.items()}
        return SlicedMicrobatch(cut_args, cut_kwargs, mb.split_batch(target, self.dims.target, lengths), target, lengths)

    def _find_length(self, args: tuple[Any, ...], kwargs: Mapping[int, dict[str, Any]], target: Any, dims: mb.Dims) -> int | None:
        """Return the length of the sequences, or None if there are none; refuse lengths that differ."""
        if self.model_inputs is not None and args:
            sizes = [("the input", [self.model_inputs.find_length(args, kwargs.get(0, {}))])]
            kwargs = {stage: values for stage, values in kwargs.items() if stage}
        else:
            sizes = [("the input", _list_lengths(args, dims, "inputs"))]
        sizes.append(("the target", _list_lengths(target, self.dims.target, "target")))
        sizes += [(f"stage_kwargs of stage {stage}", _list_lengths(values, self.dims.kwargs, "kwargs")) for stage, values in kwargs.items()]
        known = [(name, length) for name, lengths in sizes for length in lengths]
        for name, length in known:
            if length != known[0][1]:
                raise ScheduleError(
                    f"sequences of different lengths: {known[0][1]} tokens in {known[0][0]}, {length} in {name}; all must have the same, "
                    "except for tensors with None in sequence_dims, which every slice gets whole"
                )
        return known[0][1] if known else None


def _scale_lengths(lengths: Sequence[int], total: int) -> list[int]:
    """Return lengths in about the same proportions, each at least 1, that sum to `total`."""
    ends = [0]
    for number, end in enumerate(starts_of(lengths)[1:], start=1):
        ends.append(min(max(round(end * total / sum(lengths)), ends[-1] + 1), total - len(lengths) + number))
    return [end - start for start, end in pairwise(ends)]


def _list_lengths(value: Any, dims: mb.Dims, name: str) -> list[int]:
    lengths = []
    for leaf, dim in mb.pair_leaves(value, dims):
        if dim is None or not isinstance(leaf, Tensor) or leaf.dim() == 0:
            continue
        if not -leaf.dim() <= dim < leaf.dim():
            raise ScheduleError(
                f"a tensor of shape {list(leaf.shape)} has no dimension {dim} to cut into slices: give its sequence dimension, or None to "
                f"give every slice all of it, as in sequence_dims=SequenceDims({name}=...)"
            )
        lengths.append(leaf.shape[dim])
    return lengths


# How much slices count ------------------------------------------------------------------------------------------------


def share_weights(
    weights: Sequence[Any] | None, microbatches: Sequence[SlicedMicrobatch], cutter: SequenceCutter, weight: Callable[[Any], Any] | None
) -> list[float] | None:
    """Return the weight of each slice: the weight of its microbatch times its share of the tokens that the loss is averaged over.

    Which tokens these are is known for torch's cross-entropy. Other losses are averaged over what `weight` counts if its counts of slices
    add up to that of the microbatch, else over all tokens.
    """
    if weights is None:
        return None
    count = cutter.count
    counters = [counter for counter in (cutter.loss.count_targets, weight) if counter is not None]
    counts: list[Any] = []
    for part in microbatches:
        for counter in counters:
            counts += [_count(counter, target) for target in (part.target, *(part.targets or []))]
        counts.append(sum((leaf == IGNORED).any() for leaf in _check_integers(part.target)))
    numbers = iter(read_numbers([*weights, *counts]))
    whole = [next(numbers) for _ in weights]
    shares: list[float] = []
    for part in microbatches:
        chosen = None
        for _ in counters:
            total, *parts = [next(numbers) for _ in range(count + 1)]
            if chosen is None and total >= 0 and abs(sum(parts) - total) <= 1e-6 * total:
                chosen = [number / total for number in parts] if total else token_shares(part.lengths, count)
        if next(numbers) and chosen is None:
            raise ScheduleError(
                f"targets are {IGNORED}, which mostly means that they do not count, but the loss function does not say how many count in "
                f"each slice: give weight=lambda target: (target != {IGNORED}).sum()"
            )
        shares += token_shares(part.lengths, count) if chosen is None else chosen
    return [whole[unit // count] * share for unit, share in enumerate(shares)]


def token_shares(lengths: Sequence[int] | None, count: int) -> list[float]:
    """Return each slice's share of the tokens; equal shares if lengths are not known."""
    return [1 / count] * count if lengths is None else [length / sum(lengths) for length in lengths]


def _count(counter: Callable[[Any], Any], target: Any) -> Any:
    number = None if target is None else counter(target)
    return -1.0 if number is None else number


def _check_integers(target: Any) -> list[Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if not leaf.is_floating_point() and not leaf.is_complex() and leaf.dtype is not torch.bool]


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Return where each slice starts, and where the last one ends."""
    return [0, *accumulate(lengths)]
