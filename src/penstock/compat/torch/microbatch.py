"""Splitting a batch into microbatches, and merging their outputs, by torch's chunk specifications.

Torch has rules that the runtime's splitting does not: the count shrinks to the smallest batch among the arguments, block masks are
split along their batch, DTensors by their local parts, and merging can reduce. The specifications are torch's own classes, so that
programs may import them from either package, and block masks are split by torch's own function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    _CustomReducer,
    _LossReducer,
    _Replicate,
    _split_block_mask,
    sum_reducer,
)
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from penstock.runtime.batch.microbatch import microbatch_sizes
from penstock.runtime.torch_internals.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "TensorChunkSpec",
    "_CustomReducer",
    "_LossReducer",
    "_Replicate",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
    "sum_reducer",
]

DEFAULT_CHUNK_DIM = 0
ALONG_BATCH = TensorChunkSpec(DEFAULT_CHUNK_DIM)  # type: ignore[no-untyped-call]
_debug_mask_minibatches = False
"""Torch's switch for debugging: every microbatch is as large as the batch, and zero except for its own part."""


def _is_replicated(spec: Any) -> bool:
    return spec is _Replicate or isinstance(spec, _Replicate)


def _is_mask(value: Any) -> bool:
    return isinstance(value, BlockMask)


# Splitting ------------------------------------------------------------------------------------------------------------


def _split_tensor(tensor: Tensor, spec: TensorChunkSpec, num_chunks: int) -> Sequence[Tensor]:
    """Split a tensor into chunks, the larger ones first; chunks of a leaf that requires a gradient keep theirs."""
    size = tensor.size(spec.split_dim)
    if size < num_chunks:
        raise AssertionError(f"Tensor size {size} is smaller than num_chunks {num_chunks}")
    if isinstance(tensor, DTensor):
        chunks: Sequence[Tensor] = _split_dtensor(tensor, spec.split_dim, num_chunks)
    else:
        chunks = torch.tensor_split(tensor, num_chunks, spec.split_dim)
    if tensor.requires_grad and tensor.is_leaf:
        for chunk in chunks:
            chunk.retain_grad()
    return _mask_chunks(tensor, chunks, spec.split_dim) if _debug_mask_minibatches else chunks


def _split_dtensor(tensor: DTensor, dim: int, num_chunks: int) -> list[Tensor]:
    """Split the local part on each rank, so that placements stay; the global shapes are those of an even split of the whole."""
    chunks: list[Tensor] = []
    sizes = microbatch_sizes(tensor.shape[dim], num_chunks)
    for local, size in zip(torch.tensor_split(tensor.to_local(), num_chunks, dim), sizes, strict=True):
        shape = list(tensor.shape)
        shape[dim] = size
        chunks.append(_build_dtensor(local, tensor, shape))
    return chunks


def _build_dtensor(local: Tensor, like: DTensor, shape: list[int]) -> DTensor:
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, shape=torch.Size(shape), stride=like.stride(), run_check=False)


def _mask_chunks(whole: Tensor, chunks: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Put each chunk in its place in the whole, among zeros."""
    masked: list[Tensor] = []
    start = 0
    for chunk in chunks:
        local = chunk.to_local() if isinstance(chunk, DTensor) else chunk
        value = torch.zeros_like(whole.to_local() if isinstance(whole, DTensor) else whole)
        value.narrow(dim, start, local.size(dim)).copy_(local)
        masked.append(_build_dtensor(value, whole, list(whole.shape)) if isinstance(whole, DTensor) else value)
        start += local.size(dim)
    return masked


def _unmask_chunks(values: list[Any], dim: int) -> list[Any]:
    """Undo `_mask_chunks`: take each value's own part."""
    for value in values:
        if value.shape != values[0].shape:
            raise AssertionError(f"Expected shape {values[0].shape}, got {value.shape}")
    sizes = microbatch_sizes(values[0].size(dim), len(values))
    return [value.narrow(dim, sum(sizes[:k]), sizes[k]) for k, value in enumerate(values)]


def _split_value(value: Any, spec: Any, count: int) -> Sequence[Any]:
    """Split or repeat a value: one per microbatch."""
    if _is_replicated(spec):
        return [value] * count
    return _split_block_mask(value, count) if _is_mask(value) else _split_tensor(value, spec, count)


def _limit_chunks(value: Any, spec: Any, num_chunks: int) -> int:
    """Return how many microbatches a value can be split into; refuse one that cannot be split at all."""
    if _is_replicated(spec):
        return num_chunks
    if not isinstance(value, Tensor) and not _is_mask(value):
        raise ValueError(f"Unsupported chunk spec: {spec} and value: {value} combination.")
    if not isinstance(spec, TensorChunkSpec):
        raise AssertionError(f"Expected TensorChunkSpec, got {type(spec)}")
    if isinstance(value, Tensor):
        return value.size(spec.split_dim)
    if spec.split_dim != 0:
        raise AssertionError("BlockMask only supports split_dim=0")
    total: int = value.kv_num_blocks.size(0)
    return num_chunks if total == 1 else total


def _shard_dict_of_args(args_dict: dict[Any, Any], args_chunk_spec: dict[Any, Any], num_chunks: int) -> list[dict[Any, Any]]:
    """Split arguments into as many microbatches as requested, or fewer if some argument is shorter."""
    if not args_dict:
        return [{} for _ in range(num_chunks)]
    if len(args_dict) != len(args_chunk_spec):
        raise AssertionError(f"args_dict.keys() = {list(args_dict.keys())} args_chunk_spec.keys() = {list(args_chunk_spec.keys())}")
    values, tree = tree_flatten(args_dict, is_leaf=_is_mask)
    specs, _ = tree_flatten(args_chunk_spec, is_leaf=_is_mask)
    pairs = list(zip(values, specs, strict=True))
    count = min([_limit_chunks(value, spec, num_chunks) for value, spec in pairs] + [num_chunks])
    columns = [_split_value(value, spec, count) for value, spec in pairs]
    return [tree_unflatten([column[chunk] for column in columns], tree) for chunk in range(count)]


def _default_spec(value: Any) -> TensorChunkSpec | _Replicate:
    return ALONG_BATCH if isinstance(value, Tensor) or _is_mask(value) else _Replicate()


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
    kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split positional and keyword arguments: by default tensors along dimension 0, and everything else repeated."""
    named = {} if kwargs is None else kwargs
    numbered = dict(enumerate(args))
    args_spec = tree_map(_default_spec, args, is_leaf=_is_mask) if args_chunk_spec is None else args_chunk_spec
    kwargs_spec = tree_map(_default_spec, named, is_leaf=_is_mask) if kwargs_chunk_spec is None else kwargs_chunk_spec
    split = _shard_dict_of_args(numbered, dict(enumerate(args_spec)), chunks)
    named_split = _shard_dict_of_args(named, kwargs_spec, len(split))
    if len(named_split) < len(split):
        split = _shard_dict_of_args(numbered, dict(enumerate(args_spec)), len(named_split))
    if len(split) != len(named_split):
        raise RuntimeError(f"args and kwargs are split into different number of chunks: {len(split)}, {len(named_split)}")
    return [tuple(chunk[number] for number in range(len(chunk))) for chunk in split], named_split


def count_rows(chunks: Sequence[Any], chunk_spec: Any = None) -> list[int] | None:
    """Count the rows of each microbatch: the size of its first split tensor along the split dimension; `None` if nothing is split."""
    if chunk_spec is None:  # the usual case, without a walk over trees
        tensors = [chunk[0] if isinstance(chunk, tuple) and chunk else chunk for chunk in chunks]
        if all(type(tensor) is Tensor and tensor.dim() for tensor in tensors):
            return [len(tensor) for tensor in tensors]
    specs = tree_leaves(tree_map(_default_spec, chunks[0], is_leaf=_is_mask) if chunk_spec is None else chunk_spec)
    for place, (value, spec) in enumerate(zip(tree_leaves(chunks[0], is_leaf=_is_mask), specs, strict=False)):
        if isinstance(value, Tensor) and value.dim() and isinstance(spec, TensorChunkSpec):
            return [tree_leaves(chunk, is_leaf=_is_mask)[place].size(spec.split_dim) for chunk in chunks]
    return None


# Merging --------------------------------------------------------------------------------------------------------------


def merge_chunks(chunks: list[Any], chunk_spec: Any) -> Any:
    """Merge the microbatches' values into one: tensors are joined (by default along dimension 0) or reduced, other values must be equal."""
    if chunk_spec is not None:
        specs, tree = tree_flatten(chunk_spec)
    else:
        first, tree = tree_flatten(chunks[0])
        specs = [ALONG_BATCH] * len(first)
    flat = [tree_flatten(chunk)[0] for chunk in chunks]
    for chunk, leaves in zip(chunks, flat, strict=True):
        if len(leaves) != len(specs):
            raise ValueError(f"Chunk {chunk} did not match chunk spec {chunk_spec}")
    return tree_unflatten([_merge_values([leaves[k] for leaves in flat], spec) for k, spec in enumerate(specs)], tree)


def _merge_values(values: list[Any], spec: Any) -> Any:
    if isinstance(spec, TensorChunkSpec):
        return _join_tensors(_unmask_chunks(values, spec.split_dim) if _debug_mask_minibatches else values, spec.split_dim)
    if isinstance(spec, _CustomReducer):
        reduced = spec.init_value
        for value in values:
            reduced = spec.reduce_fn(reduced, value)
        return reduced
    for value in values[1:]:
        if not value == values[0]:
            raise AssertionError(f"Expected {values[0]}, got {value}")
    return values[0]


def _join_tensors(values: list[Any], dim: int) -> Tensor:
    is_dtensor = [isinstance(value, DTensor) for value in values]
    if not any(is_dtensor):
        return torch.cat(values, dim=dim)
    if not all(is_dtensor):
        raise AssertionError("merge_chunks: expected all values to be DTensors or none to be DTensors, got a mix")
    for chunk, value in enumerate(values):
        if value.placements != values[0].placements:
            raise AssertionError(
                f"merge_chunks: placement mismatch at chunk {chunk}: expected {values[0].placements}, got {value.placements}"
            )
    shape = list(values[0].shape)
    shape[dim] = sum(value.shape[dim] for value in values)
    return _build_dtensor(torch.cat([value.to_local() for value in values], dim=dim), values[0], shape)
