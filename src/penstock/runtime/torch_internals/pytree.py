"""Nested lists, tuples and dictionaries of tensors: torch's own functions on them, which have no public home in every version."""

from __future__ import annotations

from penstock.runtime.torch_internals.lookup import check_names

__all__ = ["register_pytree_node", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_structure", "tree_unflatten"]

check_names(*(f"torch.utils._pytree.{name}" for name in __all__))

from torch.utils._pytree import (  # noqa: E402 - after the clear error
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)
