"""Nested lists, tuples and dictionaries of tensors: torch's own functions on them, which have no public home in every version."""

from __future__ import annotations

from penstock.runtime.torch_internals.lookup import find_private

__all__ = ["register_pytree_node", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_structure", "tree_unflatten"]

for _name in __all__:
    find_private(f"torch.utils._pytree.{_name}")

from torch.utils._pytree import (  # noqa: E402 - after the clear error
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)
