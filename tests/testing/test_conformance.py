"""Every registered schedule passes the public suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.schedules.registry import algorithms
from penstock.testing import ScheduleConformance

pytestmark = pytest.mark.slow


def suites() -> Iterator[type[ScheduleConformance]]:
    """One class per name, so that a schedule which joins the zoo is tried without a line here.

    A schedule that takes any number of chunks is tried with two on every number of ranks, and with one, three and four on three ranks.
    """
    for name, entry in algorithms().items():
        shapes: dict[str, dict[str, Any]] = {"": {}}
        if not entry.layout.fixed:
            shapes = {"": {"chunks": (2,)}, "_on_three_ranks": {"ranks": (3,), "chunks": (1, 3, 4)}}
        for suffix, shape in shapes.items():
            yield type(f"Test_{name}{suffix}", (ScheduleConformance,), {"name": name, **shape})


globals().update({suite.__name__: suite for suite in suites()})
