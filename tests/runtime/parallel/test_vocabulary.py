"""A vocabulary spread over virtual ranks: the numbers of the whole, and a rank that does not come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from penstock.errors import PipelineError
from penstock.runtime.parallel.collective_lane import Collective, Sum, ThreadLane, exchange_nothing
from penstock.runtime.parallel.vocabulary import SpreadEmbedding, SpreadHead, split_rows

VOCABULARY, HIDDEN, TOKENS, UNITS = 10, 4, 6, 5


def run_ranks(ranks: int, work: Callable[[ThreadLane], Any]) -> list[Any]:
    lanes = ThreadLane.create(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(work, lanes))
    for lane in lanes:
        lane.close()
    return results


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


UNEVEN = (0.15, 0.8, 0.05)
"""Shares of 10 rows of which ranks have 1, 8 and 1."""


@pytest.mark.parametrize(
    ("ranks", "tied", "shares"), [(1, False, ()), (3, False, ()), (3, True, ()), (3, False, UNEVEN), (3, True, UNEVEN)]
)
def test_embedding_and_head_together(ranks: int, tied: bool, shares: tuple[float, ...]) -> None:
    """A model of an embedding and a head alone, with the collectives of both in one order, and one weight for both or two."""
    words, weight = draw(0, VOCABULARY, HIDDEN), draw(1, VOCABULARY, HIDDEN)
    tokens, targets = (torch.randint(VOCABULARY, (UNITS, TOKENS), generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))

    def train(lane: ThreadLane) -> tuple[Tensor, Tensor | None, Tensor | None]:
        embedding, head = (
            layer(rows, lane=lane, owner=0, shares=shares) for layer, rows in ((SpreadEmbedding, words), (SpreadHead, weight))
        )
        assert len(embedding.weight) == ([1, 8, 1][lane.rank] if shares else split_rows(VOCABULARY, ranks)[lane.rank])
        head = SpreadHead(embedding, lane=lane, owner=0) if tied else head
        empty = torch.empty(TOKENS, HIDDEN, dtype=torch.float64)
        losses = []
        for unit in range(UNITS):
            embedding.run_share(unit, tokens[unit])
            embedding.join_combine(unit)
        for unit in range(UNITS):
            head.join_broadcast(unit, embedding.take_output(unit) if lane.rank == 0 else empty.clone())
            head.run_share(unit, targets[unit])
            head.join_combine(unit)
        for unit in range(UNITS):
            embedding.join_broadcast(unit, head.take_input_gradient(unit) if lane.rank == 0 else empty.clone())
            head.add_weight_gradients(unit)
            losses.append(head.take_losses(unit))
            embedding.add_weight_gradients(unit)
        return torch.stack(losses), embedding.weight.grad, head.weight.grad

    results = run_ranks(ranks, train)
    whole = [value.clone().requires_grad_() for value in (words, weight)]
    whole = [whole[0], whole[0]] if tied else whole
    losses = functional.cross_entropy((whole[0][tokens] @ whole[1].t()).flatten(0, 1), targets.flatten(), reduction="none")
    losses.sum().backward()
    for of_rank in results:
        torch.testing.assert_close(of_rank[0].flatten(), losses.detach(), rtol=1e-12, atol=1e-12)
    for place, value in enumerate(whole, start=1):
        torch.testing.assert_close(torch.cat([of_rank[place] for of_rank in results]), value.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("scale", "cap"), [(0.3, None), (1.0, 0.7), (-2.0, 1.5)])
def test_logits_with_a_factor_and_a_soft_cap(scale: float, cap: float | None) -> None:
    """With a bias; two targets are ignored, and tokens count differently."""
    hidden, weight, bias, counts = draw(0, TOKENS, HIDDEN), draw(1, VOCABULARY, HIDDEN), draw(2, VOCABULARY), draw(3, TOKENS)
    targets = torch.tensor([3, -100, 9, 0, -100, 3])

    def train(lane: ThreadLane) -> list[Any]:
        head = SpreadHead(weight, bias, lane=lane, owner=1, logit_scale=scale, logit_cap=cap)
        head.join_broadcast(0, hidden if lane.rank == 1 else torch.empty_like(hidden))
        logits = head.run_share(0, targets, counts, outputs=True)
        head.join_combine(0)
        gradient = head.take_input_gradient(0) if lane.rank == 1 else None
        head.add_weight_gradients(0)
        assert head.bias is not None
        return [head.take_losses(0), gradient, logits, head.weight.grad, head.bias.grad]

    found = run_ranks(2, train)
    x, w, b = (value.clone().requires_grad_() for value in (hidden, weight, bias))
    logits = scale * (x @ w.t() + b)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    (losses * counts).sum().backward()
    rows = [torch.cat(parts, dim=-1 if place == 2 else 0) for place in (2, 3, 4) for parts in [[of_rank[place] for of_rank in found]]]
    for value, wanted in zip([found[0][0], found[1][1], *rows], [losses, x.grad, logits, w.grad, b.grad], strict=True):
        assert wanted is not None
        torch.testing.assert_close(value, wanted.detach(), rtol=1e-12, atol=1e-12)


def test_large_logits_keep_their_digits() -> None:
    """In float32: differences of logits of some ten thousands count, and these are whole numbers, so that the products are exact."""
    hidden, weight = (
        torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(7)) for shape in ((TOKENS, HIDDEN), (9, HIDDEN))
    )
    weight[1::3] = weight[::3]  # rows with the same logits, so that no softmax is all of it
    targets = torch.tensor([0, 3, 6, 1, 4, 7])

    def train(lane: ThreadLane) -> list[Any]:
        head = SpreadHead(weight.float(), lane=lane, owner=0)
        head.join_broadcast(0, hidden.float())
        head.run_share(0, targets)
        head.join_combine(0)
        head.add_weight_gradients(0)
        return [head.take_losses(0), head.take_input_gradient(0) if lane.rank == 0 else None, head.weight.grad]

    found = run_ranks(2, train)
    x, w = (value.double().requires_grad_() for value in (hidden, weight))
    losses = functional.cross_entropy(x @ w.t(), targets, reduction="none")
    losses.sum().backward()
    for value, wanted in ((found[0][0], losses), (found[0][1], x.grad), (torch.cat([of_rank[2] for of_rank in found]), w.grad)):
        assert wanted is not None
        torch.testing.assert_close(value.double(), wanted.detach(), rtol=2e-6, atol=2e-5)


def test_logits_without_a_size_are_refused() -> None:
    (lane,) = ThreadLane.create(1)
    with lane, pytest.raises(PipelineError, match=r"logit_scale is 1.0 and logit_cap 0: the scale must not be 0"):
        SpreadHead(draw(0, VOCABULARY, HIDDEN), lane=lane, owner=0, logit_cap=0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6).filter(sum), st.integers(0, 300))
def test_rows_are_as_near_to_the_shares_as_whole_rows_can_be(weights: list[float], more: int) -> None:
    """Every rank has at least one; a share above that is rounded up or down, or gives rows to ranks that would have none."""
    ranks, rows = len(weights), len(weights) + more
    shares = [weight / sum(weights) for weight in weights]
    counts = split_rows(rows, ranks, shares)
    assert sum(counts) == rows
    assert min(counts) >= 1
    filled = sum(1 - min(rows * share, 1) for share in shares)  # what ranks get beyond their shares
    assert all(-1 - filled < count - max(rows * share, 1) < 1 for count, share in zip(counts, shares, strict=True))
    assert split_rows(rows, ranks, [1 / ranks] * ranks) == split_rows(rows, ranks)


@pytest.mark.parametrize(
    ("rows", "ranks", "shares", "reason"),
    [
        (3, 4, (), "3 rows cannot be spread over 4 ranks: each needs at least one"),
        (9, 3, (0.5, 0.5), "2 shares of the vocabulary for 3 ranks"),
        (9, 2, (0.5, 0.4), "0.9 in all, not 1"),
        (9, 2, (1.5, -0.5), "rank 0 has a share of 1.5"),
        (9, 2, (0.5, float("nan")), "rank 1 has a share of nan"),
    ],
)
def test_shares_that_are_not_parts_of_the_rows_are_refused(rows: int, ranks: int, shares: tuple[float, ...], reason: str) -> None:
    with pytest.raises(PipelineError, match=reason):
        split_rows(rows, ranks, shares)


def test_layers_that_share_a_weight_share_a_lane() -> None:
    (one,), (other,) = ThreadLane.create(1), ThreadLane.create(1)
    with one, other, pytest.raises(PipelineError, match="on the same lane"):
        SpreadHead(SpreadEmbedding(draw(0, VOCABULARY, HIDDEN), lane=one, owner=0), lane=other, owner=0)


def test_a_rank_that_does_not_join_is_told() -> None:
    first, second = ThreadLane.create(2, timeout=0.1)
    with first, second:
        head = SpreadHead(draw(0, VOCABULARY, HIDDEN), lane=first, owner=0)
        head.join_broadcast(0, draw(1, TOKENS, HIDDEN))
        for wait in (first.settle, lambda: head.run_share(0, torch.zeros(TOKENS, dtype=torch.int64))):
            with pytest.raises(PipelineError, match=r"not all of 2 ranks have joined a collective within 0\.1 s"):
                wait()


def test_a_lane_that_another_rank_has_abandoned_is_told() -> None:
    first, second = ThreadLane.create(2)
    with second:
        head = SpreadHead(draw(0, VOCABULARY, HIDDEN), lane=second, owner=0)
        head.join_broadcast(0, draw(1, TOKENS, HIDDEN))
        first.abandon()
        with pytest.raises(PipelineError, match="the collectives were abandoned after a failure"):
            head.run_share(0, torch.zeros(TOKENS, dtype=torch.int64))


def test_ranks_at_different_collectives_are_told() -> None:
    first, second = ThreadLane.create(2)
    head = SpreadHead(draw(0, VOCABULARY, HIDDEN), lane=first, owner=0)
    head.join_broadcast(0, draw(1, TOKENS, HIDDEN))
    second.join(exchange_nothing())
    with pytest.raises(PipelineError, match="1 of 2 ranks are at a broadcast: every rank must join the same collectives in the same order"):
        head.run_share(0, torch.zeros(TOKENS, dtype=torch.int64))


def test_an_error_within_a_collective_is_raised_where_it_is_taken() -> None:
    def fail(value: Tensor) -> Collective:
        total = yield Sum(value)
        raise ArithmeticError(f"{total.item()}")

    lanes = ThreadLane.create(2)
    joined = [lane.join(fail(torch.ones(1))) for lane in lanes]
    for lane, collective in zip(lanes, joined, strict=True):
        with pytest.raises(ArithmeticError, match=r"2\.0"):
            lane.take(collective)
    values = [lane.join(exchange_nothing(torch.ones(1))) for lane in lanes]
    assert [lane.take(collective).item() for lane, collective in zip(lanes, values, strict=True)] == [1, 1]


def test_tokens_of_a_type_with_few_digits() -> None:
    weight = draw(0, 200, HIDDEN)
    tokens = torch.tensor([0, 99, 100, 199], dtype=torch.uint8)

    def look_up(lane: ThreadLane) -> Tensor | None:
        embedding = SpreadEmbedding(weight, lane=lane, owner=0)
        embedding.run_share(0, tokens, gradients=False)
        embedding.join_combine(0)
        return embedding.take_output(0) if lane.rank == 0 else None

    assert torch.equal(run_ranks(2, look_up)[0], weight[tokens.long()])
