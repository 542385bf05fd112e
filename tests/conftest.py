"""Settings that every test shares, and the processes that stand for ranks."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from penstock.runtime.launch.workers import Workers

# The same examples every time, so that a change is judged by what it does; `--hypothesis-profile=hunt` draws other ones.
settings.register_profile("penstock", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("penstock"), max_examples=15)
settings.register_profile("hunt", settings.get_profile("penstock"), derandomize=False, max_examples=300)
settings.load_profile("penstock")

ON_PROCESSES = re.compile(r"/composition/|/test_(processes\w*|faults|direct|big_models|safetensors|restarts)\.py::")
"""Tests whose ranks are processes."""


def pytest_configure() -> None:
    """Processes that are started from here hear Ctrl-C, also if a shell that ignores Ctrl-C runs all of this in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the modules and tests, which all live to the end, out of every later garbage collection: each would take up to a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


APART = re.compile(
    r"tests/(compat/(?!torch/test_(names|signatures)\.py)|models/|docs/|studio/)|/test_(bad_input|checkpoint_resume|search|search_orders|advice|differences|memory|shared|hanayo|compiled|main|whole_backward|running_statistics|bounds_exact|budget|boundaries|planted_faults|ends|operators_types|random_models|slices|moves|offload|published_runs|plan_slices|hugging_face|batch_planner|pipelines|tradeoff|save|against_every_order|uneven_vocabulary|clusters|named_schedules|html)\.py::"
)
"""What the quick run leaves out besides: the peers' interfaces (but for names and signatures), whole models, pages, and files that take
long for what they tell."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ON_PROCESSES.search(item.nodeid) or APART.search(item.nodeid):
            item.add_marker(pytest.mark.slow)


TOGETHER = re.compile(r"/test_(site|release|launchers)\.py::")
"""Files whose tests share something that takes seconds to build."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, tests on processes run one after the other in one place: they share a pool, and have enough to do by themselves."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFunction(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if ON_PROCESSES.search(nodeid):
                return "processes"
            return nodeid.partition("::" if TOGETHER.search(nodeid) else "[")[0]

    return ByFunction(config, log) if config.getoption("dist") in ("load", "loadgroup") else None


@pytest.fixture(scope="session", autouse=True)
def forked_ranks() -> Iterator[None]:
    """Processes that stand for ranks are forked from one that has imported torch; tests of the start itself use `started_ranks`."""
    workers = sys.modules.get("penstock.runtime.launch.workers")
    if workers is None or not hasattr(os, "pidfd_open"):
        yield
        return
    from forked_ranks import RankServer

    with pytest.MonkeyPatch.context() as patch, RankServer() as server:
        patch.setattr(workers, "subprocess", server)
        yield


@pytest.fixture
def started_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is a process of its own from the beginning, as outside of the tests."""
    monkeypatch.setattr(sys.modules["penstock.runtime.launch.workers"], "subprocess", subprocess)


@pytest.fixture(scope="session")
def start_workers(forked_ranks: None) -> Iterator[Callable[[], Workers]]:
    """Gives the pool of this session; a new one if a test has lost a process of the old one."""
    from forked_ranks import serve_pools

    yield from serve_pools()


@pytest.fixture
def workers(request: pytest.FixtureRequest, start_workers: Callable[[], Workers]) -> Workers:
    """Four processes on gloo. Functions and classes of the test's own module travel to them by value."""
    import cloudpickle

    assert ON_PROCESSES.search(request.node.nodeid), "tests that use the pool go into files that this names"
    cloudpickle.register_pickle_by_value(request.module)
    return start_workers()
