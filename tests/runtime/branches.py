"""The order in which gradients of an output with several readers are added, as docs/contract.md has it, in the unpipelined model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.ir.table import Table


def groups(table: Table, stage: int, microbatch: int) -> list[list[int]]:
    """The readers of a stage's output whose gradients are one sum, the farthest first in each, and the group of the farthest first.

    Readers on the stage's own rank are each by themselves.
    """
    rank_of = table.placement.rank_of
    found: dict[int, list[int]] = {}
    for reader in sorted((b for a, b in table.graph.edges if a == stage), reverse=True):
        rank = rank_of(reader, microbatch)
        found.setdefault(-1 - reader if rank == rank_of(stage, microbatch) else rank, []).append(reader)
    return sorted(found.values(), key=max, reverse=True)


def is_autograd_order(table: Table) -> bool:
    """Whether the sums on ranks leave the order as autograd has it: only the group that begins with the farthest reader has several."""
    cells = ((stage, microbatch) for stage in range(table.stages) for microbatch in range(table.microbatches))
    for stage, microbatch in cells:
        first, *others = groups(table, stage, microbatch) or [[]]
        readers = sorted((b for a, b in table.graph.edges if a == stage), reverse=True)
        if first != readers[: len(first)] or any(len(group) > 1 for group in others):
            return False
    return True


def branch(value: Any, table: Table, stage: int, microbatch: int) -> dict[int, Any]:
    """For each reader the stage's output; readers whose gradients are one sum have one branch of it.

    Autograd runs what was made last first, so branches are made from the nearest group to the farthest: all of them run when
    every reader has, the farthest first. If that changes nothing, readers have the output itself.
    """
    if is_autograd_order(table):
        return {reader: value for group in groups(table, stage, microbatch) for reader in group}
    found: dict[int, Any] = {}
    for group in reversed(groups(table, stage, microbatch)):
        one = pytree.tree_map(lambda leaf: leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, value)
        found |= dict.fromkeys(group, one)
    return found
