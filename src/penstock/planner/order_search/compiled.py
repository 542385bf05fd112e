"""The loops over orders: compiled if numba is installed, else as they are."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

Loop = Callable[..., Any]


class Loops(NamedTuple):
    """The loops, plain or compiled."""

    time_order: Loop
    dispatch: Loop
    anneal: Loop
    search_pattern: Loop
    compiled: bool


_FUNCTIONS = {
    "random_numbers": ("draw",),
    "timing": ("ends_weights", "time_starts", "_time_tails", "time_order"),
    "patterns": ("lay_out", "_weigh", "_shift_item", "search_pattern"),
    "dispatch": ("_is_safe", "dispatch"),
    "annealing": (
        *(
            "_keep",
            "_find_places",
            "_find_critical",
            "_find_target",
            "_is_within",
            "_estimate",
            "_choose",
            "_apply",
            "_revert",
            "_hold_again",
        ),
        *("_restore", "_keeps_within", "_flip", "_merge", "_exchange", "_rotate", "_shift", "_sweep", "anneal"),
    ),
}
"""The functions of each module, every one after those that it calls."""


@cache
def get_loops(plain: bool = False) -> Loops:
    """The compiled loops, or the plain ones if numba is missing or `plain` is set."""
    compiled = not plain and importlib.util.find_spec("numba") is not None
    known: dict[str, Loop] = {}
    for name, functions in _FUNCTIONS.items():
        module = vars(importlib.import_module(f"penstock.planner.order_search.{name}"))
        for function in functions:
            known[function] = _compile(module[function], {**module, **known}) if compiled else module[function]
    return Loops(known["time_order"], known["dispatch"], known["anneal"], known["search_pattern"], compiled)


def _compile(function: Any, names: dict[str, Any]) -> Loop:
    """Compile a copy of a function that calls the compiled copies of others."""
    import numba

    assert isinstance(function, FunctionType)
    twin = FunctionType(function.__code__, names, function.__name__)
    twin.__module__ = __name__
    compiled: Loop = numba.njit(cache=True, nogil=True)(twin)
    return compiled
