"""What crosses the edge between two stages: trees of tensors and plain values, and the gradients that come back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_unsafe_view = torch.ops.aten._unsafe_view.default


def cut(value: Any) -> Any:
    """The value as a new beginning for autograd: tensors that want a gradient become leaves that do."""
    if type(value) is Tensor:
        return value.detach().requires_grad_(value.requires_grad)
    return pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, value)


def changeable(leaves: Any) -> Any:
    """A cut value as a stage may change it in place, which torch allows of no leaf: the same memory, one step behind the leaf."""
    return pytree.tree_map(lambda leaf: _unsafe_view(leaf, leaf.shape) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, leaves)


def was_changed(leaves: Any, given: Any) -> bool:
    """Whether a stage has changed in place what `changeable` gave it; if so, whoever saved the value for its backward gets to know."""
    found = False
    for leaf, value in zip(pytree.tree_leaves(leaves), pytree.tree_leaves(given), strict=True):
        if value is not leaf and value._version:
            torch.autograd.graph.increment_version(leaf)
            found = True
    return found


def versions(value: Any) -> list[int]:
    """How often each tensor was changed in place."""
    return [leaf._version for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def detached(value: Any) -> Any:
    """The value without its history."""
    if type(value) is Tensor:
        return value.detach()
    return pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def roots(value: Any) -> list[Tensor]:
    """The tensors of an output that gradients can flow into, in the order of the tree."""
    if type(value) is Tensor:
        return [value] if value.requires_grad else []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def take_grads(leaves: Any) -> list[Tensor | None]:
    """The gradients of an input's leaves that want one, in the order of `roots`; None where none arrived."""
    if type(leaves) is Tensor:
        if not leaves.requires_grad:
            return []
        grad, leaves.grad = leaves.grad, None
        return [grad]
    wanting = roots(leaves)
    found = [leaf.grad for leaf in wanting]
    for leaf in wanting:
        leaf.grad = None
    return found


def add_grads(one: list[Tensor | None], other: list[Tensor | None]) -> list[Tensor | None]:
    """The sum of what two readers of one output sent back."""
    return [b if a is None else a if b is None else a + b for a, b in zip(one, other, strict=True)]
