"""Pipelines of processes compute the numbers of the unpipelined model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Layers, Pipeline, StepResult, rank
from penstock.runtime.launch.workers import Workers
from penstock.runtime.measure.parity import Parity
from runtime.distributed import Grads, by_processes, local_grads, numbers, together
from runtime.models import (
    GPT,
    Numbers,
    assert_all_equal,
    assert_close,
    assert_equal,
    assert_same,
    blocks,
    by_batch,
    by_loop,
    by_pipeline,
    gradients,
    loop_step,
    sums_in_order,
    token_loss,
)

IN_ORDER = ["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "interleaved-zb", "zbv", "v-half", "1f1b-v", "dualpipe-v", "hanayo"]
"""Schedules that sum each stage's gradients in the order of microbatches."""
OTHER = ["looped-bfs", "chimera", "dualpipe"]
SLOW_1F1B = pytest.param("1f1b", 4, marks=pytest.mark.slow)
"""Slow, because the first use of an optimizer imports much of torch in every process."""
LAYERS = Layers("blocks", head=["embed"], tail=["norm", "head"])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*IN_ORDER, *OTHER])
def test_schedule_against_the_loop(workers: Workers, name: str, ranks: int) -> None:
    """A batch that does not divide evenly: the pipeline equals the loop run here, and its own `parity` agrees."""
    schedule = ps.schedule(name, ranks=ranks, microbatches=6)
    model, x, y = blocks(schedule.stages + 1), torch.randn(13, 6), torch.randn(13, 6)

    def train() -> tuple[Parity, StepResult, Grads]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        return pipe.parity(x, target=y), pipe.step(x, target=y), local_grads(pipe)

    results = workers.run(train, ranks=ranks)
    found, wanted = numbers(model, [(result, grads) for _, result, grads in results]), by_loop(model, x, y, 6)
    parity = results[0][0]
    assert len({str(theirs) for theirs, _, _ in results}) == 1
    assert parity.batch is not None
    assert parity.batch.worst < 1e-5
    if name in IN_ORDER:
        assert sums_in_order(schedule)
        assert parity.loop.exact
        assert_same(found, wanted)
    else:
        assert parity.loop.worst < 1e-5
        assert_close(found, wanted, 1e-5)


@pytest.mark.parametrize("name", ["zbv", "chimera"])
def test_whole_batch_in_double(workers: Workers, name: str) -> None:
    schedule = ps.schedule(name, ranks=4, microbatches=5)
    model, x, y = blocks(schedule.stages).double(), torch.randn(13, 6).double(), torch.randn(13, 6).double()
    assert_close(by_processes(workers, model, schedule, x, y), by_batch(model, x, y), 1e-12)


@pytest.mark.parametrize(("name", "ranks"), [SLOW_1F1B, ("1f1b", 2), ("interleaved-zb", 2), ("zbv", 2), ("dualpipe", 2)])
def test_training_follows_the_unpipelined_run(workers: Workers, name: str, ranks: int) -> None:
    """Six steps with a stateful optimizer, gradient accumulation over two steps, and clipping."""
    schedule = ps.schedule(name, ranks=ranks, microbatches=4)
    model = blocks(schedule.stages).double()
    batches = [(torch.randn(9, 6).double(), torch.randn(9, 6).double()) for _ in range(6)]

    def train() -> tuple[list[float], Grads]:
        mine = copy.deepcopy(model)
        pipe = Pipeline(mine, schedule, loss_fn=functional.mse_loss)
        optimizer, losses = torch.optim.AdamW(pipe.parameters(), 0.05), []
        for number, (x, y) in enumerate(batches):
            losses.append(float(pipe.step(x, target=y).loss))
            if number % 2:
                losses.append(float(pipe.clip_grad_norm_(0.1)))
                optimizer.step()
                optimizer.zero_grad()
        return losses, {key: parameter.detach() for key, parameter in pipe.local_parameters()}

    again = copy.deepcopy(model)
    optimizer, losses = torch.optim.AdamW(again.parameters(), 0.05), []
    for number, (x, y) in enumerate(batches):
        pieces = list(zip(x.tensor_split(4), y.tensor_split(4), strict=True))
        losses.append(float(loop_step(again, pieces, [len(piece) / 9 for piece, _ in pieces], functional.mse_loss).loss))
        if number % 2:
            losses.append(float(nn.utils.clip_grad_norm_(again.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    results = workers.run(train, ranks=ranks)
    assert all(theirs == results[0][0] for theirs, _ in results)
    assert results[0][0] == pytest.approx(losses, rel=1e-10)
    found = together([parameters for _, parameters in results], [key for key, _ in model.named_parameters()])
    for key, parameter in again.named_parameters():
        torch.testing.assert_close(found[key], parameter.detach(), rtol=1e-9, atol=1e-11, msg=key)
    assert losses[0] > losses[-2]


# Batches and counts ---------------------------------------------------------------------------------------------------


def _accumulated(model: nn.Module, batches: list[tuple[Tensor, Tensor, int]]) -> Numbers:
    """Run the microbatch loop over all batches, each split into its number of microbatches."""
    again, losses = copy.deepcopy(model), []
    for x, y, count in batches:
        pieces = list(zip(x.tensor_split(count), y.tensor_split(count), strict=True))
        losses.append(loop_step(again, pieces, [len(piece) / len(x) for piece, _ in pieces], functional.mse_loss).loss)
    return Numbers(None, losses, gradients(again))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-zb", "zbv"])
def test_row_9_sizes_and_counts_that_change_with_every_step(workers: Workers, name: str) -> None:
    """A batch of 10 in 4 microbatches, then other batch sizes and counts, and the first ones again."""
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    model = blocks(schedule.stages)
    plan = ((10, None), (10, None), (7, None), (12, 6), (10, None), (4, 1), (12, 6), (3, 2))
    batches = [(torch.randn(size, 6), torch.randn(size, 6), count) for size, count in plan]

    def train() -> tuple[list[Tensor | None], Grads]:
        pipe = Pipeline(model, schedule, loss_fn=functional.mse_loss)
        losses = [pipe.step(x, target=y, microbatches=count).loss for x, y, count in batches]
        return losses, local_grads(pipe)

    results = workers.run(train, ranks=2)
    wanted = _accumulated(model, [(x, y, count or 4) for x, y, count in batches])
    for losses, _ in results:
        assert_all_equal(losses, wanted.losses)
    found = together([grads for _, grads in results], [key for key, _ in model.named_parameters()])
    for key, grad in wanted.grads.items():
        assert_equal(found[key], grad, key)


def test_microbatches_of_different_lengths(workers: Workers) -> None:
    """Lists of microbatches of different lengths, whose order and number change from step to step."""
    model = GPT(depth=4)
    lists = [[torch.randint(11, (rows, length)) for rows, length in shapes] for shapes in (((2, 8), (1, 3), (3, 5)), ((3, 5), (2, 8)))]

    def train() -> tuple[list[Tensor | None], Grads]:
        pipe = Pipeline(model, schedule="interleaved-1f1b", microbatches=3, loss_fn=token_loss, split=LAYERS)
        losses = [pipe.step_list(tokens, [each.roll(1, 1) for each in tokens]).loss for tokens in lists]
        return losses, local_grads(pipe)

    results = workers.run(train, ranks=2)
    again, wanted = copy.deepcopy(model), []
    for tokens in lists:
        rows = sum(map(len, tokens))
        pieces = [(each, each.roll(1, 1)) for each in tokens]
        wanted.append(loop_step(again, pieces, [len(each) / rows for each in tokens], token_loss).loss)
    for losses, _ in results:
        assert_all_equal(losses, wanted)
    found = together([grads for _, grads in results], [key for key, _ in model.named_parameters()])
    for key, grad in gradients(again).items():
        assert_equal(found[key], grad, key)


# What ranks share -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [SLOW_1F1B, ("zb-h1", 2), ("zbv", 2), ("dualpipe", 2)])
def test_tied_weights(workers: Workers, name: str, ranks: int) -> None:
    """A tied embedding and head are two parameters in different processes, and stay equal.

    All copies start from the values of the first.
    """
    torch.manual_seed(3)
    model = GPT(depth=4, tied=True).double()
    schedule = ps.schedule(name, ranks=ranks, microbatches=3)
    tokens = torch.randint(11, (7, 8))

    def train() -> tuple[float, Grads]:
        mine = copy.deepcopy(model)
        if rank():
            mine.head.weight.detach().mul_(1.5)
        pipe = Pipeline(mine, schedule, loss_fn=token_loss, split=LAYERS)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.5, momentum=0.9)
        for _ in range(3):
            pipe.step(tokens, target=tokens.roll(1, 1))
            norm = pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return float(norm), {key: parameter.detach() for key, parameter in pipe.local_parameters()}

    results = workers.run(train, ranks=ranks)
    again = copy.deepcopy(model)
    optimizer = torch.optim.SGD(again.parameters(), 0.5, momentum=0.9)
    for _ in range(3):
        token_loss(again(tokens), tokens.roll(1, 1)).backward()
        norm = nn.utils.clip_grad_norm_(again.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    seen: set[str] = set()
    tied: list[Tensor] = []
    for found, parameters in results:
        assert found == pytest.approx(float(norm), rel=1e-10)
        for key, value in parameters.items():
            torch.testing.assert_close(value, again.get_parameter(key).detach(), rtol=1e-9, atol=1e-11)
            tied += [value] if key in ("embed.tokens.weight", "head.weight") else []
        seen |= set(parameters)
    assert seen >= {key for key, _ in model.named_parameters()}
    assert len(tied) > 1 or name == "zbv"  # its first rank holds both ends
    for value in tied:
        assert_equal(value, tied[0])


# Randomness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("zbv", 2)])
def test_seeded_randomness_is_that_of_virtual_ranks(workers: Workers, name: str, ranks: int) -> None:
    model, tokens = GPT(depth=4, dropout=0.3), torch.randint(11, (7, 8))
    schedule = ps.schedule(name, ranks=ranks, microbatches=3)
    found = by_processes(workers, model, schedule, tokens, tokens, token_loss, split=LAYERS, seed=4)
    assert_same(found, by_pipeline(model, schedule, tokens, tokens, token_loss, split=LAYERS, seed=4))
    other = by_processes(workers, model, schedule, tokens, tokens, token_loss, split=LAYERS, seed=5)
    assert not torch.equal(other.loss, found.loss)


def test_ranks_start_from_the_callers_random_state(workers: Workers) -> None:
    torch.manual_seed(11)
    found = workers.run(lambda: torch.rand(3))
    for drawn in found:
        assert_equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(11)))
    assert_equal(torch.rand(3), found[0])
