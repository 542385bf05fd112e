"""Random cases on virtual ranks equal the plain loop, or are refused for a known reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fuzz.__main__ import describe_smallest
from fuzz.case import Case
from fuzz.check import check_case
from fuzz.draw import draw_case
from fuzz.known_cases import KNOWN
from fuzz.shrink import shrink

CASES, PER_TEST = 100, 20
"""Cases in all, and how many one test runs: the first test is quick, the others are slow."""


def assert_passes(case: Case, name: str) -> None:
    """Fail with the smallest case that fails in the same way."""
    outcome = check_case(case)
    if outcome.failed:
        smallest = shrink(case, check_case, outcome.kind, seconds=20)
        pytest.fail(f"{name}: {outcome.kind}: {outcome.text}\n{describe_smallest(smallest, None)}", pytrace=False)


def _first_seeds() -> list[object]:
    return [pytest.param(first, marks=() if first < 2 * PER_TEST else pytest.mark.slow) for first in range(0, CASES, PER_TEST)]


@pytest.mark.parametrize("first", _first_seeds())
def test_random_cases(first: int) -> None:
    for seed in range(first, first + PER_TEST):
        assert_passes(draw_case(seed), f"seed {seed}")


@pytest.mark.parametrize("name", [name for name, text in KNOWN.items() if "transport" not in text])
def test_known_case(name: str) -> None:
    assert_passes(Case.from_json(KNOWN[name]), name)


def test_case_is_one_line_of_text() -> None:
    for seed in range(40):
        case = draw_case(seed)
        assert "\n" not in case.to_json()
        assert Case.from_json(case.to_json()) == case


def test_seed_gives_the_same_case() -> None:
    assert [draw_case(seed) for seed in range(20)] == [draw_case(seed) for seed in range(20)]


def test_known_cases_can_be_read() -> None:
    read: Callable[[str], Case] = Case.from_json
    assert len({read(text) for text in KNOWN.values()}) == len(KNOWN)
