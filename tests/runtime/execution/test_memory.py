"""The memory of a rank while it runs: exactly what the simulator counts, and nothing after its last use."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.runtime import Pipeline, launch, rank
from penstock.schedules.registry import algorithms
from penstock.verifier.rules.memory import peak_memory
from runtime.live import Live, count_held, observe_actions, watch

WIDE = 4


def _trains(name: str) -> bool:
    try:
        return ps.schedule(name, ranks=2, microbatches=5).training
    except ScheduleError:
        return False


NAMES = [name for name, each in algorithms().items() if _trains(name) and not each.is_sliced]
SPLIT = ["zb-h1", "zbv", "interleaved-zb", "dualpipe-v"]

Observe = Callable[[int], None]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector, a reference cycle keeps what is in it for good."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(count)))


def observe(pipe: Pipeline, watch_with: Callable[[Any], Observe], training: bool = True) -> None:
    """Make the pipeline's next steps record what they hold after every action."""
    executor = pipe._executor(pipe.microbatches, training)
    observe_actions(executor, watch_with(executor))


def run_observed(name: str, watch_with: Callable[[Any], Observe], microbatches: int = 5, ranks: int = 2) -> list[Program]:
    schedule = ps.schedule(name, ranks=ranks, microbatches=microbatches)
    model, x = layers(schedule.stages), torch.randn(2 * microbatches, WIDE)

    def train() -> Program:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        observe(pipe, watch_with)
        pipe.step(x, target=x)
        return pipe.program()

    return launch(train, ranks)


# Counts ---------------------------------------------------------------------------------------------------------------


def counts_by_order(program: Program, of: int) -> list[dict[str, int]]:
    """What a rank holds after each action, computed only from the order of its actions."""
    contexts = stashes = received = 0
    expected = []
    for action in program[of]:
        for part in action.parts:
            contexts += {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(part.kind, 0)
            stashes += {Kind.I: 1, Kind.W: -1}.get(part.kind, 0)
            received += {Kind.RECV_F: 1, Kind.RECV_B: 1}.get(part.kind, 0) - _remote_inputs(program, of, part)
        expected.append({"contexts": contexts, "stashes": stashes, "received": received})
    return expected


def _remote_inputs(program: Program, of: int, action: Action) -> int:
    """How many messages an action consumes."""
    if action.kind not in (Kind.F, Kind.B, Kind.I):
        return 0
    graph, microbatch = program.graph, action.microbatch or 0
    sources = graph.inputs_of(action.stage) if action.kind is Kind.F else graph.outputs_of(action.stage)
    return sum(program.placement.rank_of(source, microbatch) != of for source in sources)


@pytest.mark.parametrize("name", NAMES)
def test_held_memory_follows_the_order_at_every_point(name: str) -> None:
    found: dict[int, list[dict[str, int]]] = {0: [], 1: []}
    programs = run_observed(name, lambda executor: lambda at: found[rank()].append(count_held(executor)))
    for of, program in enumerate(programs):
        assert found[of] == counts_by_order(program, of)
        assert found[of][-1] == {"contexts": 0, "stashes": 0, "received": 0}


@pytest.mark.parametrize("name", NAMES)
def test_held_memory_equals_the_simulator_s_count_at_every_point(name: str) -> None:
    found: dict[int, list[dict[str, int]]] = {0: [], 1: []}
    programs = run_observed(name, lambda executor: lambda at: found[rank()].append(count_held(executor)))
    timeline = ps.simulate(programs[0], ps.Costs(activation=1.0, weight_stash=1.0, output=1.0))
    for of, program in enumerate(programs):
        curve = timeline.memory(of)
        for what, category, per_part in (
            ("contexts", "activations", lambda part: part.kind in (Kind.F, Kind.B, Kind.I)),
            ("stashes", "weight stash", lambda part: part.kind in (Kind.I, Kind.W)),
            ("received", "receive buffers", lambda part: (part.kind in (Kind.RECV_F, Kind.RECV_B)) + _remote_inputs(program, of, part)),  # noqa: B023
        ):
            levels = np.concatenate(([0.0], curve.held[category]))
            levels = np.concatenate(([0.0], levels[1:][np.diff(levels) != 0]))
            changes = np.cumsum([sum(per_part(part) for part in action.parts) for action in program[of]])
            assert [held[what] for held in found[of]] == levels[changes].tolist(), what


@pytest.mark.parametrize("name", NAMES)
def test_peaks_equal_the_verifier_s(name: str) -> None:
    """Of contexts in which no forward shares its place with a backward: a group that holds both counts its forward first."""
    found: Counter[int] = Counter()

    def watch_with(executor: Any) -> Observe:
        def note(at: int) -> None:
            during = count_held(executor)["contexts"] + sum(part.kind in (Kind.B, Kind.I) for part in executor.actions[at].parts)
            found[rank()] = max(found[rank()], during)

        return note

    programs = run_observed(name, watch_with)
    assert [float(found[of]) for of in range(2)] == peak_memory(programs[0], ps.Costs(activation=1.0))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_messages_in_flight_stay_within_the_proved_bound(name: str, parallel: bool) -> None:
    schedule = ps.schedule(name, ranks=2, microbatches=5)
    model, x = layers(schedule.stages), torch.randn(10, WIDE)
    over: list[str] = []
    seen: Counter[tuple[int, int, Kind]] = Counter()

    def watch_with(executor: Any) -> Observe:
        bounds = executor.program.buffers.channels

        def note(at: int) -> None:
            for source, target, kind in bounds:
                what = "activations" if kind is Kind.SEND_F else "gradients"
                under_way = len(executor.group.channel((source, target, what)).messages)
                seen[source, target, kind] = max(seen[source, target, kind], under_way)
                if under_way > bounds[source, target, kind]:
                    over.append(f"{under_way} of {bounds[source, target, kind]} on {source} -> {target}")

        return note

    def train() -> None:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=functional.mse_loss)
        observe(pipe, watch_with)
        pipe.step(x, target=x)

    launch(train, 2, parallel=parallel)
    assert not over
    assert seen
    assert parallel or all(seen.values()), "something was under way in every channel"


# Last uses ------------------------------------------------------------------------------------------------------------


class Traced(nn.Module):
    """Notes the memory of what is inside: the weight's input, and the output, which only the function after it needs."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage, self.map = stage, nn.Linear(WIDE, WIDE)
        self.inputs: list[StorageWeakRef] = []
        self.outputs: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        made = torch.sigmoid(self.map(doubled))
        self.inputs.append(watch(doubled))
        self.outputs.append(watch(made))
        return made


def _forwards(program: Program, stage: int) -> list[int]:
    """The order in which a stage's microbatches run forward."""
    every = (part for row in program for action in row for part in action.parts if part.kind is Kind.F and part.stage == stage)
    return [part.microbatch or 0 for part in every]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", *SPLIT])
def test_activations_are_freed_by_their_backward(name: str) -> None:
    """What a full backward needs goes with it; of a split one, what the weights need stays until theirs."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    parts = [Traced(stage) for stage in range(schedule.stages)]
    x = torch.randn(8, WIDE)
    wrong: list[str] = []
    checked: Counter[str] = Counter()

    def watch_with(executor: Any) -> Observe:
        order = {stage: _forwards(executor.program, stage) for stage in range(schedule.stages)}

        def look(at: int) -> None:
            for part in executor.actions[at].parts:
                if part.kind not in (Kind.F, Kind.B, Kind.I, Kind.W):
                    continue
                run = order[part.stage].index(part.microbatch)
                gone = parts[part.stage].inputs[run].expired(), parts[part.stage].outputs[run].expired()
                wanted = {Kind.F: (False, False), Kind.I: (False, True), Kind.B: (True, True), Kind.W: (True, True)}[part.kind]
                checked[part.kind.name] += 1
                if gone != wanted:
                    wrong.append(f"{part}: gone {gone}, not {wanted}")

        return look

    def train() -> None:
        pipe = Pipeline(parts, schedule, loss_fn=functional.mse_loss)
        observe(pipe, watch_with)
        pipe.step(x, target=x)

    launch(train, 2)
    assert not wrong
    assert checked["F"] == 4 * schedule.stages
    assert (checked["W"] > 0) == (name in SPLIT)


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_alive_after_a_step(name: str) -> None:
    """Not even until the garbage collector comes: the tensors that are left are the gradients, step after step."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model, x = layers(schedule.stages), torch.randn(8, WIDE)
    model(x).sum().backward()  # gradients are there from the start

    def train() -> list[list[int]]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        left = []
        with Live() as live:
            live.forget(x, *model.parameters(), *(p.grad for p in model.parameters()))
            for _ in range(3):
                pipe.step(x, target=x)
                pipe.gather("all are through", None)
                left.append(live.sizes)
        return left

    assert launch(train, 2) == [[[]] * 3] * 2


def test_nothing_is_alive_after_a_failed_step() -> None:
    """Once the exception is gone, whose frames hold what they were at, and torch's engine has run again, which drops its queue then."""
    schedule = ps.schedule("zbv", ranks=2, microbatches=4)
    model, x = layers(schedule.stages), torch.randn(8, WIDE)
    model(x).sum().backward()

    def fail(grad: Tensor) -> None:
        raise ValueError("no")

    def train() -> list[int]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        with Live() as live:
            live.forget(x, *model.parameters(), *(p.grad for p in model.parameters()))
            handle = model[2][0].bias.register_hook(fail)
            with pytest.raises(PipelineError, match=r"2I0 .*no"):
                pipe.step(x, target=x)
            handle.remove()
            gc.collect()
            assert live.bytes < 4 * x.nbytes
            pipe.step(x, target=x)
            pipe.gather("all are through", None)
            return live.sizes

    assert launch(train, 2) == [[], []]


# Rows of the comparison with torch ------------------------------------------------------------------------------------


def test_row_18_no_receive_buffers_for_all_microbatches() -> None:
    """16 microbatches, and a rank of 1F1B never holds more than its few received messages, none between steps."""
    most: Counter[int] = Counter()
    left: dict[int, Any] = {}

    def watch_with(executor: Any) -> Observe:
        left[rank()] = executor

        def note(at: int) -> None:
            most[rank()] = max(most[rank()], count_held(executor)["received"])

        return note

    run_observed("1f1b", watch_with, microbatches=16, ranks=4)
    assert all(0 < most[of] <= 2 for of in range(4)), most
    for executor in left.values():
        assert {repr(cell) for cell in executor.links.registers.values} == {"empty"}
        assert all(not inbox.channel.messages and not inbox.channel.posted for inbox in executor.links.inboxes.values())


@pytest.mark.usefixtures("no_collector")
def test_row_18_sent_values_are_not_held_to_the_end_of_the_step() -> None:
    """The activation that the first rank sent for microbatch 0 goes with its backward, while others are yet to be sent."""
    parts = [Traced(0), Traced(1)]
    alive: list[int] = []

    def watch_with(executor: Any) -> Observe:
        return lambda at: alive.append(sum(not sent.expired() for sent in parts[0].outputs)) if rank() == 0 else None

    schedule = ps.schedule("1f1b", ranks=2, microbatches=12)
    x = torch.randn(12, WIDE)

    def train() -> None:
        pipe = Pipeline(parts, schedule, loss_fn=functional.mse_loss)
        observe(pipe, watch_with)
        pipe.step(x, target=x)

    launch(train, 2)
    assert len(parts[0].outputs) == 12
    assert max(alive) == 2  # 1F1B's warm-up and the one under way
    assert alive[-1] == 0


class Graphless(nn.Module):
    """Says whether a graph is built, and what is left of earlier outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDE, WIDE)
        self.graphs: list[bool] = []
        self.outputs: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(not output.expired() for output in self.outputs))
        made = torch.tanh(self.map(x))
        self.graphs.append(made.requires_grad or made.grad_fn is not None)
        self.outputs.append(watch(made))
        return made


@pytest.mark.usefixtures("no_collector")
def test_row_19_evaluation_builds_no_graph_and_keeps_no_outputs() -> None:
    parts = [Graphless() for _ in range(4)]
    schedule = ps.schedule("zbv", ranks=2, microbatches=8)
    x = torch.randn(8, WIDE)

    def evaluate() -> Any:
        return Pipeline(parts, schedule, loss_fn=functional.mse_loss).eval_step(x, target=x)

    for result in launch(evaluate, 2):
        assert result.outputs is None
        assert len(result.losses) == 8
        assert not result.loss.requires_grad
    assert [len(part.graphs) for part in parts] == [8] * 4
    assert not any(graph for part in parts for graph in part.graphs)
    assert max(parts[-1].alive) <= 1, "an output goes once its loss is there"
    assert all(output.expired() for part in parts for output in part.outputs)


def test_row_19_outputs_are_kept_on_request() -> None:
    parts = [Graphless() for _ in range(4)]
    x = torch.randn(8, WIDE)
    outputs = launch(lambda: Pipeline(parts, schedule="zbv", microbatches=8, loss_fn=functional.mse_loss).infer(x), 2)
    wanted = nn.Sequential(*parts)(x)
    for output in outputs:
        assert not output.requires_grad
        torch.testing.assert_close(output, wanted.detach())


def test_a_loss_keeps_only_its_value() -> None:
    """Whatever the loss function had room for when it made it."""
    model, x = layers(1), torch.randn(8, WIDE)
    losses = Pipeline([model], schedule="gpipe", microbatches=4, loss_fn=functional.mse_loss).step(x, target=x).losses
    assert [loss.untyped_storage().nbytes() for loss in losses] == [4] * 4
