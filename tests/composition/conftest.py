"""One thread for torch, so that sums are the same every time; and which tests on processes are in the quick run."""

from __future__ import annotations

from pathlib import Path

import pytest

from threads import one_thread  # noqa: F401 - a fixture

QUICK = (
    "test_gradients_accumulate_over_steps",
    "test_row_2_wrapped_stages",
    "test_tied_parameters",
    "test_no_gather_outside_of_the_program",
    "test_hybrid_shards_are_reduced_once",
    "test_numbers_and_waiting_weights",
    "test_found_by_one_process_skipped_by_all",
    "test_names_and_bytes",
)
"""Of the tests on processes here, those that `make quick` keeps."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        here = Path(__file__).parent in item.path.parents
        if here and "workers" in getattr(item, "fixturenames", ()) and getattr(item, "originalname", "") not in QUICK:
            item.add_marker(pytest.mark.slow)
