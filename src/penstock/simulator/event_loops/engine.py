"""Run the event loops: compiled by numba and cached on disk if numba is installed, otherwise in plain Python."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtraError, ScheduleError
from penstock.simulator.event_loops import loops
from penstock.simulator.event_loops.loops import Durations, Graph, Times


class Outcome(NamedTuple):
    """When everything happened; `reached` is the node that each rank came to, its end if nothing hangs."""

    times: Times
    reached: NDArray[np.int32]
    held_by: NDArray[np.int32]


def run(graph: Graph, takes: Durations, contention: str, engine: str = "auto") -> Outcome:
    """Time the graph. `engine` is `plain`, `compiled`, or `auto`: compiled if numba is installed."""
    compiled = compiled_loops() if _wants_compiled(engine) else None
    shared = contention != "independent"
    if compiled is not None:
        return _call(compiled[shared], graph, takes, shared)
    columns: list[Any] = [column.tolist() if isinstance(column, np.ndarray) else column for column in graph]
    as_lists = Graph(*columns)
    return _call((loops.run_independent, loops.run_shared)[shared], as_lists, Durations(*(c.tolist() for c in takes)), shared, plain=True)


def _wants_compiled(engine: str) -> bool:
    if engine not in ("auto", "plain", "compiled"):
        raise ScheduleError(f"engine must be auto, plain or compiled, got {engine!r}")
    installed = importlib.util.find_spec("numba") is not None
    if engine == "compiled" and not installed:
        raise MissingExtraError("the compiled engine", "numba", "fast")
    return installed and engine != "plain"


def _call(loop: Callable[..., None], graph: Graph, takes: Durations, shared: bool, plain: bool = False) -> Outcome:
    ranks, nodes, messages = len(graph.bounds) - 1, len(graph.rank), len(graph.sender)
    give: Callable[[Any], Any] = (lambda array: array.tolist()) if plain else (lambda array: array)
    times = Times(*(give(np.full(count, -1.0)) for count in (nodes, nodes, messages, messages, nodes, nodes)))
    at = give(np.array(graph.bounds[:-1], dtype=np.int32))
    now, free, lane = (give(np.zeros(count)) for count in (ranks, graph.num_links, ranks))
    held_by = give(np.full(messages if shared else 0, -1, dtype=np.int32))
    if shared:
        heap, state = give(np.arange(ranks, dtype=np.int32)), give(np.zeros(ranks, dtype=np.int8))
        last_on = give(np.full(graph.num_links, -1, dtype=np.int32))
        loop(graph, takes, times, at, now, heap, state, free, lane, last_on, held_by)
    else:
        stack, queued = give(np.arange(ranks, dtype=np.int32)[::-1].copy()), give(np.ones(ranks, dtype=np.int8))
        loop(graph, takes, times, at, now, stack, queued, free, lane)
    return Outcome(
        Times(*(np.asarray(column, dtype=np.float64) for column in times)),
        np.asarray(at, dtype=np.int32),
        np.asarray(held_by, dtype=np.int32),
    )


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
