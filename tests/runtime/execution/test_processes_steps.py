"""Processes around a step: evaluation in between, no work at the start, no waiting for sends, clear errors for wrong calls."""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError
from penstock.runtime import Pipeline, StepResult, rank
from penstock.runtime.device.timing import clock
from penstock.runtime.launch.workers import Workers
from penstock.runtime.transport.current_group import get_group
from penstock.runtime.transport.group import Route
from runtime.distributed import Grads, local_grads, together
from runtime.models import assert_all_equal, assert_equal, assert_same_results, blocks, gradients, loop_step

# Evaluation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [("zbv", 2), ("dualpipe-v", 2), ("1f1b-v", 4), ("interleaved-zb", 2), ("chimera", 4)])
def test_row_7_evaluation_between_steps(workers: Workers, name: str, ranks: int) -> None:
    """Where ranks hold adjacent stages or both directions too; with other counts and sizes; training goes on as if there was none."""
    schedule = ps.schedule(name, ranks=ranks, microbatches=4)
    model = blocks(schedule.stages).double()
    x, y = torch.randn(9, 6).double(), torch.randn(9, 6).double()

    def train() -> tuple[list[Any], Grads]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        found: list[Any] = [pipe.step(x, target=y).loss]
        found += [pipe.eval_step(x, target=y, microbatches=count).loss for count in (1, 4, 7)]
        found += [pipe.infer(x[:5]), pipe.infer(x, microbatches=2)]
        found.append(pipe.step(x, target=y).loss)
        found += [pipe.infer(x[:5]), pipe.eval_step(x, target=y, outputs=True).outputs]
        return found, local_grads(pipe)

    results = workers.run(train, ranks=ranks)
    with torch.no_grad():
        out = model(x)
        loss, part = functional.mse_loss(out, y), model(x[:5])
    again = copy.deepcopy(model)
    pieces = list(zip(x.tensor_split(4), y.tensor_split(4), strict=True))
    for _ in range(2):
        loop_step(again, pieces, [len(piece) / 9 for piece, _ in pieces], functional.mse_loss)
    for found, _ in results:
        assert_all_equal(found, results[0][0])
        for value, wanted in zip(found, [loss, loss, loss, loss, part, out, loss, part, out], strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
            assert not value.requires_grad
    whole = together([grads for _, grads in results], [key for key, _ in model.named_parameters()])
    for key, grad in gradients(again).items():
        torch.testing.assert_close(whole[key], grad, rtol=1e-12, atol=1e-14)


def test_evaluation_leaves_modes_and_statistics(workers: Workers) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)) for _ in range(4)))
    model[1].eval()
    x = torch.randn(8, 6)

    def evaluate() -> tuple[Tensor, bool]:
        pipe = Pipeline(model, ps.schedule("zbv", ranks=2, microbatches=2), loss_fn=functional.mse_loss)
        modes, state = [module.training for module in model.modules()], copy.deepcopy(model.state_dict())
        out = pipe.infer(x)
        same = all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        return out, same and modes == [module.training for module in model.modules()]

    found = workers.run(evaluate, ranks=2)
    assert all(same for _, same in found)
    model.eval()
    assert_equal(found[0][0], torch.cat([model(piece) for piece in x.tensor_split(2)]).detach())


def test_schedule_without_a_backward(workers: Workers) -> None:
    model, x = blocks(4), torch.randn(6, 6)
    found = workers.run(lambda: Pipeline(model, schedule="inference", microbatches=3).infer(x))
    for out in found:
        assert_equal(out, torch.cat([model(piece) for piece in x.tensor_split(3)]).detach())


# Start-up -------------------------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """Counts its forwards, and has statistics that an extra one would change."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.norm(self.map(x))


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("zbv", 2)])
def test_rows_5_and_20_no_forward_except_the_step_s_own(workers: Workers, name: str, ranks: int) -> None:
    """Shapes are told by the first messages themselves: a forward a stage and microbatch, from the first step on."""
    model, x = nn.Sequential(*(Counted() for _ in range(4))), torch.randn(8, 6)

    def train() -> list[Any]:
        pipe = Pipeline(model, ps.schedule(name, ranks=ranks, microbatches=4), loss_fn=functional.mse_loss)
        mine = [model[stage] for stage in pipe.stages]
        counts = [[stage.forwards for stage in mine]]
        for _ in range(2):
            pipe.step(x, target=x)
            counts.append([stage.forwards for stage in mine])
        counts.append([stage.forwards for number, stage in enumerate(model) if number not in pipe.stages])
        return [*counts, {number: (model[number].norm.running_mean, int(model[number].norm.num_batches_tracked)) for number in pipe.stages}]

    again = copy.deepcopy(model)
    for _ in range(2):
        for piece in x.tensor_split(4):
            again(piece)
    for start, first, second, others, statistics in workers.run(train, ranks=ranks):
        assert set(start) == {0}
        assert set(first) == {4}
        assert set(second) == {8}
        assert set(others) == {0}
        for number, (mean, batches) in statistics.items():
            assert batches == 8
            torch.testing.assert_close(mean, again[number].norm.running_mean)


def test_row_20_exchanges_do_not_grow_with_the_model(workers: Workers) -> None:
    """A pipeline is agreed on in as many exchanges whatever its stages; a step has one, at its end."""

    def count(stages: int) -> tuple[int, int, int]:
        group, _ = get_group()
        names: list[str] = []
        exchange = group.all_gather  # type: ignore[attr-defined]
        gather = exchange.run
        exchange.run = lambda name, *rest: (names.append(name), gather(name, *rest))[1]
        pipe = Pipeline(
            blocks(stages), ps.schedule("interleaved-1f1b", ranks=2, microbatches=4, chunks=stages // 2), loss_fn=functional.mse_loss
        )
        made = len(names)
        x = torch.randn(8, 6)
        pipe.step(x, target=x)
        first = len(names)
        pipe.step(x, target=x)
        return made, first - made, len(names) - first

    few, many = workers.run(count, (2,), ranks=2)[0], workers.run(count, (8,), ranks=2)[0]
    assert few == many
    assert many[0] <= 3
    assert many[1:] == (1, 1)


# Sends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("gpipe", 4), ("1f1b", 4), ("interleaved-1f1b", 2), ("interleaved-zb", 2), ("zbv", 4), ("dualpipe-v", 2), ("chimera", 4)],
)
def test_row_21_sends_are_not_waited_for(workers: Workers, name: str, ranks: int) -> None:
    """A rank lets go of a message that it has sent only when it must have been taken, as what happened since tells.

    So whenever it does that within a step, the other end has had the message before, by the clock that they share.
    """
    schedule = ps.schedule(name, ranks=ranks, microbatches=12)
    model, x = blocks(schedule.stages), torch.randn(24, 6)

    def train() -> list[tuple[int, list[tuple[Route, int, int]], dict[Route, list[int]]]]:
        from penstock.runtime.transport.framed_channels import FramedOutbox

        waits: list[tuple[Route, int, int]] = []
        puts = [0]
        wait, put = FramedOutbox._wait_for_oldest, FramedOutbox.put

        def noted_put(self: FramedOutbox, value: Any) -> None:
            puts[0] += 1
            FramedOutbox._wait_for_oldest = noted_wait  # type: ignore[method-assign]
            put(self, value)
            FramedOutbox._wait_for_oldest = wait  # type: ignore[method-assign]

        def noted_wait(self: FramedOutbox) -> None:
            waits.append((self.route, self.sends[0][0], clock()))
            wait(self)

        FramedOutbox.put = noted_put  # type: ignore[method-assign]
        try:
            pipe, found = Pipeline(model, schedule, loss_fn=functional.mse_loss), []
            for _ in range(3):
                puts[0], waits = 0, []
                pipe.step(x, target=x)
                inboxes = pipe._executor(12, training=True).links.inboxes
                found.append((puts[0], waits, {route: [there for _, _, there in inbox.times] for route, inbox in inboxes.items()}))
        finally:
            FramedOutbox.put = put  # type: ignore[method-assign]
        return found

    sent = sum(action.kind.name.startswith("SEND") for row in ps.lower(schedule) for action in row)
    for step in zip(*workers.run(train, ranks=ranks), strict=True):
        assert sum(puts for puts, _, _ in step) == sent
        there = {route: times for _, _, received in step for route, times in received.items()}
        late = [(route, number) for _, waits, _ in step for route, number, waited in waits if there[route][number] > waited]
        assert late == []


# Wrong calls ----------------------------------------------------------------------------------------------------------


def _caught(act: Any) -> str:
    try:
        act()
    except PipelineError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("known", [False, True])
def test_ranks_that_call_different_methods(workers: Workers, odd: int, known: bool) -> None:
    """One evaluates while the other trains: both say so, and both can go on; also once messages have other sizes than at first."""
    model, x = blocks(2), torch.randn(8, 6)

    def train() -> tuple[str, Tensor | None]:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss, deadline=20.0)
        if known:
            pipe.step(x, target=x)
            pipe.eval_step(torch.cat([x] * 5), target=torch.cat([x] * 5))
        call = pipe.eval_step if rank() == odd else pipe.step
        report = _caught(lambda: call(x, target=x))
        return report, pipe.eval_step(x, target=x).loss

    found = workers.run(train, ranks=2)
    assert len({report for report, _ in found}) == 1
    assert found[0][0].startswith(("rank 0 runs another step than rank 1", "rank 1 runs another step than rank 0"))
    assert "make the same calls on all" in found[0][0]
    for _, loss in found:
        torch.testing.assert_close(loss, functional.mse_loss(model(x), x).detach())


def test_rank_that_calls_something_else(workers: Workers) -> None:
    """One clips while the other makes a pipeline: both are named."""
    model = blocks(2)

    def train() -> str:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss, deadline=20.0)
        if rank():
            return _caught(lambda: pipe.clip_grad_norm_(1.0))
        return _caught(lambda: Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, deadline=20.0))

    found = workers.run(train, ranks=2)
    assert len(set(found)) == 1
    assert "'clip_grad_norm_'" in found[0]
    assert "'Pipeline'" in found[0]
    assert "every rank must make the same calls in the same order" in found[0]


def test_rank_that_steps_while_the_other_does_not(workers: Workers) -> None:
    """It waits until the deadline, and says for what; the other learns of it when it next takes part."""
    model, x = blocks(2), torch.randn(8, 6)

    def train() -> str:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
        pipe.deadline = 1.0
        for _ in range(600):
            if rank() and pipe.group.connection is not None:  # type: ignore[attr-defined]
                time.sleep(0.05)
        return _caught(lambda: pipe.step(x, target=x))

    found = workers.run(train, ranks=2)
    assert len(set(found)) == 1
    assert re.match(r"rank 0 waited \d+\.\d s for gradients from rank 1; held up by rank 1, which is between steps\n", found[0])
    assert "rank 1 is between steps" in found[0]


# Words ----------------------------------------------------------------------------------------------------------------


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_sizes_are_in_the_debug_log(workers: Workers) -> None:
    """A table in steps that send anything new: what, from whom to whom, how many bytes, how often."""
    model, x = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 6)).double(), torch.randn(8, 6).double()

    def train() -> list[list[str]]:
        kept, logger = Kept(), logging.getLogger("penstock")
        logger.addHandler(kept)
        before, _ = logger.level, logger.setLevel(logging.DEBUG)
        try:
            pipe = Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
            lines = []
            for batch in (x, x, x[:6]):
                kept.lines = []
                pipe.step(batch, target=batch)
                lines.append([line for said in kept.lines for line in said.splitlines() if "bytes" in line])
            return lines
        finally:
            logger.removeHandler(kept)
            logger.setLevel(before)

    first, second = workers.run(train, ranks=2)
    assert [len(lines) for lines in first] == [len(lines) for lines in second] == [1, 0, 1]
    found = re.fullmatch(r"0SEND_F0 to 0SEND_F1  activations to rank 1  float64\[4, 40\]  (\d+) bytes  2 times", first[0][0])
    assert found, first[0]
    assert 4 * 40 * 8 <= int(found[1]) < 4 * 40 * 8 + 256
    assert re.match(r"1SEND_B0 to 1SEND_B1  gradients to rank 0  float64\[4, 40\]", second[0][0]), second[0]
    assert all("float64[3, 40]" in line for line in (*first[2], *second[2]))


def test_nothing_is_printed(workers: Workers, tmp_path: Path) -> None:
    """By the whole life of a pipeline, a failure included, its log being left as it is."""
    model, x = blocks(4), torch.randn(8, 6)

    def train() -> StepResult:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss, record=True)
        pipe.step(x, target=x)
        pipe.eval_step(x, target=x)
        _caught(lambda: pipe.step(x[:, :5], target=x))
        return pipe.step(x, target=x)

    def watched() -> StepResult:
        """With this process's output going into a file."""
        outputs = [os.dup(1), os.dup(2)]
        with open(tmp_path / f"{rank()}.txt", "wb") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            try:
                return train()
            finally:
                sys.stdout.flush()
                for number, before in enumerate(outputs, start=1):
                    os.dup2(before, number)
                    os.close(before)

    assert_same_results(workers.run(watched))
    assert [(tmp_path / f"{each}.txt").read_text() for each in range(4)] == [""] * 4


# Everyone's value -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gather(workers: Workers, ranks: int) -> None:
    """Small values, and ones that do not fit a frame, on some ranks or on all; over and over."""
    sizes = [0, 1, 700, 900, 1000, 5000, 3_000_000]

    def gather() -> list[list[Any]]:
        group, mine = get_group()
        found = []
        for turn, size in enumerate(sizes * 2):
            text = bytes([mine + turn]) * (size if (turn + mine) % 2 else 10)
            found.append(group.gather(mine, f"turn {turn}", {"rank": mine, "text": text, "tensor": torch.full((3,), mine)}, 60.0))
        return found

    for turns in workers.run(gather, ranks=ranks):
        for turn, found in enumerate(turns):
            assert [each["rank"] for each in found] == list(range(ranks))
            for mine, each in enumerate(found):
                size = sizes[turn % len(sizes)] if (turn + mine) % 2 else 10
                assert each["text"] == bytes([mine + turn]) * size
                assert_equal(each["tensor"], torch.full((3,), mine))


def test_many_gathers_keep_nothing_alive(workers: Workers) -> None:
    def gather() -> tuple[int, list[int]]:
        group, mine = get_group()
        for turn in range(300):
            found = group.gather(mine, "turn", turn * 4 + mine, 60.0)
        return len(group.all_gather._sends), found  # type: ignore[attr-defined]

    for held, found in workers.run(gather):
        assert held <= 70
        assert found == [299 * 4 + mine for mine in range(4)]


def test_frames_of_changing_sizes_are_freed(workers: Workers) -> None:
    """Messages of several lengths in turn: what is kept to send from again does not grow with the steps."""
    model = blocks(2)

    def train() -> tuple[list[int], list[int]]:
        from penstock.runtime.transport.framed_channels import FramedOutbox

        pipe = Pipeline(model, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss)

        def steps(lengths: list[list[int]]) -> list[int]:
            counts = []
            for each in lengths:
                pieces = [torch.randn(length, 6) for length in each]
                pipe.step_list(pieces, pieces)
                ends = [end for end in get_group()[0].ends if isinstance(end, FramedOutbox)]  # type: ignore[attr-defined]
                counts.append(sum(len(slots) for end in ends for slots in end.free.values()))
            return counts

        return steps([[1, 20, 30], [30, 1, 20], [50, 50, 1]] * 20), steps([[length] * 3 for length in range(1, 400, 10)])

    for again, never_again in workers.run(train, ranks=2):
        assert again[30:57] == again[33:60]
        assert max(never_again) <= 40


def test_channel_ends_of_deleted_pipelines_are_freed(workers: Workers) -> None:
    """Of pipelines, and of programs for other counts of microbatches: after collection the group knows as many ends as before."""
    model = blocks(2)

    def train() -> tuple[list[int], list[float]]:
        import gc

        group: Any = get_group()[0]
        counts, losses = [], []
        for _ in range(6):
            pipe = Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
            for count in (2, 3, 4):
                x = torch.ones(12, 6)
                losses.append(float(pipe.step(x, target=x, microbatches=count).loss))
            pipe.eval_step(x, target=x)
            alive = len(group.ends)
            del pipe
            gc.collect()
            counts += [alive, len(group.ends)]
        return counts, losses

    for counts, losses in workers.run(train, ranks=2):
        assert counts[0] > counts[1]
        assert counts == counts[:2] * 6
        assert losses == pytest.approx([losses[0]] * len(losses))


def test_two_pipelines_in_different_orders_on_two_ranks(workers: Workers) -> None:
    """Their programs are the same, but their messages are kept apart."""

    def run() -> str:
        torch.manual_seed(0)
        pipes = [
            Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, deadline=30.0)
            for _ in range(2)
        ]
        first, second = pipes if rank() else pipes[::-1]
        x = torch.randn(4, 4)
        try:
            first.step(x, target=x)
            second.step(x[:2], target=x[:2])
        except PipelineError as error:
            return str(error)
        return "went through"

    assert all("runs another step than rank" in said for said in workers.run(run, ranks=2))


# Stages that need their backward whole --------------------------------------------------------------------------------


class Asking(nn.Module):
    """Scales its output by the gradient of its own weight, from a certain forward on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.map, self.start, self.runs = nn.Linear(6, 6).double(), start, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out = torch.tanh(self.map(x))
        if self.runs <= self.start:
            return out
        (slope,) = torch.autograd.grad(out.sum(), self.map.weight, retain_graph=True, allow_unused=True)
        return out * slope.norm()


@pytest.mark.parametrize("start", [0, 4])
def test_a_stage_that_asks_for_its_weights_gradient(workers: Workers, start: int) -> None:
    """At once, or from the second step on, which then has to be run again."""
    schedule = ps.schedule("zb-h1", ranks=2, microbatches=4)
    model = nn.Sequential(Asking(0 if start else 99), Asking(start)).double()
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()

    def train() -> tuple[Grads, int, Any]:
        pipe, failed = Pipeline(model, schedule, loss_fn=functional.mse_loss), 0
        for _ in range(2):
            try:
                pipe.step(x, target=y)
            except PipelineError as error:
                if "run this step again" not in str(error):
                    raise
                failed += 1
                pipe.step(x, target=y)
        return local_grads(pipe), failed, pipe.merged.stages

    results = workers.run(train, ranks=2)
    again = copy.deepcopy(model)
    for _ in range(2):
        loop_step(again, list(zip(x.tensor_split(4), y.tensor_split(4), strict=True)), [0.25] * 4, functional.mse_loss)
    assert [(failed, stages) for _, failed, stages in results] == [(int(start > 0), (0, 1) if start else (1,))] * 2
    found = together([grads for grads, _, _ in results], [name for name, _ in model.named_parameters()])
    for name, grad in gradients(again).items():
        assert_equal(found[name], grad, name)
