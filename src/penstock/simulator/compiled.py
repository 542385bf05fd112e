"""The event loops, compiled by numba and cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from penstock.simulator import loops

Loop = Callable[..., Any]


@cache
def compiled_loops() -> tuple[Loop, Loop]:
    """`run_independent` and `run_shared`, compiled; needs numba."""
    before = _compile(loops._before)
    push, pop = (_compile(helper, _before=before) for helper in (loops._push, loops._pop))
    return _compile(loops.run_independent), _compile(loops.run_shared, _push=push, _pop=pop)


def _compile(function: Loop, **helpers: Loop) -> Loop:
    """The function compiled, with compiled helpers in place of the plain ones that it calls."""
    import numba

    assert isinstance(function, FunctionType)
    twin = FunctionType(function.__code__, {**vars(loops), **helpers}, function.__name__)
    twin.__module__ = __name__
    compiled: Loop = numba.njit(cache=True, nogil=True)(twin)
    return compiled
