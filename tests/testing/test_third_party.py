"""A schedule from outside the zoo: registered by hand, brought by an entry point, tried by the suite."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ir.codes import B, F
from penstock.schedules import registry
from penstock.schedules.registry import Shape, linear, register
from penstock.testing import ScheduleConformance, check_schedule, conformance_cases

pytestmark = pytest.mark.slow


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry.algorithms()))


def last_first(shape: Shape, rank: int) -> Iterator[int]:
    """Run all forwards, then the backwards from the last microbatch to the first.

    Bubble: (p-1)(F+B)
    Memory: m
    """
    yield from (F(0, microbatch) for microbatch in range(shape.microbatches))
    yield from (B(0, microbatch) for microbatch in reversed(range(shape.microbatches)))


def wants_pairs(shape: Shape, rank: int) -> Iterator[int]:
    """Take an even number of microbatches only."""
    if shape.microbatches % 2:
        raise ScheduleError("even counts only")
    return last_first(shape, rank)


@pytest.mark.usefixtures("own_registry")
def test_registered_by_hand() -> None:
    register("last-first", placement=linear)(last_first)
    assert ps.available()["last-first"] == "Run all forwards, then the backwards from the last microbatch to the first."
    suite = type("TestLastFirst", (ScheduleConformance,), {"name": "last-first"})()
    suite.test_says_what_it_costs()
    cases = conformance_cases("last-first", ranks=[1, 3])
    assert [(case.ranks, case.microbatches) for case in cases] == [(1, m) for m in (1, 2, 3)] + [(3, m) for m in range(1, 10)]
    for case in cases:
        suite.test_shape(case)


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_registered_once() -> None:
    register("last-first", placement=linear)(last_first)
    register("last-first", placement=linear)(last_first)
    with pytest.raises(ScheduleError, match="already a schedule 'last-first', from"):
        register("last-first", placement=linear)(wants_pairs)
    with pytest.raises(ScheduleError, match="needs a docstring"):
        register("silent", placement=linear)(lambda shape, rank: iter(()))


@pytest.mark.usefixtures("own_registry")
def test_microbatch_counts_may_not_be_refused() -> None:
    def even_only(shape: Shape) -> None:
        if shape.microbatches % 2:
            raise ScheduleError(f"even counts only, got {shape.microbatches}")

    register("pairs", placement=linear, check=even_only)(wants_pairs)
    with pytest.raises(ScheduleError, match="even counts only, got 1"):
        conformance_cases("pairs", ranks=[2])[0].build()


@pytest.mark.usefixtures("own_registry")
def test_a_suite_without_a_shape_fails() -> None:
    def never(shape: Shape) -> None:
        raise ScheduleError("no shape is good enough")

    register("never", placement=linear, check=never)(last_first)
    with pytest.raises(AssertionError, match="never takes none of the ranks and chunks"):
        conformance_cases("never")


@pytest.mark.usefixtures("own_registry")
def test_entry_points_bring_schedules_and_broken_ones_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("someones_schedules")
    module.load = lambda: register("theirs", placement=linear)(last_first)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Registering(importlib.metadata.EntryPoint):
        def load(self) -> object:
            return super().load()()

    good = Registering("good", "someones_schedules:load", registry.ENTRY_POINT_GROUP)
    broken = importlib.metadata.EntryPoint("broken", "no_such_module_anywhere", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken, good] if group == registry.ENTRY_POINT_GROUP else [])
    monkeypatch.setattr(registry, "_load_all", registry._load_all.__wrapped__)
    with pytest.warns(UserWarning, match=r"entry point 'broken' \(no_such_module_anywhere\) could not be loaded: ModuleNotFoundError"):
        assert "theirs" in ps.available()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_schedule(ps.schedule("theirs", ranks=3, microbatches=4))


OUTSIDE = '''
from penstock.ir.codes import B, F
from penstock.schedules.registry import linear, register
from penstock.testing import ScheduleConformance

@register("outside", placement=linear)
def outside(shape, rank):
    """All forwards, then all backwards; or one of them forgotten.

    Bubble: (p-1)(F+B)
    Memory: m
    """
    yield from (F(0, m) for m in range(shape.microbatches))
    yield from (B(0, m) for m in range(FIRST if rank == 1 and shape.microbatches > 1 else 0, shape.microbatches))

class TestOutside(ScheduleConformance):
    name = "outside"
    ranks = (1, 2)
'''


@pytest.mark.parametrize(("first", "outcome"), [("0", "10 passed"), ("1", "5 failed, 5 passed")])
def test_under_pytest(tmp_path: Path, first: str, outcome: str) -> None:
    """Two ranks have six microbatch counts, one rank three, and one test looks at the docstring."""
    (tmp_path / "test_outside.py").write_text(OUTSIDE.replace("FIRST", first))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert outcome in done.stdout, done.stdout
    if first == "1":
        assert "stage 1 has no backward for microbatch 0" in done.stdout
        assert "TestOutside::test_shape[outside-p2-v1-m2]" in done.stdout
