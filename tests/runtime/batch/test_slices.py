"""Cutting microbatches into slices, and how much each slice counts in the loss."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PenstockError, ScheduleError
from penstock.runtime import Pipeline, SequenceDims, add_loss, add_metric, launch, prefix_of, rank
from penstock.runtime.batch.loss import Loss
from penstock.runtime.batch.slices import SequenceCutter
from runtime.sequences import WIDTH, WORDS, CausalBlock, assert_within, decoder, mean_loss, sliced_step, words

EXACT = 1e-12
SCHEDULE = ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3)


class Scores(nn.Linear):
    """Scores with the classes in the second dimension, as torch's cross-entropy takes them."""

    sliceable = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


def scorer() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), CausalBlock(), CausalBlock(), Scores(WIDTH, WORDS)).double()


def ignoring(tokens: int = 10) -> Tensor:
    """Targets of which many do not count: all of the last slice of the first rows, and others here and there."""
    target = words(4, tokens)
    target[:2, 6:] = -100
    target[2, :5] = -100
    target[3, 3] = -100
    return target


def by_microbatches(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Any, weight: Any) -> tuple[Tensor, list[Tensor], nn.Module]:
    """The weighted loss of two whole microbatches, both losses, and a copy of the model with its gradients."""
    model = copy.deepcopy(model)
    targets = y.split(2)
    weights = [float(weight(target)) for target in targets]
    losses = [loss_fn(model(rows), target) for rows, target in zip(x.split(2), targets, strict=True)]
    loss = sum(value * share / sum(weights) for value, share in zip(losses, weights, strict=True))
    loss.backward()
    return loss.detach(), [value.detach() for value in losses], model


def count_valid(target: Tensor) -> Tensor:
    return (target != -100).sum()


# The loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:targets with ignore_index")
@pytest.mark.parametrize(
    "loss_fn",
    [
        functional.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.rand(WORDS).double() + 0.1),
        nn.CrossEntropyLoss(label_smoothing=0.2),
        partial(functional.cross_entropy, ignore_index=3),
    ],
    ids=["function", "module", "class weights", "smoothing", "another index"],
)
@pytest.mark.parametrize("weight", [None, count_valid, len])
def test_cross_entropy_ignores_targets_as_in_the_whole_microbatch(loss_fn: Any, weight: Any) -> None:
    model, x, y = scorer(), words(4, 10), ignoring()
    if isinstance(loss_fn, partial):
        y[y == -100] = 3
    loss, losses, wanted = by_microbatches(model, x, y, loss_fn, weight or len)
    results, found = sliced_step(model, SCHEDULE, x, y, loss_fn, weight=weight)
    torch.testing.assert_close(results[0].loss, loss, rtol=EXACT, atol=0)
    torch.testing.assert_close(results[0].losses, losses, rtol=EXACT, atol=0)
    assert_within(found, wanted, EXACT)


@pytest.mark.filterwarnings("ignore:targets with ignore_index")
@pytest.mark.parametrize("schedule", ["seq1f1b", "seq-zb-h1"])
def test_slices_without_a_loss_of_their_own_get_gradients_from_later_ones(schedule: str) -> None:
    """The targets of the prompt do not count: the first slice has a gradient only through its keys and values."""
    model, x, y = scorer(), words(4, 12), words(4, 12)
    y[:, :7] = -100
    _, _, wanted = by_microbatches(model, x, y, functional.cross_entropy, len)
    for recompute in (False, True):
        table = ps.schedule(schedule, ranks=2, microbatches=2, slices=4)
        _, found = sliced_step(model, table, x, y, functional.cross_entropy, recompute=recompute)
        assert_within(found, wanted, EXACT)


def test_weights_tell_which_targets_count_for_other_losses() -> None:
    model, x, y = decoder(4), words(4, 10), ignoring()
    loss, _, wanted = by_microbatches(model, x, y, mean_loss, count_valid)
    results, found = sliced_step(model, SCHEDULE, x, y, weight=count_valid)
    torch.testing.assert_close(results[0].loss, loss, rtol=EXACT, atol=0)
    assert_within(found, wanted, EXACT)


def test_ignored_targets_of_an_unknown_loss_are_refused() -> None:
    with pytest.raises(PenstockError, match=r"targets are -100, .* give weight=lambda target: \(target != -100\).sum\(\)"):
        sliced_step(decoder(4), SCHEDULE, words(4, 10), ignoring())


def test_a_microbatch_that_does_not_count_at_all() -> None:
    model, x, y = scorer(), words(4, 10), ignoring()
    y[:2] = -100
    wanted = copy.deepcopy(model)
    functional.cross_entropy(wanted(x[2:]), y[2:]).backward()
    results, found = sliced_step(model, SCHEDULE, x, y, functional.cross_entropy, weight=count_valid)
    assert len(results[0].losses) == 2
    assert_within(found, wanted, EXACT)


def test_sums_are_added() -> None:
    model, x, y = decoder(4), words(4, 10), words(4, 10)

    def loss_fn(scores: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum")

    wanted = copy.deepcopy(model)
    loss = loss_fn(wanted(x), y)
    loss.backward()
    results, found = sliced_step(model, SCHEDULE, x, y, loss_fn, loss_reduction="sum")
    torch.testing.assert_close(results[0].loss, loss.detach(), rtol=EXACT, atol=0)
    torch.testing.assert_close(sum(results[0].losses), loss.detach(), rtol=EXACT, atol=0)
    assert_within(found, wanted, EXACT)


def test_targets_of_numbers() -> None:
    model = nn.Sequential(nn.Linear(3, WIDTH), CausalBlock(), nn.Linear(WIDTH, 2)).double()
    x, y = torch.randn(4, 10, 3).double(), torch.randn(4, 10, 2).double()
    wanted = copy.deepcopy(model)
    functional.mse_loss(wanted(x), y).backward()
    _, found = sliced_step(model, SCHEDULE, x, y, functional.mse_loss)
    assert_within(found, wanted, EXACT)


# The inputs -----------------------------------------------------------------------------------------------------------


class Conditioned(CausalBlock):
    """Takes a vector per row, a vector per token, and a factor for all."""

    def forward(self, x: Tensor, row: Tensor | None = None, *, tokens: Tensor | None = None, factor: float = 1.0) -> Tensor:
        x = x if row is None else x + row.unsqueeze(1)
        return super().forward(x if tokens is None else x + tokens) * factor


def test_arguments_that_stay_whole_and_keyword_arguments_that_are_cut() -> None:
    model = nn.ModuleList([Conditioned(), Conditioned()]).double()
    x, rows, tokens, y = (torch.randn(*shape).double() for shape in ((4, 10, WIDTH), (4, WIDTH), (4, 10, WIDTH), (4, 10, WIDTH)))
    wanted, found = copy.deepcopy(model), copy.deepcopy(model)
    functional.mse_loss(wanted[1](wanted[0](x, rows), tokens=tokens, factor=2.0), y).backward()

    def train() -> None:
        pipe = Pipeline(found, SCHEDULE, loss_fn=functional.mse_loss, sequence_dims=SequenceDims(inputs=(1, None)))
        pipe.step(x, rows, target=y, stage_kwargs={1: {"tokens": tokens, "factor": 2.0}})

    launch(train, 2)
    assert_within(found, wanted, EXACT)


def test_sequences_along_the_first_dimension() -> None:
    class First(nn.Module):
        sliceable = True

        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            every = prefix_of(self).extend(x, dim=0)
            return self.map(x) + every.cumsum(0)[-len(x) :]

    model, x, y = nn.Sequential(First(), First()).double(), torch.randn(9, 4, 3).double(), torch.randn(9, 4, 3).double()
    wanted = copy.deepcopy(model)
    functional.mse_loss(wanted(x), y).backward()
    _, found = sliced_step(model, SCHEDULE, x, y, functional.mse_loss, batch_dims=1, target_dims=1, sequence_dims=0)
    assert_within(found, wanted, EXACT)


def test_ranks_without_a_batch_need_none() -> None:
    """Middle ranks do not know how long sequences are."""
    schedule = ps.schedule("seq1f1b", ranks=3, microbatches=2, slices=3)
    model, x, y = decoder(5), words(4, 10), words(4, 10)
    wanted, found = copy.deepcopy(model), copy.deepcopy(model)
    mean_loss(wanted(x), y).backward()

    def train() -> None:
        pipe = Pipeline(found, schedule, loss_fn=mean_loss)
        pipe.step(*([x] if pipe.rank == 0 else []), **({"target": y} if pipe.rank == 2 else {}))

    launch(train, 3)
    assert_within(found, wanted, EXACT)


def test_microbatches_run_in_another_order() -> None:
    """Side losses, metrics, losses and outputs are numbered as the caller does."""

    class Noted(CausalBlock):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            add_loss(x.square().mean())
            add_metric("first", x[0, 0, 0])
            return x

    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Noted(), nn.Linear(WIDTH, WORDS)).double()
    inputs = [words(1, tokens) for tokens in (4, 9, 6)]
    schedule = ps.schedule("seq1f1b", ranks=2, microbatches=3, slices=3)

    def train(order: Any) -> Any:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=mean_loss)
        result = pipe.step_list(inputs, inputs, outputs=True, order=order)
        return result.loss, result.losses, result.metrics["first"], result.outputs, {name: p.grad for name, p in pipe.local_parameters()}

    for one, other in zip(launch(train, 2, args=(None,)), launch(train, 2, args=([2, 0, 1],)), strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


# Lengths --------------------------------------------------------------------------------------------------------------


def test_lengths_are_as_equal_as_possible() -> None:
    cutter = SequenceCutter(4, Loss(None, "mean"))
    assert cutter.choose_lengths(11) == [3, 3, 3, 2]
    assert cutter.choose_lengths(4) == [1, 1, 1, 1]
    assert SequenceCutter(2, Loss(None, "mean"), lambda total: [total - 1, 1]).choose_lengths(7) == [6, 1]


def test_lengths_of_a_plan_are_proportions() -> None:
    cutter = SequenceCutter(4, Loss(None, "mean"), [60, 20, 12, 8], scales=True)
    assert cutter.choose_lengths(100) == [60, 20, 12, 8]
    assert cutter.choose_lengths(50) == [30, 10, 6, 4]
    for total in range(4, 30):
        lengths = cutter.choose_lengths(total)
        assert sum(lengths) == total
        assert min(lengths) >= 1
        assert lengths == sorted(lengths, reverse=True)


def test_plans_choose_the_lengths() -> None:
    """Slices of equal times: the first one is the longest. Sequences of another length are cut alike."""
    model, seen = decoder(4), []

    class Watched(CausalBlock):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.shape[1])
            return super().forward(x)

    model[1] = Watched().double()
    costs = {"f": {"pair": 1.0}, "i": {"pair": 2.0}, "w": {"token": 1.0}}
    layer = ps.Layer(f=1.0, i=2.0, w=1.0, activation=1.0, output=0.1, slices=costs)
    profile = ps.Profile([layer] * 4, input=0.1, tokens=24)
    plan = ps.plan(profile, ranks=2, microbatches=1, schedules="seq1f1b", slices=3, slice_granularity=1, seconds=0)
    assert sum(plan.slice_lengths) == 24
    for tokens in (24, 12):
        x = words(1, tokens)
        wanted, found = copy.deepcopy(model), copy.deepcopy(model)
        mean_loss(wanted(x), x).backward()
        seen.clear()
        launch(lambda x=x, found=found: Pipeline(found, plan, loss_fn=mean_loss).step(x, target=x), 2)
        assert_within(found, wanted, EXACT)
        assert [length * 24 // tokens for length in seen] == pytest.approx(list(plan.slice_lengths), abs=1)
        assert seen[0] > seen[-1]


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        ([5, 5], r"slice_lengths=\[5, 5\] for a schedule with 3 slices: give 3 lengths"),
        ([5, 5, 0], r"give 3 lengths of at least 1 that sum to the sequence's"),
        ([5, 5, 1], r"slice_lengths \[5, 5, 1\] sum to 11, but the sequences have 10 tokens"),
        (lambda total: [total], r"slice_lengths \[10\] sum to 10, .* give 3 lengths of at least 1 that sum to 10"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: Any, match: str) -> None:
    with pytest.raises(PenstockError, match=match):
        sliced_step(decoder(4), SCHEDULE, words(4, 10), words(4, 10), slice_lengths=lengths)


def test_sequences_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(PenstockError, match="a sequence of 2 tokens cannot be cut into 3 slices: use a schedule with at most 2"):
        sliced_step(decoder(4), SCHEDULE, words(4, 2), words(4, 2))
    with pytest.raises(PenstockError, match="sequences of different lengths: 10 tokens in the input, 9 in the target"):
        sliced_step(decoder(4), SCHEDULE, words(4, 10), words(4, 9))
    with pytest.raises(
        PenstockError, match=r"shape \[2\] has no dimension 1 to cut into slices: .* sequence_dims=SequenceDims\(target=...\)"
    ):
        sliced_step(decoder(4), SCHEDULE, words(4, 10), torch.zeros(4))


def test_ranks_must_cut_alike() -> None:
    def build() -> None:
        first = rank() == 0
        Pipeline(decoder(4), SCHEDULE, loss_fn=mean_loss, slice_lengths=[4, 4, 2] if first else [2, 4, 4])

    with pytest.raises(PenstockError, match="the ranks disagree on slice_lengths"):
        launch(build, 2)


def test_a_name_is_enough() -> None:
    """With the schedule's own number of slices."""
    model, x = decoder(4), words(4, 10)
    wanted, found = copy.deepcopy(model), copy.deepcopy(model)
    mean_loss(wanted(x), x).backward()
    launch(lambda: Pipeline(found, schedule="seq1f1b", microbatches=2, loss_fn=mean_loss).step(x, target=x), 2)
    assert_within(found, wanted, EXACT)


def test_errors_are_schedule_errors() -> None:
    with pytest.raises(ScheduleError):
        SequenceCutter(3, Loss(None, "mean"), [1, 2])
