"""Recomputed stages run as many forwards and hold as much memory as the simulator predicts, with the same numbers."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.ir.kind import Kind
from penstock.planner.job.profile_costs import ProfileCosts
from penstock.planner.partition.stage_costs import stage_costs
from penstock.runtime import Pipeline, StageOutput, add_loss, add_metric, launch
from penstock.runtime.measure.profile import profile
from runtime.live import Live, observe_actions
from runtime.models import Block, Numbers, assert_equal, assert_same, blocks, by_loop, count_forwards, gradients, loop_step

FLAGS = {"1f1b": (True, False), "gpipe": (True, True), "zb-h1": (False, True), "zbv": (True, False, False, True), "dualpipe-v": (True,) * 4}
COUNT = 4


@pytest.mark.parametrize("name", FLAGS)
def test_forwards_are_as_many_as_the_simulator_counts(name):
    """With forwards of cost 1 and free backwards, a rank's busy time is its number of forwards."""
    schedule, flags = ps.schedule(name, ranks=2, microbatches=COUNT), FLAGS[name]
    per_stage = 2
    profiled = ps.Profile([ps.Layer(f=1, i=0, w=0)] * (per_stage * schedule.stages))
    costs = stage_costs(profiled, [per_stage] * schedule.stages, schedule.placement, flags)
    timeline = ps.simulate(ps.lower(schedule), costs)
    model, x = blocks(per_stage * schedule.stages), torch.randn(8, 6)
    runs = count_forwards(model)

    def train() -> list[int]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, recompute=flags)
        pipe.step(x, target=x)
        return [each for stage in pipe.stages for each in runs[per_stage * stage : per_stage * (stage + 1)]]

    for of, found in enumerate(launch(train, 2)):
        busy = sum(
            span.end - span.start
            for span in timeline.spans(of)
            if span.action.kind not in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
        )
        assert sum(found) == pytest.approx(busy)


@pytest.mark.parametrize("name", FLAGS)
def test_numbers_equal_those_without_recompute(name):
    schedule, x = ps.schedule(name, ranks=2, microbatches=COUNT), torch.randn(8, 6)
    model = nn.Sequential(*(nn.Sequential(Block(6), nn.Dropout(0.4)) for _ in range(2 * schedule.stages)))
    found = [step(model, schedule, x, seed=7, recompute=flags) for flags in (False, FLAGS[name], True)]
    for other in found[1:]:
        assert_same(other, found[0])


def step(model: nn.Module, schedule: Any, x: Tensor, **options: Any) -> Numbers:
    model = copy.deepcopy(model)
    results = launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss, **options).step(x, target=x.sin()), schedule.ranks)
    return Numbers(results[0].loss, results[0].losses, gradients(model))


class Aside(nn.Module):
    """A layer with a side loss and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        made = self.map(x)
        add_loss(made.square().mean())
        add_metric("largest", made.abs().max())
        return StageOutput(made, side_loss=made.abs().mean())


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_side_losses_and_metrics_count_once(name):
    schedule, x = ps.schedule(name, ranks=2, microbatches=COUNT), torch.randn(8, 6)
    parts = [Aside(), Aside()]

    def numbers(again: bool) -> tuple[Numbers, Any]:
        model = copy.deepcopy(nn.ModuleList(parts))
        results = launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss, recompute=again).step(x, target=x), 2)
        return Numbers(results[0].loss, results[0].losses, gradients(model)), results[0].metrics

    (found, metrics), (wanted, figures) = numbers(True), numbers(False)
    assert_same(found, wanted)
    assert metrics == figures
    assert len(metrics["largest"]) == 2 * COUNT


def test_outputs_and_evaluation_equal_those_without_recompute():
    model, x = blocks(4), torch.randn(8, 6)

    def run() -> Any:
        pipe = Pipeline(model, schedule="1f1b", microbatches=COUNT, loss_fn=functional.mse_loss, recompute=True)
        return pipe.step(x, target=x, outputs=True).outputs, pipe.eval_step(x, target=x).loss, pipe.infer(x)

    wanted = torch.cat([model(piece) for piece in x.chunk(COUNT)])
    for outputs, loss, inferred in launch(run, 2):
        torch.testing.assert_close(outputs, wanted.detach())
        torch.testing.assert_close(inferred, wanted.detach())
        torch.testing.assert_close(loss, functional.mse_loss(wanted, x).detach())


SCALARS = 16
"""Bytes of the loss and of the gradient that its backward starts from, with their allocation granularity."""


def product(output: Tensor, target: Tensor) -> Tensor:
    """A loss that holds its two inputs; torch's own returns a scalar in the storage of all elements that it averages."""
    return (output * target).mean()


@pytest.mark.parametrize("flags", [(False, False, False), (True, True, True), (True, False, True), (False, True, False)])
def test_a_forward_keeps_what_the_plan_predicts(flags):
    """Every tensor is watched: a stage holds the profile's activations, or if recomputed its input and output."""
    wide, rows = 64, 16
    model = nn.Sequential(*(nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)) for _ in range(6)))
    x, y = torch.randn(rows * COUNT, wide), torch.randn(rows * COUNT, wide)
    schedule = ps.schedule("gpipe", ranks=3, microbatches=COUNT)
    measured = profile(model, x[:rows], loss_fn=product, target=y[:rows], warmup=0, repeats=1, optimizer=None)
    costs = stage_costs(measured, [2, 2, 2], schedule.placement, flags)

    def train() -> list[int]:
        pipe = Pipeline(model, schedule, loss_fn=product, recompute=flags)
        executor = pipe._executor(COUNT, True)
        held = [0]
        pipe.step(x, target=y)  # the first one also looks whether stages change their inputs
        for parameter in pipe.parameters():
            parameter.grad = None
        with Live() as live:
            pieces = [piece.clone() for piece in x.chunk(COUNT)]
            targets = [piece.clone() for piece in y.chunk(COUNT)]
            live.forget(*pieces, *targets, *model.parameters())

            def look(at: int) -> None:
                if executor.actions[at].kind is Kind.F:
                    held.append(live.bytes)

            observe_actions(executor, look)
            pipe.step_list(pieces, targets)
        return [after - before for before, after in pairwise(held)]

    size = rows * wide * 4
    for stage, kept in enumerate(launch(train, 3)):
        # What a stage is given was made elsewhere, and a loss that is not recomputed holds a target that was there before.
        elsewhere = size + (size if stage == 2 and not flags[stage] else 0)
        wanted = costs.of_stage("activation", stage) - elsewhere
        for each in kept:
            assert abs(each - wanted) <= SCALARS, (stage, each, wanted)
    held = [costs.of_stage("activation", stage) for stage in range(3)]
    assert all(held[stage] <= 2 * size for stage in range(3) if flags[stage])
    assert all(held[stage] > 10 * size for stage in range(3) if not flags[stage])


# State ------------------------------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Counts its forwards in every kind of state, and its output depends on the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.runs, self.plain, self.history, self.seen = nn.Linear(6, 6), 0, torch.zeros(()), [], {}
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = 1.0
        self.runs += 1
        self.plain += 1
        self.total = self.total + x.detach().mean()
        self.history.append(float(x.detach().mean()))
        self.seen[self.runs] = self.scale
        self.scale *= 0.9
        return torch.tanh(self.map(x)) * (self.runs + self.plain * 0.5 + self.total + len(self.history) + len(self.seen)) * self.scale


class Averaged(nn.Module):
    """Saves a buffer for its backward just after changing it in a way that autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.lerp_(x.detach().mean(0), 0.3)
        return torch.tanh(self.map(x)) * self.mean


def old_spectral_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.spectral_norm(nn.Linear(6, 6))


STATEFUL = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "cumulative batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)),
    "batch norm of which some is frozen": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.BatchNorm1d(6)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "spectral norm by hooks": old_spectral_norm,
    "counters": Counter,
    "a buffer that the backward reads": Averaged,
}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return buffers and attributes by name."""
    found: dict[str, Any] = dict(model.named_buffers())
    for prefix, part in model.named_modules():
        if isinstance(part, Counter):
            found |= {f"{prefix}.{name}": vars(part)[name] for name in ("runs", "plain", "history", "seen", "scale")}
    return found


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_state_equals_that_of_one_forward(kind, name):
    """Two steps with recomputed stages equal the microbatch loop, in their numbers and in the state of the modules."""
    schedule, x = ps.schedule(name, ranks=2, microbatches=COUNT), torch.randn(16, 6).double()
    model = nn.Sequential(*(STATEFUL[kind]() for _ in range(schedule.stages))).double()
    again = copy.deepcopy(model)

    def train() -> list[Any]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, recompute=True)
        return [pipe.step(x, target=x.sin()).loss for _ in range(2)]

    losses = launch(train, 2)[0]
    pieces = list(zip(x.chunk(COUNT), x.sin().chunk(COUNT), strict=True))
    wanted = [loop_step(again, pieces, [1 / COUNT] * COUNT, functional.mse_loss) for _ in range(2)]
    torch.testing.assert_close(losses, [each.loss for each in wanted], rtol=1e-12, atol=0)
    for key, grad in gradients(again).items():
        torch.testing.assert_close(gradients(model)[key], grad, rtol=1e-9, atol=1e-12, msg=key)
    torch.testing.assert_close(state_of(model), state_of(again), rtol=1e-12, atol=1e-12)


class Late(nn.Module):
    """Changes a buffer in its third forward only, in place or by assigning another tensor."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.map, self.runs, self.in_place = nn.Linear(6, 6), 0, in_place
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        made = torch.tanh(self.map(x)) * self.scale.clone()
        if self.runs == 3:
            self.scale = self.scale.mul_(2) if self.in_place else self.scale * 2
        return made


def test_state_that_is_replaced_late_is_restored():
    model, x = Late(in_place=False), torch.randn(8, 6)
    wanted = step(nn.ModuleList([model]), ps.schedule("gpipe", 1, COUNT), x)
    assert_same(step(nn.ModuleList([model]), ps.schedule("gpipe", 1, COUNT), x, recompute=True), wanted)


def test_state_that_changes_late_in_place_is_refused_once():
    model, x = Late(in_place=True), torch.randn(8, 6)
    pipe = Pipeline([model], schedule="gpipe", microbatches=COUNT, loss_fn=functional.mse_loss, recompute=True)
    with pytest.raises(PipelineError, match="has changed 'scale' for the first time in a later forward"):
        pipe.step(x, target=x)
    model.runs = 0
    pipe.step(x, target=x)
    again = Late(in_place=True)
    again.load_state_dict(model.state_dict())
    again.scale.fill_(1)
    pieces = list(zip(x.chunk(COUNT), x.chunk(COUNT), strict=True))
    assert_equal(model.map.weight.grad, loop_step(again, pieces, [1 / COUNT] * COUNT, functional.mse_loss).grads["map.weight"])


class InPlace(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is not None:
            x *= scale.add_(1)
        return self.map(x.mul_(2)) + 1


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_inputs_may_be_changed_in_place(name):
    schedule, x = ps.schedule(name, ranks=2, microbatches=COUNT), torch.randn(8, 6)
    model, scales = nn.ModuleList([InPlace(), InPlace()]), torch.ones(8, 1)

    def numbers(again: bool) -> Numbers:
        mine = copy.deepcopy(model)

        def train() -> Any:
            pipe = Pipeline(mine, schedule, loss_fn=functional.mse_loss, recompute=again)
            pipe.step(x.clone(), target=x, stage_kwargs={1: {"scale": scales.clone()}})
            return pipe.step(x.clone(), target=x, stage_kwargs={1: {"scale": scales.clone()}})

        results = launch(train, 2)
        return Numbers(results[0].loss, results[0].losses, gradients(mine))

    assert_same(numbers(True), numbers(False))


def test_flags_must_fit():
    with pytest.raises((ScheduleError, PipelineError), match="has 1 values for 2 stages of 4 layers: give True, False"):
        step(blocks(4), ps.schedule("1f1b", 2, 2), torch.randn(4, 6), recompute=[True])


# Single layers ----------------------------------------------------------------------------------------------------------


LAYERS = {
    "1f1b": [False, True, True, True, False, True],
    "zbv": [True, False, True, False, False, True, True, True, True, True, True, False],
}
"""Recomputed layers of stages of three: the last layer of the model with its loss, and whole stages."""


@pytest.mark.parametrize("name", LAYERS)
def test_chosen_layers_run_twice_and_the_others_once(name):
    """With dropout and two layers that are one module, the numbers are those without recompute; without dropout those of the loop."""
    schedule, flags, x = ps.schedule(name, ranks=2, microbatches=COUNT), LAYERS[name], torch.randn(8, 6)
    dropping = nn.Sequential(*(nn.Sequential(Block(6), nn.Dropout(0.4)) for _ in flags))
    dropping[2] = dropping[1]
    assert_same(step(dropping, schedule, x, seed=7, recompute=flags), step(dropping, schedule, x, seed=7))
    model, y = blocks(len(flags)), x.sin()
    runs = count_forwards(model)
    found = step_in_place(model, schedule, x, recompute=flags)
    assert runs == [COUNT * (2 if again else 1) for again in flags]
    assert_same(found, by_loop(model, x, y, COUNT))


def step_in_place(model: nn.Module, schedule: Any, x: Tensor, **options: Any) -> Numbers:
    results = launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss, **options).step(x, target=x.sin()), schedule.ranks)
    return Numbers(results[0].loss, results[0].losses, gradients(model))


MIXED = [True, False, True, True, False, True, False, True]


@pytest.mark.parametrize(("kind", "flags"), [("batch norm", MIXED), ("counters", MIXED), ("a buffer that the backward reads", [True] * 8)])
def test_state_of_recomputed_layers_equals_that_of_one_forward(kind, flags):
    schedule, x = ps.schedule("zbv", ranks=2, microbatches=COUNT), torch.randn(16, 6).double()
    model = nn.Sequential(*(STATEFUL[kind]() for _ in range(2 * schedule.stages))).double()
    again = copy.deepcopy(model)

    def train() -> list[Any]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss, recompute=flags)
        return [pipe.step(x, target=x.sin()).loss for _ in range(2)]

    losses = launch(train, 2)[0]
    pieces = list(zip(x.chunk(COUNT), x.sin().chunk(COUNT), strict=True))
    wanted = [loop_step(again, pieces, [1 / COUNT] * COUNT, functional.mse_loss) for _ in range(2)]
    torch.testing.assert_close(losses, [each.loss for each in wanted], rtol=1e-12, atol=0)
    for key, grad in gradients(again).items():
        torch.testing.assert_close(gradients(model)[key], grad, rtol=1e-9, atol=1e-12, msg=key)
    torch.testing.assert_close(state_of(model), state_of(again), rtol=1e-12, atol=1e-12)


def test_recomputed_layers_keep_what_the_job_s_planner_counts():
    """Every tensor is watched: after each forward a stage holds what the planner says, and in its backwards one layer's activations too."""
    wide, rows = 8, 1024  # gradients are small
    model = nn.Sequential(*(nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)) for _ in range(6)))
    x, y = torch.randn(rows * COUNT, wide), torch.randn(rows * COUNT, wide)
    schedule, flags, size = ps.schedule("gpipe", ranks=2, microbatches=COUNT), [True, False, True, False, True, True], rows * wide * 4
    measured = profile(model, x[:rows], loss_fn=product, target=y[:rows], warmup=0, repeats=1, optimizer=None)
    job = ps.Job(model=measured, machines=ps.Machines.of("a100", gpus=2), batch=rows * COUNT)
    planned = ProfileCosts(job, ps.Configuration(pipeline=2, microbatch=rows))
    costs = stage_costs(planned.profile(flags), [3, 3], schedule.placement, [False] * 2)

    def train(recompute: Any) -> tuple[list[int], list[int]]:
        pipe = Pipeline(model, schedule, loss_fn=product, recompute=recompute)
        executor = pipe._executor(COUNT, True)
        held, peaks = [0], []
        pipe.step(x, target=y)  # the first one also looks whether layers change their inputs
        for parameter in pipe.parameters():
            parameter.grad = None
        with Live() as live:
            pieces = [piece.clone() for piece in x.chunk(COUNT)]
            targets = [piece.clone() for piece in y.chunk(COUNT)]
            live.forget(*pieces, *targets, *model.parameters())

            def look(at: int) -> None:
                if executor.actions[at].kind is Kind.F:
                    held.append(live.bytes)
                    live.peak = 0
                elif executor.actions[at].kind is Kind.B:
                    peaks.append(live.peak)

            observe_actions(executor, look)
            pipe.step_list(pieces, targets)
        return [after - before for before, after in pairwise(held)], peaks

    for stage, (kept, _) in enumerate(launch(train, 2, args=(flags,))):
        for each in kept:
            assert abs(each - (costs.of_stage("activation", stage) - size)) <= SCALARS, (stage, each)  # its input was made elsewhere
    by_layer, whole = ([peaks[0] for _, peaks in launch(train, 2, args=(choice,))] for choice in ([True] * 6, True))
    for stage in range(2):  # by layers: two inputs more per microbatch; in the backward, the activations of two layers less
        assert whole[stage] - by_layer[stage] == pytest.approx(2 * measured.layers[1].activation - 2 * COUNT * size, abs=1.1 * size)


@pytest.mark.parametrize("choice", [[0, 1], "10", [True, [True, False]], 1, {0: True}, [True, None, True, False]])
def test_other_choices_than_bools_are_refused(choice):
    """The numbers of two stages are not their choices."""
    with pytest.raises((ScheduleError, PipelineError), match="give True, False, one of these per stage, or one per layer"):
        Pipeline(blocks(4), schedule="gpipe", microbatches=2, loss_fn=functional.mse_loss, recompute=choice)
