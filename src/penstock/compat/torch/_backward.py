"""A stage's backward, whole or split in two, on a finished autograd graph.

Our stages split their backward at the operator during the forward. These functions, torch's by name, are handed a graph that
already exists, so they search it for the split as torch does, but in linear time: one walk over the nodes, and union-find for the
connected parts. Stages fall back on them when a split backward is requested that was not announced before the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining import _backward as _torch_backward
from torch.nn import Parameter

from penstock.compat.torch._debug import map_debug_info
from penstock.runtime.torch_internals.tensors import is_view

Grads = tuple[Tensor | None, ...]
Group = dict[str, Any]
"""`params`: the accumulators of parameters that are reached together. `intermediates`: the nodes on the path to the inputs from which
they are reached. `grads`: the gradients that arrived at each of those in the backward for the input."""


def __getattr__(name: str) -> Any:
    """Look up torch's names that are not defined here."""
    return getattr(_torch_backward, name)


def build_backward_error(what: str, outputs: Any, grads: Any, inputs: Any) -> RuntimeError:
    """Build the error of a failed backward, with the values it ran on."""
    return RuntimeError(
        f"Failed to run {what}:\n    Stage output: {map_debug_info(outputs)}\n"
        f"    Output gradient: {map_debug_info(grads)}\n    Input: {map_debug_info(inputs)}"
    )


# Whole ----------------------------------------------------------------------------------------------------------------


def stage_backward(
    stage_output: Any, output_grads: Any, input_values: Sequence[Any], outputs_with_grads_idxs: list[int] | None = None
) -> Grads:
    """Accumulate the gradients of all leaves, then take and return those of the inputs."""
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[k] for k in outputs_with_grads_idxs]
        output_grads = [output_grads[k] for k in outputs_with_grads_idxs]
    try:
        pairs = list(pair_with_grads(stage_output, output_grads))
        torch.autograd.backward([output for output, _ in pairs], grad_tensors=[grad for _, grad in pairs])
        return tuple(map(take_grad, input_values))
    except Exception as error:
        raise build_backward_error("stage backward", stage_output, output_grads, input_values) from error


def take_grad(value: Any) -> Tensor | None:
    """Return a tensor's gradient and clear it."""
    if not isinstance(value, Tensor):
        return None
    grad, value.grad = value.grad, None
    return grad


def pair_with_grads(output: Any, grad: Any) -> Iterator[tuple[Any, Tensor | None]]:
    """Yield each tensor of an output that requires a gradient, with that gradient; also the places in the graph of released outputs."""
    if isinstance(output, GradientEdge):
        if not isinstance(grad, Tensor):
            raise AssertionError(f"A GradientEdge needs a gradient of the next stage, got {type(grad)}")
        yield output, grad
        return
    if isinstance(output, Tensor):
        if not output.requires_grad:
            return
        if not isinstance(grad, Tensor | None):
            raise AssertionError(f"Expected Tensor or None gradient but got {type(grad)}")
        yield output, grad
    elif isinstance(output, dict) and grad is not None:
        if not isinstance(grad, dict) or output.keys() != grad.keys():
            raise AssertionError(
                f"Expected a dict with the keys {sorted(output)}, got {sorted(grad) if isinstance(grad, dict) else type(grad)}"
            )
        for key, value in output.items():
            yield from pair_with_grads(value, grad[key])
    elif isinstance(output, tuple | list) and grad is not None:
        if not isinstance(grad, tuple | list) or len(output) != len(grad):
            raise AssertionError(
                f"Expected a list of {len(output)} gradients, got {len(grad) if isinstance(grad, tuple | list) else type(grad)}"
            )
        for value, value_grad in zip(output, grad, strict=True):
            yield from pair_with_grads(value, value_grad)


# Split ----------------------------------------------------------------------------------------------------------------


def _autograd_grad_for_inputs(
    outputs: Sequence[Tensor | GradientEdge],
    inputs: Sequence[Any],
    grad_outputs: Sequence[Tensor | None] | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> Grads:
    """Return the gradients of the inputs that require one, `None` for the others."""
    requiring = [k for k, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
    grads: list[Tensor | None] = [None] * len(inputs)
    if requiring:
        computed = torch.autograd.grad(
            cast(Any, outputs), [inputs[k] for k in requiring], grad_outputs, retain_graph=retain_graph, allow_unused=allow_unused
        )
        for k, grad in zip(requiring, computed, strict=True):
            grads[k] = grad
    return tuple(grads)


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Tensor | GradientEdge | None],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Parameter],
) -> tuple[Grads, list[Group]]:
    """Compute the gradients of the inputs and add them to `.grad`; return them and the groups that `stage_backward_weight` needs."""
    try:
        ends = [
            (output, output_grads[k] if output_grads is not None else _build_start(output))
            for k, output in enumerate(stage_outputs_or_loss)
            if isinstance(output, GradientEdge) or (isinstance(output, Tensor) and output.requires_grad)
        ]
        outputs = [output for output, _ in ends]
        groups, on_path = _find_groups(_find_nodes(input_values), _find_nodes(weights), _find_nodes(outputs))
        grads = _run_input(ends, input_values, groups)
        _start_from_roots(ends, groups, on_path)
        for value, grad in zip(input_values, grads, strict=True):
            if grad is not None:
                value.grad = grad if value.grad is None else value.grad.add_(grad)
        free_graph(stage_outputs_or_loss)
        return grads, groups
    except Exception as error:
        raise build_backward_error("stage backward input", stage_outputs_or_loss, output_grads, input_values) from error


def free_graph(outputs: Sequence[Any]) -> None:
    """Free the graph behind outputs, as far as they hold it."""
    for output in outputs:
        if isinstance(output, Tensor) and not is_view(output):  # a view cannot be detached in place
            output.detach_()


def _build_start(output: Tensor | GradientEdge) -> Tensor:
    """Return the gradient with which a backward starts from a loss."""
    if isinstance(output, GradientEdge):
        raise AssertionError("A GradientEdge needs the output gradients of the next stage")
    return torch.ones_like(output)


def _run_input(ends: list[tuple[Tensor | GradientEdge, Tensor | None]], inputs: Sequence[Any], groups: list[Group]) -> Grads:
    handles = []
    for group in groups:
        group["grads"] = [None] * len(group["intermediates"])
        handles += [node.register_prehook(partial(group["grads"].__setitem__, k)) for k, node in enumerate(group["intermediates"])]
    try:
        if not ends:
            return (None,) * len(inputs)
        outputs, grads = zip(*ends, strict=True)
        return _autograd_grad_for_inputs(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _start_from_roots(ends: list[tuple[Tensor | GradientEdge, Tensor | None]], groups: list[Group], on_path: set[Node]) -> None:
    """Start the groups of outputs that do not depend on any input, which the backward did not visit, from the outputs' own gradients."""
    arrived: dict[Node, list[Tensor | None]] = {}
    for output, grad in ends:
        node = _get_grad_fn_or_grad_acc(output)
        if node is not None and node not in on_path:
            number = output.output_nr
            grads = arrived.setdefault(node, [])
            grads += [None] * (number + 1 - len(grads))
            grads[number] = grad
    for group in groups:
        for k, node in enumerate(group["intermediates"]):
            if node in arrived:
                group["grads"][k] = tuple(arrived[node])


def stage_backward_weight(weights: Iterable[Parameter], param_groups: list[Group], retain_graph: bool = False) -> Grads:
    """Add the gradients of the weights to `.grad`; return the earlier gradients, in the order of the weights."""
    owner: dict[Node | None, Parameter] = {}
    before: list[Tensor | None] = []
    for weight in weights:
        owner[_get_grad_fn_or_grad_acc(weight)] = weight
        before.append(weight.grad)
    # Groups reached from several nodes go first: they pass over the nodes between them, which must not be freed yet.
    several = [group for group in param_groups if len(group["intermediates"]) > 1]
    for group in several + [group for group in param_groups if len(group["intermediates"]) == 1]:
        for node, grad in _weight_grads(group, retain_graph or len(group["intermediates"]) > 1):
            weight = owner[node]
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
    return tuple(before)


def _weight_grads(group: Group, retain_graph: bool) -> list[tuple[Node, Tensor]]:
    """Compute the gradient of each parameter of a group."""
    kept = [(node, grads) for node, grads in zip(group["intermediates"], group["grads"], strict=False) if grads is not None]
    starts = [(GradientEdge(node, k), grad) for node, grads in kept for k, grad in enumerate(grads) if grad is not None]
    del group["intermediates"], group["grads"]  # hooks keep references: without this the graph would keep itself alive
    if not starts:
        return []
    params = list(group["params"])
    # One intermediate may lead to another, whose own gradient must not be added to.
    handles = [node.register_prehook(lambda _, grads=grads: grads) for node, grads in kept] if len(kept) > 1 else []
    try:
        edges, grads = zip(*starts, strict=True)
        computed = torch.autograd.grad(
            edges, [GradientEdge(node, 0) for node in params], grads, retain_graph=retain_graph, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    return [(node, grad) for node, grad in zip(params, computed, strict=True) if grad is not None]  # type: ignore[redundant-expr]


# The groups of a graph ------------------------------------------------------------------------------------------------


def _get_grad_fn_or_grad_acc(t: Tensor | GradientEdge) -> Node | None:
    """Return a tensor's node in the graph: the one that produced it or, for a leaf, the one that accumulates its gradient."""
    if isinstance(t, GradientEdge):
        return t.node
    if not t.requires_grad or t.grad_fn is not None:
        return t.grad_fn
    view = t.view_as(t)
    if view.grad_fn is None:
        raise RuntimeError("a leaf has no node in the graph while gradients are disabled: enable them")
    return view.grad_fn.next_functions[0][0]


def _find_nodes(tensors: Iterable[Any]) -> list[Node]:
    """Return the nodes of those values that are tensors with one."""
    nodes = (_get_grad_fn_or_grad_acc(tensor) for tensor in tensors if isinstance(tensor, Tensor | GradientEdge))
    return [node for node in nodes if node is not None]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _sort_children_first(roots: Sequence[Node]) -> list[Node]:
    """List every node that the roots reach, children first."""
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


class _UnionFind:
    """Sets of connected nodes."""

    def __init__(self) -> None:
        self.parent: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        top = node
        while (parent := self.parent.get(top, top)) is not top:
            top = parent
        while node is not top:
            self.parent[node], node = top, self.parent.get(node, top)
        return top

    def join(self, one: Node, other: Node) -> None:
        self.parent[self.find(one)] = self.find(other)


def _find_groups(inputs: Sequence[Node], params: Sequence[Node], roots: Sequence[Node]) -> tuple[list[Group], set[Node]]:
    """Find the groups of parameters, in the parameters' order, and the nodes on a path to an input.

    The roots count as on a path, so that nodes that lead to no input form groups reached from the roots.
    """
    order = _sort_children_first(roots)
    targets, on_path = set(inputs), set[Node]()
    for node in order:
        if node in targets or any(child in on_path for child in _children(node)):
            on_path.add(node)
    inner = on_path | set(roots)
    union = _UnionFind()
    intermediates: list[Node] = []
    for node in order:
        branches = [child for child in _children(node) if child not in inner]
        for child in branches:
            union.join(node, child)
        if branches and node in inner:
            intermediates.append(node)
    reached = set(order) - inner
    groups: dict[Node, Group] = {}
    for param in params:
        if param in reached:
            groups.setdefault(union.find(param), {"params": set(), "intermediates": []})["params"].add(param)
    for node in reversed(intermediates):
        if union.find(node) in groups:
            groups[union.find(node)]["intermediates"].append(node)
    return list(groups.values()), on_path
