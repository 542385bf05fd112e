"""Checkpoints of processes, loaded by another number of processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from penstock.errors import CheckpointError
from penstock.runtime import Checkpoints, Pipeline, rank
from penstock.runtime.launch.workers import Workers
from runtime.models import blocks
from runtime.resuming import Run, curve, model, pipelined

pytestmark = pytest.mark.slow


def go_on(schedule: str, folder: Path, steps: int, seed: int) -> list[float]:
    """Continue from the latest checkpoint for some steps, with an asynchronous save in the middle."""
    torch.set_num_threads(1)
    run = pipelined(model(seed, dropout=0.3), schedule)
    with Checkpoints(folder, keep=1) as checkpoints:
        found = checkpoints.load_latest(run.model, run.optimizer, **run.parts)
        first = found.step if found else 0
        losses = run.train(steps - 1, first)
        checkpoints.save_async(run.model, run.optimizer, step=first + steps - 1, **run.parts)
        losses += run.train(1, first + steps - 1)
        checkpoints.save_async(run.model, run.optimizer, step=first + steps, **run.parts)
    return losses


def test_losses_continue_with_fewer_and_more_processes(workers: Workers, tmp_path: Path) -> None:
    """From 4 ranks to 2, 3 and 1 with different schedules, then into the unpipelined model: bitwise equal."""
    losses: list[float] = []
    for number, (schedule, ranks) in enumerate([("1f1b", 4), ("zbv", 2), ("zb-h1", 3), ("1f1b", 1)]):
        found = workers.run(go_on, (schedule, tmp_path, 2, number), ranks=ranks)
        assert all(theirs == found[0] for theirs in found)
        losses += found[0]
        assert [(each.step, each.ranks) for each in Checkpoints(tmp_path).whole()] == [(len(losses), ranks)]
    plain = Run.of(model(9, dropout=0.3))
    assert plain.load(tmp_path) == 8
    losses += plain.train(2, 8)
    assert losses == curve(partial(model, dropout=0.3), 10)


def sharded() -> nn.Module:
    torch.set_num_threads(1)
    made = blocks(3)
    for block in made:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    return made


def step(trained: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    functional.mse_loss(trained(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_sharded_parameters(workers: Workers, tmp_path: Path) -> None:
    """Every rank writes and reads its own FSDP2 shards, and the unsharded model loads all of them."""
    x = torch.randn(4, 6)

    def save() -> dict[str, Tensor]:
        torch.manual_seed(1)
        made = sharded()
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
        step(made, optimizer, x)
        Checkpoints(tmp_path).save(made, optimizer, step=1)
        step(made, optimizer, x)
        return {name: value.full_tensor() for name, value in made.state_dict().items()}

    def load() -> dict[str, Tensor]:
        made = sharded()
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.3)
        Checkpoints(tmp_path).load_latest(made, optimizer)
        assert all(isinstance(each["exp_avg"], DTensor) for each in optimizer.state.values())
        step(made, optimizer, x)
        return {name: value.full_tensor() for name, value in made.state_dict().items()}

    wanted = workers.run(save, ranks=2)[0]
    for found in workers.run(load, ranks=2):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    plain = blocks(3)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.3)
    Checkpoints(tmp_path).load_latest(plain, optimizer)
    step(plain, optimizer, x)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(value, wanted[name])


def test_two_pipelines_save_together_and_apart(workers: Workers, tmp_path: Path) -> None:
    """Two data-parallel pipelines save together; what both hold is written once."""

    def save() -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
        torch.manual_seed(0)
        pipe = Pipeline(blocks(2), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, group=mesh["pipe"])
        path = Checkpoints(tmp_path).save(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), step=3)
        Checkpoints(tmp_path / f"own {rank() // 2}", group=mesh["pipe"]).save(pipe, step=4)
        return pipe.rank, sum(each.stat().st_size for each in path.glob("*.distcp"))

    found = workers.run(save, ranks=4)
    assert [pipe_rank for pipe_rank, _ in found] == [0, 1, 0, 1]
    plain = blocks(2)
    torch.manual_seed(0)
    wanted = blocks(2).state_dict()
    for folder, step_, ranks in ((tmp_path, 3, 4), (tmp_path / "own 0", 4, 2), (tmp_path / "own 1", 4, 2)):
        at = Checkpoints(folder).load_latest(plain)
        assert at is not None
        assert (at.step, at.ranks) == (step_, ranks)
        assert all(torch.equal(value, wanted[name]) for name, value in plain.state_dict().items())


def test_folder_that_is_not_shared(workers: Workers, tmp_path: Path) -> None:
    """Ranks without a shared file system are refused."""

    def save() -> str:
        pipe = Pipeline(blocks(2), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
        here = tmp_path / str(rank())
        checkpoints = Checkpoints(here)
        if rank():
            from penstock.runtime.checkpoint.storage import RankLayout

            init = RankLayout.__init__

            def elsewhere(layout: RankLayout, draft: object, *args: object) -> None:
                from dataclasses import replace

                init(layout, replace(draft, path=here / "absent"), *args)

            RankLayout.__init__ = elsewhere
        try:
            with pytest.raises(CheckpointError) as caught:
                checkpoints.save(pipe, step=1)
        finally:
            if rank():
                RankLayout.__init__ = init
        return str(caught.value)

    said = workers.run(save, ranks=2)
    assert said[0] == said[1]
    assert "rank 1 does not see" in said[0]
    assert not any((tmp_path / "0").iterdir())
