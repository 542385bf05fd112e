"""Run the loops on orders: compiled where numba is installed, else as they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from penstock.planner.orders import anneal, dispatch, timing, weave

Loop = Callable[..., Any]


class Loops(NamedTuple):
    """The three loops, in one of their forms."""

    time_order: Loop
    dispatch: Loop
    anneal: Loop
    weave: Loop
    compiled: bool


@cache
def loops(plain: bool = False) -> Loops:
    """The compiled loops, or the plain ones where numba is missing or they are asked for."""
    if plain or importlib.util.find_spec("numba") is None:
        return Loops(timing.time_order, dispatch.dispatch, anneal.anneal, weave.weave, compiled=False)
    known: dict[str, Loop] = {}
    for module in (timing, dispatch, weave, anneal):
        _compile_all(module, known)
    return Loops(known["time_order"], known["dispatch"], known["anneal"], known["weave"], compiled=True)


_ORDER: dict[ModuleType, tuple[str, ...]] = {
    timing: ("ends_weights", "time_starts", "_time_tails", "time_order"),
    weave: ("roll", "lay", "_weigh", "_shift", "weave"),
    dispatch: ("_is_safe", "dispatch"),
    anneal: (
        "_keep",
        "_find_places",
        "_find_critical",
        "_target",
        "_is_within",
        "_estimate",
        "_choose",
        "_apply",
        "_revert",
        "_hold_again",
        "_restore",
        "_keeps_within",
        "_flip",
        "_merge",
        "_exchange",
        "_rotate",
        "_shift",
        "_sweep",
        "anneal",
    ),
}
"""Each module's functions, every one after those that it calls."""


def _compile_all(module: ModuleType, known: dict[str, Loop]) -> None:
    import numba

    for name in _ORDER[module]:
        function = getattr(module, name)
        assert isinstance(function, FunctionType)
        twin = FunctionType(function.__code__, {**vars(module), **known}, name)
        twin.__module__ = __name__
        known[name] = numba.njit(cache=True, nogil=True)(twin)
