"""Data ranks draw different random numbers, but start with equal values and keep them equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from composition.parallel import WIDTH, full, mesh_of, perceptrons, schedule
from penstock.runtime import Checkpoints, Pipeline
from penstock.runtime.launch.workers import Workers

ROWS = 16


def dropping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2))).double()


def batches() -> list[Tensor]:
    return list(torch.randn(3, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def train(pipe: Pipeline, optimizer: torch.optim.Optimizer, parts: list[Tensor]) -> list[float]:
    losses = []
    for x in parts:
        losses.append(float(pipe.step(x, target=x.flip(1)).loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_random_streams_over_data_ranks(workers: Workers, tmp_path: Path) -> None:
    """Two data ranks with four microbatches each draw what one draws with eight, also when one goes on from what two have saved."""

    def pair(shard: bool) -> tuple[list[float], bool]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(dropping(), schedule("zb-h1", 2), loss_fn=functional.mse_loss, mesh=mesh, shard=shard, seed=7)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.5)
        mine = [x.chunk(2)[mesh["dp"].get_local_rank()] for x in batches()]
        losses = train(pipe, optimizer, mine[:2])
        if shard:
            Checkpoints(tmp_path).save(pipe, optimizer, step=2)
            return losses, True
        return losses, pipe.parity(mine[2], target=mine[2].flip(1)).loop.worst < 1e-12

    pipe = Pipeline(dropping(), schedule("1f1b", 1, 8), loss_fn=functional.mse_loss, seed=7)
    wanted = train(pipe, torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.5), batches())
    for shard in (False, True):
        for losses, equal in workers.run(pair, (shard,)):
            assert losses == pytest.approx(wanted[:2], rel=1e-12)
            assert equal
    again = Pipeline(dropping(), schedule("1f1b", 1, 8), loss_fn=functional.mse_loss, seed=7)
    optimizer = torch.optim.SGD(again.parameters(), 0.1, momentum=0.5)
    Checkpoints(tmp_path).load_latest(again, optimizer)
    assert train(again, optimizer, batches()[2:]) == pytest.approx(wanted[2:], rel=1e-12)


def test_copies_of_shards_begin_alike(workers: Workers) -> None:
    """Hybrid shards of models that every process has drawn by itself: each shard has the values of the first of its copies."""

    def build() -> tuple[int, dict[str, Any], dict[str, Any]]:
        mesh = mesh_of(pp=1, dp_replicate=2, dp_shard=2)
        torch.manual_seed(mesh.get_rank())
        model = perceptrons(2)
        drawn = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        pipe = Pipeline(model, schedule("interleaved-1f1b", 1), loss_fn=functional.mse_loss, mesh=mesh, shard=True)
        return mesh["dp_shard"].get_local_rank(), drawn, {name: full(parameter.detach()) for name, parameter in pipe.local_parameters()}

    found = workers.run(build)
    (_, drawn, _), (_, second, _) = found[:2]
    for _, _, held in found:
        for name, value in held.items():
            rows = -(-len(value) // 2)  # a shard has so many, the last one what is left
            assert torch.equal(value, torch.cat([drawn[name][:rows], second[name][rows:]])), name


def test_buffers_of_stages_in_shards(workers: Workers) -> None:
    """Statistics of a normalisation are those of the first data rank in every step, as they are of copies."""

    def run(shard: bool) -> Tensor:
        mesh = mesh_of(pp=2, dp=2)
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2)]
        pipe = Pipeline(nn.Sequential(*layers), schedule("1f1b", 2), loss_fn=functional.mse_loss, mesh=mesh, shard=shard)
        torch.manual_seed(mesh["dp"].get_local_rank())
        x = torch.randn(8, WIDTH)
        for _ in range(2):
            pipe.step(x, target=x)
        return pipe.infer(torch.ones(4, WIDTH))

    copies, shards = workers.run(run, (False,)), workers.run(run, (True,))
    for found in copies + shards:
        torch.testing.assert_close(found, copies[0])
