"""Costs from measured times."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.ir.costs import Costs
from penstock.ir.kind import COPIES, SHARES, Kind
from penstock.ir.program import Program
from penstock.ir.rows import Floats

_BESIDE = {Kind.UNSHARD: "unshard", Kind.REDUCE_GRAD: "reduce", Kind.BROADCAST: "broadcast", Kind.COMBINE: "combine"}
"""The kinds of actions that start a collective, and their names in `Costs`."""
_TIMED = {Kind.F: "f", Kind.I: "i", Kind.W: "w", Kind.B: "b", Kind.S: "s", Kind.T: "t", **_BESIDE}
"""All kinds of actions that take time."""
_EVEN = 1e-9
"""Times that differ by less than this share are equal."""


def measure_costs(program: Program, start: Floats, end: Floats, under_way: Floats, collective: Floats) -> Costs:
    """The costs of a step: the median of each stage and kind, and the median message and copy to or from the host.

    Of a spread vocabulary, each rank's own medians become its multiples of these.

    `start` and `end` are per action, `under_way` is the time of each message, and `collective` the time of each action's collective, or
    less than 0 if it was not measured.
    """
    taken: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(program.stages)] for kind in _TIMED}
    shares: dict[tuple[Kind, int, int], list[float]] = defaultdict(list)
    """Times of S and T by kind, rank and end."""
    bounds = program.rows.group_offsets.tolist()
    for rank, (low, _) in enumerate(pairwise(bounds)):
        for node, action in enumerate(program[rank], start=low):
            if action.kind in taken:
                time = float(collective[node] if action.kind in _BESIDE else end[node] - start[node])
                taken[action.kind][action.stage] += [time] if time >= 0 else []
                if action.kind in SHARES:
                    shares[action.kind, rank, min(action.stage, 1)].append(time)
    measured: dict[str, Any] = {}
    for kind, name in _TIMED.items():
        if any(taken[kind]):
            measured[name] = tuple(statistics.median(times) if times else 0.0 for times in taken[kind])
    for kind in SHARES:
        if not any(taken[kind]):
            continue
        ends = measured[_TIMED[kind]][0], measured[_TIMED[kind]][-1]
        medians = [
            [statistics.median(shares[kind, rank, end] or [whole]) for end, whole in enumerate(ends)] for rank in range(program.ranks)
        ]
        multiples = [[own / whole if whole else 1.0 for own, whole in zip(of_rank, ends, strict=True)] for of_rank in medians]
        if not np.allclose(multiples, 1.0, rtol=_EVEN, atol=0.0):
            measured[f"rank_{_TIMED[kind]}"] = multiples
    rows = program.rows
    copies = collective[rows.group[rows.is_kind(*COPIES)]]
    if (copies >= 0).any():
        measured["host_latency"] = float(np.median(copies[copies >= 0]))
    if "b" in measured and "i" not in measured:
        measured["i"], measured["w"] = tuple(value / 2 for value in measured["b"]), tuple(value / 2 for value in measured["b"])
    return Costs(**measured, latency=float(np.median(under_way)) if len(under_way) else 0.0)
