"""Splitting a batch into microbatches, and joining outputs again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.tensors.boundary import IMMUTABLE_TYPES, explain_registration, hides_tensor, is_array
from penstock.runtime.torch_internals import pytree

Dims = Any
"""One batch dimension for everything, or a tree like the value's with an int for what is split and None for what stays whole.
A key that a dict of dimensions lacks is split along dimension 0. Plain values always stay whole; a NumPy array, or an object that
holds a tensor but is not a pytree, is refused unless its dimension is None."""


def batch_size(value: Any, dims: Dims) -> int | None:
    """Return the size along the batch dimension, or None if nothing is split; refuse sizes that differ."""
    sizes = set()
    for leaf, dim in pair_leaves(value, dims):
        if dim is None:
            continue
        if not isinstance(leaf, Tensor):
            _check_leaf(leaf)
        elif leaf.dim() > 0:
            if not -leaf.dim() <= dim < leaf.dim():
                shape = list(leaf.shape)
                raise ScheduleError(f"a tensor of shape {shape} has no dimension {dim} to split along: give its dimension in batch_dims")
            sizes.add((leaf.shape[dim], dim))
    if len({size for size, _ in sizes}) > 1:
        shown = ", ".join(f"{size} along dimension {dim}" for size, dim in sorted(sizes))
        raise ScheduleError(f"tensors of different batch sizes: {shown}; say with batch_dims which of them stay whole")
    return next(iter(sizes))[0] if sizes else None


def microbatch_sizes(total: int, count: int) -> list[int]:
    """Return the size of each microbatch: as even as possible, the larger ones first."""
    if total < count:
        raise ScheduleError(f"a batch of {total} cannot be split into {count} microbatches: ask for at most {total}")
    size, larger = divmod(total, count)
    return [size + (index < larger) for index in range(count)]


def split_batch(value: Any, dims: Dims, sizes: Sequence[int]) -> list[Any]:
    """Split the tensors of a tree along their batch dimension; every microbatch gets everything else as it is."""
    columns: list[Sequence[Any]] = []
    slices: dict[tuple[int, int], list[Tensor]] = {}
    """The slices of each tensor, so that one that occurs several times in the tree stays one."""
    for leaf, dim in pair_leaves(value, dims):
        if dim is None or not isinstance(leaf, Tensor) or leaf.dim() == 0:
            columns.append([leaf] * len(sizes))
            continue
        if (id(leaf), dim) not in slices:
            parts = torch.split(leaf, list(sizes), dim)
            # A stage may change a slice in place, so slices are tensors with version counters of their own rather than views.
            slices[id(leaf), dim] = list(parts) if leaf.requires_grad else [part.data for part in parts]
        columns.append(slices[id(leaf), dim])
    if type(value) is Tensor:
        return list(columns[0])
    if _is_tuple_of_tensors(value) and value:
        return list(zip(*columns, strict=True))
    if not columns:  # a separate tree per microbatch, so that none changes another's
        return [pytree.tree_map(lambda leaf: leaf, value) for _ in sizes]
    spec = pytree.tree_structure(value)
    return [pytree.tree_unflatten(list(parts), spec) for parts in zip(*columns, strict=True)]


def merge_outputs(values: Sequence[Any], dim: int) -> Any:
    """Merge the outputs of microbatches: tensors are joined along the dimension, scalars stacked, anything else becomes a list."""
    flat = [pytree.tree_flatten(value) for value in values]
    if any(spec != flat[0][1] for _, spec in flat):
        return list(values)
    return pytree.tree_unflatten(
        [_join_leaves(list(parts), dim) for parts in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1]
    )


def _join_leaves(parts: list[Any], dim: int) -> Any:
    if not all(isinstance(part, Tensor) for part in parts):
        return parts
    if all(part.dim() == 0 for part in parts):
        return torch.stack(parts)
    dims = parts[0].dim()
    if not -dims <= dim < dims:
        return parts
    others = {(part.dim(), *(size for axis, size in enumerate(part.shape) if axis != dim % dims)) for part in parts}
    return torch.cat(parts, dim) if len(others) == 1 else parts


def _check_leaf(leaf: Any) -> None:
    """Refuse a leaf that holds rows but cannot be split, so that every microbatch would get all of them."""
    if type(leaf) in IMMUTABLE_TYPES:
        return
    kind = type(leaf)
    if is_array(leaf):
        raise ScheduleError(
            f"the batch has a NumPy array of shape {list(leaf.shape)}, which is not split into microbatches: give torch.from_numpy(...), "
            "or None for it in batch_dims, target_dims or kwarg_dims to give every microbatch all of it"
        )
    if hides_tensor(leaf):
        raise ScheduleError(
            f"the batch has an object of the class {kind.__name__} that holds a tensor but is not a pytree, so it cannot be split into "
            f"microbatches: {explain_registration(kind)}; or give None for it in batch_dims, target_dims or kwarg_dims to give every "
            "microbatch all of it"
        )


def _list_leaves(value: Any) -> list[Any]:
    """Return a tree's leaves; quickly for a tensor and a tuple of tensors, which most steps are given."""
    if type(value) is Tensor:
        return [value]
    return list(value) if _is_tuple_of_tensors(value) else pytree.tree_leaves(value)


def _is_tuple_of_tensors(value: Any) -> bool:
    return type(value) is tuple and all(type(part) is Tensor for part in value)


def pair_leaves(value: Any, dims: Dims) -> list[tuple[Any, int | None]]:
    """Return each leaf with its dimension: an int or None holds for all leaves below it."""
    if dims is None or isinstance(dims, int):
        return [(leaf, dims) for leaf in _list_leaves(value)]
    if isinstance(dims, dict) and isinstance(value, dict):
        return [pair for key in value for pair in pair_leaves(value[key], dims.get(key, 0))]
    if isinstance(dims, (tuple, list)) and isinstance(value, (tuple, list)) and len(dims) == len(value):
        return [pair for part, part_dims in zip(value, dims, strict=True) for pair in pair_leaves(part, part_dims)]
    raise ScheduleError(f"batch_dims {dims!r} do not fit a value of {type(value).__name__}: give a number, None, or a tree like the value")
