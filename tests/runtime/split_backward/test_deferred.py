"""The split backward: deferred gradients, hooks, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, SplitError, WholeBackwardNeeded
from penstock.runtime import Pipeline, launch
from penstock.runtime.split_backward.deferrable import Deferrable
from runtime.models import by_loop
from runtime.splitting import SPLIT, Applied, Half, assert_bitwise, assert_same_grads, check, grads_of, in_one, in_two, names, wants

# Parameters used in several ways --------------------------------------------------------------------------------------


def test_a_parameter_used_twice_is_summed_first_as_autograd_does() -> None:
    model = Applied(nn.Linear(5, 5), lambda inner, x: inner(torch.tanh(inner(x))))
    assert check(model, *((wants(4, 5),) for _ in range(3))) == names(model)


def test_a_parameter_used_many_times() -> None:
    def many(inner: nn.Module, x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.tanh(inner(x))
        return x

    model = Applied(nn.Linear(5, 5), many)
    assert check(model, *((wants(4, 5),) for _ in range(3))) == names(model)


def test_tied_weights_in_one_stage() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.head(torch.tanh(self.table(x)))
            return made

    model = Tied()
    assert check(model, *((torch.randint(0, 9, (3, 4)),) for _ in range(3))) == names(model)


def test_one_use_is_deferred_and_another_is_not() -> None:
    model = Applied(nn.Linear(5, 5), lambda inner, x: inner(x) + x @ inner.weight.t())
    assert check(model, *((wants(4, 5),) for _ in range(2)), exact=False) == {"inner.bias"}


def test_an_unused_output_gives_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            made: Tensor = self.used(x)
            return made

    model = Two()
    assert check(model, (torch.randn(4, 5),), (wants(4, 5),)) == {"used.weight", "used.bias"}
    assert in_two(model, (wants(4, 5),)).grads["unused.weight"] is None


def test_regions_without_gradient_and_detached_values() -> None:
    def partly(inner: nn.ModuleList, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = inner[0](x)
        y = inner[1](x)
        made: Tensor = inner[2](y) + inner[3](y.detach())
        return made

    model = Applied(nn.ModuleList([nn.Linear(5, 5) for _ in range(4)]), partly)
    assert check(model, (wants(4, 5),), (wants(4, 5),)) == names(model) - {"inner.0.weight", "inner.0.bias"}


def test_frozen_parameters_can_change_between_steps() -> None:
    model, twin = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    twin.load_state_dict(model.state_dict())
    deferrable = Deferrable(model)
    for frozen in (None, "0.weight", "1.weight", "0.bias", None):
        x = wants(4, 5)
        for each in (model, twin):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(name != frozen)
        deferrable.refresh(model)
        Half(model, deferrable).through(x)
        twin(x).sum().backward()
        assert_same_grads(grads_of(twin), grads_of(model))


def test_parameters_can_be_replaced_between_steps() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    half = Half(model)
    half.through(wants(4, 5))
    model[0].weight = nn.Parameter(torch.randn(5, 5))
    model[1].weight.data = torch.randn(5, 5)
    half.deferrable.refresh(model)
    model.zero_grad()
    x = wants(4, 5)
    wanted = in_one(model, (x,)).grads
    again = Half(model, half.deferrable)
    again.forward(x)
    again.deferrable.backward_input(again.deferral, [again.out], [torch.randn(4, 5, generator=torch.Generator().manual_seed(0))])
    again.deferral.run()
    assert_same_grads(wanted, grads_of(model))


# Hooks ----------------------------------------------------------------------------------------------------------------


def test_a_hook_on_the_parameter_sees_its_gradient_once_and_in_the_backward_for_the_input() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    seen: list[Tensor] = []
    model[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    half = Half(model)
    half.forward(x := wants(4, 5))
    half.backward_input()
    assert len(seen) == 1
    assert_bitwise(model[0].weight.grad, 2 * seen[0])
    half.deferral.run()
    assert len(seen) == 1
    (wanted,) = torch.autograd.grad(model(x).sum(), [model[1].weight])
    assert_bitwise(model[1].weight.grad, wanted)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [2, 3])
def test_a_hook_on_an_output_changes_what_the_weight_gets(dims: int, bias: bool) -> None:
    def hooked(inner: nn.Sequential, x: Tensor) -> Tensor:
        y = inner[0](x)
        y.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        y = torch.relu_(y)
        y.register_hook(lambda grad: grad * 3)
        made: Tensor = inner[1](y)
        return made

    model = Applied(nn.Sequential(nn.Linear(5, 5, bias=bias), nn.Linear(5, 5, bias=bias)), hooked)
    assert check(model, (wants(*[4] * (dims - 1), 5),), (torch.randn(*[4] * (dims - 1), 5),)) == names(model)


def test_module_hooks_see_what_they_would() -> None:
    def run(split: bool) -> list[Tensor]:
        torch.manual_seed(5)
        model, seen = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), []
        for module in model:
            module.register_full_backward_hook(lambda _, into, out: seen.extend((*into, *out)))
        (in_two if split else in_one)(model, (wants(6, 5),))
        return seen

    whole, parts = run(False), run(True)
    assert len(whole) == len(parts) == 6
    for one, two in zip(whole, parts, strict=True):
        assert_bitwise(one, two)


def test_post_accumulate_hooks_run_once_after_the_weights() -> None:
    """The hook sees the whole gradient, whether it was deferred, left to autograd, or both."""
    model = Applied(
        nn.ModuleDict({"map": nn.Linear(5, 5), "norm": nn.LayerNorm(5)}), lambda m, x: m["norm"](m["map"](x) + x @ m["map"].weight)
    )
    seen: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.setdefault(name, []).append(p.grad.clone()))
    x = wants(4, 5)
    grads = in_one(model, (x,)).grads
    stage = _stage(model)
    for step in (1, 2):
        half = Half(model, stage.find_deferrable())
        half.forward(x)
        half.deferrable.backward_input(half.deferral, [half.out], [torch.randn(4, 5, generator=torch.Generator().manual_seed(0))])
        assert {len(grads) for grads in seen.values()} == ({step - 1} if step > 1 else set())
        stage.backward_weights(half.deferral)
        assert {name: len(grads) for name, grads in seen.items()} == dict.fromkeys(names(model), step)
        for name, parameter in model.named_parameters():
            assert_bitwise(seen[name][-1], parameter.grad)
            torch.testing.assert_close(seen[name][-1], step * grads[name])


def test_hooks_are_restored_after_a_failure() -> None:
    def fail(grad: Tensor) -> None:
        raise ValueError("no")

    model = nn.Linear(5, 5)
    ran: list[int] = []
    model.bias.register_post_accumulate_grad_hook(lambda p: ran.append(1))
    half = Half(model)
    half.forward(x := wants(4, 5))
    x.register_hook(fail)
    with pytest.raises(ValueError, match="no"):
        half.backward_input()
    model(torch.randn(4, 5)).sum().backward()
    assert ran == [1]


def test_a_parameter_without_gradient_gets_no_hook_call() -> None:
    model = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
    ran: list[int] = []
    for number, part in enumerate(model):
        part.weight.register_post_accumulate_grad_hook(lambda _, number=number: ran.append(number))
    stage = _stage(Applied(model, lambda inner, x: inner[1](x)))
    half = Half(stage.module, stage.find_deferrable())
    half.forward(wants(4, 5))
    half.backward_input()
    stage.backward_weights(half.deferral)
    assert ran == [1]


def _stage(module: nn.Module) -> Any:
    from penstock.runtime.model.stage import Stage

    return Stage(0, module)


# What must be refused rather than computed wrong ----------------------------------------------------------------------


def force(inner: nn.Module, x: Tensor) -> Tensor:
    """Return a gradient that depends on the weights."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(inner(x).tanh().sum(), x, create_graph=True)[0]


def test_a_gradient_of_a_gradient_is_refused() -> None:
    """An inner gradient is refused, because the weight's part in it would be lost."""
    for shape in ((4, 5), (2, 4, 5)):
        half = Half(Applied(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), force))
        with pytest.raises(WholeBackwardNeeded, match="create_graph"):
            half.forward(wants(*shape))


def by_engine(inner: nn.Module, x: Tensor) -> Tensor:
    """Like `force`, but calls the engine past torch's functions."""
    x = x.detach().requires_grad_()
    out = inner(x).tanh().sum()
    run = torch.autograd.Variable._execution_engine.run_backward
    return run((out,), (torch.ones_like(out),), True, True, (x,), allow_unreachable=True, accumulate_grad=False)[0]  # type: ignore[no-any-return]


def test_a_gradient_of_a_gradient_by_the_engine_itself_is_refused_with_the_way_out() -> None:
    parts = [nn.Linear(5, 5), Applied(nn.Sequential(nn.Linear(5, 5), nn.Tanh()), by_engine), nn.Linear(5, 5), nn.Linear(5, 5)]
    schedule, x = ps.schedule(SPLIT, ranks=2, microbatches=3), torch.randn(6, 5)
    with pytest.raises(PipelineError, match=r"1F0 .*merge-backward\{stages=\.\.\.,apart=true\}"):
        launch(lambda: Pipeline(parts, schedule, loss_fn=functional.mse_loss).step(x, target=x), 2)
    merged = ps.PassList.parse("merge-backward{stages=1,apart=true}").apply(schedule)
    launch(lambda: Pipeline(parts, merged, loss_fn=functional.mse_loss).step(x, target=x), 2)
    assert_same_grads(grads_of(nn.Sequential(*parts)), by_loop(nn.Sequential(*parts), x, x, 3).grads)


def test_a_gradient_that_the_forward_asks_for_itself_is_not_counted() -> None:
    def descend(inner: nn.Module, x: Tensor) -> Tensor:
        given = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(inner(given).tanh().sum(), given)
        made: Tensor = inner(x - 0.1 * slope)
        return made

    model = Applied(nn.Linear(5, 5), descend)
    assert check(model, (wants(4, 5),), (wants(2, 4, 5),)) == names(model)


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5)])
def test_an_input_changed_in_place_is_refused_as_autograd_does(shape: tuple[int, ...]) -> None:
    def change(inner: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        made: Tensor = inner(y)
        y.add_(1)
        return made

    model = Applied(nn.Linear(5, 5), change)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        in_one(model, (wants(*shape),))
    with pytest.raises(SplitError, match=f"shape {list(shape)} .* changed in place".replace("[", r"\[").replace("]", r"\]")):
        in_two(model, (wants(*shape),))


class Again(torch.autograd.Function):
    """A custom checkpoint that requests the gradients of its parameters explicitly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inner: nn.Module, unused: bool, *parameters: Tensor) -> Tensor:
        ctx.inner, ctx.unused = inner, unused
        ctx.save_for_backward(x, *parameters)
        return inner(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grads = torch.autograd.grad(ctx.inner(x), (x, *parameters), grad, allow_unused=ctx.unused)
        return grads[0], None, None, *grads[1:]


@pytest.mark.parametrize("unused", [True, False])
def test_a_function_that_computes_its_part_again(unused: bool) -> None:
    """A custom function's parameters are deferred if it does not need their gradients; if it does, torch raises an error."""
    model = Applied(nn.Linear(5, 5), lambda inner, x: Again.apply(x, inner, unused, *inner.parameters()))
    if unused:
        assert check(model, (wants(4, 5),), (wants(2, 4, 5),)) == names(model)
    else:
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            in_two(model, (wants(4, 5),))
