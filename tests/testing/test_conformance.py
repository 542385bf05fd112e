"""Every registered schedule passes the public suite."""

from __future__ import annotations

import pytest

from penstock.schedules.registry import algorithms
from penstock.testing import ScheduleConformance

pytestmark = pytest.mark.slow

# One class a name, so that a schedule which joins the zoo is tried without a line here.
globals().update({f"Test_{name}": type(f"Test_{name}", (ScheduleConformance,), {"name": name}) for name in algorithms()})
