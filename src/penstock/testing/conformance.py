"""The suite as a class that pytest collects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.schedules.registry import algorithm
from penstock.testing.cases import Case, conformance_cases
from penstock.testing.checks import check_schedule

if TYPE_CHECKING:
    import pytest


class ScheduleConformance:
    """Subclass it in a test file under a name that starts with `Test`, and set `name` to a registered schedule."""

    name: ClassVar[str]
    ranks: ClassVar[Iterable[int]] = range(1, 5)
    chunks: ClassVar[Iterable[int]] = range(1, 4)
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the schedule itself, the same for every shape."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Generate one test per shape."""
        if "case" in metafunc.fixturenames:
            cases = conformance_cases(self.name, ranks=self.ranks, chunks=self.chunks, **self.options)
            metafunc.parametrize("case", cases, ids=str)

    def test_shape(self, case: Case) -> None:
        check_schedule(case.build())

    def test_says_what_it_costs(self) -> None:
        known = algorithm(self.name)
        assert known.summary, f"{self.name}: the docstring's first line is the summary that `penstock list` shows"
        assert known.bubble, f"{self.name}: the docstring needs a line that starts with 'Bubble:'"
        assert known.memory, f"{self.name}: the docstring needs a line that starts with 'Memory:'"
