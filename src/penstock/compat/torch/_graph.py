"""Which parameters' gradients can be had apart from the input's, found on a finished graph.

Linear in the nodes: one walk over the graph, and union-find for the parts that hang together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

Group = dict[str, Any]
"""`params`: the accumulators of parameters that are reached together; `intermediates`: the nodes they are reached from, through
which the way to the inputs goes on; `grads`, once a backward for the input has been there: what arrived at each of those."""


def _get_grad_fn_or_grad_acc(t: Tensor) -> Node | None:
    """Where a tensor stands in the graph: what made it, or, for a leaf, what collects its gradient."""
    if not t.requires_grad or t.grad_fn is not None:
        return t.grad_fn
    view = t.view_as(t)
    if view.grad_fn is None:
        raise RuntimeError("a leaf has no place in a graph while gradients are switched off: enable them")
    return view.grad_fn.next_functions[0][0]


def nodes_of(tensors: Iterable[Any]) -> list[Node]:
    """The places of those tensors that have one."""
    found = (_get_grad_fn_or_grad_acc(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    return [node for node in found if node is not None]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _upwards(roots: Sequence[Node]) -> list[Node]:
    """Every node below the roots, children first."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child in _children(node))
    return order


class _Union:
    """Nodes that hang together."""

    def __init__(self) -> None:
        self.above: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        top = node
        while (up := self.above.get(top, top)) is not top:
            top = up
        while node is not top:
            self.above[node], node = top, self.above.get(node, top)
        return top

    def join(self, one: Node, other: Node) -> None:
        self.above[self.find(one)] = self.find(other)


def find_groups(inputs: Sequence[Node], params: Sequence[Node], roots: Sequence[Node]) -> tuple[list[Group], set[Node]]:
    """The groups of parameters, in the parameters' order; and the nodes on the way to an input.

    The roots count as on the way: what leads to no input at all is one group that is reached from them.
    """
    order = _upwards(roots)
    wanted, way = set(inputs), set[Node]()
    for node in order:
        if node in wanted or any(child in way for child in _children(node)):
            way.add(node)
    inner = way | set(roots)
    union = _Union()
    intermediates: list[Node] = []
    for node in order:
        off = [child for child in _children(node) if child not in inner]
        for child in off:
            union.join(node, child)
        if off and node in inner:
            intermediates.append(node)
    reached = set(order) - inner
    groups: dict[Node, Group] = {}
    for param in params:
        if param in reached:
            groups.setdefault(union.find(param), {"params": set(), "intermediates": []})["params"].add(param)
    for node in reversed(intermediates):
        if union.find(node) in groups:
            groups[union.find(node)]["intermediates"].append(node)
    return list(groups.values()), way
