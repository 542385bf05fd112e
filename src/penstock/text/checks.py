"""Arguments that must be true or false, or a function: refused with one sentence wherever the user gives something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import ScheduleError
from penstock.text.units import shorten


def check_flag(name: str, value: Any, *, error: Callable[[str], Exception] = ScheduleError) -> bool:
    """Give True or False; refuse anything else, also what Python would take for one of them: "no" is no False."""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()  # a NumPy scalar
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {shorten(value)}")
    return value


def check_function(name: str, value: Any, call: str, *, error: Callable[[str], Exception] = ScheduleError) -> None:
    """Refuse what cannot be called; `call` says in the error how it will be, like "progress(done)"."""
    if not callable(value):
        raise error(f"{name} must be a function, which is called as {call}, got {shorten(value)}")
