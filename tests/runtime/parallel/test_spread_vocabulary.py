"""Pipelines whose vocabulary is spread over virtual ranks: the numbers of the plain loop, what is refused, and failures."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import CheckpointError, PenstockError, PipelineError, ScheduleError
from penstock.runtime import Checkpoints, Layers, Pipeline, TokenCrossEntropy, launch, rank
from penstock.runtime.execution.programs import build_training_program
from runtime.spread_models import (
    HIDDEN,
    VOCABULARY,
    assert_equal,
    build_model,
    compare_with_plain_loop,
    draw_batch,
    spread,
    train_pipeline,
)


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


def test_times_and_metrics_cover_the_shares() -> None:
    tokens, targets = draw_batch()

    def run() -> tuple[set[str], list[Any]]:
        metrics: list[Any] = []
        pipe = Pipeline(build_model(2), spread("1f1b", 2, 2), loss_fn=TokenCrossEntropy(), record=True, on_step=metrics.append)
        timeline = pipe.step(tokens, target=targets).timeline
        assert timeline is not None
        pipe.flush_metrics()
        return {action.kind.name for row in timeline.table for action in row}, metrics

    for kinds, metrics in launch(run, 2):
        assert {"S", "T", "BROADCAST", "COMBINE"} <= kinds
        assert len(metrics) == 1


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


def test_outputs_of_a_head_that_is_not_spread() -> None:
    (tokens, _), schedule = draw_batch(), spread("1f1b", 2, 4, head=False)
    for outputs in launch(lambda: Pipeline(build_model(2), schedule, loss_fn=TokenCrossEntropy()).infer(tokens), 2):
        assert_equal(outputs, build_model(2)(tokens))


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": functional.mse_loss}, "give loss_fn=TokenCrossEntropy"),
        ({"shard": True}, "shard= does not go with a vocabulary"),
        ({"accumulate_dtype": torch.float64}, "accumulate_dtype= does not go with"),
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


def test_calls_that_need_whole_ends_are_refused_and_training_goes_on(tmp_path: Any) -> None:
    tokens, targets = draw_batch()

    def run() -> list[str]:
        pipe = Pipeline(build_model(2), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy())
        attempts = [
            lambda: pipe.infer(tokens),
            lambda: pipe.eval_step(tokens),
            lambda: pipe.parity(tokens, target=targets),
            lambda: pipe.step(tokens, target=targets, outputs=True),
            lambda: pipe.step(tokens),
            lambda: pipe.step(target=targets),
            lambda: pipe.step(tokens + VOCABULARY, target=targets),
            lambda: pipe.step(tokens, target=targets - VOCABULARY),
        ]
        told = []
        for attempt in attempts:
            with pytest.raises(ScheduleError) as caught:
                attempt()
            told.append(str(caught.value))
        with pytest.raises(CheckpointError, match="Checkpoints cannot save or load a pipeline whose vocabulary is spread"):
            Checkpoints(tmp_path).save(pipe, step=0)
        loss = pipe.step(tokens, target=targets).loss
        assert loss is not None
        assert_equal(loss, TokenCrossEntropy()(build_model(2)(tokens), targets))
        return told

    for told in launch(run, 2):
        starts = ["infer and outputs=True", "every rank has a share of the head", "parity compares with", "infer and outputs=True"]
        starts += ["every rank has a share of the head", "every rank has a share of the embedding", "token 2", "target -1"]
        assert [text[: len(start)] for text, start in zip(told, starts, strict=True)] == starts


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


# Failures -------------------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """A layer that fails on one rank while told to."""

    failing_rank: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if rank() == self.failing_rank:
            raise ValueError("out of order")
        return x * 1.0


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
