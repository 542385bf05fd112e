"""A mark for tests that need OR-tools."""

from __future__ import annotations

import importlib.util

import pytest

needs_solver = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="needs OR-tools: install the extra 'solve'")
