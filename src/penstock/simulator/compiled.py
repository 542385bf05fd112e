"""The event loops, compiled by numba and cached on disk; importing this module needs numba."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numba

from penstock.simulator import loops


def _compile(function: Callable[..., Any], **helpers: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled, with compiled helpers in place of the plain ones that it calls."""
    assert isinstance(function, FunctionType)
    twin = FunctionType(function.__code__, {**vars(loops), **helpers}, function.__name__)
    twin.__module__ = __name__
    compiled: Callable[..., Any] = numba.njit(cache=True, nogil=True)(twin)
    return compiled


_before = _compile(loops._before)
run_independent = _compile(loops.run_independent)
run_shared = _compile(loops.run_shared, _push=_compile(loops._push, _before=_before), _pop=_compile(loops._pop, _before=_before))
