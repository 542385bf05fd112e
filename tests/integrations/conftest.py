"""Ranks that train with other libraries, whose imports take seconds: one process has imported them, and all ranks are forked from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from forked_ranks import RankServer, serve_pools

if TYPE_CHECKING:
    from penstock.runtime.launch.workers import Workers

LIBRARIES = ("transformers.trainer", "transformers.models.auto.modeling_auto", "trl", "lightning.pytorch")


@pytest.fixture(scope="session")
def start_workers() -> Iterator[Callable[[], Workers]]:
    """Gives a pool for these tests, so that no other test has ranks with so much in memory."""
    if not hasattr(os, "pidfd_open"):
        yield from serve_pools()
        return
    with RankServer(*LIBRARIES) as server:
        yield from serve_pools(server)
