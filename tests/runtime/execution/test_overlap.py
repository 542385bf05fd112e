"""Overlapped actions, in every way of running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.runtime import Pipeline, launch
from penstock.runtime.device.streams import StreamPair
from penstock.runtime.execution import overlap
from penstock.runtime.execution.overlap import Backward, TwoStreams, find_pair
from runtime.models import assert_same, blocks, by_loop, by_pipeline

Operations = list[Callable[[], None]]


@pytest.mark.parametrize("name", ["dualpipe-v", "dualpipe"])
def test_overlap_executor_is_used_for_every_overlapped_action(name: str) -> None:
    """With its own order of the parts the numbers are those of the fallback, to the last bit."""
    schedule = ps.schedule(name, ranks=2, microbatches=8)
    model, x, y = blocks(schedule.stages), torch.randn(9, 6), torch.randn(9, 6)
    seen: list[Action] = []

    def backwards(action: Action, operations: Operations) -> None:
        seen.append(action)
        assert len(operations) == len(action.sub_actions)
        for operation in reversed(operations):
            operation()

    found = by_pipeline(model, schedule, x, y, overlap=backwards)
    assert_same(found, by_pipeline(model, schedule, x, y))
    wanted = [action for row in schedule for action in row if action.kind is Kind.OVERLAP_F_B]
    assert wanted
    assert sorted(map(str, seen)) == sorted(map(str, wanted))


def test_fallback_equals_the_loop() -> None:
    schedule = ps.schedule("dualpipe-v", ranks=2, microbatches=8)
    model, x, y = blocks(4), torch.randn(9, 6), torch.randn(9, 6)
    assert_same(by_pipeline(model, schedule, x, y), by_loop(model, x, y, 8))


def test_three_actions_together() -> None:
    rows = [["0F0", "1F0", "0F1", "1I0", "(1W0;0B0;1F1)OVERLAP_F_B", "1B1", "0B1"]]
    schedule = ps.Schedule.from_actions(rows, ps.Placement.custom([0, 0]))
    model, x, y = blocks(2), torch.randn(4, 6), torch.randn(4, 6)
    assert_same(by_pipeline(model, schedule, x, y), by_loop(model, x, y, 2))


def test_failure_of_the_overlap_executor_itself() -> None:
    def broken(action: Action, operations: Operations) -> None:
        raise ValueError("no streams")

    schedule = ps.schedule("dualpipe-v", ranks=2, microbatches=8)
    with pytest.raises(ps.PenstockError, match=r"OVERLAP_F_B failed on rank \d: ValueError: no streams"):
        by_pipeline(blocks(4), schedule, torch.randn(8, 6), torch.randn(8, 6), overlap=broken)


class Together(nn.Module):
    """A stage with its own way to run a forward together with a backward."""

    def __init__(self, layers: nn.Module, way: str, seen: list[str]) -> None:
        super().__init__()
        self.layers, self.way, self.tell = layers, way, seen.append

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def overlapped_forward_backward(self, inputs: tuple[Tensor, ...], kwargs: dict[str, Any], backward: Backward) -> Tensor:
        assert not kwargs
        self.tell(self.way)
        assert isinstance(backward.module, Together)
        if self.way == "first":
            backward()
            return self(*inputs)
        made = self(*inputs)
        if self.way == "pieces":
            torch.autograd.backward(list(backward.outputs), list(backward.grads))
        elif self.way == "last":
            backward()
        return made


def hooked(way: str, schedule: ps.Schedule, seen: list[str]) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Together(block, way, seen) for block in blocks(schedule.stages)]


def step_of(stages: list[nn.Module], schedule: ps.Schedule, x: Tensor, autocast: bool = False, **options: Any) -> dict[str, Tensor]:
    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            Pipeline(stages, schedule, loss_fn=functional.mse_loss, **options).step(x, target=x)

    launch(step, schedule.ranks)
    return {f"{k}.{name}": p.grad for k, stage in enumerate(stages) for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", ["first", "last", "pieces"])
@pytest.mark.parametrize("name", ["dualpipe-v", "dualpipe", "split"])
def test_a_stage_runs_its_forward_and_a_backward_together(name: str, way: str) -> None:
    """The hook is asked for every overlapped action, and the numbers are those of a model without one."""
    schedule = _with_split() if name == "split" else ps.schedule(name, ranks=2, microbatches=8)
    seen: list[str] = []
    x = torch.randn(9, 6)
    found = step_of(hooked(way, schedule, seen), schedule, x)
    wanted = step_of([stage.layers for stage in hooked(way, schedule, [])], schedule, x)  # type: ignore[misc]
    assert len(seen) == sum(action.kind is Kind.OVERLAP_F_B for row in schedule for action in row) > 0
    assert [name.replace("layers.", "") for name in found] == list(wanted)
    assert all(torch.equal(*pair) for pair in zip(found.values(), wanted.values(), strict=True))


@pytest.mark.parametrize("why", ["autocast", "precision"])
def test_a_hook_that_would_change_the_numbers_is_not_used(why: str) -> None:
    """A backward runs outside of autocast, and sums in another precision come after each backward: a hook does neither."""
    schedule, x, seen = ps.schedule("dualpipe-v", ranks=2, microbatches=8), torch.randn(9, 6), list[str]()
    options: dict[str, Any] = {"accumulate_dtype": torch.float64} if why == "precision" else {"autocast": True}
    found = step_of(hooked("last", schedule, seen), schedule, x, **options)
    wanted = step_of([stage.layers for stage in hooked("last", schedule, [])], schedule, x, **options)  # type: ignore[misc]
    assert seen == []
    assert all(torch.equal(*pair) for pair in zip(found.values(), wanted.values(), strict=True))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"graphs": True}, "graphs=True"),
        ({"recompute": True}, "the stage is recomputed"),
        ({"accumulate_dtype": torch.float64}, "precision"),
    ],
)
def test_an_unused_hook_is_warned_about_once(options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    schedule, x, seen = ps.schedule("dualpipe-v", ranks=2, microbatches=8), torch.randn(9, 6), list[str]()
    overlapped = {a.sub_actions[0].stage for row in schedule for a in row if a.kind is Kind.OVERLAP_F_B}
    with caplog.at_level("WARNING", logger="penstock"):
        step_of([stage.layers for stage in hooked("last", schedule, [])], schedule, x, **options)  # type: ignore[misc]
        assert caplog.messages == []
        step_of(hooked("last", schedule, seen), schedule, x, **options)
    assert seen == []
    told = [message for message in caplog.messages if why in message]
    assert len(told) == len(caplog.messages) == len(set(told)) == len(overlapped) > 0


def _with_split() -> ps.Schedule:
    """A forward beside a backward for the input, whose weights follow later."""
    rows = [["0F0", "1F0", "0F1", "(1F1;1I0)OVERLAP_F_B", "0I0", "1W0", "1I1", "0W0", "0B1", "1W1"]]
    return ps.Schedule.from_actions(rows, ps.Placement.custom([0, 0]))


def test_hooks_of_parameters_run_after_the_weights_with_a_hooked_stage() -> None:
    schedule, calls = _with_split(), []
    stages = hooked("last", schedule, [])
    weight = stages[1].layers.map.weight
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    x = torch.randn(8, 6)
    step_of(stages, schedule, x)
    assert len(calls) == 2
    assert torch.equal(calls[-1], weight.grad)


def test_a_hook_that_forgets_the_backward_is_an_error() -> None:
    schedule = ps.schedule("dualpipe-v", ranks=2, microbatches=8)
    with pytest.raises(ps.PenstockError, match="without running its backward"):
        step_of(hooked("never", schedule, []), schedule, torch.randn(8, 6))


@pytest.mark.parametrize("name", ["dualpipe-v", "dualpipe"])
def test_two_streams_give_the_same_numbers(name: str) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=8)
    model, x, y = blocks(schedule.stages), torch.randn(9, 6), torch.randn(9, 6)
    assert_same(by_pipeline(model, schedule, x, y, overlap="streams"), by_pipeline(model, schedule, x, y))


def test_three_actions_on_two_streams() -> None:
    rows = [["0F0", "1F0", "0F1", "1I0", "(1W0;0B0;1F1)OVERLAP_F_B", "1B1", "0B1"]]
    schedule = ps.Schedule.from_actions(rows, ps.Placement.custom([0, 0]))
    model, x, y = blocks(2), torch.randn(4, 6), torch.randn(4, 6)
    assert_same(by_pipeline(model, schedule, x, y, overlap="streams"), by_loop(model, x, y, 2))


def test_a_forward_takes_the_stream_that_the_backward_next_to_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backward runs on its forward's stream, whether alone or not, and streams wait for each other around all of it."""
    ran: list[tuple[str, int]] = []

    class Noted(StreamPair):
        def run_on(self, number: int, work: Callable[[], None]) -> None:
            ran.append(("on", number))
            work()

        def join(self) -> None:
            ran.append(("join", 0))

    monkeypatch.setattr(overlap, "StreamPair", Noted)
    streams, done = TwoStreams(), []

    def work(name: str) -> Callable[[], None]:
        return lambda: done.append((name, ran[-1][1] if ran and ran[-1][0] == "on" else 0))

    def group(text: str) -> None:
        action = Action.parse(text)
        streams(action, [work(str(part)) for part in action.sub_actions])

    group("(0F1;0B0)OVERLAP_F_B")
    group("(0B1;0F2)OVERLAP_F_B")
    group("(0F3;0I2)OVERLAP_F_B")
    ran.clear()
    streams.run_alone(Action.parse("0B3"), work("0B3"))
    assert ran == [("join", 0), ("on", 1), ("join", 0)]
    assert done == [("0F1", 1), ("0B0", 0), ("0F2", 0), ("0B1", 1), ("0F3", 1), ("0I2", 0), ("0B3", 1)]


def test_actions_of_one_microbatch_are_not_a_pair() -> None:
    assert find_pair(Action.parse("(1F1;1B1)OVERLAP_F_B")) is None
    assert find_pair(Action.parse("(1B1;1F2)OVERLAP_F_B")) == (1, 0)


def test_unknown_overlap_is_refused() -> None:
    with pytest.raises(ps.PenstockError, match="give 'streams'"):
        Pipeline(blocks(2), schedule="gpipe", microbatches=2, overlap="stream")
