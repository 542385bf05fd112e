"""Failures: every rank raises the same report, nothing is changed, and the next step works."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PenstockError, PipelineError, ScheduleError
from penstock.runtime import Pipeline, launch, rank
from runtime.live import count_held
from runtime.models import assert_equal, blocks, by_loop, gradients


class BreakError(Exception):
    """What the tests raise."""


class Trap(nn.Module):
    """A layer that fails when it is told to: in the forward or the backward of one microbatch, known by its first number."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)
        self.where: tuple[str, int] | None = None

    def forward(self, x: Tensor) -> Tensor:
        where = self.where
        out = torch.tanh(self.map(x[:, 1:]))
        if where == ("forward", int(x[0, 0])):
            raise BreakError(f"trap in the forward of {where[1]}")
        if where == ("backward", int(x[0, 0])):
            out.register_hook(lambda grad: _break(f"trap in the backward of {where[1]}"))
        return torch.cat([x[:, :1], out], 1)


def _break(text: str) -> None:
    raise BreakError(text)


def traps(count: int) -> nn.Sequential:
    return nn.Sequential(*(Trap() for _ in range(count)))


def batch(count: int) -> tuple[Tensor, Tensor]:
    """Rows that begin with the number of their microbatch."""
    x = torch.randn(count, 7)
    x[:, 0] = torch.arange(count)
    return x, torch.randn(count, 7)


def _fails_and_recovers(name: str, ranks: int, stage: int, where: tuple[str, int], *, before: bool, match: str) -> None:
    schedule = ps.schedule(name, ranks=ranks, microbatches=8)
    model = traps(schedule.stages)
    x, y = batch(8)
    wanted = by_loop(model, x, y, 8)

    def train() -> str:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        if before:
            pipe.step(x, target=y)
        kept = {key: (p.grad, None if p.grad is None else p.grad.clone(), p.detach().clone()) for key, p in pipe.named_parameters()}
        messages = []
        for _ in range(2):  # twice in a row
            pipe.gather("ready", None)
            model[stage].where = where
            with pytest.raises(PipelineError, match=match) as caught:
                pipe.step(x, target=y)
            messages.append(str(caught.value))
            assert isinstance(caught.value.__cause__, BreakError)
            for key, parameter in pipe.named_parameters():
                grad, value, data = kept[key]
                assert parameter.grad is grad, key
                assert_equal(parameter.grad, value, key)
                assert_equal(parameter.detach(), data, key)
        pipe.gather("repaired", None)
        model[stage].where = None
        if before:
            for parameter in pipe.parameters():
                parameter.grad = None
        result = pipe.step(x, target=y)
        assert_equal(result.loss, wanted.loss)
        return messages[0]

    messages = launch(train, ranks)
    assert len(set(messages)) == 1  # the same report on every rank
    for key, grad in wanted.grads.items():
        assert_equal(gradients(model)[key], grad, key)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_forward_of_stage_3_and_microbatch_5(name: str, before: bool) -> None:
    match = r"^3F5 \(stage 3, forward of microbatch 5\) failed on rank 3: BreakError: trap in the forward of 5\n"
    _fails_and_recovers(name, 4, 3, ("forward", 5), before=before, match=match)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(("name", "kind"), [("1f1b", "B"), ("zb-h1", "I")])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("microbatch", [0, 7])
def test_backward(name: str, kind: str, stage: int, microbatch: int, before: bool) -> None:
    """Also in the very last backward of the first stage, when the other ranks have ended their work already."""
    match = rf"^{stage}{kind}{microbatch} \(stage {stage}, backward.* of microbatch {microbatch}\) failed on rank {stage}: BreakError"
    _fails_and_recovers(name, 4, stage, ("backward", microbatch), before=before, match=match)


@pytest.mark.parametrize(("name", "stage", "holder"), [("interleaved-1f1b", 2, 0), ("zbv", 2, 1), ("dualpipe-v", 3, 0)])
def test_first_stage_and_stages_that_share_a_rank(name: str, stage: int, holder: int) -> None:
    match = rf"^{stage}F4 \(stage {stage}, forward of microbatch 4\) failed on rank {holder}"
    _fails_and_recovers(name, 2, stage, ("forward", 4), before=True, match=match)
    _fails_and_recovers(name, 2, 0, ("forward", 0), before=False, match=r"^0F0 \(stage 0, forward of microbatch 0\) failed on rank 0")


def test_part_of_an_overlapped_action_is_named() -> None:
    """Of `(0F5;7B1)OVERLAP_F_B` the part that failed is named, forward or backward."""
    schedule = ps.schedule("dualpipe-v", ranks=2, microbatches=8)
    overlapped = [action.sub_actions for row in schedule for action in row if action.sub_actions]
    forward, backward = overlapped[0]
    for part, where in ((forward, "forward"), (backward, "backward")):
        holder = schedule.placement.rank_of(part.stage)
        match = rf"^{part} \(stage {part.stage}, {where}.* of microbatch {part.microbatch}\) failed on rank {holder}: BreakError"
        _fails_and_recovers("dualpipe-v", 2, part.stage, (where, part.microbatch or 0), before=False, match=match)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_loss_function(name: str) -> None:
    calls = 0

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise BreakError("no loss")
        return functional.mse_loss(out, target)

    schedule = ps.schedule(name, ranks=2, microbatches=4)
    last = schedule.stages - 1
    model, (x, y) = traps(schedule.stages), batch(4)

    def train() -> None:
        pipe = Pipeline(model, schedule, loss_fn=loss_fn)
        with pytest.raises(PipelineError, match=rf"^{last}F2 \(stage {last}, forward of microbatch 2\) failed .*BreakError: no loss"):
            pipe.step(x, target=y)
        assert all(p.grad is None for p in pipe.parameters())
        pipe.step(x, target=y)

    launch(train, 2)
    for key, grad in by_loop(model, x, y, 4).grads.items():
        assert_equal(gradients(model)[key], grad, key)


def test_report_says_what_the_others_wait_for() -> None:
    model, (x, y) = traps(3), batch(4)
    model[1].where = ("forward", 1)

    def train() -> None:
        Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss).step(x, target=y)

    with pytest.raises(PipelineError) as caught:
        launch(train, 3)
    lines = [re.sub(r"[0-9.]+ s;", "a while;", line) for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        "  rank 0 waits for gradients from rank 1, for 0B0, since a while; done before: 0F2, 0SEND_F2, 0RECV_B0",
        "  rank 1 runs 1F1 since a while; done before: 1F0, 1SEND_F0, 1RECV_F1",
        "  rank 2 waits for activations from rank 1, for 2F0, since a while; done before: 2RECV_F0",
    ]
    assert any(note.startswith("raised on rank") for note in caught.value.__notes__)


def test_nothing_of_a_failed_step_is_held() -> None:
    model, (x, y) = traps(2), batch(4)
    model[1].where = ("forward", 3)
    pipe = Pipeline(model, ps.schedule("looped-bfs", ranks=1, microbatches=4), loss_fn=functional.mse_loss)
    with pytest.raises(PipelineError, match="1F3"):
        pipe.step(x, target=y)
    executor = pipe._executor(4, True)
    assert set(count_held(executor).values()) == {0}
    assert not executor.compute.step_input.args


def test_gradients_may_be_clipped_after_a_failure() -> None:
    """The group works again for any next call, not only for a step."""
    model, (x, y) = traps(2), batch(4)

    def train() -> Tensor:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        pipe.gather("ready", None)
        model[1].where = ("forward", 2)
        with pytest.raises(PipelineError, match="1F2"):
            pipe.step(x, target=y)
        norm = pipe.clip_grad_norm_(1e9)
        model[1].where = None
        assert Pipeline(model, schedule="zb-h1", microbatches=2, loss_fn=functional.mse_loss).eval_step(x, target=y).loss is not None
        return norm

    norms = launch(train, 2)
    assert_equal(norms[0], norms[1])
    assert_equal(norms[0], by_loop(model, x, y, 4).norm)


def test_interrupt_in_a_step_stays_an_interrupt() -> None:
    """Ctrl-C is not an error of the step: it comes through as itself, and nothing is changed."""
    model, (x, y) = traps(2), batch(2)

    class Interrupts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    pipe = Pipeline(nn.Sequential(*model, Interrupts()), schedule="1f1b-v", microbatches=2, loss_fn=functional.mse_loss)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, target=y)
    assert all(p.grad is None for p in pipe.parameters())


# Ranks that do not do the same ----------------------------------------------------------------------------------------


def test_failure_outside_a_step() -> None:
    """One rank fails in the user's own code: the others raise a report, and its error is raised."""
    model, (x, y) = traps(3), batch(4)
    seen: list[str] = []

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        if rank() == 1:
            raise BreakError("user code")
        for _ in range(2):  # trying again does not help: a rank is gone
            with pytest.raises(PipelineError, match="stopped because another rank failed: BreakError"):
                pipe.step(x, target=y)
            seen.append(threading.current_thread().name)

    with pytest.raises(BreakError, match="user code") as caught:
        launch(train, 3)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert sorted(seen) == ["rank 0", "rank 0", "rank 2", "rank 2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 5}, "the ranks disagree on microbatches: 4 on rank 0, 5 on rank 1"),
        ({"schedule": "gpipe"}, "the ranks disagree on schedule"),
        ({"schedule": "interleaved-1f1b"}, "the ranks disagree on stages"),
        ({"loss_reduction": "sum"}, "the ranks disagree on loss_reduction: 'mean' on rank 0, 'sum' on rank 1"),
        ({"seed": 3}, "the ranks disagree on seed: None on rank 0, 3 on rank 1"),
    ],
)
def test_ranks_that_disagree(options: dict[str, Any], message: str) -> None:
    model = blocks(4)

    def build() -> None:
        mine = {"schedule": "1f1b", "microbatches": 4, "loss_reduction": "mean", "seed": None} | (options if rank() == 1 else {})
        Pipeline(model, loss_fn=functional.l1_loss, **mine)

    with pytest.raises(PipelineError, match=message):
        launch(build, 2)


def test_rank_that_stops_early() -> None:
    """A deadlock report, at once, and no waiting for a deadline."""
    model, (x, y) = traps(2), batch(4)

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
        for _ in range(2 if rank() else 3):
            pipe.step(x, target=y)

    with pytest.raises(PipelineError, match="no rank can go on") as caught:
        launch(train, 2)
    assert re.search(r"  rank 0 waits for gradients from rank 1, for 0B0, .*\n  rank 1 has ended", str(caught.value))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("mine", "theirs"), [(4, 3), (3, 4)])
def test_ranks_with_different_counts(mine: int, theirs: int, training: bool) -> None:
    """Neither a hang nor a result that lacks a microbatch."""
    model, (x, y) = traps(2), batch(4)

    def run() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=lambda out, _: out.square().mean())
        call = pipe.step if training else pipe.eval_step
        with pytest.raises(PipelineError, match=r"microbatches|no rank can go on"):
            call(x, target=y, microbatches=mine if rank() else theirs)
        assert len(call(x, target=y).losses) == 4  # and what was left under way does not spoil the next

    launch(run, 2)


def test_ranks_that_call_different_methods() -> None:
    model, (x, y) = traps(2), batch(4)

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        if rank():
            pipe.clip_grad_norm_(1.0)
        else:
            pipe.gather("something else", None)

    with pytest.raises(PipelineError, match=r"rank 1 is at 'clip_grad_norm_', but rank 0 at 'something else'"):
        launch(train, 2)


def test_bad_arguments_on_every_rank_leave_the_pipeline_usable() -> None:
    model, (x, y) = traps(2), batch(4)

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
        with pytest.raises(ScheduleError):
            pipe.step(x, target=y, microbatches=9)
        assert pipe.step(x, target=y).loss is not None

    launch(train, 2)


# Without the baton ----------------------------------------------------------------------------------------------------


def _parallel(fn: Callable[[], Any], ranks: int) -> list[Any]:
    """Ranks at the same time; a hang would end the test by itself."""
    return launch(fn, ranks, parallel=True)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-zb", "dualpipe-v"])
def test_parallel_ranks_have_the_same_numbers(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=6)
    model, (x, y) = traps(schedule.stages), batch(6)
    wanted = by_loop(model, x, y, 6)

    def train() -> list[Any]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, deadline=60)
        results = [pipe.step(x, target=y).loss, pipe.eval_step(x, target=y, microbatches=4).loss, pipe.infer(x)]
        return [*results, pipe.clip_grad_norm_(1e9)]

    for loss, evaluated, outputs, norm in _parallel(train, 2):
        assert_equal(loss, wanted.loss)
        torch.testing.assert_close(evaluated, wanted.loss)
        assert outputs.shape == (6, 7)
        assert_equal(norm, wanted.norm)
    for key, grad in wanted.grads.items():
        assert_equal(gradients(model)[key], grad, key)


def test_parallel_ranks_with_separate_copies() -> None:
    """A bidirectional pipeline of ranks that run at the same time, each with its own model."""
    model, (x, y) = traps(4).double(), tuple(part.double() for part in batch(8))
    schedule = ps.schedule("dualpipe", ranks=4, microbatches=8)
    wanted = by_loop(model, x, y, 8)

    def train() -> dict[str, Tensor | None]:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=functional.mse_loss, deadline=60)
        pipe.step(x, target=y)
        return {key: p.grad for key, p in pipe.named_parameters()}

    for grads in _parallel(train, 4):
        for key, grad in grads.items():
            torch.testing.assert_close(grad, wanted.grads[key], rtol=1e-11, atol=1e-14)


def test_parallel_failure_and_recovery() -> None:
    model, (x, y) = traps(3), batch(6)

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=6, loss_fn=functional.mse_loss, deadline=60)
        for _ in range(3):
            pipe.gather("ready", None)
            model[1].where = ("forward", 3)
            with pytest.raises(PipelineError, match=r"1F3 \(stage 1, forward of microbatch 3\) failed on rank 1"):
                pipe.step(x, target=y)
            assert all(p.grad is None for p in pipe.parameters())
            pipe.gather("repaired", None)
        model[1].where = None
        pipe.gather("go", None)
        pipe.step(x, target=y)

    _parallel(train, 3)
    for key, grad in by_loop(model, x, y, 6).grads.items():
        assert_equal(gradients(model)[key], grad, key)


def test_parallel_rank_that_stops_early_is_noticed_at_once() -> None:
    model, (x, y) = traps(2), batch(4)

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss, deadline=120)
        for _ in range(1 if rank() else 2):
            pipe.step(x, target=y)

    with pytest.raises(PipelineError, match="no rank can go on"):
        _parallel(train, 2)


@pytest.mark.parametrize("parallel", [False, True])
def test_deadline(parallel: bool) -> None:
    """A rank that is busy for too long is waited for no longer."""
    model, (x, y) = traps(2), batch(4)
    release = threading.Event()

    def train() -> None:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss, deadline=0.3)
        pipe.step(x, target=y)
        if rank():
            release.wait(30)
        try:
            pipe.step(x, target=y)
        finally:
            release.set()

    with pytest.raises(PipelineError, match=r"rank 0 waited 0.3 s for .* from rank 1") as caught:
        launch(train, 2, parallel=parallel)
    assert "  rank 1 is between steps" in str(caught.value)


def test_failures_leave_no_thread_behind() -> None:
    before = threading.active_count()
    model, (x, y) = traps(2), batch(2)
    model[0].where = ("forward", 0)
    for parallel in (False, True):
        with pytest.raises(PenstockError):
            launch(
                lambda: Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss).step(x, target=y),
                2,
                parallel=parallel,
            )
    assert threading.active_count() <= before
