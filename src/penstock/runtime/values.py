"""What crosses the edge between two stages: trees of tensors and plain values, and the gradients that come back."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def cut(value: Any) -> Any:
    """The value as a new beginning for autograd: tensors that want a gradient become leaves that do."""
    if type(value) is Tensor:
        return value.detach().requires_grad_(value.requires_grad)
    return pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf, value)


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


def take_grads(leaves: Any) -> Any:
    """The gradients of an input's leaves that want one, in the order of `roots`; None where none arrived."""
    if type(leaves) is Tensor:
        grad, leaves.grad = leaves.grad, None
        return grad if leaves.requires_grad else []
    found = []
    for leaf in pytree.tree_leaves(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            found.append(leaf.grad)
            leaf.grad = None
    return found


def add_grads(one: Any, other: Any) -> Any:
    """The sum of what two readers of one output sent back."""
    if isinstance(one, list) or isinstance(other, list):
        return [add_grads(a, b) for a, b in zip(as_list(one), as_list(other), strict=True)]
    return other if one is None else one if other is None else one + other


def as_list(grads: Any) -> list[Tensor | None]:
    return grads if isinstance(grads, list) else [grads]
