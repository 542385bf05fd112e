"""The data order reads every sample once per epoch, and continues from any position."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CheckpointError, ScheduleError
from penstock.runtime import DataOrder

SIZES = st.integers(1, 40).flatmap(lambda samples: st.tuples(st.just(samples), st.integers(1, samples)))


@given(SIZES, st.integers(0, 3))
def test_every_sample_at_most_once_per_epoch(sizes: tuple[int, int], seed: int) -> None:
    samples, batch = sizes
    order = DataOrder(samples, batch, seed=seed)
    for _ in range(3):
        epoch = torch.cat([next(order) for _ in range(samples // batch)]).tolist()
        assert len(set(epoch)) == len(epoch) == samples // batch * batch
        assert set(epoch) <= set(range(samples))


@given(SIZES, st.integers(0, 30), st.integers(1, 9))
def test_continues_from_any_position(sizes: tuple[int, int], read: int, more: int) -> None:
    one, other = DataOrder(*sizes, seed=2), DataOrder(*sizes, seed=2)
    for _ in itertools.islice(one, read):
        torch.rand(1)  # whatever else is drawn
    other.load_state_dict(one.state_dict())
    assert [next(one).tolist() for _ in range(more)] == [next(other).tolist() for _ in range(more)]


def test_another_batch_size_continues_at_the_next_sample() -> None:
    one, other = DataOrder(12, 4, seed=1), DataOrder(12, 2, seed=1)
    read = next(one).tolist()
    other.load_state_dict(one.state_dict())
    rest = torch.cat([next(other) for _ in range(4)]).tolist()
    assert sorted(read + rest) == list(range(12))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    order = DataOrder(30, 30, seed=1)
    first, second = next(order).tolist(), next(order).tolist()
    assert first != second
    assert first != next(DataOrder(30, 30, seed=2)).tolist()
    assert first == next(DataOrder(30, 30, seed=1)).tolist()


def test_another_order_is_rejected() -> None:
    state = DataOrder(12, 4, seed=1).state_dict()
    with pytest.raises(CheckpointError, match="in an order with seed=1, and this one has seed=2"):
        DataOrder(12, 4, seed=2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="samples=12"):
        DataOrder(13, 4, seed=1).load_state_dict(state)
    with pytest.raises(ScheduleError, match="batches of 5 from 4 samples"):
        DataOrder(4, 5)
