"""Joining torch.distributed: the first process of a rank takes part, and a later one waits to take its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from penstock.runtime.transport import current_group


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store for one rank, as a launcher keeps it while processes end and others are started."""
    store = dist.HashStore()
    monkeypatch.setattr(current_group, "rendezvous", lambda url: iter([(store, 0, 1)]))
    monkeypatch.setattr(current_group, "_initialised", [])
    monkeypatch.setattr(current_group, "_returned", [])
    yield store
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("store")
def test_a_second_process_of_a_rank_takes_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not open torch's process group with the others, who have one already: it gets one of its own."""
    current_group.initialise()
    assert "gloo" in dist.get_backend_config()
    assert current_group._returned == []
    dist.destroy_process_group()
    current_group.initialise()  # again, in the same process
    assert "gloo" in dist.get_backend_config()
    assert current_group._returned == []
    dist.destroy_process_group()
    monkeypatch.setattr(current_group, "_STARTED", current_group._STARTED + 1)  # as in a new process
    current_group.initialise()
    assert dist.get_backend() == "fake"
    assert current_group._returned == [0]


@pytest.mark.usefixtures("store")
def test_a_new_start_has_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart of all processes by torchrun counts as another start, although the store is the same."""
    for restarts in ("0", "1"):
        monkeypatch.setattr(current_group, "_STARTED", int(restarts))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        current_group.initialise()
        assert "gloo" in dist.get_backend_config()
        dist.destroy_process_group()
    assert current_group._returned == []
