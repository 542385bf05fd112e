"""What hypothesis draws for the simulator: tables that run, orders that may not, and costs of every form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import strategies as st

import penstock as ps
from ir.strategies import graphs, placements
from penstock.ir.action import Action
from penstock.ir.costs import CONTENTION, Costs
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.passes.buffers import Buffers
from penstock.passes.pass_list import PassList
from penstock.schedules.registry import algorithm

EVEN = ("dualpipe", "chimera")
"""Schedules for even ranks only."""


# Tables ---------------------------------------------------------------------------------------------------------------


@st.composite
def zoo(draw: st.DrawFn, most_ranks: int = 4, most_microbatches: int = 7) -> Schedule:
    """Any registered schedule of a small shape, with or without edges that skip stages."""
    name = draw(st.sampled_from(sorted(ps.available())))
    layout = algorithm(name).layout
    ranks = 1 if name == "data-parallel" else draw(st.integers(1, most_ranks))
    ranks += ranks % 2 if name in EVEN else 0
    chunks = layout.chunks if layout.fixed else draw(st.integers(1, 3))
    made = ps.schedule(name, ranks=ranks, microbatches=draw(st.integers(1, most_microbatches)), chunks=chunks)
    return made.with_graph(draw(graphs(made.stages))) if draw(st.booleans()) else made


@st.composite
def orders(draw: st.DrawFn) -> Schedule:
    """Any order that runs, on any placement: actions picked at random from those whose needs are met."""
    placement = draw(placements())
    graph = draw(graphs(placement.stages))
    microbatches, split = draw(st.integers(1, 4)), draw(st.lists(st.booleans(), min_size=placement.stages, max_size=placement.stages))
    rows = _picked(placement, graph, microbatches, split, draw(st.randoms(use_true_random=False)))
    return Schedule.from_actions(rows, placement, microbatches=microbatches, graph=graph)


def _picked(placement: Placement, graph: StageGraph, microbatches: int, split: list[bool], random: Random) -> list[list[Action]]:
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    todo = [
        Action(s, k, m) for s in range(placement.stages) for m in range(microbatches) for k in (Kind.F, *((Kind.I, Kind.W) if split[s] else (Kind.B,)))
    ]
    made: set[tuple[bool, int, int]] = set()
    while todo:
        ready = [action for action in todo if _met(action, graph, made)]
        action = random.choice(ready)
        todo.remove(action)
        row = rows[placement.rank_of(action.stage, action.microbatch or 0)]
        together = bool(row) and random.random() < 0.15 and _met(action, graph, made - {_makes(part) for part in row[-1].parts})
        # what is added to an earlier action must not be waited for by anything that waits for that action
        row.append(action)
        if together and _last_two_free(rows, placement, graph):
            row[-2:] = [Action.overlap(*row[-2].parts, action)]
        made.add(_makes(action))
    return rows


def _last_two_free(rows: list[list[Action]], placement: Placement, graph: StageGraph) -> bool:
    return False


def _makes(action: Action) -> tuple[bool, int, int]:
    """Whether it is an activation, the stage, the microbatch; a weight gradient makes nothing that is waited for."""
    return action.kind is Kind.F, action.stage if action.kind is not Kind.W else -1, action.microbatch or 0


def _met(action: Action, graph: StageGraph, made: set[tuple[bool, int, int]]) -> bool:
    stage, microbatch = action.stage, action.microbatch or 0
    if action.kind is Kind.F:
        return all((True, other, microbatch) in made for other in graph.inputs_of(stage))
    if action.kind is Kind.W:
        return (False, stage, microbatch) in made
    return (True, stage, microbatch) in made and all((False, other, microbatch) in made for other in graph.outputs_of(stage))
