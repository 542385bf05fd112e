"""Slices on processes: over gloo, with data ranks, with sharded stages, and from one checkpoint to the next."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from composition.parallel import Outcome, batch, check, mesh_of, perceptrons, split_over
from models.tiny import VOCABULARY, llama
from penstock.ir.kind import Kind
from penstock.runtime import Checkpoints, Pipeline
from penstock.runtime.launch.workers import Workers
from runtime.distributed import local_grads, together
from runtime.models import Numbers, gradients
from runtime.sequences import assert_within, decoder, mean_loss, words

EXACT = 1e-12


def whole(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Numbers:
    model = copy.deepcopy(model)
    loss = mean_loss(model(x), y)
    loss.backward()
    return Numbers(loss.detach(), [], gradients(model))


@pytest.mark.parametrize(("name", "offload"), [("seq-zb-h1", None), ("slimpipe", None), ("seq-zb-h1", 60), ("slimpipe", True)])
def test_gloo(workers: Workers, name: str, offload: int | None) -> None:
    """Also with slices of different lengths, so that messages change their form from one to the next, and with moves to the host."""
    schedule = ps.schedule(name, ranks=3, microbatches=2, slices=4)
    model, x, y = decoder(max(6, schedule.stages)), words(4, 13), words(4, 13)

    def train() -> Any:
        pipe = Pipeline(model, schedule, loss_fn=mean_loss, slice_lengths=[5, 4, 3, 1], recompute=True, offload=offload)
        assert pipe.program().rows.is_kind(Kind.OFFLOAD).any() == bool(offload)
        return pipe.step(x, target=y).loss, local_grads(pipe), pipe.eval_step(x, target=y).loss

    found, wanted = workers.run(train, ranks=3), whole(model, x, y)
    for loss, _, again in found:
        torch.testing.assert_close((loss, again), (wanted.loss, wanted.loss), rtol=EXACT, atol=0)
    grads = together([grads for _, grads, _ in found], list(wanted.grads))
    for parameter_name, parameter in model.named_parameters():
        parameter.grad = grads[parameter_name]
    assert_within(model, wanted.grads, EXACT)


@pytest.mark.parametrize(("shard", "offload"), [(False, None), (True, None), (False, 100), (True, 100)])
def test_data_ranks_and_shards(workers: Workers, shard: bool, offload: int | None) -> None:
    """Two data ranks with other numbers of rows each; with FSDP2 and without, and with moves to the host."""
    model, x, y = decoder(4), words(7, 11), words(7, 11)
    schedule = ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=3)

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=mean_loss, mesh=mesh, shard=shard, offload=offload)
        mine, target = split_over(mesh, x, y, (3, 4))
        return Outcome.of(pipe, pipe.step(mine, target=target))

    check(workers.run(train), whole(model, x, y))


@pytest.mark.parametrize(("name", "recompute"), [("interleaved-zb", False), ("interleaved-1f1b", True)])
def test_moves_of_sharded_stages(workers: Workers, name: str, recompute: bool) -> None:
    """The same numbers to the last bit, and as much on the host as without shards: gathered parameters never go there."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model, x, y = perceptrons(4), *batch(16)

    def train(shard: bool, offload: int | None) -> tuple[Outcome, int]:
        mesh = mesh_of(pp=2, dp=2)
        options: dict[str, Any] = {"loss_fn": functional.mse_loss, "mesh": mesh, "shard": shard, "recompute": recompute, "offload": offload}
        pipe = Pipeline(copy.deepcopy(model), schedule, residency=1 if shard else None, **options)
        mine, target = split_over(mesh, x, y, (8, 8))
        for _ in range(2):  # parameters are gathered to other memory in the second step
            for parameter in pipe.parameters():
                parameter.grad = None
            result = pipe.step(mine, target=target)
        moves = pipe._executor(pipe.microbatches, True).compute.moves
        return Outcome.of(pipe, result), 0 if moves is None else moves.memory.peak

    plain, moved, whole = (workers.run(train, options) for options in ((True, None), (True, 100), (False, 100)))
    for (expected, _), (outcome, held), (_, unsharded) in zip(plain, moved, whole, strict=True):
        assert outcome.loss is not None
        assert expected.loss is not None
        assert torch.equal(outcome.loss, expected.loss)
        assert outcome.norm == expected.norm
        assert held == unsharded
    assert moved[0][1] > 0


@pytest.mark.parametrize("sharded", [False, True])
def test_transformers_models(workers: Workers, sharded: bool) -> None:
    """Packed documents; also with FSDP2 over two data ranks and moves to the host."""
    model = llama()
    tokens = torch.randint(3, VOCABULARY, (4, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]).expand(4, -1).contiguous()
    rows = {"input_ids": tokens, "labels": tokens, "position_ids": positions}

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2) if sharded else None
        part = slice(None) if mesh is None else slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
        schedule = ps.schedule("seq-zb-h1", ranks=2, microbatches=2, slices=3)
        pipe = Pipeline(copy.deepcopy(model), schedule, mesh=mesh, shard=sharded, offload=sharded)
        return Outcome.of(pipe, pipe.step({name: value[part] for name, value in rows.items()}))

    other = copy.deepcopy(model)
    loss = other(**rows, use_cache=False).loss
    loss.backward()
    check(workers.run(train, ranks=4 if sharded else 2), Numbers(loss.detach(), [], gradients(other)), 1e-5)


def test_checkpoints_hold_nothing_of_slices(workers: Workers, tmp_path: Path) -> None:
    """Training goes on with another number of slices, to the same losses."""
    model, batches = decoder(4), [words(4, 12) for _ in range(4)]

    def train(slices: int, first: int) -> list[float]:
        pipe = Pipeline(copy.deepcopy(model), ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=slices), loss_fn=mean_loss)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        losses = []
        with Checkpoints(tmp_path) as checkpoints:
            if first:
                checkpoints.load_latest(pipe, optimizer)
            for number in range(first, first + 2):
                losses.append(float(pipe.step(batches[number], target=batches[number]).loss))  # type: ignore[arg-type]
                optimizer.step()
                optimizer.zero_grad()
            checkpoints.save(pipe, optimizer, step=first + 2)
        return losses

    losses = workers.run(train, (3, 0), ranks=2)[0] + workers.run(train, (4, 2), ranks=2)[0]
    plain = copy.deepcopy(model)
    optimizer, wanted = torch.optim.AdamW(plain.parameters(), lr=0.01), []
    for tokens in batches:
        loss = mean_loss(plain(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    assert losses == pytest.approx(wanted, rel=1e-9)
