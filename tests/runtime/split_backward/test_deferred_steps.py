"""The split backward in a step: no side effects, gradients added in place, compiled parts, failures."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError
from penstock.runtime import Pipeline, launch
from penstock.runtime.split_backward import deferral as deferral_module
from penstock.runtime.split_backward.deferrable import Deferrable
from penstock.runtime.split_backward.deferral import Deferral, get_deferral
from runtime.models import by_loop
from runtime.splitting import SPLIT, Applied, Half, assert_bitwise, assert_same_grads, check, grads_of, in_one, in_two, names, wants

# Leaving everything as it was -----------------------------------------------------------------------------------------


def _state() -> tuple[Any, ...]:
    return functional.linear, functional.embedding, functional.conv1d, functional.conv2d, functional.conv3d


def test_an_exception_in_a_forward_restores_everything() -> None:
    before = _state()

    def fail(inner: nn.ParameterList, x: Tensor) -> Tensor:
        assert _state() != before
        x = x @ inner[0]
        raise ValueError("no")

    model = Applied(nn.ParameterList([nn.Parameter(torch.randn(5, 5))]), fail)
    half = Half(model)
    with pytest.raises(ValueError, match="no"):
        half.forward(wants(4, 5))
    assert _state() == before
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    x = wants(4, 5)
    (x @ model.inner[0]).sum().backward()
    assert_bitwise(model.inner[0].grad, x.detach().t() @ torch.ones(4, 5))


def test_nothing_stays_in_place_after_a_step() -> None:
    before = _state()
    model = nn.Sequential(*(Applied(nn.ParameterList([nn.Parameter(torch.randn(5, 5))]), lambda inner, x: x @ inner[0]) for _ in range(4)))
    x = torch.randn(4, 5)
    launch(lambda: Pipeline(model, ps.schedule(SPLIT, 2, 2), loss_fn=functional.mse_loss).step(x, target=x), 2)
    assert _state() == before
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert {p._backward_hooks for p in model.parameters()} == {None}


def test_recordings_inside_each_other() -> None:
    inner, outer = nn.Linear(5, 5), nn.Linear(5, 5)
    deferrable, deferral = Deferrable(inner), Deferral()
    other, rest = Deferrable(outer), Deferral()
    x = wants(4, 5)
    with other.forward(rest):
        with deferrable.forward(deferral):
            hidden = inner(x)
        out = outer(hidden)
    rest.backward = deferral.backward = True
    out.sum().backward()
    assert (len(deferral.operators), len(rest.operators)) == (1, 1)


def test_threads_do_not_disturb_each_other() -> None:
    """One thread records a split forward while another trains without one, many times."""
    torch.manual_seed(2)
    models = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(4)]
    x = wants(4, 5)
    wanted = [in_one(model, *[(x,)] * 30).grads for model in models]
    found: list[Any] = [None] * 4
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait()
        found[number] = (in_two if number % 2 else in_one)(models[number], *[(x,)] * 30)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, run in enumerate(found):
        assert_same_grads(wanted[number], run.grads)
        assert run.waited == (names(models[number]) if number % 2 else set())


def test_a_backward_on_another_thread_records_with_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the backward runs on another thread, as on a device, a recomputed forward is recorded for its own stage only."""
    mine, other = nn.Linear(5, 5), nn.Linear(5, 5)
    halves = [Half(mine), Half(other)]
    for half in halves:
        half.forward(wants(4, 5))
    found: dict[str, list[Deferral | None]] = {}

    def look(when: str) -> None:
        def work() -> None:
            found[when] = [get_deferral(mine.weight), get_deferral(other.weight), get_deferral(torch.ones(1))]

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    halves[0].out.register_hook(lambda grad: look("outside a backward"))
    halves[0].backward_input()
    monkeypatch.setattr(deferral_module, "_current_graph_task", lambda: 7)
    look("no backward runs")
    halves[1].out.register_hook(lambda grad: look("the other's backward"))
    halves[1].backward_input()
    assert found == {
        "outside a backward": [None] * 3,
        "no backward runs": [None] * 3,
        "the other's backward": [None, halves[1].deferral, None],
    }


def test_parallel_ranks_split_side_by_side() -> None:
    schedule = ps.schedule(SPLIT, ranks=2, microbatches=4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)))
    x, y = torch.randn(8, 5), torch.randn(8, 5)
    for _ in range(5):
        model.zero_grad()
        launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss).step(x, target=y), 2, parallel=True)
        assert_same_grads(grads_of(model), by_loop(model, x, y, 4).grads)


# Fused accumulation ---------------------------------------------------------------------------------------------------

FUSED_BOUND = 1e-6
"""Tolerance of fused accumulation in float32, relative to the largest gradient, for sums of this length."""


@pytest.mark.parametrize("shape", [(64, 32), (4, 16, 32)], ids=str)
def test_fused_accumulation_is_within_its_bound(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16))
    microbatches = [(wants(*shape),) for _ in range(6)]
    plain, fused = in_two(model, *microbatches), in_two(model, *microbatches, fused=True)
    assert fused.waited == names(model)
    for name, grad in plain.grads.items():
        other = fused.grads[name]
        assert grad is not None
        assert other is not None
        assert (grad - other).abs().max() <= FUSED_BOUND * grad.abs().max()
        if "bias" in name:
            assert_bitwise(grad, other)


def test_fused_accumulation_adds_to_the_gradient_in_place() -> None:
    model = nn.Linear(5, 5, bias=False)
    half = Half(model)
    half.through(wants(4, 5))
    total = model.weight.grad
    assert total is not None
    before, x = total.clone(), wants(4, 5)
    again = Half(model, half.deferrable)
    again.forward(x)
    again.backward_input()
    again.deferral.run(fused=True)
    assert model.weight.grad is total
    torch.testing.assert_close(total, before + torch.ones(4, 5).t() @ x.detach())


def test_fused_accumulation_only_if_it_is_safe() -> None:
    """A weight that is used twice and a gradient of another dtype are added without fusing."""
    twice = Applied(nn.Linear(5, 5), lambda inner, x: inner(torch.tanh(inner(x))))
    microbatches = [(wants(4, 5),) for _ in range(3)]
    assert_same_grads(in_two(twice, *microbatches).grads, in_two(twice, *microbatches, fused=True).grads)

    def autocast(model: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    model = nn.Linear(5, 5)
    one = in_two(model, *microbatches, forward=autocast)
    two = in_two(model, *microbatches, forward=autocast, fused=True)
    assert_same_grads(one.grads, two.grads)


def test_a_pipeline_with_fused_accumulation() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    schedule = ps.schedule(SPLIT, ranks=2, microbatches=4)
    launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss, accumulate="fused").step(x, target=y), 2)
    wanted = by_loop(model, x, y, 4).grads
    for name, grad in grads_of(model).items():
        assert (grad - wanted[name]).abs().max() <= FUSED_BOUND * wanted[name].abs().max()


# Compiled parts -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "module.compile"])
def test_a_compiled_stage_runs_its_backward_whole_and_says_so(in_place: bool, caplog: pytest.LogCaptureFixture) -> None:
    parts = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)]
    model = nn.ModuleList(parts)
    stages: list[Any] = list(parts)
    if in_place:
        stages[1].compile(backend="eager")
    else:
        stages[1] = torch.compile(parts[1], backend="eager")
    schedule = ps.schedule(SPLIT, ranks=2, microbatches=3)
    x, y = torch.randn(6, 5), torch.randn(6, 5)
    with caplog.at_level(logging.WARNING, "penstock"):
        kinds = launch(lambda: _step_and_kinds(stages, schedule, x, y), 2)
    warned = [record.getMessage() for record in caplog.records if "cannot split" in record.getMessage()]
    assert warned
    assert all("[1]" in message for message in warned)
    assert kinds[0] | kinds[1] == {(1, "B"), *((stage, kind) for stage in (0, 2, 3) for kind in "IW")}
    assert_same_grads(grads_of(nn.Sequential(*parts)), by_loop(nn.Sequential(*parts), x, y, 3).grads)
    assert len(list(model.parameters())) == 8


def _step_and_kinds(stages: list[Any], schedule: Any, x: Tensor, y: Tensor) -> set[tuple[int, str]]:
    from penstock.runtime import rank

    pipe = Pipeline(stages, schedule, loss_fn=functional.mse_loss)
    pipe.step(x, target=y)
    return {(action.stage, action.kind.name) for action in pipe.program()[rank()] if action.kind.name in "BIW"}


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_inside_a_stage_is_left_to_autograd() -> None:
    mapped = torch.compile(lambda x, weight: torch.tanh(functional.linear(x, weight)), backend="eager")
    model = Applied(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5, bias=False)), lambda inner, x: mapped(inner[0](x), inner[1].weight))
    assert check(model, (wants(4, 5),), (wants(4, 5),)) == {"inner.0.weight", "inner.0.bias"}


# In a pipeline --------------------------------------------------------------------------------------------------------


def test_errors_of_a_split_stage_name_stage_and_microbatch() -> None:
    def change(inner: nn.Module, x: Tensor) -> Tensor:
        y = x * 2
        made: Tensor = inner(y)
        y.add_(1)
        return made

    model = [nn.Linear(5, 5), nn.Linear(5, 5), Applied(nn.Linear(5, 5), change), nn.Linear(5, 5)]
    x = torch.randn(4, 5)
    with pytest.raises(PipelineError, match=r"2W0 \(stage 2, backward for the weights of microbatch 0\).*SplitError"):
        launch(lambda: Pipeline(model, ps.schedule(SPLIT, 2, 2), loss_fn=functional.mse_loss).step(x, target=x), 2)


def test_row_16_the_weight_pass_is_linear_in_depth() -> None:
    """Twice the layers take twice the Python calls in both backwards; torch's weight pass takes four times as many."""

    def calls(layers: int) -> int:
        model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True) for _ in range(layers)))
        half = Half(model)
        half.forward(wants(2, 3, 8))
        return _count_calls(half.backward_input) + _count_calls(half.deferral.run)

    few, many = calls(8), calls(32)
    assert few > 8 * 4  # something was counted for each operator
    assert many <= 4.2 * few


def _count_calls(work: Callable[[], Any]) -> int:
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
