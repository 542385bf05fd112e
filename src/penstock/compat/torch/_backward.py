"""A stage's backward, whole or in two, on a graph that is already there.

Our stages split their backward at the operator while they run forward, which these functions cannot: they are handed a finished
graph. So they find the split in the graph, as torch does, in one linear walk, and give torch's own results. Stages fall back on
them where a split backward is asked for that was not announced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups, reverse_closure
from torch.nn import Parameter

from penstock.compat.torch._debug import map_debug_info
from penstock.compat.torch._graph import Group, _get_grad_fn_or_grad_acc, find_groups, nodes_of

__all__ = [
    "construct_reverse_graph",
    "get_param_groups",
    "reverse_closure",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]

Grads = tuple[Tensor | None, ...]


def _failed(what: str, outputs: Any, grads: Any, inputs: Any) -> RuntimeError:
    return RuntimeError(
        f"Failed to run {what}:\n    Stage output: {map_debug_info(outputs)}\n"
        f"    Output gradient: {map_debug_info(grads)}\n    Input: {map_debug_info(inputs)}"
    )


# The whole ------------------------------------------------------------------------------------------------------------


def stage_backward(
    stage_output: Any, output_grads: Any, input_values: Sequence[Any], outputs_with_grads_idxs: list[int] | None = None
) -> Grads:
    """Add the gradients of all leaves, and take those of the inputs."""
    if outputs_with_grads_idxs is not None:
        stage_output = [stage_output[k] for k in outputs_with_grads_idxs]
        output_grads = [output_grads[k] for k in outputs_with_grads_idxs]
    try:
        pairs = list(_with_grads(stage_output, output_grads))
        torch.autograd.backward([output for output, _ in pairs], grad_tensors=[grad for _, grad in pairs])
        return tuple(map(_take_grad, input_values))
    except Exception as error:
        raise _failed("stage backward", stage_output, output_grads, input_values) from error


def _take_grad(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor):
        return None
    grad, value.grad = value.grad, None
    return grad


def _with_grads(output: Any, grad: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each tensor of an output that takes part in autograd, and its gradient."""
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
            yield from _with_grads(value, grad[key])
    elif isinstance(output, tuple | list) and grad is not None:
        if not isinstance(grad, tuple | list) or len(output) != len(grad):
            raise AssertionError(
                f"Expected a list of {len(output)} gradients, got {len(grad) if isinstance(grad, tuple | list) else type(grad)}"
            )
        for value, its_grad in zip(output, grad, strict=True):
            yield from _with_grads(value, its_grad)


# In two ---------------------------------------------------------------------------------------------------------------


def _autograd_grad_for_inputs(
    outputs: Sequence[Tensor],
    inputs: Sequence[Any],
    grad_outputs: Sequence[Tensor | None] | None = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> Grads:
    """The gradients of those inputs that want one, None for the others."""
    wanting = [k for k, value in enumerate(inputs) if isinstance(value, Tensor) and value.requires_grad]
    made: list[Tensor | None] = [None] * len(inputs)
    if wanting:
        found = torch.autograd.grad(
            outputs, [inputs[k] for k in wanting], grad_outputs, retain_graph=retain_graph, allow_unused=allow_unused
        )
        for k, grad in zip(wanting, found, strict=True):
            made[k] = grad
    return tuple(made)


def stage_backward_input(
    stage_outputs_or_loss: Sequence[Tensor],
    output_grads: Sequence[Tensor | None] | None,
    input_values: Sequence[Any],
    weights: Iterable[Parameter],
) -> tuple[Grads, list[Group]]:
    """The gradients of the inputs, added to theirs; and what `stage_backward_weight` needs for the rest."""
    try:
        ends = [
            (output, torch.ones_like(output) if output_grads is None else output_grads[k])
            for k, output in enumerate(stage_outputs_or_loss)
            if output.requires_grad
        ]
        outputs = [output for output, _ in ends]
        groups, way = find_groups(nodes_of(input_values), nodes_of(weights), nodes_of(outputs))
        grads = _run_input(ends, input_values, groups)
        _start_from_roots(ends, groups, way)
        for value, grad in zip(input_values, grads, strict=True):
            if grad is not None:
                value.grad = grad if value.grad is None else value.grad.add_(grad)
        for output in stage_outputs_or_loss:
            if not output._is_view():  # a view cannot be detached in place
                output.detach_()
        return grads, groups
    except Exception as error:
        raise _failed("stage backward input", stage_outputs_or_loss, output_grads, input_values) from error


def _run_input(ends: list[tuple[Tensor, Tensor | None]], inputs: Sequence[Any], groups: list[Group]) -> Grads:
    handles = []
    for group in groups:
        group["grads"] = [None] * len(group["intermediates"])
        handles += [node.register_prehook(_keeper(group["grads"], k)) for k, node in enumerate(group["intermediates"])]
    try:
        if not ends:
            return (None,) * len(inputs)
        outputs, grads = zip(*ends, strict=True)
        return _autograd_grad_for_inputs(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


def _keeper(grads: list[Any], place: int) -> Callable[[Any], None]:
    def keep(arrived: Any) -> None:
        grads[place] = arrived

    return keep


def _start_from_roots(ends: list[tuple[Tensor, Tensor | None]], groups: list[Group], way: set[Node]) -> None:
    """Outputs from which no way leads to an input were not gone through: their groups start from the outputs' own gradients."""
    arrived: dict[Node, list[Tensor | None]] = {}
    for output, grad in ends:
        node = _get_grad_fn_or_grad_acc(output)
        if node is not None and node not in way:
            at = output.output_nr
            row = arrived.setdefault(node, [])
            row += [None] * (at + 1 - len(row))
            row[at] = grad
    for group in groups:
        for k, node in enumerate(group["intermediates"]):
            if node in arrived:
                group["grads"][k] = tuple(arrived[node])


def stage_backward_weight(weights: Iterable[Parameter], param_groups: list[Group], retain_graph: bool = False) -> Grads:
    """Add the gradients of the weights; what they had before, in their order."""
    owner: dict[Node | None, Parameter] = {}
    before: list[Tensor | None] = []
    for weight in weights:
        owner[_get_grad_fn_or_grad_acc(weight)] = weight
        before.append(weight.grad)
    # What is reached from several nodes goes over the nodes between them, which must not be freed before.
    several = [group for group in param_groups if len(group["intermediates"]) > 1]
    for group in several + [group for group in param_groups if len(group["intermediates"]) == 1]:
        for node, grad in _weight_grads(group, retain_graph or len(group["intermediates"]) > 1):
            weight = owner[node]
            weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
    return tuple(before)


def _weight_grads(group: Group, retain_graph: bool) -> list[tuple[Node, Tensor]]:
    """The gradient of each parameter of a group."""
    kept = [(node, grads) for node, grads in zip(group["intermediates"], group["grads"], strict=False) if grads is not None]
    starts = [(GradientEdge(node, k), grad) for node, grads in kept for k, grad in enumerate(grads) if grad is not None]
    del group["intermediates"], group["grads"]  # a hook holds what it holds: without this the graph would hold itself
    if not starts:
        return []
    params = list(group["params"])
    # From one intermediate the way may lead on to another, whose own gradient then must not be added to.
    handles = [node.register_prehook(_setter(grads)) for node, grads in kept] if len(kept) > 1 else []
    try:
        edges, grads = zip(*starts, strict=True)
        found = torch.autograd.grad(edges, [GradientEdge(node, 0) for node in params], grads, retain_graph=retain_graph, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return [(node, grad) for node, grad in zip(params, found, strict=True) if grad is not None]  # type: ignore[redundant-expr]


def _setter(grads: Any) -> Callable[[Any], Any]:
    return lambda arrived: grads


def _null_coalesce_accumulate(lhs: Tensor | None, rhs: Tensor | None) -> Tensor | None:
    """The sum of what is there."""
    if lhs is None or rhs is None:
        return rhs if lhs is None else lhs
    return torch.add(lhs, rhs)
