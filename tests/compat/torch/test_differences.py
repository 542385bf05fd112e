"""What torch itself does in the rows of the tables of differences in docs/from-pytorch.md; that ours does otherwise is tested beside it.

Rows that are cases of `benchmarks/peer_cases.py`, or that `test_better.py` and other files run on both packages, are left out.
"""

from __future__ import annotations

import copy
import json
import signal
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compat.torch.both import BOTH, OURS, TORCH, VERSION, made, parse, texts, with_waits
from compat.torch.models import blocks, data, schedule, stages
from penstock.errors import VerifyError


def test_orders_with_repeated_actions_and_mutual_waits_are_validated() -> None:
    repeated = ("0F0 0B0 0B0", "1F0 1B0")
    waiting = ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    for rows, count in ((repeated, 1), (waiting, 2)):
        TORCH.schedules._validate_schedule(parse(TORCH, *rows), 2, 2, count)
        with pytest.raises(AssertionError):
            OURS.schedules._validate_schedule(parse(OURS, *rows), 2, 2, count)


def test_a_forward_without_a_microbatch_is_parsed() -> None:
    assert TORCH.schedules._Action.from_str("0F").microbatch_index is None
    with pytest.raises(RuntimeError):
        OURS.schedules._Action.from_str("0F")


def test_torch_cannot_simulate_what_it_lowers() -> None:
    theirs, mine = (made(package, "ScheduleDualPipeV", 2, 2, 6) for package in BOTH)
    with pytest.raises((ValueError, AssertionError, RuntimeError)):
        TORCH.schedules._simulate_comms_compute(copy.deepcopy(theirs.pipeline_order_with_comms), lambda stage: min(stage, 3 - stage), 4)
    assert mine._simulate()


@pytest.mark.usefixtures("alone")
def test_an_order_with_too_few_microbatches_is_run() -> None:
    """Torch drops the rest of the batch without a word."""
    x, y = data(8)
    row = "0F0 1F0 1B0 0B0"
    theirs = TORCH.schedules._PipelineScheduleRuntime(stages(TORCH, blocks(2)), 2, loss_fn=functional.mse_loss)
    theirs.pipeline_order_with_comms = parse(TORCH, with_waits(row))
    theirs.step(x, target=y, return_outputs=False)
    mine = OURS.schedules._PipelineScheduleRuntime(stages(OURS, blocks(2)), 2, loss_fn=functional.mse_loss)
    mine.pipeline_order_with_comms = parse(OURS, row)
    with pytest.raises(VerifyError):
        mine.step(x, target=y)


def test_spacing_an_order_whose_input_nobody_produces() -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for package in BOTH:
            held = made(package, "ScheduleInterleavedZeroBubble", 2, 2, 4)
            held.pipeline_order = parse(package, "0F0 2F1", "1F0")
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            try:
                spaced: Any = texts(held._add_bubbles_to_actions(4))
            except TimeoutError:
                spaced = None
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            assert (spaced is None) == (package is TORCH)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alone")
def test_no_microbatches() -> None:
    schedule(TORCH, "ScheduleGPipe", stages(TORCH, blocks(1)), 0)
    with pytest.raises(ValueError, match="microbatch"):
        schedule(OURS, "ScheduleGPipe", stages(OURS, blocks(1)), 0)


def test_lowering_functions_and_their_arguments() -> None:
    for package, left in ((TORCH, 0), (OURS, 4)):
        rows = parse(package, "0F0 0B0 0F1 0B1")
        package.schedules._add_send_recv(rows, lambda stage: 0, 1)
        assert len(rows.get(0, ())) == left
        (row,) = parse(package, "0F0 0I0 0W0 .").values()
        package.schedules._merge_bw(row)
        assert len(row) == left


def test_backwards_for_the_input_in_a_trace(tmp_path: Path) -> None:
    kinds = []
    for package in BOTH:
        package.schedules._dump_chrometrace(parse(package, "0F0 0I0 0W0"), str(tmp_path / "trace.json"))
        kinds.append([event["cat"] for event in json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]])
    assert kinds == [["computation", "communication", "computation"], ["computation"] * 3]


# Steps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_hooks_after_accumulation_under_a_split_backward(name: str) -> None:
    calls = []
    for package in BOTH:
        modules, (x, y) = blocks(2), data()
        seen: Counter[int] = Counter()
        for module in modules:
            for parameter in module.parameters():
                parameter.register_post_accumulate_grad_hook(lambda parameter, seen=seen: seen.update([id(parameter)]))
        schedule(package, name, stages(package, modules), 4, loss_fn=functional.mse_loss).step(x, target=y)
        calls.append(sorted(seen.values()))
    assert calls[1] == [4] * 8
    assert sum(calls[0]) < sum(calls[1])


class Tracked(nn.Linear):
    """Records whether its output has a graph."""

    def __init__(self, graphs: list[bool]) -> None:
        super().__init__(6, 6)
        self.graphs = graphs

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.graphs.append(out.requires_grad)
        return out


@pytest.mark.usefixtures("alone")
def test_graphs_in_an_evaluation() -> None:
    for package in BOTH:
        graphs: list[bool] = []
        x, y = data()
        schedule(package, "ScheduleGPipe", stages(package, [Tracked(graphs)]), 4, loss_fn=functional.mse_loss).eval(x, target=y)
        assert any(graphs) == (package is TORCH)


@pytest.mark.usefixtures("alone")
def test_the_first_stage_of_a_split_backward_runs_in_its_input_part() -> None:
    """Of a first stage whose batch needs no gradient, torch runs the whole backward in W."""
    ran = []

    class Marking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ran.append(1)
            return grad

    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return Marking.apply(self.linear(x))  # type: ignore[no-any-return,no-untyped-call]

    for package in BOTH:
        modules, (x, y) = [Marked(), nn.Linear(6, 6)], data(4)
        made = package.schedules._PipelineScheduleRuntime(stages(package, modules), 1, loss_fn=functional.mse_loss)
        made.pipeline_order_with_comms = parse(package, with_waits("0F0 1F0 1I0 0I0 0W0 1W0 0REDUCE_GRAD 1REDUCE_GRAD"))
        during: list[int] = []
        kind = package.schedules._ComputationType.BACKWARD_WEIGHT

        def weights(action: Any, ctx: Any, during: list[int] = during) -> None:
            during.append(len(ran))
            held = {stage.stage_index: stage for stage in ctx.schedule_ref._stages}
            held[action.stage_index].backward_weight_one_chunk(action.microbatch_index, last_backward=True)

        made.register_custom_function(kind, weights)
        ran.clear()
        made.step(x, target=y)
        assert (during[0] == 0) == (package is TORCH)
        assert len(ran) == 1


@pytest.mark.usefixtures("alone")
def test_gradients_of_the_batch_are_kept_by_the_stage() -> None:
    for package, kept in ((TORCH, 4 if VERSION >= (2, 12) else 0), (OURS, 0)):
        x, y = data(8)
        held = stages(package, blocks(2))
        schedule(package, "ScheduleInterleaved1F1B", held, 4, loss_fn=functional.mse_loss).step(x.requires_grad_(), target=y)
        assert sum(isinstance(grad, Tensor) for (grad,) in held[0].bwd_cache.values()) == kept


@pytest.mark.usefixtures("alone")
def test_arguments_that_a_module_does_not_take() -> None:
    caught = []
    for package in BOTH:
        made = schedule(package, "ScheduleGPipe", stages(package, blocks(1)), 4, loss_fn=functional.mse_loss)
        with pytest.raises((TypeError, RuntimeError)) as error:
            made.step(data()[0], target=data()[1], unknown=1)
        caught.append(error.value)
    assert isinstance(caught[0], TypeError)
    assert isinstance(caught[1], TypeError)
    assert isinstance(caught[1], RuntimeError)
