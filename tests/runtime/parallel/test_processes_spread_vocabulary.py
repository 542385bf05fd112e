"""Pipelines whose vocabulary is spread over processes: the numbers of the plain loop, and a rank that fails."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import Pipeline, TokenCrossEntropy, device_mesh, rank
from penstock.runtime.launch.workers import Workers
from runtime import spread_models
from runtime.spread_models import build_model, compare_with_plain_loop, draw_batch, spread, train_pipeline

cloudpickle.register_pickle_by_value(spread_models)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"), [("1f1b", 2, 4), ("interleaved-1f1b", 2, 4), ("zbv", 2, 4), ("1f1b", 4, 6), ("zbv", 4, 8)]
)
def test_it_trains_like_the_plain_loop(workers: Workers, name: str, ranks: int, microbatches: int) -> None:
    schedule, (tokens, targets) = spread(name, ranks, microbatches), draw_batch()
    model = build_model(schedule.stages)

    def run() -> dict[str, Any]:
        torch.set_num_threads(1)
        pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), deadline=60)
        evaluated = pipe.eval_step(tokens, target=targets).loss
        trained = train_pipeline(pipe, tokens, targets)
        spread_models.assert_equal(trained["losses"][0], evaluated)
        return trained

    compare_with_plain_loop(workers.run(run, ranks=ranks), model, tokens, targets, microbatches)


class Failing(nn.Module):
    """A layer that fails on rank 1 once."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and rank() == 1:
            self.fails = False
            raise ValueError("out of order")
        return x * 1.0


def test_a_rank_that_fails_ends_the_waits_of_the_others(workers: Workers) -> None:
    """Long before the deadline, and the next step has the numbers of the whole model."""
    schedule, (tokens, targets) = spread("1f1b", 2, 4), draw_batch()
    words, *_, head = build_model(0)
    model = nn.Sequential(words, Failing(), Failing(), head)

    def run() -> tuple[str, Tensor | None]:
        pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), deadline=600)
        told = ""
        try:
            pipe.step(tokens, target=targets)
        except PipelineError as error:
            told = str(error).partition("\n")[0]
        return told, pipe.step(tokens, target=targets).loss

    for told, loss in workers.run(run, ranks=2):
        assert "failed on rank 1: ValueError: out of order" in told
        assert loss is not None
        spread_models.assert_equal(loss, TokenCrossEntropy()(build_model(0)(tokens), targets))


def test_data_parallel_ranks_are_refused(workers: Workers) -> None:
    schedule = spread("1f1b", 2, 4)

    def run() -> str:
        try:
            Pipeline(build_model(2), schedule, loss_fn=TokenCrossEntropy(), mesh=device_mesh(pp=2, dp=2))
        except ScheduleError as error:
            return str(error)
        return ""

    told = workers.run(run, ranks=4)
    assert [text.partition(",")[0] for text in told] == ["mesh= does not go with a vocabulary that is spread over the ranks"] * 4
