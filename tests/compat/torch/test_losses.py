"""Losses and their weights: uneven microbatches, losses that a program keeps itself, orders without reductions."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compat.torch.both import BOTH, LOOPED, ON_A_V, OURS, SINGLE, Package, parse
from compat.torch.models import assert_same, blocks, chunks_of, data, grads, loop, run, schedule, stages

ALL = [*SINGLE, *LOOPED, *ON_A_V]

pytestmark = pytest.mark.usefixtures("alone")


def whole_batch(modules: list[nn.Module], x: Tensor, y: Any, loss_fn: Any = functional.mse_loss) -> list[Tensor | None]:
    """Return the gradients of the unpipelined model on the whole batch."""
    held = copy.deepcopy(modules)
    loss_fn(nn.Sequential(*held)(x), y).backward()
    return grads(held)


# Uneven microbatches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 11, 6])
@pytest.mark.parametrize("name", ALL)
def test_uneven_microbatches_count_by_their_rows(name: str, size: int) -> None:
    modules, (x, y) = blocks(chunks_of(name)), data(size)
    outcome = run(OURS, name, modules, x, y, 4)
    assert_same(outcome.grads, whole_batch(modules, x, y))
    assert_same(outcome.losses, loop(modules, x, y, 4).losses)  # unweighted


def test_rows_are_those_of_the_first_target_tensor() -> None:
    modules, (x, y) = blocks(1), data(10)

    def loss_fn(output: Tensor, target: dict[str, Any]) -> Tensor:
        return functional.mse_loss(output, target["y"]) * target["factor"]

    outcome = run(OURS, "ScheduleGPipe", modules, x, {"factor": 2, "y": y}, 4, loss_fn=loss_fn)
    assert_same(outcome.grads, [2 * grad for grad in whole_batch(modules, x, y) if grad is not None])


def mean_square(output: Tensor) -> Tensor:
    """A loss of the output alone, which takes a mean."""
    return output.square().mean()


@pytest.mark.parametrize("size", [10, 6])
@pytest.mark.parametrize("name", ALL)
def test_uneven_microbatches_without_a_target_count_by_the_rows_of_the_arguments(name: str, size: int) -> None:
    modules, (x, _) = blocks(chunks_of(name)), data(size)
    outcome = run(OURS, name, modules, x, None, 4, loss_fn=mean_square)
    assert_same(outcome.grads, whole_batch(modules, x, None, lambda output, _: mean_square(output)))


def test_rows_of_the_arguments_follow_the_chunk_specification() -> None:
    """The first argument is repeated, the second is split along its second dimension."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, factor: Tensor, x: Tensor) -> Tensor:
            return self.linear(factor * x).transpose(0, 1)  # type: ignore[no-any-return]

    module, factor, x = Scaled(), torch.full((3, 1, 6), 0.5), torch.randn(3, 10, 6)
    held = copy.deepcopy(module)
    microbatch = OURS.microbatch
    spec = (microbatch._Replicate(), microbatch.TensorChunkSpec(1))
    made = OURS.schedules.ScheduleGPipe(stages(OURS, [held])[0], 4, loss_fn=mean_square, args_chunk_spec=spec)
    made.step(factor, x)
    mean_square(module(factor, x)).backward()
    assert_same(grads([held]), grads([module]))


@pytest.mark.parametrize(
    ("chunks", "spec", "rows"),
    [
        ([(torch.ones(3, 2),), (torch.ones(2, 2),)], None, [3, 2]),
        ([(1, torch.tensor(2), {"x": torch.ones(3)}), (1, torch.tensor(2), {"x": torch.ones(2)})], None, [3, 2]),
        ([("text",), ("text",)], None, None),
        ([(), ()], None, None),
    ],
)
def test_rows_of_microbatches(chunks: list[Any], spec: Any, rows: list[int] | None) -> None:
    assert OURS.microbatch.count_rows(chunks, spec) == rows


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum")


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(reduction="sum"), summed])
def test_sum_losses_are_not_weighted(loss_fn: Any) -> None:
    """Always with `scale_grads=False`; with `scale_grads=True` if the loss function has `reduction="sum"`."""
    modules, (x, y) = blocks(1), data(10)
    wanted = whole_batch(modules, x, y, summed)
    assert_same(run(OURS, "Schedule1F1B", modules, x, y, 4, loss_fn=loss_fn, scale_grads=False).grads, wanted)
    if isinstance(loss_fn, nn.Module):
        found = run(OURS, "Schedule1F1B", modules, x, y, 4, loss_fn=loss_fn).grads
        assert_same(found, [grad / 4 for grad in wanted if grad is not None])


def test_even_microbatches_are_not_weighted() -> None:
    """The backward starts from the same tensor that the loss function returned."""
    modules, (x, y) = blocks(1), data(8)
    made = schedule(OURS, "ScheduleGPipe", stages(OURS, modules), 4, loss_fn=functional.mse_loss)
    seen = []
    asked = made._maybe_get_loss

    def get(stage: Any, microbatch: int) -> Any:
        loss = asked(stage, microbatch)
        seen.append(loss is made._internal_losses[microbatch])
        return loss

    made._maybe_get_loss = get
    made.step(x, target=y)
    assert seen == [True] * 4


# Losses kept by programs ----------------------------------------------------------------------------------------------


def with_own_forward(package: Package, name: str, modules: list[nn.Module], x: Tensor, y: Tensor, odd_only: bool) -> list[Any]:
    """A custom forward that computes its losses itself, or those of odd microbatches."""
    held, losses = copy.deepcopy(modules), list[Tensor]()
    made = schedule(package, name, stages(package, held), 4, loss_fn=functional.mse_loss)
    by_index = {stage.stage_index: stage for stage in made._stages}

    def forward(action: Any, ctx: Any) -> None:
        stage, k = by_index[action.stage_index], action.microbatch_index
        output = stage.forward_one_chunk(k, ctx.arg_mbs[k], ctx.kwarg_mbs[k])
        if stage.is_last and not (odd_only and k % 2 == 0):
            ctx.schedule_ref._internal_losses.append(functional.mse_loss(output, ctx.target_mbs[k]))
        else:
            ctx.schedule_ref._maybe_compute_loss(stage, output, ctx.target_mbs, k)
        if k is not None and stage.stage_index + 1 in by_index:
            by_index[stage.stage_index + 1].set_local_fwd_input(output, k)

    made.register_custom_function(package.schedules.FORWARD, forward)
    out = made.step(x, target=y, losses=losses)
    return [out, losses, grads(held)]


@pytest.mark.parametrize("odd_only", [False, True])
@pytest.mark.parametrize("package", BOTH, ids=repr)
def test_losses_appended_by_a_custom_function(package: Package, odd_only: bool) -> None:
    modules, (x, y) = blocks(2), data()
    wanted = loop(modules, x, y, 4)
    found = with_own_forward(package, "ScheduleInterleaved1F1B", modules, x, y, odd_only)
    assert_same(found, [wanted.output, wanted.losses, wanted.grads])


def test_losses_appended_by_a_custom_function_count_by_their_rows() -> None:
    modules, (x, y) = blocks(2), data(10)
    found = with_own_forward(OURS, "ScheduleInterleaved1F1B", modules, x, y, odd_only=False)
    assert_same(found[2], whole_batch(modules, x, y))


@pytest.mark.parametrize("package", BOTH, ids=repr)
def test_a_loss_replaced_by_a_subclass(package: Package) -> None:
    """The loss in the list counts, not the one computed first."""
    modules, (x, y) = blocks(1), data()
    wanted = loop(modules, x, y, 4)

    class Doubled(package.schedules.ScheduleGPipe):  # type: ignore[misc,name-defined]
        def _maybe_compute_loss(self, *args: Any) -> None:
            super()._maybe_compute_loss(*args)
            self._internal_losses[-1] = self._internal_losses[-1] * 2

    held, losses = copy.deepcopy(modules), list[Tensor]()
    Doubled(stages(package, held)[0], 4, loss_fn=functional.mse_loss).step(x, target=y, losses=losses)
    assert_same(losses, [2 * loss for loss in wanted.losses])
    assert_same(grads(held), [2 * grad for grad in wanted.grads if grad is not None])


# Orders without reductions --------------------------------------------------------------------------------------------


def test_an_order_without_reductions_warns() -> None:
    modules, (x, y) = blocks(2), data()
    rows = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"

    def made(scale: bool, text: str = rows, count: int = 2) -> Any:
        held = OURS.schedules._PipelineScheduleRuntime(
            stages(OURS, copy.deepcopy(modules)), count, loss_fn=functional.mse_loss, scale_grads=scale
        )
        held.pipeline_order_with_comms = parse(OURS, text)
        return held

    scaled = made(True)
    scaled.eval(x)
    with pytest.warns(UserWarning, match="no REDUCE_GRAD for stage 0, 1: its gradients are not divided by 2"):
        scaled.step(x, target=y)
    quiet = [scaled, made(False), made(True, rows + " 0REDUCE_GRAD 1REDUCE_GRAD"), made(True, "0F0 1F0 1B0 0B0", 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in quiet:  # the first has warned once already
            each.step(x, target=y)
    with pytest.warns(UserWarning, match="no REDUCE_GRAD for stage 1:"):
        made(True, rows + " 0REDUCE_GRAD").step(x, target=y)


def test_a_star_import_does_not_overwrite_names() -> None:
    names: dict[str, Any] = {"F": functional, "B": 1, "I": 2, "W": 3, "dist": 4, "torch": torch}
    before = dict(names)
    exec("from penstock.compat.torch.schedules import *", names)
    assert {name: names[name] for name in before} == before
    assert {"Schedule1F1B", "get_schedule_class"} <= set(names)


# Steps of programs ----------------------------------------------------------------------------------------------------


class ByHand(OURS.schedules.PipelineScheduleSingle):  # type: ignore[misc,name-defined]
    """All forwards, then all backwards; a batch of the wrong width fails in the first forward."""

    def _step_microbatches(self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, losses: Any = None) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0])
        stage, count = self._stage, self._n_microbatches
        for k in range(count):
            self._maybe_compute_loss(stage, stage.forward_one_chunk(k, arg_mbs[k], kwarg_mbs[k]), target_mbs, k)
        for k in range(count):
            stage.backward_one_chunk(k, loss=self._maybe_get_loss(stage, k), last_backward=k == count - 1)
        self._update_losses(stage, losses)
        stage.perform_reduce_grad(count if self.scale_grads else 1)


class Wrapped(OURS.schedules.ScheduleGPipe):  # type: ignore[misc,name-defined]
    """Wraps one of our steps."""

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        super()._step_microbatches(*args, **kwargs)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("own", [ByHand, Wrapped])
def test_gradients_of_earlier_steps_are_not_divided_again(own: Any, scale: bool) -> None:
    modules, (x, y) = blocks(1), data(10)
    held = copy.deepcopy(modules)
    made = own(stages(OURS, held)[0], 4, loss_fn=functional.mse_loss, scale_grads=scale)
    wanted = loop(modules, x, y, 4, scale)
    for times in (1, 2, 3):
        made.step(x, target=y)
        assert_same(grads(held), [times * grad for grad in wanted.grads if grad is not None])
    made.eval(x, target=y) if own is Wrapped else None
    with pytest.raises(RuntimeError, match="failed to run forward"):
        made.step(x[:, :5], target=y)
    assert_same(grads(held), [3 * grad for grad in wanted.grads if grad is not None])
    made.step(x, target=y)
    assert_same(grads(held), [4 * grad for grad in wanted.grads if grad is not None])
