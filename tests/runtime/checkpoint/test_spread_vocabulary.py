"""Checkpoints of pipelines whose vocabulary is spread over ranks: loaded by others, whether these spread it or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import penstock as ps
from penstock.errors import CheckpointError
from penstock.runtime import Checkpoints, Pipeline, TokenCrossEntropy, launch, rank
from runtime.spread_models import HIDDEN, VOCABULARY, draw_batch, plan_for_cluster, spread
from runtime.spread_resuming import build, build_empty, compare, go_on, make_optimizer, step_plain


def test_a_run_continues_on_other_ranks_with_and_without_a_spread_vocabulary(tmp_path: Path) -> None:
    ways = [spread("1f1b", 4, 4), spread("zbv", 2, 4), ps.schedule("1f1b", 2, 4), spread("1f1b", 2, 4, head=False), spread("zb-h1", 3, 4)]
    for number, schedule in enumerate(ways):
        model = build_empty(tmp_path)
        for losses in launch(go_on, schedule.ranks, args=(model, schedule, tmp_path, 2)):
            compare(losses, 2 * number)
    for name, step in (("step-00000002", 2), ("step-00000010", 10)):  # into the unpipelined model
        plain = build_empty(tmp_path)
        optimizer = make_optimizer(plain)
        Checkpoints(tmp_path).load(name, plain, optimizer)
        compare([step_plain(plain, optimizer) for _ in range(2)], step)


def test_a_run_continues_on_ranks_in_another_order(tmp_path: Path) -> None:
    """On two devices of a cluster in the plan's order, with unequal shares of the rows, in the other order, and in their own."""
    plans = [plan_for_cluster(1, 0), plan_for_cluster(1, 0, shares=(0.9, 0.1)), plan_for_cluster(0, 1), spread("1f1b", 3, 4)]
    for number, plan in enumerate(plans):
        models = [build_empty(tmp_path) for _ in range(3)]
        for losses in launch(lambda: go_on(models[rank()], plan, tmp_path, 2), 2 if number < 3 else 3):  # noqa: B023 - called at once
            compare(losses, 2 * number)


def test_tied_ends_continue_on_other_ranks_with_and_without_a_spread_vocabulary(tmp_path: Path) -> None:
    """The weight is written once, and has the names of both ends for those that do not spread it."""
    for number, schedule in enumerate([spread("1f1b", 3, 4), ps.schedule("1f1b", 2, 4), spread("zbv", 2, 4)]):
        model = build_empty(tmp_path, tied=True)
        for losses in launch(go_on, schedule.ranks, args=(model, schedule, tmp_path, 2)):
            compare(losses, 2 * number, tied=True)
    places = dcp.FileSystemReader(tmp_path / "step-00000002").read_metadata().storage_data
    weights = [{key.offset: place for key, place in places.items() if key.fqn == f"model.{name}.weight"} for name in "05"]
    assert len(weights[0]) == 3
    assert weights[0] == weights[1]
    for name, step in (("step-00000002", 2), ("step-00000006", 6)):
        plain = build_empty(tmp_path, tied=True)
        optimizer = make_optimizer(plain)
        Checkpoints(tmp_path).load(name, plain, optimizer)
        compare([step_plain(plain, optimizer) for _ in range(2)], step, tied=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_rank_writes_its_rows_and_torch_reads_the_whole(tmp_path: Path) -> None:
    launch(go_on, 4, args=(build(), spread("1f1b", 4, 4), tmp_path, 1))
    saved = dcp.FileSystemReader(tmp_path / "step-00000001").read_metadata().state_dict_metadata
    for name, width in (("0.weight", (HIDDEN,)), ("5.weight", (HIDDEN,)), ("5.bias", ())):
        for key in (f"model.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
            assert saved[key].size == (VOCABULARY, *width)
            assert [tuple(chunk.sizes) for chunk in saved[key].chunks] == [(rows, *width) for rows in (3, 3, 3, 2)]
    model = build()
    step_plain(model, make_optimizer(model))
    state: dict[str, Any] = {"model": {name: torch.empty_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=str(tmp_path / "step-00000001"))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state["model"][name], value, rtol=0, atol=1e-10)


class ByColumns(torch.optim.SGD):
    """An optimizer that keeps one value per column of a weight, as those that factorise their state do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() > 1:
                    self.state[parameter]["columns"] = parameter.detach().sum(dim=0)


def test_state_that_does_not_follow_the_rows_is_refused(tmp_path: Path) -> None:
    tokens, targets = draw_batch()
    model, schedule = build(), spread("1f1b", 2, 4)
    optimizer = ByColumns(model.parameters(), lr=0.1)
    step_plain(model, optimizer)
    Checkpoints(tmp_path / "whole").save(model, optimizer, step=1)

    def run() -> tuple[str, str]:
        pipe = Pipeline(build(), schedule, loss_fn=TokenCrossEntropy())
        optimizer = ByColumns(pipe.parameters(), lr=0.1)
        pipe.step(tokens, target=targets)
        optimizer.step()
        with pytest.raises(CheckpointError) as saved:
            Checkpoints(tmp_path / "rows").save(pipe, optimizer, step=1)
        with pytest.raises(CheckpointError) as loaded:
            Checkpoints(tmp_path / "whole").load_latest(pipe, optimizer)
        return str(saved.value), str(loaded.value)

    for saved, loaded in launch(run, 2):
        assert "the optimizer keeps 0.weight.columns of shape [6] for 6 rows of a parameter of shape [11, 6]" in saved
        assert "optimizer.state.0.weight.columns was saved with shape [6] for a parameter of shape [11, 6]" in loaded
    assert not Checkpoints(tmp_path / "rows").whole()


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = build()
    other[0] = nn.Embedding(VOCABULARY + 1, HIDDEN).double()
    Checkpoints(tmp_path).save(other, step=1)

    def run() -> None:
        Checkpoints(tmp_path).load_latest(Pipeline(build(), spread("1f1b", 2, 4), loss_fn=TokenCrossEntropy()))

    with pytest.raises(CheckpointError, match=r"has 0.weight with shape \[12, 6\], but the model's has \[11, 6\]"):
        launch(run, 2)
