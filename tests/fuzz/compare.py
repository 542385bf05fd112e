"""Two records side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuzz.records import Record

EXACT = 0.0


def describe_difference(found: Any, wanted: Any, tolerance: float = EXACT, scale: float | None = None) -> str | None:
    """How two values differ, None if they do not; tensors relative to `scale`, or to the wanted one's largest value."""
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        return _describe_tensors(found, wanted, tolerance, scale)
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        differences = (describe_difference(one, other, tolerance, scale) for one, other in zip(found, wanted, strict=True))
        return next((difference for difference in differences if difference is not None), None)
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        differences = (describe_difference(found[name], wanted[name], tolerance, scale) for name in found)
        return next((difference for difference in differences if difference is not None), None)
    if isinstance(found, Tensor) or isinstance(wanted, Tensor) or type(found) is not type(wanted) or found != wanted:
        return f"{_shorten(found)} in place of {_shorten(wanted)}"
    return None


def _shorten(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


def _describe_tensors(found: Tensor, wanted: Tensor, tolerance: float, scale: float | None) -> str | None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype or type(found) is not type(wanted):
        return f"{type(found).__name__} {found.dtype} {list(found.shape)} in place of {wanted.dtype} {list(wanted.shape)}"
    if found.is_sparse or found.is_nested:
        return _describe_tensors(_dense(found), _dense(wanted), tolerance, scale)
    if torch.equal(found, wanted):
        return None
    one, other = found.double(), wanted.double()
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(same, 0.0).nan_to_num(nan=float("inf"))
    worst = float(apart.max())
    finite = other[other.isfinite()].abs()
    largest = scale if scale is not None else float(finite.max()) if finite.numel() else 0.0
    return f"off by {worst:.3g}; the largest value is {largest:.3g}" if worst > tolerance * largest else None


def _dense(tensor: Tensor) -> Tensor:
    return torch.cat(list(tensor.unbind())) if tensor.is_nested else tensor.to_dense()


def list_differences(found: Record, wanted: Record, tolerance: float) -> Iterator[tuple[str, str]]:
    """The names whose values differ, each with how. Gradients, parameters and buffers are held against the largest of their kind."""
    for name in sorted(found.keys() ^ wanted.keys()):
        yield name, "is missing" if name in wanted else "should not be there"
    scales = {group: _largest(value for name, value in wanted.items() if _group(name) == group) for group in {*map(_group, wanted)}}
    for name in wanted:
        if name in found:
            difference = describe_difference(found[name], wanted[name], tolerance, scales[_group(name)])
            if difference is not None:
                yield name, difference


def _group(name: str) -> str:
    """What a value is compared in proportion to: all gradients of one call belong together, say."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[2:3] == ["grad"] else ".".join(parts[:2]) if parts[0] == "state" else name


def _largest(values: Iterator[Any]) -> float:
    largest = 0.0
    for value in values:
        if isinstance(value, (list, dict)):
            largest = max(largest, _largest(iter(value.values() if isinstance(value, dict) else value)))
        elif isinstance(value, Tensor) and value.numel():
            sizes = (_dense(value) if value.is_sparse or value.is_nested else value).double().abs()
            sizes = sizes[sizes.isfinite()]
            largest = max(largest, float(sizes.max())) if sizes.numel() else largest
    return largest
