"""Schedules from files, from other programs, and for custom placements."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from ir.peers import lowered, order_of, write_order
from penstock.errors import ScheduleError, VerifyError
from penstock.ir.table import Table
from penstock.passes.pass_list import PassList
from penstock.runtime import Pipeline, launch
from runtime.models import assert_close, assert_same, blocks, by_batch, by_loop, by_pipeline, gradients, sums_in_order


def _check(table: Table, batch: int = 11) -> None:
    model, x, y = blocks(table.stages), torch.randn(batch, 6), torch.randn(batch, 6)
    found, wanted = by_pipeline(model, table, x, y), by_loop(model, x, y, table.microbatches)
    if sums_in_order(table):
        assert_same(found, wanted)
    else:
        assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb", "zbv", "dualpipe-v", "dualpipe"])
def test_compute_only_file(name: str, tmp_path: Path) -> None:
    ps.schedule(name, ranks=2, microbatches=6).to_csv(tmp_path / "order.csv")
    table = ps.load(tmp_path / "order.csv")
    assert not table.lowered
    _check(table)


@pytest.mark.parametrize("receive", ["paired", "just-in-time", 2])
@pytest.mark.parametrize("name", ["gpipe", "zbv", "dualpipe-v"])
def test_lowered_file(name: str, receive: str | int, tmp_path: Path) -> None:
    program = ps.lower(ps.schedule(name, ranks=2, microbatches=6), receive=receive, fsdp=receive == "paired")
    program.to_csv(tmp_path / "program.csv")
    table = ps.load(tmp_path / "program.csv")
    assert table.lowered
    assert table.rows == program.rows
    _check(table)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("GPipe", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2)],
)
def test_order_written_by_torch(name: str, chunks: int, tmp_path: Path) -> None:
    order = order_of(name, 2, 6, chunks)
    compute = {rank: [None if a is None or not a.is_compute_op else a for a in row] for rank, row in order.items()}
    write_order(compute, tmp_path / "torch.csv")
    _check(ps.load(tmp_path / "torch.csv"))


@pytest.mark.parametrize(("name", "chunks"), [("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_program_lowered_by_torch(name: str, chunks: int, tmp_path: Path) -> None:
    lowered(name, 2, 6, chunks)._dump_csv(str(tmp_path / "torch.csv"), format="compute_comms")
    table = ps.load(tmp_path / "torch.csv")
    assert table.lowered
    _check(table)


def test_custom_placement() -> None:
    """Two stages in the middle on one rank, the ends on the other; every order by hand."""
    rows = [
        ["0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B0", "0B1"],
        ["1F0", "2F0", "1F1", "2F1", "2I0", "1B0", "2W0", "2B1", "1B1"],
    ]
    schedule = ps.Schedule.from_actions(rows, ps.Placement.custom([0, 1, 1, 0]))
    assert sums_in_order(schedule)
    _check(schedule)


def test_custom_placement_with_uneven_ranks() -> None:
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "2F0", "3F0", "3B0", "2B0", "1B0", "1F1", "2F1", "3F1", "3B1", "2B1", "1B1"]]
    _check(ps.Schedule.from_actions(rows, ps.Placement.custom([0, 1, 1, 1])))


def test_rank_without_a_stage() -> None:
    """It takes part in every collective step and gets the same result."""
    schedule = ps.Schedule.from_actions([["0F0", "1F0", "1B0", "0B0"], []], ps.Placement.custom([0, 0], ranks=2))
    model, x, y = blocks(2), torch.randn(3, 6), torch.randn(3, 6)
    assert_same(by_pipeline(model, schedule, x, y), by_loop(model, x, y, 1))

    def others() -> tuple[float, float]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        assert pipe.parity(x, target=y).loop.exact
        return float(pipe.eval_step(x, target=y).loss), float(pipe.clip_grad_norm_(1.0))

    one, other = launch(others, 2)
    assert one == other


def test_sums_are_made_in_the_schedule_s_order() -> None:
    """Microbatches backwards: the sum differs from the loop's in its rounding, and equals the loop run in that order."""
    schedule = ps.Schedule.from_actions([["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]], ps.Placement.linear(1))
    model, x, y = blocks(1), torch.randn(9, 6), torch.randn(9, 6)
    found = by_pipeline(model, schedule, x, y)
    again = copy.deepcopy(model)
    for xx, yy in reversed(list(zip(x.tensor_split(3), y.tensor_split(3), strict=True))):
        (functional.mse_loss(again(xx), yy) * (3 / 9)).backward()
    for name, grad in gradients(again).items():
        assert torch.equal(found.grads[name], grad), name
    assert any(not torch.equal(found.grads[name], grad) for name, grad in by_loop(model, x, y, 3).grads.items())


def test_a_file_is_fixed_to_one_microbatch_count(tmp_path: Path) -> None:
    ps.schedule("1f1b", ranks=2, microbatches=4).to_csv(tmp_path / "order.csv")
    table = ps.load(tmp_path / "order.csv")
    model, x, y = blocks(2), torch.randn(8, 6), torch.randn(8, 6)

    def train() -> float:
        pipe = Pipeline(model, table, loss_fn=functional.mse_loss)
        with pytest.raises(ScheduleError, match=r"5 microbatches, but order is fixed to 4"):
            pipe.step(x, target=y, microbatches=5)
        loss = pipe.eval_step(x, target=y, microbatches=5).loss  # forwards alone need no schedule
        assert loss is not None
        return float(loss)

    for loss in launch(train, 2):
        assert loss == pytest.approx(float(by_batch(model, x, y).loss), rel=1e-6)


def test_program_that_hangs_is_refused() -> None:
    """The receive of the gradient comes before the send of the activation, so no rank can start."""
    rows = [["0F0", "0RECV_B0", "0B0", "0SEND_F0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]]
    program = ps.Program.from_actions(rows, ps.Placement.linear(2))

    def train() -> None:
        Pipeline(blocks(2), program, loss_fn=functional.mse_loss).step(torch.randn(1, 6), target=torch.randn(1, 6))

    with pytest.raises(VerifyError, match="rank 0"):
        launch(train, 2)


def test_schedule_that_drops_work_is_refused() -> None:
    schedule = ps.Schedule.from_actions([["0F0", "0F1", "0B0"]], ps.Placement.linear(1))
    with pytest.raises(VerifyError, match="0B1"):
        Pipeline(blocks(1), schedule, loss_fn=functional.mse_loss).step(torch.randn(2, 6), target=torch.randn(2, 6))


def test_order_that_cannot_run_is_refused_with_the_place() -> None:
    schedule = ps.Schedule.from_actions([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]], ps.Placement.linear(2))

    def train() -> None:
        Pipeline(blocks(2), schedule, loss_fn=functional.mse_loss).step(torch.randn(2, 6), target=torch.randn(2, 6))

    with pytest.raises(VerifyError, match="1F1"):
        launch(train, 2)


@pytest.mark.parametrize("slots", [1, 2])
def test_channels_with_few_slots(slots: int) -> None:
    """A sender waits for a free slot, and the numbers are the same."""
    program = ps.PassList.parse(f"reduce-grad,send-receive,buffers{{slots={slots}}}").apply(ps.schedule("gpipe", ranks=3, microbatches=7))
    ps.verify(program)
    _check(program)


def test_forward_only_schedule_does_not_train() -> None:
    pipe = Pipeline(nn.Sequential(nn.Linear(3, 3)), ps.schedule("inference", ranks=1, microbatches=2), loss_fn=functional.mse_loss)
    x = torch.randn(4, 3)
    with pytest.raises(ScheduleError, match="has no backward"):
        pipe.step(x, target=x)
    assert pipe.infer(x).shape == (4, 3)


@pytest.mark.parametrize("limit", ["all", "4"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv", "dualpipe"])
def test_program_that_waits_for_its_sends(name: str, limit: str) -> None:
    passes = PassList.parse(f"reduce-grad{{wait=deferred}},send-receive,wait-send{{outstanding={limit}}}")
    _check(passes.apply(ps.schedule(name, ranks=2, microbatches=6)))
