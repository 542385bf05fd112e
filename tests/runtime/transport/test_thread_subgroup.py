"""Some virtual ranks as a group of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.errors import PipelineError
from penstock.runtime import launch, rank
from penstock.runtime.device.connections import broadcast_options
from penstock.runtime.transport.current_group import get_group
from penstock.runtime.transport.subgroup import ThreadSubgroup, join_members


def join(members: list[int]) -> Any:
    return join_members(*get_group(), members)


def test_members_gather_without_the_other_ranks() -> None:
    """The two groups call different things, and one of them more often."""

    def gather() -> list[Any]:
        group = join([0, 2] if rank() in (0, 2) else [3, 1])
        assert isinstance(group, ThreadSubgroup)
        found = [group.gather(group.rank, "first", (rank(), group.rank), 20.0)]
        if rank() % 2:
            found.append(group.gather(group.rank, "second", rank(), 20.0))
        return found

    even, odd = [[(0, 0), (2, 1)]], [[(3, 0), (1, 1)], [3, 1]]
    assert launch(gather, ranks=4) == [even, odd, even, odd]


@pytest.mark.parametrize("parallel", [False, True])
def test_sums_and_copies(parallel: bool) -> None:
    def compute() -> tuple[list[float], list[float]]:
        group = join([0, 1, 3]) if rank() != 2 else join([2])
        mine = torch.tensor([2.0 ** rank(), 1.0], dtype=torch.float64)
        other = mine.clone()
        connection = group.connect_collectives(20.0)
        connection.allreduce([mine]).wait()
        connection.broadcast([other], broadcast_options(len(group.members) - 1)).wait()
        other_list = other.tolist()
        other.add_(1)
        return mine.tolist(), other_list

    joined = ([1.0 + 2.0 + 8.0, 3.0], [8.0, 1.0])  # copied from the last of the three
    assert launch(compute, ranks=4, parallel=parallel) == [joined, joined, ([4.0, 1.0], [4.0, 1.0]), joined]


def test_members_that_call_different_methods() -> None:
    def gather() -> None:
        group = join([0, 1])
        group.gather(group.rank, f"call {rank()}", None, 20.0)

    with pytest.raises(PipelineError, match="every rank must make the same calls in the same order"):
        launch(gather, ranks=2)


def test_a_failure_outside_the_subgroup_is_raised_inside() -> None:
    messages = []

    def gather() -> None:
        if rank() == 2:
            raise ValueError("lost")
        group = join([0, 1])
        if rank() == 1:
            get_group()[0].gather(rank(), "all ranks", None, 20.0)
        with pytest.raises(PipelineError) as caught:
            group.gather(group.rank, "members", None, 20.0)
        messages.append(str(caught.value))

    with pytest.raises(ValueError, match="lost"):
        launch(gather, ranks=3)
    assert len(messages) == 1
    assert "lost" in messages[0]
