"""One thread for torch, so that sums are the same every time, and a process group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from threads import one_thread  # noqa: F401 - a fixture


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only, which holds all stages."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
