"""Refusals and failures of the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.deepspeed.training import WIDTH, by_engine, by_loop, data, loss_fn, model, sgd
from penstock.compat.deepspeed import PipelineEngine, as_deepspeed
from penstock.compat.deepspeed import schedule as s
from penstock.errors import PenstockError, PipelineError, ScheduleError, VerifyError
from penstock.runtime import launch, rank


class Written(s.PipeSchedule):
    """Two stages, one microbatch, written out."""

    rows: tuple[list[s.PipeInstruction], list[s.PipeInstruction]]

    def steps(self) -> Iterator[list[s.PipeInstruction]]:
        yield self.rows[self.stage_id]


def written(first: list[s.PipeInstruction], second: list[s.PipeInstruction]) -> type[Written]:
    return type("Written", (Written,), {"rows": (first, second)})


class Skip(s.PipeInstruction):
    """An instruction of a user's own, with which a stream cannot be proved."""


class Unproved(PipelineEngine):
    """Runs the streams that it gets."""

    def _exec_skip(self) -> None:
        pass

    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, "Skip": _exec_skip}  # noqa: RUF012


def train_unproved(rows: type[Written], **options: Any) -> None:
    def train() -> None:
        engine = Unproved(model(2), micro_batches=1, loss_fn=loss_fn, train_schedule=rows, deadline=20, **options)
        engine.train_batch(iter(data(2)))

    launch(train, ranks=2)


GOOD = (
    [s.LoadMicroBatch(0), s.ForwardPass(0), s.SendActivation(0), s.RecvGrad(0), s.BackwardPass(0)],
    [s.RecvActivation(0), s.LoadMicroBatch(0), s.ForwardPass(0), s.BackwardPass(0), s.SendGrad(0)],
)


# Before anything runs -------------------------------------------------------------------------------------------------


def test_a_deadlock_is_refused_before_it_runs() -> None:
    whole = model(2)
    rows = written(
        [s.LoadMicroBatch(0), s.ForwardPass(0), s.RecvGrad(0), s.SendActivation(0), s.BackwardPass(0)],
        list(GOOD[1]),
    )
    for strict in (True, False):
        with pytest.raises(VerifyError, match="deadlock"):
            by_engine(whole, data(1), 1, 2, train_schedule=rows, strict=strict)
    assert all(parameter.grad is None for parameter in whole.parameters())


def test_a_buffer_that_is_not_filled_is_refused_before_it_runs() -> None:
    rows = written(list(GOOD[0]), GOOD[1][1:])
    with pytest.raises(VerifyError, match="it uses buffer 0 before RecvActivation has filled it"):
        by_engine(model(2), data(1), 1, 2, train_schedule=rows)


def test_a_refusal_leaves_the_engine_as_it_was() -> None:
    whole, batches = model(2), data(4)
    wanted = by_loop(copy.deepcopy(whole), batches, 4)

    def train() -> float:
        engine = PipelineEngine(whole, micro_batches=4, loss_fn=loss_fn, optimizer=sgd, train_schedule=written(*GOOD), deadline=20)
        with pytest.raises(VerifyError, match="complete"):
            engine.train_batch(iter(batches))
        engine.train_schedule = as_deepspeed("gpipe")
        return engine.train_batch(iter(batches)).item()

    assert launch(train, ranks=2) == [wanted[0].item()] * 2


def fails(said: str, error: type[PenstockError], stages: int = 2, **options: Any) -> None:
    with pytest.raises(error) as caught:
        by_engine(model(2), data(2), 2, stages, **options)
    assert said in str(caught.value)


def test_instructions_that_the_engine_does_not_know() -> None:
    fails("PipelineEngine does not understand instruction CommitP2P()", PipelineError, 1, train_schedule=s.DualPipeVSchedule)


def test_an_optimizer_over_the_parameters_of_other_stages() -> None:
    whole = model(2)

    def train() -> None:
        PipelineEngine(whole, micro_batches=2, optimizer=sgd(whole.parameters()))

    with pytest.raises(ScheduleError, match="give a function that makes one"):
        launch(train, ranks=2)


def test_one_iterator_for_two_stages() -> None:
    shared = iter(data(4))

    def train() -> None:
        PipelineEngine(model(2), micro_batches=2, loss_fn=loss_fn, deadline=20).train_batch(shared)

    with pytest.raises(ScheduleError, match="one and the same iterator: each needs its own"):
        launch(train, ranks=2)


def test_backwards_in_evaluation() -> None:
    def evaluate() -> None:
        engine = PipelineEngine(model(2), micro_batches=2, loss_fn=loss_fn, eval_schedule=s.TrainSchedule, deadline=20)
        engine.eval_batch(iter(data(2)))

    with pytest.raises(ScheduleError, match="a schedule with BackwardPass: take one that only goes forward"):
        launch(evaluate, ranks=2)


def test_shared_parameters_without_their_reduction() -> None:
    layer = nn.Linear(WIDTH, WIDTH)

    def train() -> None:
        whole = nn.Sequential(layer, nn.Tanh(), layer)
        engine = PipelineEngine(whole, micro_batches=1, loss_fn=loss_fn, train_schedule=written(*GOOD), split=[1, 2], deadline=20)
        engine.train_batch(iter(data(1)))

    with pytest.raises(ScheduleError, match="the schedule has no ReduceTiedGrads"):
        launch(train, ranks=2)


def test_arguments_that_cannot_be() -> None:
    engine = PipelineEngine(model(1), micro_batches=1, loss_fn=loss_fn)
    with torch.no_grad(), pytest.raises(PipelineError, match=r"train_batch\(\) needs gradients"):
        engine.train_batch(iter(data(1)))
    with pytest.raises(ScheduleError, match="reduce_output is 'avg' or None, got 'sum'"):
        engine.eval_batch(iter(data(1)), reduce_output="sum")
    with pytest.raises(ScheduleError, match="rank 1 runs stage 1, but the map of modules has none for it"):
        launch(lambda: PipelineEngine({0: model(1)}, micro_batches=1), ranks=2)


# While it runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            [Skip(), s.LoadMicroBatch(0), s.ForwardPass(0), s.RecvGrad(0), s.SendActivation(0), s.BackwardPass(0)],
            list(GOOD[1]),
            "no rank can go on: each waits for another",
        ),
        (
            [*GOOD[0], Skip()],
            [s.LoadMicroBatch(0), s.ForwardPass(0), s.RecvActivation(0), s.BackwardPass(0), s.SendGrad(0)],
            "ForwardPass(buffer_id=0) in step 0 failed on rank 1: ScheduleError: it uses buffer 0 before RecvActivation has filled it",
        ),
        (
            [Skip(), s.LoadMicroBatch(0), s.LoadMicroBatch(0), *GOOD[0][1:]],
            list(GOOD[1]),
            "LoadMicroBatch(buffer_id=0) in step 0 failed on rank 0: ScheduleError: it overwrites buffer 0, which is still needed",
        ),
        (
            [Skip(), s.LoadMicroBatch(1), *GOOD[0][1:]],
            list(GOOD[1]),
            "LoadMicroBatch(buffer_id=1) in step 0 failed on rank 0: ScheduleError: it names no buffer of the stage, which has 1",
        ),
        (
            [*GOOD[0], Skip()],
            [s.RecvActivation(0), s.LoadMicroBatch(0), s.ForwardPass(0), s.SendGrad(0), s.BackwardPass(0)],
            "SendGrad(buffer_id=0) in step 0 failed on rank 1: ScheduleError: it uses buffer 0 before BackwardPass has filled it",
        ),
    ],
)
def test_streams_that_could_not_be_proved_fail_with_the_place(
    first: list[s.PipeInstruction], second: list[s.PipeInstruction], said: str
) -> None:
    with pytest.raises(PipelineError) as caught:
        train_unproved(written(first, second))
    assert said in str(caught.value)


def test_a_report_says_where_every_rank_is() -> None:
    rows = written([Skip(), *GOOD[0][:2], s.RecvGrad(0), s.SendActivation(0), s.BackwardPass(0)], list(GOOD[1]))
    with pytest.raises(PipelineError) as caught:
        train_unproved(rows)
    assert "rank 0 waits for gradients from rank 1, for RecvGrad(buffer_id=0)" in str(caught.value)
    assert "rank 1 waits for activations from rank 0, for RecvActivation(buffer_id=0)" in str(caught.value)


def test_blocking_sends_wait_for_their_receive() -> None:
    """Both send before they receive: with sends that block, neither goes on."""

    class Two(s.PipeSchedule):
        def steps(self) -> Iterator[list[s.PipeInstruction]]:
            if self.is_first_stage:
                yield [Skip(), *(each for m in (0, 1) for each in (s.LoadMicroBatch(m), s.ForwardPass(m), s.SendActivation(m)))]
                yield [each for m in (0, 1) for each in (s.RecvGrad(m), s.BackwardPass(m))]
            else:
                for m in (0, 1):
                    yield [s.RecvActivation(m), s.LoadMicroBatch(m), s.ForwardPass(m), s.BackwardPass(m), s.SendGrad(m)]

    def train(strict: bool) -> float:
        engine = Unproved(model(2), micro_batches=2, loss_fn=loss_fn, train_schedule=Two, strict=strict, deadline=20)
        return engine.train_batch(iter(batches)).item()

    batches = data(2)
    with pytest.raises(PipelineError, match="rank 1 to take activations"):
        launch(train, ranks=2, args=(True,))
    assert len(set(launch(train, ranks=2, args=(False,)))) == 1


def broken(at: int) -> type[nn.Module]:
    class Broken(nn.Module):
        """Fails in the forward of one microbatch, the first time."""

        def __init__(self) -> None:
            super().__init__()
            self.map, self.calls = nn.Linear(WIDTH, WIDTH), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == at:
                raise ValueError("a bad sample")
            return self.map(x)

    return Broken


def test_a_failure_reaches_every_rank_and_leaves_no_gradients() -> None:
    whole, batches = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), broken(at=3)()), data(4)
    alone = copy.deepcopy(whole)
    alone[2].calls = 10

    def train() -> list[Any]:
        engine = PipelineEngine(whole, micro_batches=4, loss_fn=loss_fn, optimizer=sgd, split=[1, 1, 1], deadline=20)
        with pytest.raises(PipelineError) as caught:
            engine.train_batch(iter(batches))
        untouched = all(parameter.grad is None for parameter in engine.parameters())
        return [str(caught.value), untouched, engine.train_batch(iter(batches)).item()]

    found = launch(train, ranks=3)
    wanted = by_loop(alone, batches, 4)[0].item()
    for said, untouched, loss in found:
        assert "ForwardPass(buffer_id=0) in step 6 failed on rank 2: ValueError: a bad sample" in said
        assert untouched
        assert loss == wanted


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: None, "there is no data: give train_batch(data_iter=...)"),
        (lambda: iter(data(1)), "the data ended within the batch"),
        (lambda: iter([torch.zeros(3, WIDTH)] * 2), "a microbatch is a pair of inputs and labels, got Tensor"),
    ],
)
def test_data_that_do_not_fit(make: Callable[[], Any], said: str) -> None:
    def train() -> None:
        PipelineEngine(model(2), micro_batches=2, loss_fn=loss_fn, deadline=20).train_batch(make())

    with pytest.raises(PipelineError) as caught:
        launch(train, ranks=2)
    assert said in str(caught.value)
    assert "LoadMicroBatch(buffer_id=" in str(caught.value)


def test_a_loss_that_is_no_number() -> None:
    fails("a loss is a tensor with one element; give loss_fn=", PipelineError, loss_fn=None)


def test_a_schedule_that_fails_while_it_is_made() -> None:
    class Bad(s.PipeSchedule):
        def steps(self) -> Iterator[list[s.PipeInstruction]]:
            raise KeyError("nothing here")

    fails("making the schedule failed on rank", PipelineError, train_schedule=Bad)


def test_ranks_that_call_different_things() -> None:
    def train() -> None:
        engine = PipelineEngine(model(2), micro_batches=2, loss_fn=loss_fn, deadline=20)
        if rank() == 0:
            engine.train_batch(iter(data(2)))

    with pytest.raises(PipelineError, match="waits for all ranks to reach"):
        launch(train, ranks=2)
