"""What hypothesis draws for the simulator: tables that run, orders that may not, and costs of every form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

import penstock as ps
from ir.strategies import graphs, placements
from penstock.errors import PassError
from penstock.ir.action import Action
from penstock.ir.costs import CONTENTION, Costs
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.passes.base import Pass
from penstock.passes.buffers import Buffers
from penstock.passes.pass_list import PassList
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard
from penstock.passes.vocabulary import Vocabulary
from penstock.schedules.registry import algorithm

EVEN = ("dualpipe", "chimera")
"""Schedules for even ranks only."""

# Tables ---------------------------------------------------------------------------------------------------------------


@st.composite
def zoo(draw: st.DrawFn, most_ranks: int = 4, most_microbatches: int = 7, most_slices: int = 3) -> Schedule:
    """Any registered schedule of a small shape, with or without edges that skip stages."""
    name = draw(st.sampled_from(sorted(ps.available())))
    layout = algorithm(name).layout
    ranks = 1 if name == "data-parallel" else draw(st.integers(1, most_ranks))
    ranks += ranks % 2 if name in EVEN else 0
    chunks = layout.chunks if layout.fixed else layout.unit[1] * draw(st.integers(1, 2))
    slices = {} if algorithm(name).slices is None else {"slices": draw(st.integers(1, most_slices))}
    made = ps.schedule(name, ranks=ranks, microbatches=draw(st.integers(1, most_microbatches)), chunks=chunks, **slices)
    return made.with_graph(draw(graphs(made.stages))) if draw(st.booleans()) else made


@st.composite
def orders(draw: st.DrawFn, most_slices: int = 3) -> Schedule:
    """Any order that runs, on any placement, some actions overlapped."""
    placement = draw(placements())
    graph = draw(graphs(placement.stages))
    microbatches, slices = draw(st.integers(1, 4)), draw(st.integers(1, most_slices)) if len(placement.copies) == 1 else 1
    split = draw(st.lists(st.booleans(), min_size=placement.stages, max_size=placement.stages))
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for rank, group in _picked(placement, graph, (microbatches, slices), split, draw(st.randoms(use_true_random=False))):
        rows[rank].append(group[0] if len(group) == 1 else Action.overlap(*group))
    return Schedule.from_actions(rows, placement, microbatches=microbatches, graph=graph, slices=slices)


Made = set[tuple[bool, int, int]]
"""What there is so far: whether it is an activation or a gradient, of which stage and microbatch."""


def _picked(
    placement: Placement, graph: StageGraph, counts: tuple[int, int], split: list[bool], random: Random
) -> Iterator[tuple[int, list[Action]]]:
    """One action after the other, or two of one rank together, from those whose needs are met."""
    microbatches, slices = counts
    units = range(microbatches * slices)
    todo = [Action(s, kind, m) for s, halves in enumerate(split) for m in units for kind in (Kind.F, *_backward(halves))]
    made: Made = set()
    while todo:
        ready = [action for action in todo if _met(action, graph, slices, made)]
        group = [random.choice(ready)]
        rank = placement.rank_of(group[0].stage, group[0].microbatch or 0)
        others = [a for a in ready if a != group[0] and placement.rank_of(a.stage, a.microbatch or 0) == rank]
        if others and random.random() < 0.2:
            group.append(random.choice(others))
        for action in group:
            todo.remove(action)
            if action.kind is not Kind.W:
                made.add((action.kind is Kind.F, action.stage, action.microbatch or 0))
        yield rank, group


def _backward(split: bool) -> tuple[Kind, ...]:
    return (Kind.I, Kind.W) if split else (Kind.B,)


def _met(action: Action, graph: StageGraph, slices: int, made: Made) -> bool:
    stage, microbatch = action.stage, action.microbatch or 0
    if action.kind is Kind.F and microbatch % slices and (True, stage, microbatch - 1) not in made:
        return False
    if action.kind in (Kind.B, Kind.I) and (microbatch + 1) % slices and (False, stage, microbatch + 1) not in made:
        return False
    if action.kind is Kind.F:
        return all((True, other, microbatch) in made for other in graph.inputs_of(stage))
    if action.kind is Kind.W:
        return (False, stage, microbatch) in made
    return (True, stage, microbatch) in made and all((False, other, microbatch) in made for other in graph.outputs_of(stage))


@st.composite
def programs(draw: st.DrawFn, schedules: st.SearchStrategy[Schedule] | None = None) -> Program:
    """A schedule, lowered in any way; with few slots it may not run."""
    schedule = draw(schedules_of_any_kind if schedules is None else schedules)
    passes = ["merge-backward"] if draw(st.booleans()) else []
    if draw(st.booleans()):
        passes.append(f"shard{{lookahead={draw(st.integers(0, 3))},residency={draw(st.sampled_from(('all', '2')))}}}")
    receive = draw(st.sampled_from(("paired", "just-in-time", "0", "1", "3")))
    slots = draw(st.sampled_from(("", "{slots=1}", "{slots=2}", "{slots=3}")))
    passes += draw(st.sampled_from(([], ["reduce-grad"], ["reduce-grad{wait=now}"], ["reduce-grad{wait=deferred}"])))
    waits = draw(st.sampled_from(([], ["wait-send"], ["wait-send{outstanding=2}"], ["wait-send{outstanding=4}"])))
    try:
        return PassList.parse(",".join([*passes, f"send-receive{{receive={receive}}}", *waits, f"buffers{slots}"])).apply(schedule)
    except PassError:  # so few sends cannot be outstanding
        reject()


@st.composite
def copied(draw: st.DrawFn) -> tuple[Table, Costs]:
    """A table that moves activations to the host, and costs for it; the link is shared only if everything takes time."""
    schedule = draw(schedules_of_any_kind)
    passes = [f"offload{{share={draw(st.sampled_from((30, 50, 100)))},ahead={draw(st.integers(0, 3))}}}"]
    if draw(st.booleans()):
        passes += ["shard"] if draw(st.booleans()) else []
        passes += ["reduce-grad", f"send-receive{{receive={draw(st.sampled_from(('paired', 'just-in-time', '2')))}}}", "buffers"]
    table = PassList.parse(",".join(passes)).apply(schedule)
    contention, shared = draw(contentions), draw(st.integers(1, 3))
    amounts = eighths if contention == "independent" and shared == 1 else some_eighths
    host = {"host_latency": draw(amounts), "host_bandwidth": draw(st.sampled_from((None, 0.5, 2.0))), "host_link_shared": shared}
    return table, replace(draw(costs(table, amounts, contention)), **host)


@st.composite
def spread(draw: st.DrawFn) -> tuple[Table, Costs]:
    """A table whose vocabulary is spread over the ranks, and costs for it."""
    schedule = draw(schedules_of_any_kind.filter(lambda schedule: schedule.stages > 1))
    head, embedding = draw(st.sampled_from(((True, True), (True, False), (False, True))))
    passes: list[Pass] = [Vocabulary(head, embedding, draw(st.integers(0, 3)))]
    if draw(st.booleans()):
        passes += [Shard()] if draw(st.booleans()) else []
        passes += [ReduceGrad(), SendReceive(draw(st.sampled_from(("paired", "just-in-time", 2)))), Buffers()]
    table = PassList.of(passes).apply(schedule)
    contention = draw(contentions)
    amounts = eighths if contention == "independent" else some_eighths
    a_stage = st.lists(amounts, min_size=table.stages, max_size=table.stages)
    a_unit = st.lists(st.lists(amounts, min_size=table.units, max_size=table.units), min_size=table.stages, max_size=table.stages)
    further = {name: draw(st.one_of(amounts, a_stage, a_unit)) for name in ("s", "t", "broadcast", "combine", "logits")}
    a_rank = st.lists(st.one_of(amounts, st.tuples(amounts, amounts)), min_size=table.ranks, max_size=table.ranks)
    further |= {name: draw(st.one_of(st.just(1.0), amounts, a_rank)) for name in ("rank_s", "rank_t", "rank_logits")}
    return table, replace(draw(costs(table, amounts, contention)), **further)


schedules_of_any_kind = st.one_of(zoo(), orders())
tables = st.one_of(schedules_of_any_kind, programs())


@st.composite
def disturbed(draw: st.DrawFn) -> Table:
    """A table with two actions of a rank swapped, so that it may wait forever."""
    table = draw(tables)
    rows = [list(row) for row in table]
    row = rows[draw(st.integers(0, len(rows) - 1))]
    if row:
        one, other = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, len(row) - 1))
        row[one], row[other] = row[other], row[one]
    if isinstance(table, Program):
        made = Program.from_actions(rows, table.placement, microbatches=table.microbatches, graph=table.graph, slices=table.slices)
        return made.changed(buffers=table.buffers)
    return Schedule.from_actions(rows, table.placement, microbatches=table.microbatches, graph=table.graph, slices=table.slices)


# Costs ----------------------------------------------------------------------------------------------------------------

SIZES = ("activation", "weight_stash", "output")
PER_ACTION = ("f", "i", "w", *SIZES)
PER_STAGE = ("parameters", "shard", "unshard", "reduce", "optimizer")

eighths = st.integers(0, 16).map(lambda number: number / 8)
"""Sums of these are exact, so that what happens at one moment happens at one moment in every implementation."""
some_eighths = st.integers(1, 16).map(lambda number: number / 8)


@st.composite
def costs(draw: st.DrawFn, table: Table, amounts: st.SearchStrategy[float] = eighths, contention: str = "independent") -> Costs:
    """Every field in every form that it takes."""
    stages, microbatches = table.stages, table.units
    a_stage = st.one_of(amounts, st.lists(amounts, min_size=stages, max_size=stages))
    a_row = st.lists(amounts, min_size=microbatches, max_size=microbatches)
    an_action = st.one_of(a_stage, st.lists(st.one_of(amounts, a_row), min_size=stages, max_size=stages))
    fields: dict[str, Any] = {name: draw(an_action) for name in PER_ACTION}
    fields |= {name: draw(a_stage) for name in PER_STAGE}
    fields["b"] = draw(st.one_of(st.none(), an_action))
    fields["latency"] = draw(st.one_of(amounts, _links(table.ranks, amounts)))
    rates = st.sampled_from((None, 0.5, 1.0, 2.0))
    fields["bandwidth"] = draw(st.one_of(rates, _links(table.ranks, rates)))
    if contention == "links":
        lane = st.integers(0, table.ranks)
        fields["lanes"] = draw(_links(table.ranks, st.tuples(lane, lane)))
    fields["overlap"] = draw(st.sampled_from((0.5, 0.75, 1.0)))
    return Costs(**fields, contention=contention)


def _links(ranks: int, values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[list[Any]]]:
    """A table with one value per pair of ranks."""
    return st.lists(st.lists(values, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks)


def real_costs(table: Table, random: Random, contention: str) -> Costs:
    """Another real number for everything, so that nothing falls together by chance."""
    stages, microbatches, ranks = table.stages, table.units, table.ranks

    def an_action() -> list[list[float]]:
        return [[random.uniform(0.1, 3) for _ in range(microbatches)] for _ in range(stages)]

    fields: dict[str, Any] = {name: an_action() for name in PER_ACTION}
    fields |= {name: [random.uniform(0, 2) for _ in range(stages)] for name in PER_STAGE}
    fields["latency"], fields["bandwidth"] = random.uniform(0.01, 2), random.uniform(0.2, 3)
    if random.random() < 0.5:
        fields["latency"] = [[random.uniform(0.01, 2) for _ in range(ranks)] for _ in range(ranks)]
        fields["bandwidth"] = [[random.choice((None, random.uniform(0.2, 3))) for _ in range(ranks)] for _ in range(ranks)]
    if contention == "links":
        fields["lanes"] = [[(random.randint(0, ranks), random.randint(0, ranks)) for _ in range(ranks)] for _ in range(ranks)]
    return Costs(**fields, b=an_action(), overlap=random.uniform(0.4, 1.2), contention=contention)


contentions = st.sampled_from(CONTENTION)


@st.composite
def timed(draw: st.DrawFn, of: st.SearchStrategy[Table] = tables) -> tuple[Table, Costs]:
    """A table and costs for it: zeros only if each message has a link of its own, because on shared links they leave the order open."""
    table, contention = draw(of), draw(contentions)
    amounts = eighths if contention == "independent" else some_eighths
    return table, draw(costs(table, amounts, contention))
