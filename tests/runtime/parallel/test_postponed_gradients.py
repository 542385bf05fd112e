"""`finalize_gradients=False` without data parallelism: copies of a parameter are summed once, by the next step that finalizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import Pipeline, launch
from runtime.distributed import Grads, local_grads, together
from runtime.models import assert_equal, gradients, sums_in_order
from runtime.summing import COUNT, model_of

STEPS = 3
SCHEDULES = ["chimera", "dualpipe", "1f1b", "zbv"]
Pieces = list[tuple[Tensor, Tensor]]


def squares(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum")


def draw(steps: int = STEPS, dtype: torch.dtype = torch.float64) -> list[Pieces]:
    """Return the microbatches of each step, of several sizes."""
    torch.manual_seed(3)
    return [[(torch.randn(2 + k % 3, 6, dtype=dtype), torch.randn(2 + k % 3, 6, dtype=dtype)) for k in range(COUNT)] for _ in range(steps)]


def by_loop(model: nn.Module, pieces: Pieces) -> Grads:
    """Run the unpipelined model over all microbatches in order."""
    model = copy.deepcopy(model)
    model.zero_grad()
    for x, y in pieces:
        squares(model(x), y).backward()
    return gradients(model)


def by_pipeline(model: nn.Module, schedule: ps.Schedule, steps: list[Pieces], finalize: list[bool], own: bool, **options: Any) -> Grads:
    """Run steps on virtual ranks, which share one model, or with `own` have one copy each."""
    one = copy.deepcopy(model)
    one.zero_grad()

    def train() -> Grads:
        mine = copy.deepcopy(model) if own else one
        pipe = Pipeline(mine, schedule, loss_fn=squares, loss_reduction="sum", **options)
        for pieces, last in zip(steps, finalize, strict=True):
            pipe.step_list([x for x, _ in pieces], [y for _, y in pieces], finalize_gradients=last)
        return local_grads(pipe)

    found = launch(train, schedule.ranks)
    return together(found, sorted({name for theirs in found for name in theirs}))


def assert_near(found: Grads, wanted: Grads, tolerance: float) -> None:
    for name, grad in found.items():
        expected = wanted.get(name, wanted["0.weight"])
        assert grad is not None
        assert expected is not None
        assert float((grad - expected).abs().max()) <= tolerance * float(expected.abs().max()), name


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_three_steps_equal_one_over_all_microbatches(name: str, tied: bool, own: bool) -> None:
    """Bitwise equal if each parameter's gradients are summed in the order of microbatches, else to 1e-12 in float64.

    Stages that add to one tied parameter on one rank, or to an object that several ranks share, do so in the schedule's order.
    """
    schedule = ps.schedule(name, ranks=2, microbatches=COUNT)
    model, steps = model_of(schedule.stages, torch.float64, tied), draw()
    found = by_pipeline(model, schedule, steps, [False, False, True], own)
    every = [piece for pieces in steps for piece in pieces]
    one_step = by_pipeline(model, schedule, [every], [True], own)
    assert found.keys() == one_step.keys()
    if sums_in_order(schedule) and (not tied or (own and name == "1f1b")):
        for key, grad in one_step.items():
            assert_equal(found[key], grad, key)
    assert_near(found, one_step, 1e-12)
    assert_near(found, by_loop(model, every), 1e-12)


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_what_was_finalized_before_is_not_summed_again(name: str) -> None:
    """Over a finalized, a postponed and another finalized step, every gradient counts once."""
    schedule = ps.schedule(name, ranks=2, microbatches=COUNT)
    model, steps = model_of(schedule.stages, torch.float64, True), draw()
    found = by_pipeline(model, schedule, steps, [True, False, True], own=True)
    assert_near(found, by_loop(model, [piece for pieces in steps for piece in pieces]), 1e-12)


@pytest.mark.parametrize(("name", "own"), [("1f1b", True), ("1f1b", False)], ids=["own", "shared"])
def test_sums_in_a_dtype_are_rounded_once_over_all_steps(name: str, own: bool) -> None:
    half = torch.bfloat16
    schedule = ps.schedule(name, ranks=2, microbatches=COUNT)
    model, steps = model_of(schedule.stages, half, True), draw(dtype=half)
    options = {"accumulate_dtype": torch.float64}
    found = by_pipeline(model, schedule, steps, [False, False, True], own, **options)
    one_step = by_pipeline(model, schedule, [[piece for pieces in steps for piece in pieces]], [True], own, **options)
    each = by_pipeline(model, schedule, steps, [True, True, True], own, **options)
    for key, grad in one_step.items():
        assert_equal(found[key], grad, key)
    assert any(not torch.equal(grad, found[key]) for key, grad in each.items())  # rounded three times


def test_gradients_are_incomplete_until_a_step_finalizes() -> None:
    """Copies keep their finalized gradients meanwhile; clipping and parity, which need all gradients, are refused."""
    schedule = ps.schedule("1f1b", ranks=2, microbatches=COUNT)
    model, steps = model_of(schedule.stages, torch.float64, True), draw(1)

    def train() -> None:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=squares, loss_reduction="sum")
        inputs, targets = [x for x, _ in steps[0]], [y for _, y in steps[0]]
        pipe.step_list(inputs, targets)
        tied = dict(pipe.local_parameters())[f"{len(model) - 1}.weight" if pipe.rank else "0.weight"]
        before = tied.grad.clone()
        pipe.step_list(inputs, targets, finalize_gradients=False)
        assert pipe.postponed_steps == 1
        assert_equal(tied.grad, before)
        with pytest.raises(ScheduleError, match="clip_grad_norm_ needs the gradients, but those of the last 1 steps are not finalized"):
            pipe.clip_grad_norm_(1.0)
        with pytest.raises(ScheduleError, match="parity needs the gradients"):
            pipe.parity(inputs[0], target=targets[0])
        pipe.step_list(inputs, targets)
        assert pipe.postponed_steps == 0
        torch.testing.assert_close(tied.grad, 3 * before, rtol=1e-12, atol=1e-12)
        pipe.clip_grad_norm_(1.0)

    launch(train, 2)


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("accumulate", [None, torch.float64], ids=["plain", "dtype"])
def test_a_failed_step_leaves_the_postponed_gradients_as_they_were(own: bool, accumulate: torch.dtype | None) -> None:
    schedule = ps.schedule("1f1b", ranks=2, microbatches=COUNT)
    dtype = torch.float64 if accumulate is None else torch.float32
    model, steps = model_of(schedule.stages, dtype, True), draw(2, dtype)
    one = copy.deepcopy(model)
    one.zero_grad()

    def train(fail: bool) -> Grads:
        calls = [0]

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            calls[0] += 1
            if fail and calls[0] == 2 * COUNT:
                raise ValueError("the last microbatch")
            return squares(output, target)

        mine = copy.deepcopy(model) if own else one
        pipe = Pipeline(mine, schedule, loss_fn=loss_fn, loss_reduction="sum", accumulate_dtype=accumulate)
        first, second = ([list(part) for part in zip(*pieces, strict=True)] for pieces in steps)
        pipe.step_list(*first, finalize_gradients=False)
        if fail:
            with pytest.raises(PipelineError, match="the last microbatch"):
                pipe.step_list(*second, finalize_gradients=False)
        pipe.step_list(*second)
        return {key: None if grad is None else grad.clone() for key, grad in local_grads(pipe).items()}

    wanted = launch(train, 2, args=(False,))
    one.zero_grad()
    for found, expected in zip(launch(train, 2, args=(True,)), wanted, strict=True):
        assert found.keys() == expected.keys()
        for key, grad in expected.items():
            assert_equal(found[key], grad, key)


def test_ranks_that_disagree_are_refused() -> None:
    schedule = ps.schedule("1f1b", ranks=2, microbatches=COUNT)
    model, steps = model_of(schedule.stages, torch.float64, False), draw(1)

    def train() -> None:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=squares, loss_reduction="sum")
        inputs, targets = [x for x, _ in steps[0]], [y for _, y in steps[0]]
        with pytest.raises(PipelineError, match="give `finalize_gradients` the same value on all ranks"):
            pipe.step_list(inputs, targets, finalize_gradients=pipe.rank == 0)

    launch(train, 2)
