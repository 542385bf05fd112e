"""Times orders of one problem and builds them from rules, with the columns that the loops need."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from penstock.ir.rows import Floats, Ints
from penstock.planner.order_search.dispatch import DispatchRule, DispatchState
from penstock.planner.order_search.flat_problem import Flags, FlatProblem, replace_full_backwards
from penstock.planner.order_search.timing import MODULUS, Clock

Loop = Callable[..., Any]
_LOOPS = ("timing", "dispatch", "annealing", "patterns", "permutations")
"""The modules of the loops: every function there runs plain and compiled."""


class Loops(NamedTuple):
    """The loops that are called from outside, plain or compiled."""

    time_order: Loop
    dispatch: Loop
    anneal: Loop
    search_pattern: Loop
    time_permutations: Loop
    find_excess: Loop
    search_permutations: Loop
    compiled: bool


@cache
def get_loops(plain: bool = False) -> Loops:
    """The compiled loops, or the plain ones if numba is missing or `plain` is set."""
    modules = [importlib.import_module(f"penstock.planner.order_search.{name}") for name in _LOOPS]
    defined = [value for module in modules for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    loops: dict[str, Loop] = {value.__name__: value for value in defined if isinstance(value, FunctionType)}
    compiled = not plain and importlib.util.find_spec("numba") is not None
    if compiled:
        import numba

        # Copies of the functions, which call the compiled copies of each other.
        copies = {name: FunctionType(loop.__code__, dict(loop.__globals__), name) for name, loop in loops.items()}
        for copy in copies.values():
            copy.__module__ = __name__
        loops = {name: numba.njit(cache=True, nogil=True)(copy) for name, copy in copies.items()}
        for copy in copies.values():
            copy.__globals__.update(loops)
    return Loops(**{name: loops[name] for name in Loops._fields if name in loops}, compiled=compiled)


@dataclass(frozen=True)
class Order:
    """One order of the nodes and its objective; `full` marks the cells with a full backward."""

    nodes: Ints
    full: Flags
    objective: float
    source: str = ""


class Evaluator:
    """Times orders of one problem, and builds orders from dispatch rules."""

    def __init__(self, flat: FlatProblem, *, plain: bool = False) -> None:
        self.flat = flat
        self.loops = get_loops(plain)
        self.nodes, self.cells = 3 * flat.stages * flat.microbatches, flat.stages * flat.microbatches
        self.clock, self.spare, self.dispatch_state = self._clock(), self._clock(), self._dispatch_state()
        self._room = self.ints(self.nodes)
        self._known: dict[bytes, FlatProblem] = {}
        self.usual = float(np.mean(flat.duration)) or 1.0
        """Mean time of a node."""

    def _clock(self) -> Clock:
        flat, nodes, ints, floats = self.flat, self.nodes, self.ints, self.floats
        return Clock(
            **{name: floats(nodes) for name in ("start", "arrive", "tail")},
            walk=ints(nodes),
            **{name: ints(flat.ranks) for name in ("at", "stack", "queued")},
            **{name: floats(flat.ranks) for name in ("now", "lane")},
            free=floats(flat.num_links),
            left=ints(flat.stages),
        )

    def _dispatch_state(self) -> DispatchState:
        flat, ints, floats = self.flat, self.ints, self.floats
        return DispatchState(
            arrive=floats(self.nodes),
            **{name: ints(flat.stages) for name in ("forwards", "inputs", "weights", "ended")},
            **{name: floats(flat.ranks) for name in ("now", "wake", "held", "under_way", "begun", "lane", "left")},
            free=floats(flat.num_links),
            at=ints(flat.ranks),
        )

    # Columns ----------------------------------------------------------------------------------------------------------

    def as_column(self, values: Any) -> Any:
        """An array, or a list for the plain loops, which are faster on lists."""
        return values if self.loops.compiled else values.tolist()

    def ints(self, count: int) -> Any:
        return self.as_column(np.zeros(count, dtype=np.int64))

    def floats(self, count: int) -> Any:
        return self.as_column(np.zeros(count))

    def seed(self, seed: int) -> Any:
        """The state of `timing.draw`."""
        return self.as_column(np.array([1 + seed % (MODULUS - 1)], dtype=np.int64))

    def copy_flat(self, full: Flags) -> FlatProblem:
        """The problem with these full backwards, its arrays a copy."""
        flat = replace_full_backwards(self.flat, full)
        return flat._replace(**{name: self.as_column(column) for name, column in flat._asdict().items() if isinstance(column, np.ndarray)})

    def _find_flat(self, full: Flags) -> FlatProblem:
        key = full.tobytes()
        if key not in self._known:
            self._known[key] = self.copy_flat(full)
        return self._known[key]

    def leave_free(self, more: Floats) -> None:
        """Lower each rank's limit."""
        self.flat = self.flat._replace(limit=self.flat.limit - more)
        self._known.clear()

    # Work -------------------------------------------------------------------------------------------------------------

    def time(self, nodes: Ints, full: Flags) -> float:
        """The objective of an order, -1 if it deadlocks."""
        return float(self.loops.time_order(self._find_flat(full), self.as_column(nodes), self.clock))

    def find_peaks(self, nodes: Ints, full: Flags) -> Floats:
        """Peak memory of each rank, beyond what it always holds."""
        flat = replace_full_backwards(self.flat, full)
        takes, keeps = flat.takes[nodes], flat.keeps[nodes]
        most = np.zeros(flat.ranks)
        for rank in range(flat.ranks):
            row = slice(flat.bounds[rank], flat.bounds[rank + 1])
            after = np.cumsum(takes[row] + keeps[row])
            most[rank] = max(after.max(initial=0.0), (after - keeps[row]).max(initial=0.0))
        return most

    def dispatch(self, rule: DispatchRule, full: Flags, bound: float = math.inf) -> float:
        """The objective of the order that a rule gives, -1 if there is none, infinite if above the bound; `last_order` has the order.

        With patience, a rank may have waited for a node that it then did not run: timed again, the order may take less.
        """
        columns = rule._replace(base=self.as_column(rule.base), most=self.as_column(rule.most), ahead=self.as_column(rule.ahead))
        return float(self.loops.dispatch(self._find_flat(full), columns, self._room, self.dispatch_state, bound))

    @property
    def last_order(self) -> Ints:
        """The order that was dispatched last."""
        return np.array(self._room, dtype=np.int64)
