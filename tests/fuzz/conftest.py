"""One thread for torch, so that sums are the same every time."""

from __future__ import annotations

from threads import one_thread  # noqa: F401 - a fixture
