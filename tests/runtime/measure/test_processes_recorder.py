"""Recorded timelines of steps, with all ranks on one clock, on processes and virtual ranks."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.cli.main import main
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.runtime import Pipeline, StepResult, launch, rank
from penstock.runtime.launch.workers import Workers
from penstock.runtime.measure import recorder
from penstock.runtime.measure.recorder import StepTimes, build_timeline, clock_offsets
from penstock.runtime.transport.current_group import get_group
from penstock.simulator.timeline import Timeline
from penstock.text.units import Units
from runtime.models import blocks

BATCH = torch.randn(12, 6)
NAP = 0.004


def recorded(model: nn.Module, schedule: Any) -> StepResult:
    pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, record=True)
    pipe.step(BATCH, target=BATCH)
    return pipe.step(BATCH, target=BATCH)


def run(workers: Workers | None, schedule: ps.Schedule, model: nn.Module | None = None, **options: Any) -> Timeline:
    """Return the timeline of the second step, after checking that all ranks agree on it."""
    model = blocks(schedule.stages) if model is None else model
    if workers is None:
        found = [each.timeline for each in launch(recorded, schedule.ranks, args=(model, schedule), **options)]
    else:
        found = [each.timeline for each in workers.run(recorded, (model, schedule), ranks=schedule.ranks)]
    assert found[0] is not None
    for other in found[1:]:
        assert other is not None
        for name in ("start", "end", "depart", "arrive"):
            assert np.array_equal(getattr(other, name), getattr(found[0], name))
    return found[0]


def assert_sound(found: Timeline, schedule: ps.Schedule) -> None:
    """Check that every action of the program occurs once, in order, after its dependencies, and takes time."""
    assert found.source == "measured"
    assert found.table == ps.lower(schedule)
    offsets = found.table.rows.group_offsets.tolist()
    assert len(found.start) == len(found.end) == offsets[-1]
    assert found.start.min() == 0
    for low, high in itertools.pairwise(offsets):
        assert (found.start[low:high] <= found.end[low:high]).all()
        assert (found.end[low : high - 1] <= found.start[low + 1 : high]).all()
    spans = {str(span.action): span for each in range(found.ranks) for span in found.spans(each)}
    assert len(spans) == sum(len(row) for row in schedule)
    assert all(span.end > span.start for span in spans.values())
    makers = {str(part): span for span in spans.values() for part in span.action.parts}
    messages = list(found.transfers())
    assert len(messages) == len(found.table.links.data.before)
    for message in messages:
        made, used = next(makers[name] for name in _makers(message.sent) if name in makers), makers[str(message.used)]
        assert made.end <= message.start <= message.end
        assert message.end <= (used.start if message.used == used.action.parts[0] else used.end)  # later parts wait for themselves
    _assert_costs(found)


def _makers(sent: ps.Action) -> list[str]:
    """Return the compute actions that may produce the message of a send."""
    return [f"{sent.stage}{kind}{sent.microbatch}" for kind in ("F" if sent.kind is Kind.SEND_F else "BI")]


def _assert_costs(found: Timeline) -> None:
    assert found.makespan == found.end.max() > 0
    assert 0 <= found.bubble < 1
    kinds = {part.kind for row in found.table for action in row if not action.sub_actions for part in action.parts}
    for kind in kinds & {Kind.F, Kind.B, Kind.I, Kind.W}:
        assert max(found.costs.per_stage(kind.name.lower(), found.table.stages)) > 0
    assert found.costs.latency >= 0


SCHEDULES = [("gpipe", 2), ("1f1b", 4), ("interleaved-1f1b", 2), ("zbv", 2), ("dualpipe-v", 2), ("chimera", 4), ("looped-bfs", 2)]


@pytest.mark.parametrize(("name", "ranks"), SCHEDULES)
def test_timeline_of_processes(workers: Workers, name: str, ranks: int) -> None:
    schedule = ps.schedule(name, ranks=ranks, microbatches=4)
    assert_sound(run(workers, schedule), schedule)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("interleaved-zb", 2), ("dualpipe-v", 2)])
def test_timeline_of_virtual_ranks(name: str, ranks: int, parallel: bool) -> None:
    schedule = ps.schedule(name, ranks=ranks, microbatches=4)
    if not parallel:
        assert_sound(run(None, schedule), schedule)
        return
    models = [blocks(schedule.stages) for _ in range(ranks)]
    found = launch(lambda: recorded(models[rank()], schedule).timeline, ranks, parallel=True)[0]
    assert_sound(found, schedule)


def test_edges_that_skip_stages_are_recorded(workers: Workers) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(6, 6)

        def forward(self, *given: Tensor) -> Tensor:
            return self.map(sum(given))

    schedule = ps.schedule("1f1b", ranks=4, microbatches=3, graph=StageGraph.chain(4, [(0, 2), (0, 3), (1, 3)]))
    assert_sound(run(workers, schedule, nn.ModuleList(Sum() for _ in range(4))), schedule)


def test_evaluation_is_recorded_too(workers: Workers) -> None:
    model = blocks(4)

    def evaluate() -> tuple[Timeline, ps.Program]:
        pipe = Pipeline(model, schedule="zbv", microbatches=4, loss_fn=functional.mse_loss, record=True)
        return pipe.eval_step(BATCH, target=BATCH).timeline, pipe.program(4, training=False)

    found, program = workers.run(evaluate, ranks=2)[0]
    assert found.table == program
    assert {span.action.kind for each in range(2) for span in found.spans(each)} == {Kind.F}
    assert sum(len(found.spans(each)) for each in range(2)) == 4 * 4


def test_recording_can_be_switched_at_any_time(workers: Workers) -> None:
    model = blocks(2)

    def train() -> list[bool]:
        pipe = Pipeline(model, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss)
        found = []
        for pipe.record in (False, True, False, True):
            found.append(pipe.step(BATCH, target=BATCH).timeline is not None)
        return found

    assert workers.run(train, ranks=2) == [[False, True, False, True]] * 2


def test_each_step_has_its_own_times(workers: Workers) -> None:
    """A result has the timeline of its own step, even if it is read after later steps."""
    model = Naps(2, forward=1)

    def train() -> list[float]:
        pipe = Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, record=True)
        results = []
        for factor in (10, 0):
            for stage in model:
                stage.forward_nap = NAP * factor
            results.append(pipe.step(BATCH, target=BATCH))
        return [max(result.timeline.costs.per_stage("f", 2)) for result in results if result.timeline is not None]

    slow, quick = workers.run(train, ranks=2)[0]
    assert slow >= 10 * NAP
    assert quick != slow


# What takes how long --------------------------------------------------------------------------------------------------


class Nap(nn.Module):
    """A stage whose forward and backward take at least these times, in seconds."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.forward_nap, self.backward_nap = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.forward_nap)
        made = self.map(x)
        if self.backward_nap:
            made.register_hook(lambda grad: time.sleep(self.backward_nap))
        return made


class Naps(nn.Sequential):
    def __init__(self, stages: int, forward: float = 0.0, backward: float = 0.0) -> None:
        super().__init__(*(Nap(NAP * forward * (stage + 1), NAP * backward * (stage + 1)) for stage in range(stages)))


def test_costs_are_those_of_the_stages(workers: Workers) -> None:
    """Measured costs are those of each stage without waiting: a forward starts when its input has arrived."""
    schedule = ps.schedule("1f1b", ranks=4, microbatches=3)
    found = run(workers, schedule, Naps(4, forward=1, backward=2))
    for stage, (forward, backward) in enumerate(zip(found.costs.per_stage("f", 4), found.costs.per_stage("b", 4), strict=True)):
        assert forward >= NAP * (stage + 1)
        assert backward >= 2 * NAP * (stage + 1)
    first = {str(span.action): span for span in found.spans(3)}["3F0"]
    assert first.start >= NAP * (1 + 2 + 3)
    assert found.busy.sum() >= 3 * NAP * 3 * (1 + 2 + 3 + 4)
    again = ps.simulate(found.table, found.costs)
    assert again.makespan > 3 * 3 * NAP * 4


@pytest.mark.parametrize("processes", [False, True])
def test_actions_that_run_together_count_all_their_parts(workers: Workers, processes: bool) -> None:
    """In an overlapped pair whose backward waits for its gradient, the wait does not count, but the forward does."""
    schedule = ps.schedule("dualpipe-v", ranks=2, microbatches=6)
    found = run(workers if processes else None, schedule, Naps(4, forward=1, backward=1))
    together = [span for each in range(2) for span in found.spans(each) if span.action.sub_actions]
    assert together
    for span in together:
        assert span.end - span.start >= NAP * sum(part.stage + 1 for part in span.action.parts if part.kind is not Kind.W)


# Files and pictures ---------------------------------------------------------------------------------------------------


def test_saved_and_compared(workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved timeline loads unchanged, and `penstock compare` compares it with the prediction."""
    schedule = ps.schedule("zbv", ranks=2, microbatches=4)
    found = run(workers, schedule)
    measured, predicted = tmp_path / "measured.json", tmp_path / "predicted.json"
    found.save(measured)
    ps.simulate(ps.lower(schedule), ps.Costs()).save(predicted)
    loaded = Timeline.load(measured)
    assert loaded.source == "measured"
    assert loaded.table == found.table
    assert loaded.costs == found.costs
    for name in ("start", "end", "depart", "arrive"):
        assert np.array_equal(getattr(loaded, name), getattr(found, name))
    assert loaded.units == found.units == Units("s")
    assert main(["compare", str(predicted), str(measured)]) == 2
    assert "the unit of the predicted times is not known" in capsys.readouterr().err
    assert main(["compare", str(predicted), str(measured), "--scale", "auto", "--json"]) == 0
    (difference,) = json.loads(capsys.readouterr().out)["differences"]
    assert difference["makespan"]["measured"] == pytest.approx(found.makespan)
    assert len(difference["actions"]) == sum(len(row) for row in schedule)
    assert main(["compare", str(predicted), str(measured), "--scale", "auto"]) == 0
    assert "where they part" in capsys.readouterr().out
    for suffix in ("svg", "trace.json", "html"):
        found.save(tmp_path / f"measured.{suffix}")
        assert (tmp_path / f"measured.{suffix}").stat().st_size > 1000


def test_gaps_and_critical_path_of_a_measured_timeline(workers: Workers) -> None:
    """Every idle gap has a cause, work and idle time add up to the makespan, and the critical path spans it."""
    schedule = ps.schedule("1f1b", ranks=4, microbatches=3)
    found = run(workers, schedule, Naps(4, forward=1))
    for each in range(4):
        idle = sum(gap.end - gap.start for gap in found.gaps(each))
        assert idle + found.busy[each] == pytest.approx(found.makespan)
    path = found.critical_path
    last = int(np.argmax(found.finished))
    assert (path[-1].rank, path[-1].action, path[-1].end) == (last, found.spans(last)[-1].action, found.spans(last)[-1].end)
    assert all(one.start <= other.end for one, other in itertools.pairwise(path))


# Clocks ---------------------------------------------------------------------------------------------------------------


def _offsets(monkeypatch: pytest.MonkeyPatch, ahead: list[int], machines: list[str]) -> list[list[int]]:
    """A group whose ranks read clocks of their own; every reading advances time by one."""
    ticks = itertools.count()
    monkeypatch.setattr(recorder, "clock", lambda: next(ticks) + ahead[rank()])
    monkeypatch.setattr(recorder, "machine_id", lambda: machines[rank()])

    def compare() -> list[int]:
        group, mine = get_group()
        return clock_offsets(group, mine, 10.0)

    return launch(compare, len(ahead))


def test_clocks_of_other_machines_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets are exact to within the duration of a gather, here a few readings."""
    ahead = [7_000, 7_000, -5_000_000, 90_000_000_000]
    found = _offsets(monkeypatch, ahead, ["a", "a", "b", "c"])
    assert all(theirs == found[0] for theirs in found)
    assert found[0][:2] == [0, 0]
    for theirs, true in zip(found[0], ahead, strict=True):
        assert abs(theirs - (true - ahead[0])) <= 2 * len(ahead)


def test_processes_of_a_machine_share_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _offsets(monkeypatch, [0, 123, 456], ["a", "a", "a"]) == [[0, 0, 0]] * 3


def test_machine_id_is_the_same_in_all_processes(workers: Workers) -> None:
    assert set(workers.run(recorder.machine_id)) == {recorder.machine_id()}


def test_processes_share_one_clock(workers: Workers) -> None:
    """Readings in other processes lie between two readings here."""
    before = recorder.clock()
    found = workers.run(recorder.clock)
    after = recorder.clock()
    assert all(before < reading < after for reading in found)


def _records(found: Timeline, ahead: list[int]) -> list[StepTimes]:
    """Turn a timeline into the times that ranks with these clocks would record, in nanoseconds, with a wait for every message."""
    bounds = found.table.rows.group_offsets.tolist()
    times = {name: np.rint(getattr(found, name) * 1e6).astype(np.int64) for name in ("start", "end", "depart", "arrive")}
    records = []
    for mine, (low, high) in enumerate(itertools.pairwise(bounds)):
        received: dict[Any, list[tuple[int, int, int]]] = {}
        for message, (source, target, kind) in enumerate(found.messages.channels[at] for at in found.messages.channel.tolist()):
            if target == mine:
                what = "activations" if kind is Kind.SEND_F else "gradients"
                sent, there = int(times["depart"][message]) + ahead[source], int(times["arrive"][message]) + ahead[mine]
                received.setdefault((source, target, what), []).append((sent, min(sent - ahead[source] + ahead[mine], there), there))
        begun, ended = ((times[name][low:high] + ahead[mine]).tolist() for name in ("start", "end"))
        records.append(StepTimes(begun, ended, received))
    return records


@pytest.mark.parametrize("name", ["1f1b", "chimera", "interleaved-zb"])
def test_one_clock_for_all_ranks(name: str) -> None:
    """Times recorded by clocks that differ give the original timeline."""
    program = ps.lower(ps.schedule(name, ranks=4, microbatches=6))
    wanted = ps.simulate(program, ps.Costs(f=3.0, i=4.0, w=2.0, latency=0.5))
    ahead = [10**15, 10**15 + 5_000_000_000, 10**15 - 77, 0]
    found = build_timeline(program, _records(wanted, ahead), ahead)
    for column in ("start", "end", "depart", "arrive"):
        assert np.allclose(getattr(found, column), getattr(wanted, column) * 1e-3, rtol=0, atol=1e-8), column
    for kind in ("f", "i", "w"):
        if wanted.table.rows.is_kind(Kind[kind.upper()]).any():
            assert found.costs.per_stage(kind, program.stages) == pytest.approx(
                [x * 1e-3 for x in wanted.costs.per_stage(kind, program.stages)], rel=1e-5
            )
    assert found.costs.latency == pytest.approx(0.5e-3, rel=1e-5)
    assert found.makespan == pytest.approx(wanted.makespan * 1e-3, rel=1e-6)
    assert found.bubble == pytest.approx(wanted.bubble, rel=1e-5)


def test_message_without_a_wait_takes_as_long_as_the_fastest() -> None:
    """The arrival of an early message is not observed, but it is no later than the receive."""
    program = ps.lower(ps.schedule("1f1b", ranks=2, microbatches=2))
    simulated = ps.simulate(program, ps.Costs(latency=0.25))
    first, second = _records(simulated, [0, 0])
    route = (0, 1, "activations")
    (sent, asked, there), (later, _, _) = second.received[route]
    late = later + 40 * (there - sent)
    changed = replace(second, received={**second.received, route: [(sent, asked, there), (later, late, late)]})
    found = build_timeline(program, [first, changed], [0, 0])
    times = [(message.start, message.end) for message in found.transfers() if (message.source, message.kind) == (0, Kind.SEND_F)]
    assert [end - start for start, end in times] == pytest.approx([0.25e-3] * 2, rel=1e-6)


# Profiler -------------------------------------------------------------------------------------------------------------


def _profiled(model: nn.Module, schedule: Any) -> tuple[dict[str, int], list[str]]:
    pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pipe.step(BATCH, target=BATCH)
    return {event.key: event.count for event in profiler.key_averages()}, [f"penstock::{action}" for action in pipe.program()[pipe.rank]]


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("name", ["zb-h1", "dualpipe-v"])
def test_profiler_shows_each_action(workers: Workers, name: str, processes: bool) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=6)
    arguments = (blocks(schedule.stages), schedule)
    found = workers.run(_profiled, arguments, ranks=2) if processes else [_on_rank_0(*arguments)]
    for counts, actions in found:
        assert len(actions) > 12
        assert [counts.get(action) for action in actions] == [1] * len(actions)


def _on_rank_0(model: nn.Module, schedule: ps.Schedule) -> tuple[dict[str, int], list[str]]:
    """The profiler records only the thread that it was started on."""

    def train() -> Any:
        if rank() == 0:
            return _profiled(model, schedule)
        return Pipeline(model, schedule, loss_fn=functional.mse_loss).step(BATCH, target=BATCH)

    return launch(train, 2)[0]
