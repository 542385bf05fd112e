"""Random cases on processes equal the plain loop and virtual ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuzz.__main__ import describe_smallest
from fuzz.case import Case
from fuzz.check import check_case
from fuzz.draw import draw_case
from fuzz.known_cases import KNOWN
from fuzz.shrink import shrink
from penstock.runtime.launch.workers import Workers

CASES, PER_TEST = 20, 10
FIRST = 100_000
"""The first seed: other cases than those on virtual ranks alone."""

Start = Callable[[], Workers]


def assert_passes(case: Case, name: str, start: Start) -> None:
    """Fail with the smallest case that fails in the same way."""
    outcome = check_case(case, start)
    if outcome.failed:
        smallest = shrink(case, lambda smaller: check_case(smaller, start), outcome.kind, seconds=20)
        pytest.fail(f"{name}: {outcome.kind}: {outcome.text}\n{describe_smallest(smallest, start)}", pytrace=False)


@pytest.mark.parametrize("first", range(FIRST, FIRST + CASES, PER_TEST))
def test_random_cases(first: int, start_workers: Start) -> None:
    for seed in range(first, first + PER_TEST):
        assert_passes(draw_case(seed, "both"), f"seed {seed}", start_workers)


@pytest.mark.parametrize("name", [name for name, text in KNOWN.items() if "transport" in text])
def test_known_case(name: str, start_workers: Start) -> None:
    assert_passes(Case.from_json(KNOWN[name]), name, start_workers)
