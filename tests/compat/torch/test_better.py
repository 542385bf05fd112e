"""Cases that torch gets wrong: each test shows that ours is correct and what torch does."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

from compat.torch.both import BOTH, LOOPED, ON_A_V, OURS, SINGLE, TORCH, VERSION, forward_cache, parse
from compat.torch.models import Outcome, assert_same, blocks, chunks_of, data, grads, loop, run, schedule, stages
from penstock.errors import VerifyError

ALL = [*SINGLE, *LOOPED, *ON_A_V]
SPLIT = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("name", SPLIT)
def test_frozen_first_stage(name: str) -> None:
    modules, (x, y) = blocks(2), data()
    for parameter in modules[0].parameters():
        parameter.requires_grad_(False)
    wanted = loop(modules, x, y, 6)
    assert_same(run(OURS, name, modules, x, y, 6), wanted)
    if name != "ScheduleDualPipeV" and VERSION >= (2, 12):
        theirs = run(TORCH, name, modules, x, y, 6).grads
        assert theirs == [None] * 8


class TwoOut(nn.Module):
    """A parameter that feeds only a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.side = nn.Linear(6, 6), nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor, side: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.side.exp() + (0 if side is None else side)


def two_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return functional.mse_loss(output[0] * output[1], target)


def test_a_parameter_of_a_second_output() -> None:
    modules, (x, y) = [TwoOut(), TwoOut()], data()
    whole = copy.deepcopy(modules)
    for piece, wanted in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        (two_loss(whole[1](*whole[0](piece)), wanted) / 4).backward()
    found = run(OURS, "ScheduleInterleavedZeroBubble", modules, x, y, 4, loss_fn=two_loss)
    assert_same(found.grads, grads(whole))


@pytest.mark.parametrize("name", ALL)
def test_evaluation_leaves_gradients_unchanged(name: str) -> None:
    modules, (x, y) = blocks(chunks_of(name)), data()
    held, losses = copy.deepcopy(modules), list[Tensor]()
    made = schedule(OURS, name, stages(OURS, held), 4, loss_fn=functional.mse_loss)
    made.step(x, target=y)
    out = made.eval(x, target=y, losses=losses)
    wanted = loop(modules, x, y, 4)
    assert_same(Outcome(out, losses, grads(held)), wanted)
    assert not out.requires_grad
    assert not any(loss.requires_grad for loss in losses)
    assert not any(forward_cache(stage) for stage in (made._stages if hasattr(made, "_stages") else [made._stage]))


def test_torch_divides_gradients_in_evaluation() -> None:
    modules, (x, y) = blocks(1), data()
    held = copy.deepcopy(modules)
    made = schedule(TORCH, "ScheduleGPipe", stages(TORCH, held), 4, loss_fn=functional.mse_loss)
    made.step(x, target=y)
    before = [grad.clone() for grad in grads(held) if grad is not None]
    made.eval(x, target=y)
    assert_same(grads(held), [grad / 4 for grad in before])


@pytest.mark.parametrize("name", ON_A_V)
def test_evaluation_with_adjacent_stages_on_one_rank(name: str) -> None:
    modules, (x, y) = blocks(2), data()
    assert_same(schedule(OURS, name, stages(OURS, copy.deepcopy(modules)), 4).eval(x), loop(modules, x, y, 4).output)
    made = schedule(TORCH, name, stages(TORCH, copy.deepcopy(modules)), 4, loss_fn=functional.mse_loss)
    with pytest.raises(AssertionError):
        made.eval(x, target=y)


@pytest.mark.parametrize("name", ALL)
def test_two_steps_add_up(name: str) -> None:
    modules, (x, y) = blocks(chunks_of(name)), data()
    twice = [None if grad is None else 2 * grad for grad in loop(modules, x, y, 4).grads]
    assert_same(run(OURS, name, modules, x, y, 4, steps=2).grads, twice)


def test_gradients_are_accumulated_in_place() -> None:
    """A reference to a gradient, as optimizers keep it, sees the sum."""
    modules, (x, y) = blocks(1), data()
    held = copy.deepcopy(modules)
    made = schedule(OURS, "Schedule1F1B", stages(OURS, held), 4, loss_fn=functional.mse_loss)
    made.step(x, target=y)
    kept = grads(held)
    made.step(x, target=y)
    assert [id(grad) for grad in grads(held)] == [id(grad) for grad in kept]


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_no_forward_before_the_first_step(name: str) -> None:
    counts = []
    for package in BOTH:
        modules = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(chunks_of(name))]
        made = schedule(package, name, stages(package, modules), 4, loss_fn=functional.mse_loss)
        x, y = data()
        made.step(x, target=y)
        counts.append([int(module[1].num_batches_tracked) for module in modules])  # type: ignore[arg-type]
    ahead = 5 if VERSION < (2, 14) else 4  # since 2.14 torch restores buffers after its extra forward
    assert counts == [[ahead] * len(counts[0]), [4] * len(counts[0])]


def test_shape_inference_restores_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices without messages need an extra forward to infer shapes."""
    monkeypatch.setattr(OURS.stage.PipelineStage, "use_messages", lambda self, count, training: False)
    modules = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)]
    x, y = data()
    wanted = loop(modules, x, y, 4)
    made = schedule(OURS, "ScheduleInterleavedZeroBubble", stages(OURS, modules), 4, loss_fn=functional.mse_loss)
    out = made.step(x, target=y)
    assert [int(module[1].num_batches_tracked) for module in modules] == [4, 4]  # type: ignore[arg-type]
    assert_same(out, wanted.output)
    assert_same(grads(modules), wanted.grads)
    assert made._stages[0]._inference_mode == OURS._utils.InferenceMode.DYNAMIC


def in_order_of(package: Any, row: str, modules: list[nn.Module], x: Tensor, y: Tensor) -> Outcome:
    held, losses = copy.deepcopy(modules), list[Tensor]()
    made = package.schedules._PipelineScheduleRuntime(stages(package, held), 3, loss_fn=functional.mse_loss, scale_grads=False)
    made._prepare_schedule_with_comms(parse(package, row), format="compute_comms")
    return Outcome(made.step(x, target=y, losses=losses), losses, grads(held))


@pytest.mark.parametrize("row", ["0F2 0F0 0F1 0B1 0B2 0B0", "0F1 0I1 0F2 0F0 0I0 0W0 0I2 0W2 0W1"])
def test_outputs_and_losses_in_the_order_of_microbatches(row: str) -> None:
    modules, (x, y) = blocks(1), data()
    assert_same(in_order_of(OURS, row, modules, x, y), loop(modules, x, y, 3, scale=False))


def test_torch_permutes_outputs() -> None:
    modules, (x, y) = blocks(1), data()
    theirs, wanted = in_order_of(TORCH, "0F2 0F0 0F1 0B1 0B2 0B0", modules, x, y).output, loop(modules, x, y, 3).output
    assert_same(theirs, torch.cat([wanted[8:], wanted[:8]]))


def test_a_failed_step_leaves_the_stages_clean() -> None:
    class Moody(nn.Module):
        angry = False
        calls: int | None = None

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            self.calls = None if self.calls is None else self.calls - 1
            if self.angry or self.calls == 0:
                raise ValueError("not now")
            return self.linear(x)

    for name in ("ScheduleGPipe", "ScheduleInterleavedZeroBubble"):
        modules, (x, y) = [Moody() for _ in range(chunks_of(name))], data()
        held = copy.deepcopy(modules)
        made = schedule(OURS, name, stages(OURS, held), 4, loss_fn=functional.mse_loss)
        held[-1].calls = 2
        with pytest.raises(RuntimeError, match="failed to run forward"):
            made.step(x, target=y)
        assert grads(held) == [None] * len(grads(held))
        held[-1].calls = None
        made.step(x, target=y)
        kept = copy.deepcopy(grads(held))
        held[-1].angry = True
        with pytest.raises(RuntimeError, match="failed to run forward"):
            made.step(x, target=y)
        assert_same(grads(held), kept, exact=True)
        held[-1].angry = False
        made.step(x, target=y)
        assert_same(grads(held), [2 * grad for grad in kept if grad is not None])


@pytest.mark.parametrize("size", [10, 7])
@pytest.mark.parametrize("name", ALL)
def test_uneven_microbatches(name: str, size: int) -> None:
    modules, (x, y) = blocks(chunks_of(name)), data(size)
    assert_same(run(OURS, name, modules, x, y, 4), loop(modules, x, y, 4))


def pair_loss(output: Tensor, target: Any) -> Tensor:
    return functional.mse_loss(output, target["y"]) * target["w"].mean()


def test_trees_as_targets() -> None:
    modules, (x, y) = blocks(2), data()
    tree = {"y": y, "w": torch.rand(12)}
    found = run(OURS, "ScheduleInterleaved1F1B", modules, x, tree, 4, loss_fn=pair_loss)
    whole = copy.deepcopy(modules)
    for k, piece in enumerate(x.tensor_split(4)):
        out = whole[1](whole[0](piece))
        (pair_loss(out, {key: value.tensor_split(4)[k] for key, value in tree.items()}) / 4).backward()
    assert_same(found.grads, grads(whole))
    tupled = run(OURS, "Schedule1F1B", modules[:1], x, (y, y), 4, loss_fn=lambda out, target: functional.mse_loss(out, target[1]))
    assert_same(tupled.grads, loop(modules[:1], x, y, 4).grads)
    alone = run(OURS, "Schedule1F1B", modules[:1], x, None, 4, loss_fn=lambda out: out.square().mean())
    assert_same(alone.grads, loop(modules[:1], x, y, 4, loss_fn=lambda out, _: out.square().mean()).grads)


def test_a_loss_without_a_target() -> None:
    modules, (x, _) = blocks(1), data()
    made = schedule(OURS, "ScheduleGPipe", stages(OURS, modules), 4, loss_fn=functional.mse_loss)
    with pytest.raises(TypeError, match="pass target="):
        made.step(x)
    assert made.eval(x).shape == x.shape


class Reshaped(nn.Module):
    """The output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.view(-1, 6)).view(-1, 2, 3)


@pytest.mark.parametrize("name", SPLIT)
def test_outputs_that_are_views(name: str) -> None:
    modules = [Reshaped(), Reshaped()]
    x, y = torch.randn(12, 6), torch.randn(12, 2, 3)
    assert_same(run(OURS, name, modules, x, y, 6), loop(modules, x, y, 6))


@pytest.mark.parametrize("name", SPLIT)
def test_hooks_run_once_and_see_the_whole_gradient(name: str) -> None:
    modules, (x, y) = blocks(2), data()
    held, seen = copy.deepcopy(modules), list[Tensor]()
    weight = held[0][0].weight  # type: ignore[index]

    def hook(parameter: Any) -> None:
        seen.append(parameter.grad.clone())

    weight.register_post_accumulate_grad_hook(hook)
    schedule(OURS, name, stages(OURS, held), 4, loss_fn=functional.mse_loss, scale_grads=False).step(x, target=y)
    assert len(seen) == 4
    assert_same(seen[-1], loop(modules, x, y, 4, scale=False).grads[0])


# Proofs ---------------------------------------------------------------------------------------------------------------


def test_orders_that_hang_or_lose_work_are_refused() -> None:
    ran = []

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(1)
            return super().forward(x)

    for row in ("0F0 1F0 1B0", "1F0 0F0 1B0 0B0", "0F0 1F0 0B0 1B0", "0F0 1F0 1B0 0B0 0B0"):
        made = OURS.schedules._PipelineScheduleRuntime(stages(OURS, [Noting(6, 6), Noting(6, 6)]), 1, loss_fn=functional.mse_loss)
        made.pipeline_order_with_comms = parse(OURS, row)
        with pytest.raises(VerifyError, match=r"\d finding"):
            made.step(*data()[:1], target=data()[1])
    assert not ran


@pytest.mark.parametrize(
    ("count", "row"),
    [
        (2, "0F0 1F0 1B0 0B0"),
        (4, "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"),
        (1, "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"),
        (2, "0F0 1F0 1B0 0B0 0F2 1F2 1B2 0B2"),
    ],
)
def test_orders_with_a_wrong_microbatch_count_are_refused(count: int, row: str) -> None:
    modules, (x, y) = blocks(2), data()
    made = OURS.schedules._PipelineScheduleRuntime(stages(OURS, modules), count, loss_fn=functional.mse_loss)
    made.pipeline_order_with_comms = parse(OURS, row)
    with pytest.raises(VerifyError):
        made.step(x, target=y)
    assert grads(modules) == [None] * len(grads(modules))


def test_a_forward_only_order_evaluates() -> None:
    modules, (x, y) = blocks(2), data()
    made = OURS.schedules._PipelineScheduleRuntime(stages(OURS, modules), 2, loss_fn=functional.mse_loss)
    made.pipeline_order_with_comms = parse(OURS, "0F0 1F0 0F1 1F1")
    assert_same(made.eval(x, target=y), loop(modules, x, y, 2).output)


def test_a_single_row_with_missing_microbatches_is_refused() -> None:
    held = stages(OURS, blocks(1), [0], 2)
    made = OURS.schedules._PipelineScheduleRuntime(held, 2, loss_fn=functional.mse_loss)
    made.pp_group_size = 2
    made.pipeline_order_with_comms = parse(OURS, "0F0 0SEND_F0 0RECV_B0 0B0")
    with pytest.raises(ValueError, match=r"forward for microbatches \[0\], but a step has 2"):
        made.step(data()[0])


def test_an_order_with_stages_of_another_rank_is_refused() -> None:
    made = OURS.schedules._PipelineScheduleRuntime(stages(OURS, blocks(1), [0], 2), 1, loss_fn=functional.mse_loss)
    made.pipeline_order_with_comms = parse(OURS, "0F0 1F0 1B0 0B0")
    with pytest.raises(ValueError, match="holds only stages 0"):
        made.step(*data()[:1], target=data()[1])


def test_a_missing_order_is_refused() -> None:
    made = OURS.schedules._PipelineScheduleRuntime(stages(OURS, blocks(1)), 1, loss_fn=functional.mse_loss)
    with pytest.raises(AssertionError, match="Must call _prepare_schedule_with_comms"):
        made.step(*data()[:1], target=data()[1])
    with pytest.raises(AssertionError, match="Must initialize"):
        made._dump_csv("nowhere.csv")


# Efficiency -----------------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block that is recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), 0

    def count(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.count, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_checkpoints_are_recomputed_once() -> None:
    modules, (x, y) = [Checkpointed(), Checkpointed()], data()
    held = copy.deepcopy(modules)
    schedule(OURS, "ScheduleInterleavedZeroBubble", stages(OURS, held), 4, loss_fn=functional.mse_loss).step(x, target=y)
    assert [module.calls for module in held] == [8, 8]
    assert_same(grads(held), loop(modules, x, y, 4).grads)


@pytest.mark.parametrize("name", LOOPED)
def test_a_step_frees_its_memory(name: str) -> None:
    modules, (x, y) = blocks(3), data()
    held = stages(OURS, modules)
    made = schedule(OURS, name, held, 4, loss_fn=functional.mse_loss)
    for run_step in (made.step, made.eval):
        run_step(x, target=y)
        for stage in held:
            assert not forward_cache(stage)
            assert not stage.bwd_cache
            assert not stage.dw_runner
            assert all(getattr(info, "buffer", None) is None for infos in stage.args_recv_info.values() for info in infos)
            assert not any(stage.grad_recv_info.values())


def test_no_reference_cycles() -> None:
    """A schedule and its stages are freed with their last reference, without the garbage collector."""
    modules, (x, y) = blocks(2), data()
    gc.collect()
    gc.disable()
    try:
        held = stages(OURS, copy.deepcopy(modules))
        made = schedule(OURS, "ScheduleInterleavedZeroBubble", held, 4, loss_fn=functional.mse_loss)
        made.step(x, target=y)
        made.eval(x, target=y)
        watched = [weakref.ref(made), *map(weakref.ref, held), *(weakref.ref(stage.submod) for stage in held)]
        del made, held
        assert [each() for each in watched] == [None] * len(watched)
    finally:
        gc.enable()
