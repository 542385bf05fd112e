"""Pipelines whose vocabulary is spread over virtual ranks: the numbers of the plain loop, what is refused, and failures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.draw.boxes import list_collective_boxes
from penstock.errors import PenstockError, PipelineError, PlacementError, ScheduleError
from penstock.ir.kind import Kind
from penstock.runtime import Layers, Pipeline, TokenCrossEntropy, launch, rank
from penstock.runtime.execution.programs import build_training_program
from penstock.runtime.parallel import spread_vocabulary
from penstock.runtime.parallel.vocabulary import SpreadHead
from penstock.simulator.comparison.differences import differences
from penstock.simulator.timeline import Timeline
from runtime.spread_models import (
    HIDDEN,
    TOKENS,
    VOCABULARY,
    assert_equal,
    build_model,
    compare_with_plain_loop,
    draw_batch,
    plan_for_cluster,
    spread,
    train_pipeline,
)

UNEVEN = (0.0, 0.7, 0.3)
"""Shares of the rows: one rank has only the row that each must have."""


def train(schedule: Any, build: Any = build_model, batch: tuple[Tensor, Tensor] | None = None, *, blocks: int = 0, **options: Any) -> None:
    """Train on virtual ranks, and compare."""
    table = getattr(schedule, "schedule", schedule)
    table = table if isinstance(table, (ps.Schedule, ps.Program)) else schedule
    tokens, targets = draw_batch() if batch is None else batch
    blocks = blocks or table.stages

    def run() -> dict[str, Any]:
        return train_pipeline(Pipeline(build(blocks), schedule, **{"loss_fn": TokenCrossEntropy(), **options}), tokens, targets)

    found = launch(run, table.ranks)
    compare_with_plain_loop(found, build(blocks), tokens, targets, table.microbatches, options.get("loss_fn"))


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("1f1b", 2, 4), ("1f1b", 4, 6), ("interleaved-1f1b", 2, 4), ("zb-h1", 3, 4), ("zbv", 2, 4), ("zbv", 4, 8)],
)
def test_it_trains_like_the_plain_loop(name: str, ranks: int, microbatches: int) -> None:
    train(spread(name, ranks, microbatches))


@pytest.mark.parametrize("options", [{"head": False}, {"embedding": False}, {"ahead": 0}])
def test_one_end_may_stay_in_its_stage(options: dict[str, Any]) -> None:
    train(spread("zbv", 2, 4, **options))


def test_layers_with_a_bias_and_a_padding_row() -> None:
    train(spread("1f1b", 2, 4), partial(build_model, bias=True, padding=3))


def test_a_list_of_layers() -> None:
    schedule, (tokens, targets) = spread("interleaved-1f1b", 2, 4), draw_batch()
    layers = partial(build_model, schedule.stages)
    found = launch(lambda: train_pipeline(Pipeline(list(layers()), schedule, loss_fn=TokenCrossEntropy()), tokens, targets), 2)
    compare_with_plain_loop(found, layers(), tokens, targets, 4)


@pytest.mark.parametrize("loss_fn", [functional.cross_entropy, nn.CrossEntropyLoss()])
def test_the_loss_of_torch(loss_fn: Any) -> None:
    train(spread("1f1b", 2, 4), batch=draw_batch(9), loss_fn=loss_fn)


def test_recomputed_stages_and_programs() -> None:
    train(ps.lower(spread("zbv", 2, 4)), recompute=True)


def test_a_backward_that_cannot_be_split_keeps_its_place_among_the_shares() -> None:
    schedule = spread("zbv", 2, 4)
    program = build_training_program(schedule, 4, (0, schedule.stages - 1))  # verified there
    assert not [action for row in program for action in row if action.stage == 0 and str(action.kind.name) == "I"]


class Decoder(nn.Module):
    """A model whose layers are named, with a norm before the head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.blocks, self.norm = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(blocks)), nn.LayerNorm(HIDDEN)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def test_a_model_whose_layers_are_named() -> None:
    train(spread("zbv", 2, 4), Decoder, blocks=5, split=Layers("blocks", head=["words"], tail=["norm", "head"]))


def test_a_plan_that_spreads_the_vocabulary() -> None:
    sizes = {"layers": 5, "hidden": 512, "heads": 4, "sequence": 512, "vocabulary": 262144}
    profile = ps.Profile.transformer(**sizes, flops=400e12, latency=1e-5, bandwidth="50GB")
    plan = ps.plan(profile, ranks=2, microbatches=4, seconds=0, schedules=["1f1b"], vocabulary=True)
    assert plan.vocabulary
    train(plan, blocks=5)


@pytest.mark.parametrize(
    ("parallel", "shares", "rows"), [(False, (), (4, 4, 3)), (True, (), (4, 4, 3)), (False, UNEVEN, (1, 7, 3)), (True, UNEVEN, (1, 7, 3))]
)
def test_a_cluster_plan_that_reorders_the_ranks(parallel: bool, shares: tuple[float, ...], rows: tuple[int, ...]) -> None:
    """Rows are by rank of the pipeline, and so are the logits of all ranks."""
    plan, (tokens, targets) = plan_for_cluster(2, 0, 1, shares=shares), draw_batch()
    model = build_model(6)
    copies = [build_model(6) for _ in range(3)]

    def run() -> dict[str, Any]:
        pipe = Pipeline(copies[rank()], plan, loss_fn=TokenCrossEntropy(), record=True)
        assert pipe.rank == plan.devices.index(rank())
        first = next(name for name, _ in pipe.named_parameters() if name.startswith("0.weight"))
        assert first == f"0.weight[{sum(rows[: pipe.rank])}:{sum(rows[: pipe.rank + 1])}]"
        outputs = pipe.infer(tokens)
        check_collectives(pipe.eval_step(tokens, target=targets).timeline)  # type: ignore[arg-type]
        return {**train_pipeline(pipe, tokens, targets), "outputs": outputs}

    found = launch(run, 3, parallel=parallel)
    for of_rank in found:
        assert_equal(of_rank["outputs"], model(tokens))
    compare_with_plain_loop(found, model, tokens, targets, 4)


def test_ignored_targets_counts_of_microbatches_and_microbatches_by_hand() -> None:
    """The mean is over the targets that count, in steps with another number of microbatches and in lists of different lengths."""
    tokens, targets = draw_batch()
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(2)) < 0.3] = -100
    schedule = spread("1f1b", 2, 3)

    def run() -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
        pipe = Pipeline(build_model(2), schedule, loss_fn=TokenCrossEntropy(), weight=lambda target: (target != -100).sum())
        losses = [pipe.step(tokens, target=targets).loss, pipe.step(tokens, target=targets, microbatches=5).loss]
        lengths = [(tokens[:2, :3], targets[:2, :3]), (tokens[:2, 3:], targets[:2, 3:]), (tokens[2:], targets[2:])]
        losses.append(pipe.step_list([x for x, _ in lengths], [y for _, y in lengths], order=[2, 0, 1]).loss)
        return losses, {name: parameter.grad for name, parameter in pipe.named_parameters()}

    found, model = launch(run, 2), build_model(2)
    loss = TokenCrossEntropy()(model(tokens), targets)
    loss.backward()
    for losses, _ in found:
        for of_step in losses:
            assert of_step is not None
            assert_equal(of_step, loss)
    rows = [value for _, gradients in found for name, value in gradients.items() if name.startswith("0.weight[") and value is not None]
    words = model.get_parameter("0.weight").grad
    assert words is not None
    assert_equal(torch.cat(rows), 3 * words)


def test_gradients_of_microbatches_are_summed_in_a_type_with_more_digits() -> None:
    """Exactly the gradients of single microbatches in bfloat16, which count a quarter each, summed without rounding and rounded once."""
    tokens, targets = draw_batch(8, 5)
    schedule = spread("zbv", 2, 4)

    def run() -> list[tuple[Tensor, Tensor, Tensor]]:
        model = build_model(4, bias=True).bfloat16()
        pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), accumulate_dtype=torch.float64)
        own = list(pipe.parameters())

        def take_gradients() -> list[Tensor]:
            gradients = [parameter.grad for parameter in own if parameter.grad is not None]
            assert len(gradients) == len(own)
            for parameter in own:
                parameter.grad = None
            return gradients

        terms = []
        for x, y in zip(tokens.split(2), targets.split(2), strict=True):
            pipe.step(x, target=y, microbatches=1)
            terms.append([gradient.double() / 4 for gradient in take_gradients()])
        pipe.step(tokens, target=targets)
        summed = take_gradients()
        rounded_often = Pipeline(model, schedule, loss_fn=TokenCrossEntropy())
        rounded_often.step(tokens, target=targets)
        others = [parameter.grad for parameter in rounded_often.parameters() if parameter.grad is not None]
        return list(zip(summed, map(sum, zip(*terms, strict=True)), others, strict=True))

    found = [gradients for of_rank in launch(run, 2) for gradients in of_rank]
    assert len(found) == 2 * (4 + 3)
    assert all(torch.equal(gradient, wanted.bfloat16()) for gradient, wanted, _ in found)
    assert not all(torch.equal(gradient, other) for gradient, _, other in found)


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x * 1.0


@pytest.mark.parametrize("parallel", [False, True])
def test_a_recorded_timeline_has_the_times_of_collectives(parallel: bool, tmp_path: Path) -> None:
    """In a step and in an evaluation; the wait for a collective is told as the wait for the slow stage of the other rank."""
    tokens, targets = draw_batch()
    schedule, (words, *_, head) = spread("1f1b", 2, 4), build_model(0)

    def run() -> list[Any]:
        metrics: list[Any] = []
        model = nn.Sequential(words, nn.Identity(), Slow(), head)
        pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), record=True, on_step=metrics.append)
        timelines = [pipe.step(tokens, target=targets).timeline, pipe.eval_step(tokens, target=targets).timeline]
        pipe.flush_metrics()
        assert len(metrics) == 1
        return timelines

    for timelines in launch(run, 2, parallel=parallel):
        for timeline in timelines:
            check_collectives(timeline)
        stepped = timelines[0]
        waits = [gap for gap in stepped.gaps(0) if gap.cause == "waiting" and gap.action.kind is Kind.F and gap.end - gap.start > 0.005]
        assert {(gap.rank, gap.action.stage) for gap in waits} == {(1, 1)}
        stepped.save(tmp_path / "measured.json")
        predicted, measured = ps.simulate(ps.lower(schedule), stepped.costs), Timeline.load(tmp_path / "measured.json")
        way = differences(predicted, measured, scale=1.0).way
        assert sum(delay.added for delay in way) == pytest.approx(measured.makespan - predicted.makespan)


def check_collectives(timeline: Timeline) -> None:
    """Every collective starts after all ranks have joined it and the one before it has ended, and whatever needs it after its end."""
    graph, rows = timeline.flat.graph(), timeline.table.rows
    joins = np.flatnonzero(graph.meet >= 0)
    assert len(joins) == rows.is_kind(Kind.BROADCAST, Kind.COMBINE).sum() == len(list_collective_boxes(timeline)) > 0
    for low, high in pairwise(graph.meet_at.tolist()):
        together = graph.join[low:high]
        assert timeline.start[together].max() <= timeline.collective_start[together].max()
    for number in range(timeline.ranks):
        own = joins[graph.rank[joins] == number]
        assert (timeline.collective_start[own][1:] >= timeline.collective_end[own][:-1]).all()
    waiting = [
        (node, gather) for node in range(len(rows.heads.nonzero()[0])) for gather in graph.gather[slice(*graph.gather_at[node : node + 2])]
    ]
    assert waiting
    for node, gather in waiting:
        assert timeline.start[node] >= timeline.collective_end[gather]
    for name in ("broadcast", "combine") if timeline.table.training else ("combine",):
        values = getattr(timeline.costs, name)
        assert values[0] > 0
        assert values[-1] > 0


@pytest.mark.parametrize("options", [{}, {"head": False}])
def test_evaluation_has_the_loss_of_the_whole_model(options: dict[str, Any]) -> None:
    """Between training steps, with dropout off, for another number of microbatches."""
    (tokens, targets), schedule = draw_batch(), spread("zbv", 2, 4, **options)

    def build() -> nn.Sequential:
        model = build_model(4)
        model[1].append(nn.Dropout(0.5))
        return model

    def run() -> list[Any]:
        pipe = Pipeline(build(), schedule, loss_fn=TokenCrossEntropy())
        results = [pipe.eval_step(tokens, target=targets), pipe.eval_step(tokens, target=targets, microbatches=5)]
        assert all(parameter.grad is None for parameter in pipe.parameters())
        pipe.step(tokens, target=targets)
        results.append(pipe.eval_step(tokens, target=targets))
        return [result.loss for result in results] + results[1].losses

    model = build().eval()
    with torch.no_grad():
        loss = TokenCrossEntropy()(model(tokens), targets)
        parts = [TokenCrossEntropy()(model(x), y) for x, y in zip(tokens.tensor_split(5), targets.tensor_split(5), strict=True)]
    for losses in launch(run, 2):
        assert_equal(torch.stack(losses), torch.stack([loss] * 3 + parts))


FOUR = [("1f1b", 2, 4), ("interleaved-1f1b", 2, 4), ("zb-h1", 3, 4), ("zbv", 2, 4)]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), FOUR)
def test_outputs_are_the_whole_logits(name: str, ranks: int, microbatches: int) -> None:
    """Of infer, of evaluations with and without a target, and of steps, in the order of the caller; on every rank."""
    (tokens, targets), schedule = draw_batch(), spread(name, ranks, microbatches)
    parts = list(zip(tokens.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True))
    order = list(reversed(range(microbatches)))

    def run() -> list[Any]:
        pipe = Pipeline(build_model(schedule.stages, bias=True), schedule, loss_fn=TokenCrossEntropy())
        evaluated = pipe.eval_step(tokens, target=targets, outputs=True), pipe.eval_step(tokens, outputs=True), pipe.eval_step(tokens)
        assert_equal(evaluated[0].loss, TokenCrossEntropy()(evaluated[0].outputs, targets))  # type: ignore[arg-type]
        assert evaluated[1].loss is None
        assert evaluated[2].loss is None
        assert evaluated[2].outputs is None
        stepped = pipe.step(tokens, target=targets, outputs=True)
        listed = pipe.step_list([x for x, _ in parts], [y for _, y in parts], order=order, outputs=True)
        assert "outputs" in repr(listed)
        return [pipe.infer(tokens), pipe.infer(tokens, microbatches=3), *(r.outputs for r in (*evaluated[:2], stepped, listed))]

    wanted = build_model(schedule.stages, bias=True)(tokens)
    for outputs in launch(run, ranks):
        for output in outputs:
            assert_equal(output, wanted)


@pytest.mark.parametrize("options", [{"head": False}, {"embedding": False}])
def test_outputs_if_one_end_is_in_its_stage(options: dict[str, Any]) -> None:
    """Without the embedding, the ranks behind the first need no batch to infer."""
    (tokens, _), schedule = draw_batch(), spread("1f1b", 2, 4, **options)

    def run() -> Any:
        pipe = Pipeline(build_model(2), schedule, loss_fn=TokenCrossEntropy())
        return pipe.infer(*([tokens] if "head" in options or rank() == 0 else []))

    for outputs in launch(run, 2):
        assert_equal(outputs, build_model(2)(tokens))


def test_outputs_on_some_ranks_only_are_refused() -> None:
    tokens, targets = draw_batch()

    def run() -> None:
        pipe = Pipeline(build_model(2), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy())
        pipe.step(tokens, target=targets, outputs=rank() == 1)

    with pytest.raises(PipelineError, match="rank 0 does not return outputs, but rank 1 returns outputs"):
        launch(run, 2)


# Tied and frozen ends -------------------------------------------------------------------------------------------------


def build_tied(blocks: int, **options: Any) -> nn.Sequential:
    model = build_model(blocks, **options)
    model[-1].weight = model[0].weight
    return model


@pytest.mark.parametrize(("name", "ranks", "microbatches"), FOUR)
def test_tied_ends_train_like_the_plain_loop(name: str, ranks: int, microbatches: int) -> None:
    """The weight counts once in the norm, and is one parameter: `compare_with_plain_loop` counts its elements."""
    train(spread(name, ranks, microbatches), partial(build_tied, bias=True, padding=3))


def test_tied_ends_with_shares_of_different_size() -> None:
    train(plan_for_cluster(0, 1, 2, shares=UNEVEN), partial(build_tied, bias=True, padding=3), blocks=6)


def test_shares_of_too_few_rows_are_refused() -> None:
    plan = plan_for_cluster(0, 1, 2, shares=UNEVEN)
    small = nn.Sequential(nn.Embedding(2, HIDDEN), *(nn.Linear(HIDDEN, HIDDEN) for _ in range(6)), nn.Linear(HIDDEN, 2))
    with pytest.raises(PipelineError, match="2 rows cannot be spread over 3 ranks: each needs at least one"):
        launch(lambda: Pipeline(small, plan, loss_fn=TokenCrossEntropy()), 3)


def test_a_weight_that_is_not_of_two_spread_ends_is_refused() -> None:
    def build_with_middle() -> nn.Sequential:
        model = build_model(2)
        middle = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        middle.weight = model[0].weight
        model[1].append(middle)
        return model

    with pytest.raises(PlacementError, match="'3' shares its weight with '0', but only '3' is spread"):
        launch(lambda: Pipeline(build_tied(2), spread("1f1b", 2, 4, embedding=False), loss_fn=TokenCrossEntropy()), 2)
    with pytest.raises(PlacementError, match="'0' shares its weight with '1', which is in a stage"):
        launch(lambda: Pipeline(build_with_middle(), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy()), 2)


def build_frozen(blocks: int, *, frozen: Sequence[str], build: Any = build_model) -> nn.Sequential:
    model: nn.Sequential = build(blocks, bias=True)
    for name in frozen:
        model.get_parameter(name.replace("-1", str(blocks + 1))).requires_grad_(False)
    return model


@pytest.mark.parametrize(("name", "ranks", "microbatches"), FOUR)
@pytest.mark.parametrize("frozen", [["0.weight"], ["-1.weight", "-1.bias"], ["0.weight", "-1.weight"]])
def test_frozen_ends_stay_as_they_are(name: str, ranks: int, microbatches: int, frozen: list[str]) -> None:
    train(spread(name, ranks, microbatches), partial(build_frozen, frozen=frozen))


def test_frozen_tied_ends_and_stages() -> None:
    train(spread("zbv", 2, 4), partial(build_frozen, frozen=["0.weight"], build=build_tied))
    first_stage = ["0.weight", "1.0.weight", "1.0.bias", "4.0.weight", "4.0.bias"]
    train(spread("zbv", 2, 4), partial(build_frozen, frozen=first_stage))


def test_frozen_rows_cannot_be_thawed_in_the_pipeline() -> None:
    tokens, targets = draw_batch()

    def run() -> None:
        pipe = Pipeline(build_frozen(2, frozen=["0.weight"]), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy())
        for parameter in pipe.parameters():
            parameter.requires_grad_()
        pipe.step(tokens, target=targets)

    with pytest.raises(ScheduleError, match=r"rows of 0.weight were frozen when the pipeline was created"):
        launch(run, 2)


# Parity ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks", "microbatches"), FOUR)
@pytest.mark.parametrize("build", [build_model, build_tied, partial(build_frozen, frozen=["0.weight"])])
def test_parity_with_the_whole_model(name: str, ranks: int, microbatches: int, build: Any) -> None:
    (tokens, targets), schedule = draw_batch(), spread(name, ranks, microbatches)

    def run() -> Any:
        pipe = Pipeline(build(schedule.stages), schedule, loss_fn=TokenCrossEntropy())
        before = pipe.step(tokens, target=targets)
        gradients = {name: None if value.grad is None else value.grad.clone() for name, value in pipe.named_parameters()}
        parity = pipe.parity(tokens, target=targets)
        after = {name: value.grad for name, value in pipe.named_parameters()}
        for key, gradient in gradients.items():
            assert gradient is after[key] is None or torch.equal(gradient, after[key])  # type: ignore[arg-type]
        assert_equal(pipe.eval_step(tokens, target=targets).loss, before.loss)  # type: ignore[arg-type]
        return parity

    for parity in launch(run, ranks):
        for comparison in parity.all:
            assert comparison.worst < 1e-12, str(comparison)


def test_parity_finds_wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's rows of the head get a gradient that is too large."""
    tokens, targets = draw_batch()
    add = SpreadHead.add_weight_gradients

    def add_twice(self: SpreadHead, unit: int) -> None:
        add(self, unit)
        if self.lane.rank == 1 and self.weight.grad is not None:
            self.weight.grad *= 1.5

    monkeypatch.setattr(SpreadHead, "add_weight_gradients", add_twice)
    for parity in launch(
        lambda: Pipeline(build_model(2), spread("1f1b", 2, 2), loss_fn=TokenCrossEntropy()).parity(tokens, target=targets), 2
    ):
        large = {difference.name for difference in parity.loop.differences if difference.relative > 1e-12}
        assert large == {"3.weight[6:11]", "norm"}


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": functional.mse_loss}, "give loss_fn=TokenCrossEntropy"),
        ({"shard": True}, "shard= needs mesh="),
        ({"graphs": True}, "graphs= does not go with"),
        ({"ties": [["0.weight", "3.weight"]]}, "ties= does not go with"),
        ({"offload": True}, "moves activations to host memory, which a pipeline cannot run together"),
        ({"schedule": spread("dualpipe", 2, 4)}, "runs 2 copies of the model, which"),
        ({"schedule": ps.spread_vocabulary(ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=2))}, "cuts sequences into 2 slices"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"schedule": spread("1f1b", 2, 4), "loss_fn": TokenCrossEntropy(), **options}
    with pytest.raises(PenstockError, match=message):
        launch(lambda: Pipeline(build_model(2), **arguments), 2)


def test_calls_without_what_a_rank_needs_are_refused_and_training_goes_on() -> None:
    tokens, targets = draw_batch()

    def run() -> list[str]:
        pipe = Pipeline(build_model(2), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy())
        attempts = [
            lambda: pipe.eval_step(tokens, target=targets) if rank() else pipe.infer(tokens),
            lambda: pipe.step(tokens),
            lambda: pipe.step(target=targets),
            lambda: pipe.step(tokens + VOCABULARY, target=targets),
            lambda: pipe.step(tokens, target=targets - VOCABULARY),
            lambda: pipe.step(tokens.to(torch.uint8), target=targets),
            lambda: pipe.step(tokens, target=targets > 3),
        ]
        told = []
        for attempt in attempts:
            with pytest.raises(ScheduleError) as caught:
                attempt()
            told.append(str(caught.value))
        loss = pipe.step(tokens, target=targets.to(torch.uint8)).loss  # torch's cross-entropy takes these too
        assert loss is not None
        assert_equal(loss, TokenCrossEntropy()(build_model(2)(tokens), targets))
        return told

    for told in launch(run, 2):
        starts = [
            "every rank has a share of the head and the loss, but",
            "every rank has a share of the head",
            "every rank has a share of the embedding",
            "token 2",
            "target -1",
            "the tokens are torch.uint8",
            "the target of a head",
        ]
        assert [text[: len(start)] for text, start in zip(told, starts, strict=True)] == starts


def test_numbers_on_a_device_are_checked_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host, which stands for a device here, the device's check fails at once."""
    (tokens, targets), ignored = draw_batch(), torch.full((9, TOKENS), -100)
    monkeypatch.setattr(spread_vocabulary, "is_on_host", lambda _: False)

    def run(attempt: int) -> None:
        pipe = Pipeline(build_model(2), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy(), weight=torch.numel)
        pipe.step(tokens, target=ignored)
        pipe.step(tokens + 10 * attempt, target=targets - VOCABULARY)

    for attempt, what in enumerate(["target", "token"]):
        with pytest.raises(RuntimeError, match=f"a {what} is outside of the vocabulary of 11 rows"):
            launch(partial(run, attempt), 2)


def test_targets_of_two_dimensions_need_the_loss_of_tokens() -> None:
    tokens, targets = draw_batch()
    with pytest.raises(ScheduleError, match=r"targets have 2 dimensions.*give loss_fn=TokenCrossEntropy"):
        launch(lambda: Pipeline(build_model(2), spread("1f1b", 2, 4), loss_fn=functional.cross_entropy).step(tokens, target=targets), 2)


def test_an_order_whose_schedule_spreads_nothing_is_refused() -> None:
    tokens, targets = (list(part.split(1)) for part in draw_batch(4, 3))
    order = ps.BatchPlanner(ps.schedule("1f1b", 2, 4), ps.Costs(), sequence=4).order([1, 2, 3, 4])

    def run() -> None:
        Pipeline(build_model(2), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy()).step_list(tokens, targets, order=order)

    with pytest.raises(ScheduleError, match=r"spreads layers of the stages \[\] over the ranks, the pipeline's those of \[0, 1\]"):
        launch(run, 2)


def test_hooks_see_the_gradients_of_the_rows() -> None:
    tokens, targets = draw_batch()

    def run() -> tuple[int, bool]:
        pipe = Pipeline(build_model(2), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy())
        rows = next(parameter for name, parameter in pipe.named_parameters() if name.startswith("3.weight["))
        seen: list[Tensor | None] = []
        rows.register_post_accumulate_grad_hook(lambda parameter: seen.append(None if parameter.grad is None else parameter.grad.clone()))
        pipe.step(tokens, target=targets)
        assert seen[-1] is not None
        assert rows.grad is not None
        return len(seen), torch.equal(seen[-1], rows.grad)

    assert launch(run, 2) == [(4, True)] * 2


@pytest.mark.parametrize("options", [{"bias": True}, {"padding": 3}])
def test_hooks_change_the_gradients_of_the_rows(options: dict[str, Any]) -> None:
    """Of two steps, because the first gradient of a parameter is stored and later ones are added."""
    tokens, targets = draw_batch()

    def run() -> dict[str, Tensor | None]:
        pipe = Pipeline(build_model(2, **options), spread("1f1b", 2, 3), loss_fn=TokenCrossEntropy())
        for _, parameter in pipe.named_parameters():
            parameter.register_hook(lambda gradient: 3 * gradient)
            parameter.register_hook(lambda _: None)
        for _ in range(2):
            pipe.step(tokens, target=targets)
        return {name: parameter.grad for name, parameter in pipe.named_parameters()}

    model = build_model(2, **options)
    (6 * TokenCrossEntropy()(model(tokens), targets)).backward()
    for gradients in launch(run, 2):
        for key, gradient in gradients.items():
            name, _, rows = key.partition("[")
            wanted = model.get_parameter(name).grad
            assert gradient is not None
            assert wanted is not None
            assert_equal(gradient, wanted[slice(*map(int, rows[:-1].split(":")))] if rows else wanted)


def test_a_microbatch_that_does_not_count_has_its_loss() -> None:
    tokens, targets = draw_batch()
    numbers = iter(range(8))

    def run() -> list[Tensor]:
        pipe = Pipeline(build_model(2), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy(), weight=lambda _: next(numbers) % 4)
        return pipe.step(tokens, target=targets).losses

    model, parts = build_model(2), zip(tokens.tensor_split(4), targets.tensor_split(4), strict=True)
    wanted = torch.stack([TokenCrossEntropy()(model(x), y) for x, y in parts])
    for losses in launch(run, 2):
        assert_equal(torch.stack(losses), wanted)


# Failures -------------------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """A layer that fails on one rank while told to."""

    failing_rank: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if rank() == self.failing_rank:
            raise ValueError("out of order")
        return x * 1.0


@pytest.mark.parametrize("parallel", [False, True])
def test_a_failure_between_steps_ends_the_lanes_of_all_ranks(parallel: bool) -> None:
    """The rank that fails has no step in progress, and the other has. Neither takes the other's next step for its own."""
    (tokens, targets), models = draw_batch(), [build_model(2) for _ in range(2)]

    def run() -> list[str]:
        def fail(_: Any) -> None:
            if rank() == 0:
                raise ValueError("out of order")

        pipe, told = Pipeline(models[rank()], spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy(), on_step=fail, deadline=60), []
        pipe.step(tokens, target=targets)
        with pytest.raises(PipelineError, match="on_step failed on rank 0"):
            pipe.flush_metrics() if rank() == 0 else pipe.step(tokens, target=targets)
        with pytest.raises(PipelineError) as caught:
            pipe.step(tokens, target=targets)
        told.append(str(caught.value).partition(":")[0])
        return told

    assert launch(run, 2, parallel=parallel) == [["rank 0 is at batch 2 of this pipeline, but rank 1 is at batch 3 of this pipeline"]] * 2


@pytest.mark.parametrize("parallel", [False, True])
def test_a_failure_ends_the_collectives_of_all_ranks_and_the_next_step_starts_anew(parallel: bool) -> None:
    tokens, targets = draw_batch()
    words, *_, head = model = build_model(0)  # not in the threads below, which share one random stream
    wanted = TokenCrossEntropy()(model(tokens), targets)

    def run() -> list[str]:
        failing = [Failing(), Failing()]
        pipe = Pipeline(nn.Sequential(words, *failing, head), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy(), deadline=60)
        told = []
        for number, layer in enumerate(failing):
            layer.failing_rank = number
            with pytest.raises(PipelineError, match="ValueError: out of order") as caught:
                pipe.step(tokens, target=targets)
            told.append(str(caught.value).partition("\n")[0])
            layer.failing_rank = None
            assert all(parameter.grad is None for parameter in pipe.parameters())
            loss = pipe.step(tokens, target=targets).loss
            assert loss is not None
            assert_equal(loss, wanted)
            for parameter in pipe.parameters():
                parameter.grad = None
        return told

    first, second = launch(run, 2, parallel=parallel)
    assert first == second
    assert "failed on rank 0" in first[0]
    assert "failed on rank 1" in first[1]
