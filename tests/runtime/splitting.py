"""A module's backward in one piece and in two, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.runtime.split_backward.deferrable import Deferrable
from penstock.runtime.split_backward.deferral import Deferral

Grads = dict[str, Tensor | None]
Forward = Callable[..., Any]


@dataclass
class Run:
    """What the backwards of some microbatches gave: gradients of the parameters and of the inputs, and the outputs."""

    outputs: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor | None] = field(default_factory=list)
    grads: Grads = field(default_factory=dict)
    waited: set[str] = field(default_factory=set)
    """Parameters that had no gradient before the first backward for the weights, and had one after it."""


def grads_of(module: nn.Module) -> Grads:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in module.named_parameters()}


def in_one(module: nn.Module, *microbatches: tuple[Any, ...], forward: Forward | None = None) -> Run:
    """Autograd's own backward, on a copy of the module."""
    module = copy.deepcopy(module)
    run = Run()
    for number, args in enumerate(microbatches):
        given = _fresh(args)
        roots = _roots(module(*given) if forward is None else forward(module, *given))
        torch.autograd.backward(roots, _start(roots, number))
        run.outputs += [root.detach() for root in roots]
        run.inputs += _input_grads(given)
    run.grads = grads_of(module)
    return run


def in_two(module: nn.Module, *microbatches: tuple[Any, ...], forward: Forward | None = None, fused: bool = False) -> Run:
    """The backward for the input and the backward for the weights, on a copy of the module."""
    module = copy.deepcopy(module)
    run = Run()
    deferrable = Deferrable(module)
    for number, args in enumerate(microbatches):
        given = _fresh(args)
        deferral = Deferral()
        with deferrable.forward(deferral):
            roots = _roots(module(*given) if forward is None else forward(module, *given))
        deferrable.backward_input(deferral, roots, _start(roots, number))
        run.inputs += _input_grads(given)
        before = {name for name, p in module.named_parameters() if p.grad is not None}
        deferral.run(fused)
        if number == 0:
            run.waited = {name for name, p in module.named_parameters() if p.grad is not None} - before
        run.outputs += [root.detach() for root in roots]
    run.grads = grads_of(module)
    return run


def check(module: nn.Module, *microbatches: tuple[Any, ...], forward: Forward | None = None, exact: bool = True) -> set[str]:
    """Hold the two against each other to the last bit (or closely); the parameters whose gradients waited."""
    one, two = in_one(module, *microbatches, forward=forward), in_two(module, *microbatches, forward=forward)
    same = assert_bitwise if exact else torch.testing.assert_close
    for a, b in zip(one.outputs, two.outputs, strict=True):
        same(a, b)
    for one_input, two_input in zip(one.inputs, two.inputs, strict=True):
        assert (one_input is None) == (two_input is None)
        if one_input is not None and two_input is not None:
            same(one_input, two_input)
    assert_same_grads(one.grads, two.grads, same)
    return two.waited


def assert_same_grads(one: Grads, two: Grads, same: Callable[[Tensor, Tensor], None] | None = None) -> None:
    assert one.keys() == two.keys()
    for name, grad in one.items():
        other = two[name]
        assert (grad is None) == (other is None), f"{name}: {grad} against {other}"
        if grad is not None and other is not None:
            (same or assert_bitwise)(grad, other)


def assert_bitwise(one: Tensor, two: Tensor) -> None:
    assert one.dtype == two.dtype
    assert one.shape == two.shape
    if not torch.equal(one, two):
        raise AssertionError(f"differ by up to {(one - two).abs().max().item():g}")


def names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def _fresh(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as leaves of their own, dense as they were, wanting gradients as they did."""
    return pytree.tree_map(_leaf, args)  # type: ignore[no-any-return]


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(value.detach()).requires_grad_(value.requires_grad)


def _roots(made: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _start(roots: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(root.shape, generator=generator, dtype=root.dtype).to(root.device) for root in roots]


def _input_grads(given: tuple[Any, ...]) -> list[Tensor | None]:
    return [leaf.grad for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor) and leaf.requires_grad]


SPLIT = "zbv"


def wants(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def twice(make: Callable[[], Tensor]) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """Two microbatches: the first gradient is put in place, the second added to it."""
    return (make(),), (make(),)


class Applied(nn.Module):
    """A module with a forward of its own: `forward(inner, x)`."""

    def __init__(self, inner: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.function = inner, forward

    def forward(self, *args: Any) -> Any:
        return self.function(self.inner, *args)


class Half:
    """The two backwards of a module, step by step."""

    def __init__(self, module: nn.Module, deferrable: Deferrable | None = None) -> None:
        self.module, self.deferral = module, Deferral()
        self.deferrable = Deferrable(module) if deferrable is None else deferrable

    def forward(self, *args: Any) -> Any:
        with self.deferrable.forward(self.deferral):
            self.out = self.module(*args)
        return self.out

    def backward_input(self) -> None:
        self.deferrable.backward_input(self.deferral, [self.out], [torch.ones_like(self.out)])

    def through(self, *args: Any) -> None:
        self.forward(*args)
        self.backward_input()
        self.deferral.run()


class Using(nn.Module):
    """A module of raw parameters and a function of them."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, *args: Any) -> Any:
        return self.function(*args, *self.weights)
