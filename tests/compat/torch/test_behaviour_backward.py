"""The behaviour that torch's own tests of a stage's backward require, on both packages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.torch.both import BOTH, Package
from compat.torch.models import assert_same, blocks, grads

both = pytest.mark.parametrize("package", BOTH, ids=repr)


def model() -> nn.Module:
    return nn.Sequential(*blocks(3))


def of_autograd(module: nn.Module, xs: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
    """Return the gradients of the inputs and the parameters for a sum of squares of the output."""
    alone, inputs = copy.deepcopy(module), [x.clone().requires_grad_() for x in xs]
    for x in inputs:
        alone(x).square().sum().backward()
    return [x.grad for x in inputs if x.grad is not None], grads([alone])


@both
def test_stage_backward(package: Package) -> None:
    module, x = model(), torch.randn(4, 6)
    value = x.clone().requires_grad_()
    out = module(value)
    (found,) = package._backward.stage_backward(out, 2 * out.detach(), [value])
    inputs, weights = of_autograd(module, [x])
    assert_same(found, inputs[0])
    assert_same(grads([module]), weights)
    assert value.grad is None  # taken


@both
def test_stage_backward_from_a_loss(package: Package) -> None:
    module, x = model(), torch.randn(4, 6)
    value = x.clone().requires_grad_()
    (found,) = package._backward.stage_backward(module(value).square().sum(), None, (value,))
    inputs, weights = of_autograd(module, [x])
    assert_same([found, grads([module])], [inputs[0], weights])


@both
@pytest.mark.parametrize("shape", ["tuple", "list", "dict"])
def test_stage_backward_of_trees(package: Package, shape: str) -> None:
    module, x = model(), torch.randn(4, 6)
    value = x.clone().requires_grad_()
    first = module(value)
    ends: Any = {"a": first, "b": first * 2} if shape == "dict" else (first, first * 2)
    starts: Any = {"a": torch.ones(4, 6), "b": torch.zeros(4, 6)} if shape == "dict" else (torch.ones(4, 6), torch.zeros(4, 6))
    if shape == "list":
        ends, starts = list(ends), list(starts)
    (found,) = package._backward.stage_backward(ends, starts, [value])
    alone, other = copy.deepcopy(module), x.clone().requires_grad_()
    alone.zero_grad()
    alone(other).sum().backward()
    assert_same([found, grads([module])], [other.grad, grads([alone])])


@both
def test_inputs_without_gradients(package: Package) -> None:
    module, x = model(), torch.randn(4, 6)
    found = package._backward.stage_backward(module(x).sum(), None, [x, 3, None])
    assert found == (None, None, None)


@both
def test_selected_outputs(package: Package) -> None:
    value = torch.randn(3, requires_grad=True)
    ends, starts = (value * 2, value.detach(), value * 3), (torch.ones(3), None, torch.ones(3))
    (found,) = package._backward.stage_backward(ends, starts, [value], outputs_with_grads_idxs=[0, 2])
    assert_same(found, torch.full((3,), 5.0))


@both
def test_stage_backward_input(package: Package) -> None:
    """Gradients of the inputs, and none of the weights."""
    module, x = model(), torch.randn(4, 6)
    value = x.clone().requires_grad_()
    found, groups = package._backward.stage_backward_input([module(value).square().sum()], None, [value], module.parameters())
    inputs, _ = of_autograd(module, [x])
    assert_same([found[0], value.grad], [inputs[0]] * 2)
    assert grads([module]) == [None] * 12
    assert groups


@both
def test_stage_backward_input_from_gradients(package: Package) -> None:
    module, x = model(), torch.randn(4, 6)
    value = x.clone().requires_grad_()
    out = module(value)
    found, _ = package._backward.stage_backward_input([out], [2 * out.detach()], [value], module.parameters())
    assert_same(found[0], of_autograd(module, [x])[0][0])


@both
def test_stage_backward_weight(package: Package) -> None:
    module, x = model(), torch.randn(4, 6)
    value = x.clone().requires_grad_()
    _, groups = package._backward.stage_backward_input([module(value).square().sum()], None, [value], module.parameters())
    package._backward.stage_backward_weight(module.parameters(), groups)
    assert_same(grads([module]), of_autograd(module, [x])[1])


@both
@pytest.mark.parametrize("late", [False, True])
def test_backward_weight_of_several_microbatches(package: Package, late: bool) -> None:
    """Each right after its backward for the input, or all at the end."""
    module, xs = model(), [torch.randn(4, 6) for _ in range(10)]
    waiting = []
    for x in xs:
        value = x.clone().requires_grad_()
        _, groups = package._backward.stage_backward_input([module(value).square().sum()], None, [value], module.parameters())
        waiting.append(groups)
        if not late:
            package._backward.stage_backward_weight(module.parameters(), waiting.pop())
    for groups in waiting:
        package._backward.stage_backward_weight(module.parameters(), groups)
    assert_same(grads([module]), of_autograd(module, xs)[1])


@both
def test_frozen_weights(package: Package) -> None:
    module, x = model(), torch.randn(4, 6)
    for parameter in module[1].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    value = x.clone().requires_grad_()
    _, groups = package._backward.stage_backward_input([module(value).square().sum()], None, [value], module.parameters())
    package._backward.stage_backward_weight(module.parameters(), groups)
    assert_same(grads([module]), of_autograd(module, [x])[1])
    assert grads([module[1]]) == [None] * 4  # type: ignore[index]


@both
def test_a_stage_without_weights(package: Package) -> None:
    value = torch.randn(3, requires_grad=True)
    found, groups = package._backward.stage_backward_input([value.exp().sum()], None, [value], iter(()))
    assert_same(found[0], value.detach().exp())
    assert list(groups) == []
    package._backward.stage_backward_weight(iter(()), groups)


@both
def test_a_failure_describes_the_values(package: Package) -> None:
    with pytest.raises(RuntimeError, match=r"Failed to run stage backward[\s\S]*Stage output") as error:
        package._backward.stage_backward((torch.ones(2, requires_grad=True) * 2,), (torch.ones(2), torch.ones(2)), [])
    assert error.value.__cause__ is not None
