"""The metrics of steps, against the result of the step and the recorder's timeline of the same step; on processes and virtual ranks."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import Pipeline, StepMetrics, StepResult, launch, rank
from penstock.runtime.batch.result import RankTimes, ResultShare
from penstock.runtime.launch.workers import Workers
from penstock.runtime.measure.metrics import combine_shares
from penstock.simulator.gaps import CAUSES

BATCH = torch.randn(12, 6)
NAP = 0.02


class Nap(nn.Module):
    """A layer whose forward and backward take a known time."""

    def __init__(self, forward: float = NAP, backward: float = NAP) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.naps = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.naps[0])
        y = self.map(x)
        if y.requires_grad:
            y.register_hook(lambda grad: time.sleep(self.naps[1]))
        return y


def run_steps(model: nn.Module, schedule: ps.Schedule, steps: int, options: dict[str, Any]) -> list[tuple[StepMetrics, StepResult, float]]:
    """Train; per step its metrics, its result, and the norm that clipping returned."""
    seen: list[StepMetrics] = []
    pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, on_step=seen.append, **options)
    results, norms = [], []
    for _ in range(steps):
        results.append(pipe.step(BATCH, target=BATCH))
        assert len(seen) == len(norms)  # the norm is not known yet
        norms.append(float(pipe.clip_grad_norm_(1.0)))
    return list(zip(seen, results, norms, strict=True))


def run(workers: Workers | None, *args: Any) -> list[Any]:
    schedule = args[1]
    return launch(run_steps, schedule.ranks, args=args) if workers is None else workers.run(run_steps, args, ranks=schedule.ranks)


@pytest.fixture(params=["threads", "gloo"])
def place(request: pytest.FixtureRequest) -> Workers | None:
    return request.getfixturevalue("workers") if request.param == "gloo" else None


def test_metrics_are_those_of_the_step_and_the_same_on_every_rank(place: Workers | None) -> None:
    schedule = ps.schedule("zb-h1", ranks=3, microbatches=4)
    by_rank = run(place, nn.Sequential(*(Nap(0.001, 0.001) for _ in range(3))), schedule, 3, {})
    for number, steps in enumerate(zip(*by_rank, strict=True)):
        metrics, result, norm = steps[0]
        assert [other for other, _, _ in steps] == [metrics] * 3
        assert metrics.step == number + 1
        assert metrics.loss == float(result.loss)
        assert metrics.grad_norm == norm
        assert metrics.samples == 12
        assert metrics.tokens is None
        assert metrics.tokens_per_second is None
        assert metrics.samples_per_second == 12 / metrics.seconds
        assert metrics.drifts == ()
        assert metrics.makespan <= metrics.seconds or number == 0


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b"])
def test_times_agree_with_the_recorder(place: Workers | None, name: str) -> None:
    """A step that is recorded as well has two accounts of its times: sums per rank, and what ran when on one clock."""
    schedule = ps.schedule(name, ranks=3, microbatches=3)
    model = nn.Sequential(*(Nap() for _ in range(schedule.stages)))
    over: list[list[float]] = [[] for _ in range(3)]
    under: list[list[float]] = [[] for _ in range(3)]
    for metrics, result, _ in run(place, model, schedule, 5, {"record": True})[0]:
        timeline = result.timeline
        assert timeline is not None
        makespan = float(timeline.end[timeline.computes].max() - timeline.start[timeline.computes].min())
        assert metrics.makespan == pytest.approx(makespan, abs=1e-6)
        assert metrics.bubble == pytest.approx(1 - float(timeline.busy.sum()) / (3 * makespan), abs=1e-6)
        for number, spent in enumerate(metrics.ranks):
            assert spent.forward + spent.backward == pytest.approx(float(timeline.busy[number]), abs=1e-6)
            assert spent.forward > 3 * NAP * schedule.stages / 3
            assert spent.backward > 3 * NAP * schedule.stages / 3
            assert spent.overlapped == 0
            assert spent.idle == pytest.approx(metrics.makespan - spent.forward - spent.backward)
            idle = {cause: sum(gap.end - gap.start for gap in timeline.gaps(number) if gap.cause == cause) for cause in CAUSES}
            waited = idle["waiting"] + idle["communication"]
            over[number].append(spent.waiting - waited - idle["fill"])
            under[number].append(spent.waiting - waited)
            peers = {gap.rank for gap in timeline.gaps(number) if gap.cause == "waiting"}
            assert peers <= set(spent.waits)
    for number in range(3):
        # A rank that is itself late, to the step or after a send, has waited less than its gaps are long, and on a busy machine time can
        # pass between the readings of the two accounts: not in all steps, though.
        assert min(over[number]) < NAP / 2, over
        assert max(under[number]) > -NAP / 2, under


def train_apart(late: float) -> list[StepMetrics]:
    seen: list[StepMetrics] = []
    pipe = Pipeline(nn.Sequential(Nap(0, 0), Nap(0, 0)), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, on_step=seen.append)
    for _ in range(3):
        time.sleep(late if rank() == 0 else 0)
        pipe.step(BATCH, target=BATCH)
    pipe.flush_metrics()
    return seen


def test_a_rank_that_is_late_to_the_step_is_waited_for(workers: Workers) -> None:
    """Its loading of the batch, say: the others wait for its first message, and the time counts in the step's seconds."""
    for metrics in workers.run(train_apart, (0.3,), ranks=2)[1][1:]:
        assert metrics.seconds > 0.3
        assert metrics.ranks[1].waits[0] > 0.15  # less than all of it, if rank 1 was late too
        assert metrics.ranks[0].waits[1] < metrics.ranks[1].waits[0]


# Delivery ----------------------------------------------------------------------------------------------------------------


def small(**options: Any) -> Pipeline:
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    return Pipeline(layers, schedule="gpipe", microbatches=2, loss_fn=functional.mse_loss, **options)


def deliver_late() -> tuple[list[int], list[int], list[int], list[int]]:
    seen: list[StepMetrics] = []
    pipe = small(on_step=[seen.append])
    counts = []
    pipe.step(BATCH, target=BATCH)
    counts.append(len(seen))
    pipe.step(BATCH, target=BATCH, finalize_gradients=False)
    counts.append(len(seen))
    pipe.eval_step(BATCH, target=BATCH)
    counts.append(len(seen))
    pipe.infer(BATCH)
    pipe.step(BATCH, target=BATCH)
    counts.append(len(seen))
    pipe.flush_metrics()
    pipe.flush_metrics()
    counts.append(len(seen))
    return counts, [metrics.step for metrics in seen], [metrics.grad_norm for metrics in seen], [metrics.samples for metrics in seen]


def test_without_clipping_metrics_come_with_the_next_call() -> None:
    for counts, steps, norms, samples in launch(deliver_late, 2):
        assert counts == [0, 1, 2, 2, 3]
        assert steps == [1, 2, 3]
        assert norms == [None, None, None]
        assert samples == [12, 12, 12]


def compare_first() -> list[int]:
    seen: list[StepMetrics] = []
    pipe = small(on_step=seen.append)
    pipe.parity(BATCH, target=BATCH)
    pipe.step(BATCH, target=BATCH)
    pipe.flush_metrics()
    return [metrics.step for metrics in seen]


def test_a_parity_check_is_no_step() -> None:
    assert launch(compare_first, 2) == [[1], [1]]


def on_first_only() -> int:
    seen: list[StepMetrics] = []
    pipe = small(on_step=seen.append if rank() == 0 else None)
    pipe.step(BATCH, target=BATCH)
    pipe.flush_metrics()
    assert all(len(metrics.ranks) == 2 for metrics in seen)
    return len(seen)


def test_one_rank_may_have_the_callback_alone() -> None:
    assert launch(on_first_only, 2) == [1, 0]


def count_tokens() -> StepMetrics:
    seen: list[StepMetrics] = []
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = Pipeline(
        layers,
        schedule="gpipe",
        microbatches=3,
        loss_fn=nn.CrossEntropyLoss(),
        weight=lambda target: (target != -100).sum(),
        on_step=seen.append,
    )
    target = torch.arange(12) % 6
    target[::4] = -100
    is_last = rank() == 1
    pipe.step(*([] if is_last else [BATCH]), **({"target": target} if is_last else {}))  # each rank is given only what it needs
    pipe.flush_metrics()
    return seen[0]


def test_tokens_are_what_the_weight_counts() -> None:
    first, second = launch(count_tokens, 2)
    assert first == second
    assert first.tokens == 9
    assert first.samples == 12
    assert first.tokens_per_second == 9 / first.seconds


def fail_to_write() -> None:
    def write(metrics: StepMetrics) -> None:
        raise OSError("no space left")

    pipe = small(on_step=write if rank() == 0 else None, deadline=20.0)
    pipe.step(BATCH, target=BATCH)
    with pytest.raises(PipelineError, match=r"on_step failed on rank 0: OSError: no space left"):
        pipe.step(BATCH, target=BATCH)


def test_a_callback_that_raises_fails_the_call_on_every_rank() -> None:
    launch(fail_to_write, 2)


@pytest.mark.parametrize("wrong", [3, "run.csv", [print, None], {print}])
def test_what_cannot_be_called_is_refused(wrong: Any) -> None:
    with pytest.raises(ScheduleError, match=r"on_step must be a function of a step's metrics, or a list of them"):
        small(on_step=wrong)


def without_callback() -> None:
    pipe = small()
    result = pipe.step(BATCH, target=BATCH)
    pipe.flush_metrics()
    executor = pipe._executor(2, True)
    assert not executor.recording
    assert set(executor.begun) == {0}  # nothing was timed
    assert all(share.times is None for share in result._shares)


def test_nothing_is_measured_without_a_callback() -> None:
    launch(without_callback, 2)


# Several machines ---------------------------------------------------------------------------------------------------------


def share_of(machine: int, ahead: int, first: int, last: int) -> ResultShare:
    """The share of a rank that computes from one millisecond to another, on a clock that is this far ahead."""
    times = RankTimes(machine, 7 + ahead, first * 10**6 + ahead, last * 10**6 + ahead, 20 * 10**6, 10**6, 2 * 10**6, 0, {}, None)
    return ResultShare(microbatches=2, sizes=((3, 2),), times=times)


def test_ranks_on_other_machines_are_put_on_one_clock() -> None:
    ahead = 5 * 10**12
    metrics = combine_shares(4, [share_of(1, 0, 1, 11), share_of(2, ahead, 3, 9), share_of(2, ahead, 5, 7)])
    assert metrics.makespan == pytest.approx(0.010)
    assert metrics.bubble == pytest.approx(1 - 9 / 30)
    assert metrics.ranks[1].idle == pytest.approx(0.007)
    assert (metrics.step, metrics.samples, metrics.seconds) == (4, 6, 0.02)
    same = combine_shares(4, [share_of(1, 0, 1, 11), replace(share_of(1, 0, 3, 9)), share_of(1, 0, 5, 7)])
    assert replace(same, step=4) == metrics


# Drift ------------------------------------------------------------------------------------------------------------------


class Throttled(Nap):
    """A layer whose forward becomes slower after some calls."""

    def __init__(self, calls: int) -> None:
        super().__init__(0.002, 0.002)
        self.calls, self.slow_from = 0, calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        time.sleep(0.006 if self.calls > self.slow_from else 0)
        return super().forward(x)


def train_throttled() -> tuple[list[StepMetrics], list[str]]:
    seen: list[StepMetrics] = []
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("penstock.runtime.measure.metrics")
    logger.addHandler(handler)
    try:
        model = nn.Sequential(Nap(0.002, 0.002), Throttled(2 * 50))
        pipe = Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, on_step=seen.append)
        for _ in range(100):
            pipe.step(BATCH, target=BATCH)
        pipe.flush_metrics()
    finally:
        logger.removeHandler(handler)
    return seen, logged


@pytest.mark.slow
def test_a_rank_that_slows_down_is_named_in_the_log_and_to_the_callback(workers: Workers) -> None:
    (seen, logged), (others, silent) = workers.run(train_throttled, (), ranks=2)
    assert seen == others
    drifts = [drift for metrics in seen for drift in metrics.drifts]
    (drift,) = [drift for drift in drifts if (drift.rank, drift.kind) == (1, "forward") and abs(drift.since - 51) <= 4]
    assert drift.after - drift.before == pytest.approx(0.012, rel=0.5)  # a busy machine adds to each
    assert str(drift) in logged
    assert not silent
