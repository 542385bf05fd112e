"""`finalize_gradients=False` with data ranks: nothing is reduced until a step finalizes, which reduces the sum of all once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from composition.parallel import Outcome, assert_near, batch, check, counted, full, mesh_of, perceptrons, pipeline
from penstock.errors import PipelineError
from penstock.runtime import Layers, Pipeline
from penstock.runtime.launch.workers import Workers
from runtime.models import GPT, Numbers, assert_equal, gradients, token_loss

KINDS = pytest.mark.parametrize(
    ("name", "shard"),
    [("1f1b", False), ("zbv", False), ("1f1b", True), ("zbv", True)],
    ids=["1f1b", "zbv", "1f1b-FSDP2", "zbv-FSDP2"],
)
SIZES = ((2, 1, 4), (3, 3, 1), (1, 2, 2))
"""Rows of the microbatches of each of three steps; the second data rank has them in the opposite order."""


def squares(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum")


def draw() -> list[list[list[tuple[Tensor, Tensor]]]]:
    """Microbatches by data rank and step."""
    torch.manual_seed(5)
    return [[[batch(rows) for rows in (sizes if data == 0 else sizes[::-1])] for sizes in SIZES] for data in range(2)]


def step_list(pipe: Pipeline, pieces: Sequence[tuple[Tensor, Tensor]], **options: Any) -> Any:
    return pipe.step_list([x for x, _ in pieces], [y for _, y in pieces], **options)


def by_loop(model: nn.Module, pieces: Sequence[tuple[Tensor, Tensor]]) -> Numbers:
    """The unpipelined model over all microbatches."""
    again = copy.deepcopy(model)
    total = torch.zeros((), dtype=torch.float64)
    for x, y in pieces:
        loss = squares(again(x), y)
        loss.backward()
        total += loss.detach()
    return Numbers(total, [], gradients(again))


@KINDS
def test_three_steps_equal_one_over_all_microbatches(workers: Workers, name: str, shard: bool) -> None:
    """To the last bit: each data rank sums its microbatches in the same order, and the sums are reduced once in both."""
    model, pieces = perceptrons(4 if name == "zbv" else 2), draw()

    def train() -> tuple[Outcome, Outcome, list[int]]:
        mesh = mesh_of(pp=2, dp=2)
        mine = pieces[mesh["dp"].get_local_rank()]
        pipe = pipeline(copy.deepcopy(model), name, mesh, shard=shard, loss_fn=squares, loss_reduction="sum")
        reductions, losses = [], []
        for number, microbatches in enumerate(mine):
            with counted() as calls:
                losses.append(step_list(pipe, microbatches, finalize_gradients=number == 2).loss)
            reductions.append(calls["reduce_scatter"])
        found = Outcome(sum(losses), *_grads(pipe))
        whole = pipeline(copy.deepcopy(model), name, mesh, shard=shard, loss_fn=squares, loss_reduction="sum")
        every = [piece for microbatches in mine for piece in microbatches]
        return found, Outcome.of(whole, step_list(whole, every)), reductions

    results = workers.run(train)
    for found, wanted, reductions in results:
        stages = len(model) // 2
        assert reductions == ([0, 0, stages] if shard else [0, 0, 0])
        for key, grad in wanted.grads.items():
            assert_equal(found.grads[key], grad, key)
    everything = [piece for mine in pieces for microbatches in mine for piece in microbatches]
    check([found for found, _, _ in results], by_loop(model, everything))


def _grads(pipe: Pipeline) -> tuple[dict[str, Tensor | None], float]:
    norm = float(pipe.clip_grad_norm_(1e9))
    return {name: full(parameter.grad) for name, parameter in pipe.local_parameters()}, norm


@KINDS
def test_gradients_that_were_finalized_before_count_once(workers: Workers, name: str, shard: bool) -> None:
    """Finalized, postponed with an evaluation after it, finalized: `grad` changes only in the steps that finalize."""
    model, pieces = perceptrons(4 if name == "zbv" else 2), draw()

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        first, second, third = pieces[mesh["dp"].get_local_rank()]
        pipe = pipeline(copy.deepcopy(model), name, mesh, shard=shard, loss_fn=squares, loss_reduction="sum")
        losses = [step_list(pipe, first).loss]
        before = {key: full(parameter.grad) for key, parameter in pipe.local_parameters()}
        losses.append(step_list(pipe, second, finalize_gradients=False).loss)
        pipe.eval_step(third[0][0].repeat(4, 1), target=third[0][1].repeat(4, 1))
        for key, parameter in pipe.local_parameters():
            assert_equal(full(parameter.grad), before[key], key)
        losses.append(step_list(pipe, third).loss)
        return Outcome(sum(losses), *_grads(pipe))

    everything = [piece for mine in pieces for microbatches in mine for piece in microbatches]
    check(workers.run(train), by_loop(model, everything))


@pytest.mark.parametrize("shard", [False, True], ids=["replicate", "FSDP2"])
def test_tied_parameters_are_summed_once(workers: Workers, shard: bool) -> None:
    """A token embedding on the first rank and its transpose on the last, over two data ranks."""
    torch.manual_seed(0)
    model, layers = GPT(depth=2, tied=True).double(), Layers("blocks", head=["embed"], tail=["norm", "head"])
    batches = [torch.randint(0, 11, (8, 8)) for _ in range(2)]

    def train() -> Outcome:
        mesh = mesh_of(pp=2, dp=2)
        pipe = pipeline(copy.deepcopy(model), "1f1b", mesh, shard=shard, loss_fn=token_loss, split=layers)
        losses = []
        for number, tokens in enumerate(batches):
            mine = tokens.chunk(2)[mesh["dp"].get_local_rank()]
            losses.append(pipe.step(mine, target=mine.roll(-1, 1), finalize_gradients=number == 1).loss)
        return Outcome(sum(losses), *_grads(pipe))

    again = copy.deepcopy(model)
    for tokens in batches:
        token_loss(again(tokens), tokens.roll(-1, 1)).backward()
    wanted = gradients(again)
    norm = Numbers(None, [], wanted).norm  # the matrix once
    wanted["head.weight"] = wanted["embed.tokens.weight"]
    found = workers.run(train)
    for outcome in found:
        assert outcome.norm == pytest.approx(float(norm), rel=1e-12)
        for key, grad in outcome.grads.items():
            assert_near(key, grad, wanted[key], 1e-12)
    assert {key for outcome in found for key in outcome.grads} | {"head.weight"} == set(wanted)


def test_sums_in_a_reduce_dtype(workers: Workers) -> None:
    """Shards in bfloat16 that are summed and reduced in float32: three steps equal one, to the last bit."""
    model, pieces = perceptrons(2, torch.float32), draw()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def train() -> None:
        mesh = mesh_of(pp=2, dp=2)
        mine = [[(x.float(), y.float()) for x, y in microbatches] for microbatches in pieces[mesh["dp"].get_local_rank()]]

        def wide(output: Tensor, target: Tensor) -> Tensor:
            return squares(output.float(), target)

        def shard(layer: nn.Module, mesh: Any) -> Any:
            return fully_shard(layer, mesh=mesh, mp_policy=policy)

        found, wanted = (pipeline(copy.deepcopy(model), "1f1b", mesh, shard=shard, loss_fn=wide, loss_reduction="sum") for _ in range(2))
        for number, microbatches in enumerate(mine):
            step_list(found, microbatches, finalize_gradients=number == 2)
        step_list(wanted, [piece for microbatches in mine for piece in microbatches])
        expected = dict(wanted.local_parameters())
        for key, parameter in found.local_parameters():
            assert_equal(full(parameter.grad), full(expected[key].grad), key)

    workers.run(train)


def test_data_ranks_that_disagree_are_refused(workers: Workers) -> None:
    model, pieces = perceptrons(2), draw()

    def train() -> None:
        mesh = mesh_of(pp=2, dp=2)
        data = mesh["dp"].get_local_rank()
        pipe = pipeline(copy.deepcopy(model), "1f1b", mesh, loss_fn=squares, loss_reduction="sum")
        with pytest.raises(PipelineError, match="the data ranks give finalize_gradients different values"):
            step_list(pipe, pieces[data][0], finalize_gradients=data == 0)

    workers.run(train)
