"""Layers measured on slices, with a stand-in for what layers keep of earlier slices and a clock that the layers move themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.errors import ScheduleError
from penstock.planner.profile import SliceCost
from penstock.runtime import Pipeline, launch
from penstock.runtime.batch.loss import Loss
from penstock.runtime.measure import layer as measuring
from penstock.runtime.measure.layer import MeasuredLayer
from penstock.runtime.measure.profile import profile
from penstock.runtime.measure.slices import SliceMeter, check_places, list_places
from penstock.runtime.model.stage import Stage
from runtime.sequences import WIDTH, CausalBlock, decoder, mean_loss, words

FORWARD = SliceCost(fixed=3.0, token=0.5, pair=0.01)
BACKWARD = SliceCost(fixed=2.0, token=0.25, pair=0.025)
TOKENS = 64


class Clock:
    """The time, which only layers move, and a watch that reads it."""

    now = 0.0

    def __init__(self, value: Any) -> None:
        self.marks = [Clock.now]

    def mark(self) -> None:
        self.marks.append(Clock.now)

    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.marks, self.marks[1:], strict=False)]


class Memory:
    """Keeps the tokens of earlier slices, joined."""

    current: Memory | None = None

    def __init__(self, slices: int) -> None:
        self.slices = slices
        self.lengths: dict[int, int] = {}
        self.unit = 0
        self.rows = torch.empty(0)

    @contextmanager
    def forward(self, stage: int, unit: int, *, share: float, training: bool) -> Iterator[None]:
        Memory.current, self.unit = self, unit
        yield
        Memory.current = None

    def extend(self, tokens: Tensor) -> int:
        """Keep the tokens of this slice; return how many there are before it."""
        self.lengths[self.unit] = tokens.shape[1]
        self.rows = tokens.new_empty(tokens.shape[0], sum(self.lengths.values()), tokens.shape[2])
        return sum(length for unit, length in self.lengths.items() if unit < self.unit)

    def take_roots(self) -> list[Tensor]:
        return []

    def wrap_backward(self, stage: int, unit: int, operation: Callable[..., None]) -> Callable[..., None]:
        assert unit == self.slices - 1
        return operation

    def list_kept(self) -> list[Tensor]:
        return [self.rows]


class _Tick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, prefix: int) -> Tensor:
        ctx.place = x.shape[1], prefix
        Clock.now += FORWARD.at(*ctx.place)
        ctx.save_for_backward(x.clone())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Clock.now += BACKWARD.at(*ctx.place)
        return grad * 2, None


class Ticking(nn.Module):
    """A layer that takes the times above."""

    def forward(self, x: Tensor) -> Tensor:
        prefix = 0 if Memory.current is None else Memory.current.extend(x)
        y: Tensor = _Tick.apply(x, prefix)  # type: ignore[no-untyped-call]
        return y


class Whole(nn.Module):
    """A layer that cannot run on slices: it needs all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == TOKENS
        return x.flip(1)


def cut(value: Any, lengths: list[int]) -> list[Any]:
    parts = torch.split(value[0] if isinstance(value, tuple) else value, lengths, 1)
    return [(part,) for part in parts] if isinstance(value, tuple) else list(parts)


def measure(monkeypatch: pytest.MonkeyPatch, modules: list[nn.Module], places: list[tuple[int, int]], dtype: torch.dtype) -> list[Any]:
    monkeypatch.setattr(measuring, "Stopwatch", Clock)
    inputs: Any = (torch.randn(2, TOKENS, 4, dtype=dtype, requires_grad=True),)
    loss = Loss(lambda output, target: (output - target).square().mean(), "mean")
    target = torch.randn(2, TOKENS, 4, dtype=dtype)
    layers = []
    for place, module in enumerate(modules):
        layer = MeasuredLayer(str(place), Stage(place, module, unpack=place == 0), loss if module is modules[-1] else None, target, inputs)
        inputs = layer.measure_memory(0, None)
        layer.times.append(layer.time())
        layers.append(layer)
    meter = SliceMeter(
        places,
        TOKENS,
        cut=lambda inputs, target, lengths: (cut(inputs, lengths), cut(target, lengths)),
        make_memory=Memory,
        loss=loss,
        can_slice=lambda layer: not isinstance(layer.stage.module, Whole),
        cut_input=cut,
    )
    return meter.measure(layers, warmup=1, repeats=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_times_of_a_layer_are_found_without_that_of_its_prefix(monkeypatch, dtype):
    costs = measure(monkeypatch, [Ticking(), Ticking()], list_places(TOKENS, 4), dtype)
    for cost in costs:
        assert (cost.f.fixed, cost.f.token, cost.f.pair) == pytest.approx((3.0, 0.5, 0.01))
        assert (cost.i.fixed, cost.i.token, cost.i.pair) == pytest.approx((2.0, 0.25, 0.025))
        assert cost.w == SliceCost()
        assert cost.error < 1e-9
        number = torch.finfo(dtype).bits // 8
        assert (cost.keys, cost.key_gradients) == (2 * 4 * number, 2 * 4 * 4)  # kept once, and summed in 32 bits
    saved = 2 * 4 * number  # each layer holds its input, and a copy of it for its backward
    assert costs[0].activation.at(16, 32) == pytest.approx(16 * 2 * saved, rel=1e-6)


def test_layers_that_cannot_run_on_slices_have_none(monkeypatch):
    costs = measure(monkeypatch, [Ticking(), Whole(), Ticking()], list_places(TOKENS, 4), torch.float32)
    assert costs[1] is None
    assert costs[2].f.pair == pytest.approx(0.01)


def test_no_measured_size_is_larger_than_the_fitted_one(monkeypatch):
    class Uneven(Ticking):
        def forward(self, x: Tensor) -> Tensor:
            extra = torch.ones(1 if x.shape[1] > 20 else 5000, requires_grad=True)
            return super().forward(x) + extra.square().sum() * 0

    (cost,) = measure(monkeypatch, [Uneven()], list_places(TOKENS, 4), torch.float32)
    assert cost.activation.at(16, 0) >= 5000 * 4


def test_places_cover_the_sequence():
    assert list_places(100, 2) == [(50, 0), (50, 50)]
    for tokens, slices in ((64, 3), (1000, 16), (7, 7)):
        assert check_places(list_places(tokens, slices), tokens)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: list_places(64, 1), "slices=1 for sequences of 64 tokens: from 2 up to one per token"),
        (lambda: list_places(64, 65), "slices=65"),
        (lambda: check_places([(32, 40)], 64), "a slice of 32 tokens after 40 does not lie in a sequence of 64"),
        (lambda: check_places([(0, 4)], 64), "a slice of 0 tokens"),
        (lambda: check_places([(32, 0)], 64), "1 slices are too few for a fit"),
    ],
)
def test_wrong_places_are_refused(act, message):
    with pytest.raises(ScheduleError, match=message):
        act()


# With what layers really keep of earlier slices ------------------------------------------------------------------------

QUICK = {"warmup": 0, "repeats": 1}


def test_a_decoder_is_profiled_planned_and_trained_on_slices_of_the_planned_lengths():
    model, x = decoder(4, torch.float32), words(2, 64)
    measured = profile(model, x, loss_fn=mean_loss, target=x, slices=4, **QUICK)
    assert (measured.tokens, measured.lacks_slices) == (64, "")
    for layer in measured.layers[1:3]:
        assert layer.slices is not None
        assert layer.slices.keys == layer.slices.key_gradients == 2 * 2 * WIDTH * 4  # rows, keys and values of 4 bytes each
    for layer in (measured.layers[0], measured.layers[3]):
        assert layer.slices is not None
        assert layer.slices.keys == layer.slices.key_gradients == 0
    plan = ps.plan(measured, ranks=2, microbatches=2, slices=3, slice_granularity=8, schedules="seq1f1b", seconds=0)
    wanted = mean_loss(model(x), x).item()
    lengths: list[int] = []
    model[0].register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))

    def train() -> float:
        pipe = Pipeline(model, plan, loss_fn=mean_loss)
        return float(pipe.step(x, target=x).loss)

    for loss in launch(train, 2):
        assert loss == pytest.approx(wanted, rel=1e-5)
    assert lengths == [*plan.slice_lengths] * 2


def test_a_plan_with_slices_and_moves_is_run():
    """Under a limit that the plan without moves exceeds, the activations that the plan moves are moved, and the numbers stay."""
    model, x = decoder(6, torch.float32), words(4, 64)
    measured = profile(model, x[:2], loss_fn=mean_loss, target=x[:2], slices=4, **QUICK)
    options = {"ranks": 2, "microbatches": 2, "slices": 4, "slice_granularity": 8, "schedules": "seq1f1b", "seconds": 0}
    limit = 0.65 * max(ps.plan(measured, **options).predicted.peak_memory)
    plan = ps.plan(measured, **options, memory_limit=limit, offload=True, host_bandwidth=1e12)
    wanted = mean_loss(model(x), x).item()

    def train() -> tuple[float, int]:
        pipe = Pipeline(model, plan, loss_fn=mean_loss)
        loss = float(pipe.step(x, target=x).loss)
        moves = pipe._executor(2, True).compute.moves
        return loss, 0 if moves is None else moves.memory.peak

    results = launch(train, 2)
    assert [loss for loss, _ in results] == pytest.approx([wanted] * 2, rel=1e-5)
    assert max(moved for _, moved in results) > 0


def test_layers_that_mix_tokens_in_another_way_have_no_slices():
    layers = [nn.Embedding(11, WIDTH), CausalBlock(), nn.Conv1d(64, 64, 1), CausalBlock()]
    measured = profile(layers, words(1, 64), slices=2, **QUICK)
    assert measured.lacks_slices == "it does not say what a slice takes on 2 Conv1d"
    assert measured.layers[3].slices is not None


def test_a_sample_without_a_sequence_is_refused():
    with pytest.raises(ScheduleError, match="slices= needs a sample with a sequence"):
        profile([nn.Embedding(4, 4)], torch.zeros(3, dtype=torch.long), slices=2, **QUICK)
