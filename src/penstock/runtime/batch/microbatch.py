"""A batch as microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError
from penstock.runtime.tensors.boundary import IMMUTABLE_TYPES, explain_registration, hides_tensor, is_array

Dims = Any
"""The batch dimension of everything (an int), or a tree like the value's: an int for what is split, None for what stays whole.
A name that a dict of dimensions lacks is split along dimension 0. Plain values stay whole by themselves; an array, or an object that
is no pytree but holds a tensor, is refused unless None says that it is to stay whole."""


def batch_size(value: Any, dims: Dims) -> int | None:
    """The size along the batch dimension, None where nothing is split; refuses sizes that differ."""
    sizes = {(_size(leaf, dim), dim) for leaf, dim in _split_leaves(value, dims)}
    if len({size for size, _ in sizes}) > 1:
        found = ", ".join(f"{size} along dimension {dim}" for size, dim in sorted(sizes))
        raise ScheduleError(f"tensors of different batch sizes: {found}; say with batch_dims which ones are to stay whole")
    return next(iter(sizes))[0] if sizes else None


def microbatch_sizes(total: int, count: int) -> list[int]:
    """How many elements each microbatch gets: as even as can be, the larger ones first."""
    if total < count:
        raise ScheduleError(f"a batch of {total} cannot be cut into {count} microbatches: ask for at most {total}")
    each, more = divmod(total, count)
    return [each + (index < more) for index in range(count)]


def split_batch(value: Any, dims: Dims, sizes: Sequence[int]) -> list[Any]:
    """The value of each microbatch: tensors along their batch dimension, everything else as it is."""
    columns: list[Sequence[Any]] = []
    seen: dict[tuple[int, int], list[Tensor]] = {}
    """The slices of each tensor: one that stands in several places of the tree stays one."""
    for leaf, dim in zip(_leaves(value), _spread(dims, value), strict=True):
        if dim is None or not isinstance(leaf, Tensor) or leaf.dim() == 0:
            columns.append([leaf] * len(sizes))
            continue
        if (id(leaf), dim) not in seen:
            seen[id(leaf), dim] = _slices(leaf, dim, sizes)
        columns.append(seen[id(leaf), dim])
    if type(value) is Tensor:
        return list(columns[0])
    if _is_tuple_of_tensors(value) and value:
        return list(zip(*columns, strict=True))
    if not columns:  # a tree of its own for each microbatch, so that none changes another's
        return [pytree.tree_map(lambda leaf: leaf, value) for _ in sizes]
    spec = pytree.tree_structure(value)
    return [pytree.tree_unflatten(list(parts), spec) for parts in zip(*columns, strict=True)]


def _slices(leaf: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Slices that a stage may change in place: to torch each is a tensor of its own, not a view that counts its changes with the others."""
    parts = torch.split(leaf, list(sizes), dim)
    return list(parts) if leaf.requires_grad else [part.data for part in parts]


def merge_outputs(values: Sequence[Any], dim: int) -> Any:
    """One batch again: tensors joined along the dimension, scalars stacked, anything else as a list."""
    flat = [pytree.tree_flatten(value) for value in values]
    if any(spec != flat[0][1] for _, spec in flat):
        return list(values)
    return pytree.tree_unflatten([_joined(list(parts), dim) for parts in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1])


def _joined(parts: list[Any], dim: int) -> Any:
    if not all(isinstance(part, Tensor) for part in parts):
        return parts
    if all(part.dim() == 0 for part in parts):
        return torch.stack(parts)
    return torch.cat(parts, dim) if _fit(parts, dim) else parts


def _fit(parts: Sequence[Tensor], dim: int) -> bool:
    """Whether tensors can be joined along the dimension."""
    dims = parts[0].dim()
    if not -dims <= dim < dims:
        return False
    return len({(part.dim(), *(size for axis, size in enumerate(part.shape) if axis != dim % dims)) for part in parts}) == 1


def join_microbatches(values: Sequence[Any], dims: Dims) -> tuple[Any] | None:
    """What `split` would give these values for, in a tuple of one; None where nothing would."""
    flat = [pytree.tree_flatten(value) for value in values]
    if any(spec != flat[0][1] for _, spec in flat):
        return None
    whole = []
    for parts, dim in zip(zip(*(leaves for leaves, _ in flat), strict=True), _spread(dims, values[0]), strict=True):
        if dim is not None and all(isinstance(part, Tensor) and part.dim() > 0 for part in parts):
            if not _fit(parts, dim):
                return None
            whole.append(torch.cat(parts, dim))
        elif all(part is parts[0] for part in parts):
            whole.append(parts[0])
        else:
            return None
    return (pytree.tree_unflatten(whole, flat[0][1]),)


def _size(leaf: Tensor, dim: int) -> int:
    if not -leaf.dim() <= dim < leaf.dim():
        raise ScheduleError(f"a tensor of shape {list(leaf.shape)} has no dimension {dim} to be split along: say so with batch_dims")
    return leaf.shape[dim]


def _split_leaves(value: Any, dims: Dims) -> list[tuple[Tensor, int]]:
    found = []
    for leaf, dim in zip(_leaves(value), _spread(dims, value), strict=True):
        if dim is None:
            continue
        if not isinstance(leaf, Tensor):
            _check_leaf(leaf)
        elif leaf.dim() > 0:
            found.append((leaf, dim))
    return found


def _check_leaf(leaf: Any) -> None:
    """Refuse what holds rows that could not be told apart, so that every microbatch would get all of them."""
    if type(leaf) in IMMUTABLE_TYPES:
        return
    kind = type(leaf)
    if is_array(leaf):
        raise ScheduleError(
            f"the batch has a NumPy array of shape {list(leaf.shape)}, which is not cut into microbatches: give torch.from_numpy(...), or "
            "say None for it in batch_dims, target_dims or kwarg_dims to give every microbatch all of it"
        )
    if hides_tensor(leaf):
        raise ScheduleError(
            f"the batch has an object of the class {kind.__name__} that holds a tensor, but is no pytree, so it cannot be cut into "
            f"microbatches: {explain_registration(kind)}; or say None for it in batch_dims, target_dims or kwarg_dims to give every microbatch "
            "all of it"
        )


def _leaves(value: Any) -> list[Any]:
    """A tree's leaves; quick for what most steps are given, a tensor and a tuple of tensors."""
    if type(value) is Tensor:
        return [value]
    return list(value) if _is_tuple_of_tensors(value) else pytree.tree_leaves(value)


def _is_tuple_of_tensors(value: Any) -> bool:
    """The usual arguments."""
    return type(value) is tuple and all(type(part) is Tensor for part in value)


def _spread(dims: Dims, value: Any) -> list[int | None]:
    """One dimension a leaf: a number holds for all below it, and so does None."""
    if dims is None or isinstance(dims, int):
        return [dims] * len(_leaves(value))
    if isinstance(dims, dict) and isinstance(value, dict):
        return [each for key in value for each in _spread(dims.get(key, 0), value[key])]
    if isinstance(dims, (tuple, list)) and isinstance(value, (tuple, list)) and len(dims) == len(value):
        return [each for one, part in zip(dims, value, strict=True) for each in _spread(one, part)]
    raise ScheduleError(f"batch_dims {dims!r} do not fit a value of {type(value).__name__}: give a number, None, or a tree like the value")
