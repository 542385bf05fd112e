"""Measured profiles agree with formulas and with a running pipeline, and leave the model unchanged."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.errors import CostsError, PlacementError, ScheduleError
from penstock.planner.partition.stage_costs import stage_costs
from penstock.runtime import Layers, Pipeline, launch
from penstock.runtime.measure.profile import profile
from runtime.live import Live, observe_actions

QUICK = {"warmup": 0, "repeats": 1}


def example() -> Any:
    path = Path(__file__).parents[3] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("example_gpt", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["example_gpt"] = module
    spec.loader.exec_module(module)
    return module


gpt = example()
SHAPE = gpt.Shape(vocabulary=64, context=32, width=32, heads=4, blocks=2)


@pytest.fixture(scope="module")
def measured() -> ps.Profile:
    layers, tokens, loss, target = gpt.build(SHAPE, batch=3)
    return profile(layers, tokens, loss_fn=loss, target=target, **QUICK)


def test_a_transformer_holds_what_the_formulas_say(measured):
    """Sizes agree up to the norms' statistics, 2 numbers per token and norm, which the formulas leave out, and masks."""
    wanted = ps.Profile.transformer(layers=2, hidden=32, heads=4, sequence=32, vocabulary=64, flops=1, microbatch=3, bytes=4)
    tokens = 3 * 32
    for found, computed in zip(measured.layers[1:3], wanted.layers[1:3], strict=True):
        assert computed.activation <= found.activation <= computed.activation + 2 * 2 * 4 * tokens + 4 * tokens
        assert found.weight_stash == computed.weight_stash
        assert found.output == computed.output
    head, computed = measured.layers[-1], wanted.layers[-1]
    assert computed.activation <= head.activation <= computed.activation + (2 * 4 + 8) * tokens + 16  # the norm's, and the targets
    assert head.weight_stash == computed.weight_stash
    assert measured.input == 8 * tokens  # though the rows are part of a larger tensor, with the targets


@pytest.mark.parametrize("splits", [True, False])
def test_only_the_layers_own_work_is_timed(monkeypatch: pytest.MonkeyPatch, splits: bool) -> None:
    """Inspecting modules, detaching the input and creating the first gradients take 30 ms each here, and are not measured."""
    import penstock.runtime.measure.layer as measuring

    def slow(call: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.03)
            return call(*args, **kwargs)

        return called

    layers = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh() if splits else Doubled())]
    monkeypatch.setattr(nn.Module, "modules", slow(nn.Module.modules))
    monkeypatch.setattr(torch, "ones_like", slow(torch.ones_like))
    monkeypatch.setattr(measuring, "detach_as_leaves", slow(measuring.detach_as_leaves))
    for layer in profile(layers, torch.randn(2, 4), warmup=1, repeats=3).layers:
        assert max(layer.f, layer.i, layer.w) < 0.03


class Doubled(nn.Module):
    """A module that cannot split its backward, because it asks for gradients in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.square()
        (slope,) = torch.autograd.grad(y.sum(), x, torch.ones(()), create_graph=True)
        return slope


def test_parameters_gradients_and_optimizer(measured):
    layers, *_ = gpt.build(SHAPE)
    for layer, found in zip(layers, measured.layers, strict=True):
        size = sum(parameter.nbytes for parameter in layer.parameters())
        assert found.parameters == found.gradients == size
        steps = 4 * len(list(layer.parameters()))  # AdamW counts its steps for each
        assert found.optimizer == 2 * size + steps


def test_labels(measured):
    assert (measured.microbatch, measured.time_unit, measured.size_unit, measured.keeps_output) == (3, "s", "B", True)
    assert "measured on cpu" in measured.source
    assert [layer.name for layer in measured.layers] == ["0 Embedding", "1 Block", "2 Block", "3 Head"]
    assert all(layer.f > 0 and layer.i > 0 and layer.w > 0 for layer in measured.layers)


# Against a pipeline that runs -----------------------------------------------------------------------------------------


def in_phases(ranks: int, microbatches: int) -> ps.Schedule:
    """All F, then all I, then all W."""
    rows = [[f"{rank}{kind}{m}" for kind in "FIW" for m in range(microbatches)] for rank in range(ranks)]
    return ps.Schedule.from_actions(rows, ps.Placement.linear(ranks))


def watched_step(pipe: Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[tuple[str, int]]:
    """Return the kind of each action of a step, and the bytes allocated by this rank that are alive after it."""
    held: list[tuple[str, int]] = []
    with Live() as live:
        live.forget(x, y, *model.parameters(), *(p.grad for p in model.parameters()))
        executor = pipe._executor(pipe.microbatches, True)
        observe_actions(executor, lambda at: held.append((executor.actions[at].kind.name, live.bytes)))
        pipe.step(x, target=y)
    return held


def test_a_running_stage_holds_what_was_measured():
    """Between the phases a rank holds all activations, then all stashes: to the byte, except for two numbers of the loss."""
    microbatches, rows = 4, 3
    layers, tokens, loss, target = gpt.build(SHAPE, batch=rows)
    measured = profile(layers, tokens, loss_fn=loss, target=target, **QUICK)
    stages = stage_costs(measured, (2, 2), ps.Placement.linear(2), (False, False))
    model = nn.Sequential(*layers)
    _, x, _, y = gpt.build(SHAPE, batch=rows * microbatches)

    def train() -> list[tuple[str, int]]:
        pipe = Pipeline(model, in_phases(2, microbatches), loss_fn=loss, split=[2, 2])
        pipe.step(x, target=y)
        return watched_step(pipe, model, x, y)

    message = measured.layers[1].output
    held = launch(train, 2)
    for rank in range(2):
        empty = 4 * sum(p.numel() for layer in layers[2 * rank : 2 * rank + 2] for p in layer.parameters())  # the gradients' backup
        activations = ([size for kind, size in held[rank] if kind == "F"][-1] - empty) / microbatches
        stashes = ([size for kind, size in held[rank] if kind == "I"][-1] - empty) / microbatches
        # Tensors count where they are made: not the batch, nor what came in, but what the other rank still holds.
        elsewhere = measured.input if rank == 0 else message
        assert activations + elsewhere == pytest.approx(stages.of_stage("activation", rank), abs=16)
        assert stashes == pytest.approx(stages.of_stage("weight_stash", rank) + (message if rank else -measured.input), abs=16)


# Layers of all sorts --------------------------------------------------------------------------------------------------


def one(layer: nn.Module, sample: Any, **given: Any) -> ps.Layer:
    return profile([layer], sample, **QUICK, **given).layers[0]


class Twice(nn.Module):
    """Saves one tensor in several places."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        return y * y + y.view(-1).sum() * y.detach()


def test_memory_that_is_saved_twice_counts_once():
    x = torch.randn(8, 16, requires_grad=True)
    found = one(Twice(), x)
    assert found.activation == 2 * x.nbytes  # the input, which every stage holds, and its exponential


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointed_layer_holds_only_its_input():
    inner = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh())
    x = torch.randn(8, 16, requires_grad=True)
    assert one(Checkpointed(inner), x).activation == x.nbytes
    assert one(inner, x).activation > 4 * x.nbytes


def test_weight_stash_is_input_and_output_gradient_of_each_linear():
    x = torch.randn(8, 16, requires_grad=True)
    found = one(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), x)
    assert found.weight_stash == 4 * 8 * (16 + 64 + 64 + 16)
    assert one(nn.Tanh(), x).weight_stash == 0


def test_a_frozen_layer_has_no_gradients():
    layer = nn.Linear(16, 16).requires_grad_(False)
    found = one(layer, torch.randn(8, 16, requires_grad=True))
    assert (found.gradients, found.optimizer, found.weight_stash) == (0, 0, 0)
    assert found.parameters == 4 * (16 * 16 + 16)
    assert one(layer, torch.randn(8, 16)).activation == 4 * 8 * 16  # nothing goes backward, but the stage has its input


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * y, {"sum": x + y}


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return pair[0] + pair[1]["sum"]


def test_trees_of_tensors_and_several_arguments():
    x = torch.randn(8, 16)
    found = profile([Pair(), Join()], (x, x.clone()), **QUICK)
    assert [layer.output for layer in found.layers] == [2 * x.nbytes, x.nbytes]
    assert found.input == 2 * x.nbytes


def test_layers_by_name():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 10)

    found = profile(Model(), torch.randint(10, (4, 5)), split=Layers("blocks", head=["embed"], tail=["head"]), **QUICK)
    assert [layer.name for layer in found.layers] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [layer.name for layer in profile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(2, 8), **QUICK).layers] == ["0", "1"]


def test_other_microbatch_sizes_from_the_sample_s_rows():
    found = profile([nn.Linear(16, 8)], torch.randn(4, 16), microbatch_sizes=[2, 4, 10], **QUICK)
    assert found.sizes == (2, 4, 10)
    assert [found.at(size).layers[0].output for size in (2, 4, 10)] == [4 * 8 * size for size in (2, 4, 10)]


def test_custom_optimizer():
    layer, x = nn.Linear(16, 16, bias=False), torch.randn(2, 16)
    assert one(layer, x, optimizer="sgd").optimizer == 0
    assert one(layer, x, optimizer=None).optimizer == 0
    assert one(layer, x, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.9)).optimizer == 4 * 16 * 16


def test_a_compiled_layer_is_not_split():
    found = one(torch.compile(nn.Linear(16, 16), backend="eager"), torch.randn(8, 16))
    assert found.weight_stash == 0
    assert found.gradients == 4 * (16 * 16 + 16)


def test_model_is_unchanged():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    model[0].weight.grad = torch.ones(8, 8)
    model[3].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.data.sub_(parameter.grad))
    x = torch.randn(6, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    profile(model, x, loss_fn=functional.mse_loss, target=torch.zeros(6, 8), warmup=1, repeats=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8))
    assert [parameter.grad is None for parameter in model.parameters()] == [False] + [True] * 5
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training


def test_the_median_of_the_rounds_is_taken(monkeypatch):
    from penstock.runtime.device import timing

    clock = iter([mark * 10**9 for f in (5, 1, 100) for mark in (0, f, f + 7, f + 9, f + 12)])  # 7: the gradients are made
    monkeypatch.setattr(timing, "clock", lambda: next(clock))
    found = profile([nn.Linear(4, 4)], torch.randn(2, 4), warmup=0, repeats=3).layers[0]
    assert (found.f, found.i, found.w) == (5, 2, 3)


def test_links_may_have_units():
    found = profile([nn.Linear(4, 4)], torch.zeros(2, 4), **QUICK, latency="5us", bandwidth="12.5GB")
    assert (found.latency, found.bandwidth) == (5e-6, 12.5e9)


@pytest.mark.parametrize(
    ("model", "sample", "given", "kind", "said"),
    [
        ([], torch.zeros(2, 4), {}, PlacementError, "at least one layer"),
        ([3], torch.zeros(2, 4), {}, PlacementError, "each an nn.Module"),
        (nn.Linear(4, 4), torch.zeros(2, 4), {}, PlacementError, "does not say which layers it has"),
        ([nn.Linear(4, 4)], 3, {}, ScheduleError, "no tensor with a batch dimension"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"repeats": 0}, ScheduleError, "repeats must be a whole number of at least 1, got 0"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"warmup": "3"}, ScheduleError, "warmup must be a whole number of at least 0, got '3'"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"loss_fn": 3}, ScheduleError, "loss_fn must be a function"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"progress": 3}, ScheduleError, "progress must be a function"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"optimizer": 3}, ScheduleError, "optimizer must be a function"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"latency": "5KB"}, CostsError, "latency: '5KB' is not a time"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"bandwidth": "1Gbit"}, CostsError, "bandwidth: '1Gbit' is not a bandwidth"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"slices": "2"}, ScheduleError, "slices must be a number of slices, or pairs"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"slices": [2]}, ScheduleError, "slices must be a number of slices, or pairs"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"optimizer": "adm"}, ScheduleError, "did you mean 'adam'"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"microbatch_sizes": [0]}, ScheduleError, "a microbatch size must be a whole number"),
        ([nn.Linear(4, 4)], torch.zeros(2, 4), {"microbatch_sizes": 2}, ScheduleError, "microbatch_sizes must be a list"),
    ],
)
def test_invalid_arguments(model, sample, given, kind, said):
    with pytest.raises(kind, match=said):
        profile(model, sample, **{**QUICK, **given})


# What can wait, and what cannot ---------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """An RNN that passes on only its outputs."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.inner = make(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)[0]
        return made


@pytest.mark.parametrize(
    ("layer", "shape", "stash"),
    [
        (nn.LayerNorm(64), (1024, 64), 2 * 1024 * 64 * 4 + 2 * 1024 * 4),  # input and gradient, and two statistics per row
        (nn.RMSNorm(64), (1024, 64), 2 * 1024 * 64 * 4),
        (nn.GroupNorm(4, 8), (8, 8, 32, 32), 2 * 8 * 8 * 32 * 32 * 4 + 2 * 8 * 4 * 4),
        (nn.ConvTranspose2d(2, 4, 2, stride=2), (3, 2, 5, 5), 3 * (2 * 25 + 4 * 100) * 4),
        (nn.Linear(64, 32), (64,), (64 + 32) * 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layer_with_deferred_weight_gradients(layer: nn.Module, shape: tuple[int, ...], stash: int) -> None:
    found = profile([layer, nn.Tanh()], wanting(*shape), **QUICK).layers[0]
    assert found.w > 0
    assert found.weight_stash == stash


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
def test_layer_without_deferred_weight_gradients(make: Any) -> None:
    found = profile([Sequence(make), nn.Tanh()], wanting(2, 5, 16), **QUICK).layers[0]
    assert found.weight_stash == 0


class Asking(nn.Module):
    """Asks autograd for its weight's gradient, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.runs = nn.Linear(64, 64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out: Tensor = self.map(x)
        (slope,) = torch.autograd.grad(out.sum(), self.map.weight, retain_graph=True)
        return out * slope.norm()


def test_layer_that_needs_a_whole_backward() -> None:
    """The I of such a layer is its whole backward, and nothing is left for its W."""
    layer = Asking()
    asking, plain = profile([layer, nn.Linear(64, 64)], wanting(256, 64), warmup=1, repeats=3).layers
    assert asking.weight_stash == 0 < plain.weight_stash
    assert asking.w < asking.i / 10
    assert layer.runs == 0
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_loss_that_needs_a_whole_backward() -> None:
    layer = nn.Linear(64, 64)

    def loss(out: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(out.sum(), layer.weight, retain_graph=True)
        return out.mean() * slope.norm()

    first, last = profile([nn.Linear(64, 64), layer], wanting(256, 64), loss_fn=loss, **QUICK).layers
    assert last.weight_stash == 0 < first.weight_stash


def wanting(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_layer_behind_another_computes_the_gradient_of_its_input():
    """As a stage does, unless the input is data."""

    class Noting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            noted.append(x.requires_grad)
            return super().forward(x)

    noted: list[bool] = []
    profile([Noting(4, 4)], torch.randn(2, 4), **QUICK)
    assert not any(noted)
    noted.clear()
    profile([nn.Linear(4, 4), Noting(4, 4), nn.ReLU(), Noting(4, 4)], torch.randn(2, 4), **QUICK)
    assert noted
    assert all(noted)
