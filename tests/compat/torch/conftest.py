"""One thread for torch, so that sums are the same every time, and a process group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from compat.torch.both import VERSION
from threads import one_thread  # noqa: F401 - a fixture


def pytest_configure(config: pytest.Config) -> None:
    if VERSION < (2, 13):  # torch's own stages read the gradients of inputs that are not leaves
        config.addinivalue_line("filterwarnings", "ignore:The .grad attribute of a Tensor that is not a leaf")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests of either package's behaviour on ours alone before torch 2.13, which they describe."""
    for item in items:
        if VERSION < (2, 13) and "compat" in str(item.path) and item.name.endswith("torch]"):
            item.add_marker(pytest.mark.skip(reason="describes torch 2.13 and later"))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only, which holds all stages."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
