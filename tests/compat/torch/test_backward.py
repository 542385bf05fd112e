"""A stage's backward on a finished graph, against the installed torch and against autograd."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from compat.torch.both import BOTH, OURS, TORCH, Package


class Tied(nn.Module):
    """One weight used twice, a parameter off the path to the input, a second output, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(x))
        hidden = self.linear(hidden) + x
        return self.other(hidden * self.scale) + self.scale.exp()


def models() -> Iterator[nn.Module]:
    yield nn.Linear(4, 4)
    yield nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    yield nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    yield Tied()
    yield nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


def both_halves(package: Package, module: nn.Module, x: Tensor, retain: bool = False) -> tuple[Any, list[Any], list[Any]]:
    """Return the gradients of the input, and those of the weights before and after the second half."""
    loss = module(x).square().sum()
    backward = package._backward
    grads, groups = backward.stage_backward_input((loss,), None, [x], module.parameters())
    between = [p.grad for p in module.parameters()]
    backward.stage_backward_weight(module.parameters(), groups, retain_graph=retain)
    return grads, between, [p.grad for p in module.parameters()]


@pytest.mark.parametrize("which", range(5))
def test_split_backward_equals_autograd(which: int) -> None:
    module = list(models())[which]
    x = torch.randn(2, 3, 4)
    found = []
    if isinstance(module, Tied):  # torch frees the graph that a tied weight's other use needs
        with pytest.raises(RuntimeError, match="a second time"):
            both_halves(TORCH, copy.deepcopy(module), x.clone().requires_grad_())
    for package in [OURS] if isinstance(module, Tied) else BOTH:
        mine, value = copy.deepcopy(module), x.clone().requires_grad_()
        grads, between, after = both_halves(package, mine, value)
        assert between == [None] * len(between)
        assert value.grad is not None
        assert torch.equal(grads[0], value.grad)
        found.append((value.grad, after))
    alone, value = copy.deepcopy(module), x.clone().requires_grad_()
    alone(value).square().sum().backward()
    for grad, after in found:
        torch.testing.assert_close(grad, value.grad)
        torch.testing.assert_close(after, [p.grad for p in alone.parameters()])


@pytest.mark.parametrize("which", range(5))
def test_parameter_groups_equal_torch(which: int) -> None:
    """The same parameters form a group, reached from the same nodes."""
    module, x = list(models())[which], torch.randn(2, 3, 4, requires_grad=True)
    names = {id(p): name for name, p in module.named_parameters()}
    found = []
    for package in BOTH:
        loss = module(x).square().sum()
        _, groups = package._backward.stage_backward_input((loss,), None, [x], module.parameters())
        assert all(set(group) == {"params", "intermediates", "grads"} for group in groups)
        assert all(len(group["grads"]) == len(group["intermediates"]) for group in groups)
        found.append(
            sorted(
                (sorted(names[id(node.variable)] for node in group["params"]), sorted(node.name() for node in group["intermediates"]))
                for group in groups
            )
        )
    assert found[1] == found[0]


def test_gradients_accumulate_over_microbatches() -> None:
    for package in BOTH:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        alone = copy.deepcopy(module)
        for _ in range(5):
            x = torch.randn(3, 4)
            both_halves(package, module, x.clone().requires_grad_())
            alone(x).square().sum().backward()
        torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in alone.parameters()])


def test_backward_weight_returns_earlier_gradients() -> None:
    """The earlier gradients, in the order of the weights."""
    for package in BOTH:
        module, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        kept = [p.grad for p in module.parameters()]
        _, groups = package._backward.stage_backward_input((module(x).sum(),), None, [x], module.parameters())
        given_back = package._backward.stage_backward_weight(module.parameters(), groups)
        assert [id(grad) for grad in given_back] == [id(grad) for grad in kept]
        assert all("intermediates" not in group and "grads" not in group for group in groups)


def test_missing_gradients_at_intermediates() -> None:
    """No gradient may have arrived at an intermediate."""
    for package in BOTH:
        module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
        _, groups = package._backward.stage_backward_input((module(x).sum(),), None, [x], module.parameters())
        for group in groups:
            group["grads"] = [(None,) if k else grads for k, grads in enumerate(group["grads"])]
        groups[0]["grads"] = [(None,)]
        package._backward.stage_backward_weight(module.parameters(), groups)
        assert sum(p.grad is None for p in module.parameters()) == 2


# Gradients torch loses ------------------------------------------------------------------------------------------------


class Side(nn.Module):
    """A parameter that feeds only an output that does not depend on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.free = nn.Linear(4, 4), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.free.exp()


def test_outputs_independent_of_the_input() -> None:
    module, x = Side(), torch.randn(3, 4, requires_grad=True)
    seeds = (torch.randn(3, 4), torch.randn(3))
    _, groups = OURS._backward.stage_backward_input(module(x), seeds, [x], module.parameters())
    OURS._backward.stage_backward_weight(module.parameters(), groups)
    alone = copy.deepcopy(module)
    alone.zero_grad()
    torch.autograd.backward(alone(x.detach()), seeds)
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in alone.parameters()])


def test_inputs_without_gradient() -> None:
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    grads, groups = OURS._backward.stage_backward_input((module(x).sum(),), None, [x], module.parameters())
    assert grads == (None,)
    assert all(p.grad is None for p in module.parameters())
    OURS._backward.stage_backward_weight(module.parameters(), groups)
    alone = copy.deepcopy(module)
    alone.zero_grad()
    alone(x).sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in alone.parameters()])


def test_outputs_that_are_views() -> None:
    module, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError):
        TORCH._backward.stage_backward_input((module(x).view(2, 6),), (torch.ones(2, 6),), [x], module.parameters())
    _, groups = OURS._backward.stage_backward_input((module(x).view(2, 6),), (torch.ones(2, 6),), [x], module.parameters())
    OURS._backward.stage_backward_weight(module.parameters(), groups)
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad, x.detach().sum(0).expand(4, 4))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(["linear", "tied", "add", "scale", "split"]), st.booleans()), min_size=1, max_size=8), st.booleans()
)
def test_random_graphs(plan: list[tuple[str, bool]], wants: bool) -> None:
    """Both halves together equal the full backward, for any graph."""
    torch.manual_seed(len(plan))
    tied = nn.Linear(4, 4)
    own = nn.ModuleList([nn.Linear(4, 4) for _ in plan])
    scales = nn.ParameterList([torch.rand(4) for _ in plan])
    everything = nn.ModuleList([tied, own, scales])

    def forward(x: Tensor) -> Tensor:
        value = x
        for (kind, cut), linear, scale in zip(plan, own, scales, strict=True):
            if kind == "linear":
                value = torch.tanh(linear(value))
            elif kind == "tied":
                value = tied(value) + linear(value)
            elif kind == "add":
                value = value + scale.exp() @ linear.weight
            elif kind == "scale":
                value = value * (tied.weight.sum(0) + scale)
            else:
                left, right = linear(value).split(2, dim=-1)
                value = torch.cat([right, left * scale[:2]], dim=-1)
            value = value.detach() + 0 * value.sum() if cut else value
        return value

    x = torch.randn(3, 4, requires_grad=wants)
    loss = forward(x).square().sum()
    if not loss.requires_grad:
        return
    _, groups = OURS._backward.stage_backward_input((loss,), None, [x], everything.parameters())
    OURS._backward.stage_backward_weight(everything.parameters(), groups)
    found, of_input = [p.grad for p in everything.parameters()], x.grad
    everything.zero_grad()
    x.grad = None
    forward(x).square().sum().backward()
    for mine, wanted in zip([of_input, *found], [x.grad, *(p.grad for p in everything.parameters())], strict=True):
        if wanted is None:
            assert mine is None
        else:
            torch.testing.assert_close(torch.zeros_like(wanted) if mine is None else mine, wanted, rtol=1e-4, atol=1e-5)


# Full backward --------------------------------------------------------------------------------------------------------


def test_full_backward_equals_autograd() -> None:
    for package in BOTH:
        module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4, requires_grad=True)
        alone, value = copy.deepcopy(module), x.detach().clone().requires_grad_()
        output = {"a": module(x), "b": [module(x).sum(), "text"], "c": torch.ones(2)}
        grads = {"a": torch.ones(3, 4), "b": [None, None], "c": None}
        found = package._backward.stage_backward(output, grads, (x, "no tensor"))
        (alone(value).sum() * 2).backward()
        assert found[1] is None
        assert x.grad is None
        torch.testing.assert_close(found[0], value.grad)
        torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in alone.parameters()])


def test_full_backward_from_some_outputs() -> None:
    for package in BOTH:
        x = torch.ones(2, requires_grad=True)
        outputs = [(x * 2).sum(), (x * 5).sum()]
        found = package._backward.stage_backward(outputs, [torch.tensor(1.0), torch.tensor(1.0)], [x], outputs_with_grads_idxs=[1])
        assert found[0].tolist() == [5, 5]


@pytest.mark.parametrize("case", ["kind", "length", "keys", "scalar"])
def test_errors(case: str) -> None:
    for package in BOTH:
        x = torch.ones(2, requires_grad=True)
        given: dict[str, tuple[Any, Any]] = {
            "kind": ([x * 1], [3]),
            "length": ([x * 1], [x, x]),
            "keys": ({"a": x * 1}, {"b": x}),
            "scalar": (x * 1, None),
        }
        with pytest.raises(RuntimeError, match="Failed to run stage backward"):
            package._backward.stage_backward(*given[case], [x])
    with pytest.raises(RuntimeError, match="Failed to run stage backward input"):
        OURS._backward.stage_backward_input((x * 1,), (torch.ones(3),), [x], iter(()))
