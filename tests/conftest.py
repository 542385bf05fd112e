"""Settings that every test shares, and the processes that stand for ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from penstock.runtime.workers import Workers

settings.register_profile("penstock", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests that use the pool run in one process of pytest-xdist, so that only one pool is started."""
    for item in items:
        if "workers" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.fixture(scope="session")
def start_workers() -> Iterator[Callable[[], Workers]]:
    """Gives the pool of this session; a new one where a test has lost a process of the old one."""
    from penstock.runtime.workers import Workers

    started: list[Workers] = []

    def start() -> Workers:
        if not started or any(process.poll() is not None for process in started[-1].processes):
            started.append(Workers(4))
        return started[-1]

    yield start
    for pool in started:
        pool.close()


@pytest.fixture
def workers(request: pytest.FixtureRequest, start_workers: Callable[[], Workers]) -> Iterator[Workers]:
    """Four processes on gloo. Functions and classes of the test's own module travel to them by value."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(request.module)
    yield start_workers()
    cloudpickle.unregister_pickle_by_value(request.module)
