"""A problem as flat arrays, and orders to and from schedules.

A *node* is one compute action, numbered `(kind * stages + stage) * microbatches + microbatch`; kind 0 is F, 1 is I and 2 is W.
A *cell* is a stage and microbatch: a node without its kind. A full backward is an I that takes as long as it, and a W that takes
no time and no memory. An *order* is one array of nodes, rank after rank, as the offsets of `Shop.bounds` cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.ir.rows import Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.planner.problem import SLACK, Problem

Floats = NDArray[np.float64]
Flags = NDArray[np.int8]

# Lists in the plain loops, arrays in the compiled ones.
Column = Any


class Shop(NamedTuple):
    """What the loops read; `duration`, `takes` and `keeps` follow from which backwards are full."""

    ranks: int
    stages: int
    microbatches: int
    rank: Column
    """Of each node."""
    duration: Column
    before: Column
    """Each node's input: what must have ended, and whose message must have come; -1 for none."""
    after: Column
    """The next node of the microbatch's way through the stages, -1 for none; every I is also followed by its W."""
    travel: Column
    link: Column
    """What each node's message takes, and the link that it occupies; -1 where both are on one rank."""
    num_links: int
    takes: Column
    """The memory that each node takes when it starts."""
    keeps: Column
    """And what it adds when it ends."""
    limit: Column
    """What each rank may hold, beyond what it always holds."""
    closing: Column
    """Each rank's optimizer."""
    reduce: Column
    """Each stage's gradient reduction."""
    any_reduce: bool
    full: Column
    """Whether each cell has a full backward."""
    is_alike: bool
    """Whether all microbatches take and hold the same."""
    is_span: bool
    """Whether the longest rank span counts instead of the makespan."""
    is_split: bool
    """Whether backwards may be split."""
    may_merge: bool
    """Whether it can pay to have full backwards among split ones."""
    input_time: Column
    weight_time: Column
    full_time: Column
    activation: Column
    stash: Column
    """Of each cell: the times of its backwards, and the memory."""
    bounds: Column
    """Where each rank's part of an order begins, and the number of nodes."""
    stage_at: Column
    stage_of: Column
    """Rank r holds the stages `stage_of[stage_at[r] : stage_at[r + 1]]`."""
    alone: Column
    """The most that one microbatch alone holds on each rank."""
    work: Column
    """What each rank's nodes and its optimizer take."""


def shop_of(problem: Problem, reserve: Sequence[float] = ()) -> Shop:
    """The problem with split backwards where they are allowed; `reserve` is memory of each rank to leave free."""
    stages, microbatches, costs = problem.stages, problem.microbatches, problem.costs
    tables = {name: costs.table(name, stages, microbatches) for name in ("f", "i", "w", "b", "activation", "weight_stash")}
    times = np.concatenate([tables[name].ravel() for name in ("f", "i", "w")])
    ranks = _ranks(problem)
    before, after = _ways(stages, microbatches)
    hops = _hops(problem)
    travel, link, num_links = _links(problem, ranks, after, hops)
    reduce = np.array(costs.per_stage("reduce", stages))
    optimizer = np.array(costs.per_stage("optimizer", stages))
    held = [problem.placement.stages_of(rank) for rank in range(problem.ranks)]
    activation, stash = tables["activation"].ravel(), tables["weight_stash"].ravel()
    cells = stages * microbatches
    merges = bool((tables["b"] < tables["i"] + tables["w"]).any() or (stash > activation).any())
    shop = Shop(
        ranks=problem.ranks,
        stages=stages,
        microbatches=microbatches,
        rank=np.tile(ranks.ravel(), 3),
        duration=times,
        before=before,
        after=after,
        travel=travel,
        link=link,
        num_links=num_links,
        takes=np.concatenate((activation, np.zeros(2 * cells))),
        keeps=np.concatenate((np.zeros(cells), stash - activation, -stash)),
        limit=_limits(problem, reserve),
        closing=np.array([sum(optimizer[stage] for stage in stages_of) for stages_of in held], dtype=np.float64),
        reduce=reduce,
        any_reduce=bool(reduce.any()),
        full=np.zeros(cells, dtype=np.int8),
        is_alike=all((table == table[:, :1]).all() for table in (*tables.values(), hops)),
        is_span=not problem.barrier,
        is_split=problem.split,
        may_merge=problem.split and merges,
        input_time=tables["i"].ravel(),
        weight_time=tables["w"].ravel(),
        full_time=tables["b"].ravel(),
        activation=activation,
        stash=stash,
        bounds=np.concatenate(([0], np.cumsum(np.bincount(np.tile(ranks.ravel(), 3), minlength=problem.ranks)))),
        stage_at=np.concatenate(([0], np.cumsum([len(stages_of) for stages_of in held]))),
        stage_of=np.array([stage for stages_of in held for stage in stages_of], dtype=np.int64),
        alone=np.zeros(problem.ranks),
        work=np.zeros(problem.ranks),
    )
    return merged(shop, np.full(cells, not problem.split, dtype=np.int8))


def merged(shop: Shop, full: Flags) -> Shop:
    """The shop with full backwards in the cells of the mask, and split ones in the others; its arrays are its own."""
    whole = full.astype(bool)
    stash = np.where(whole, 0.0, shop.stash)
    zeros = np.zeros(len(full))
    forward = shop.duration[: len(full)]
    backward, weights = np.where(whole, shop.full_time, shop.input_time), np.where(whole, 0.0, shop.weight_time)
    duration = np.concatenate((forward, backward, weights))
    return shop._replace(
        duration=duration,
        full=full.copy(),
        takes=np.concatenate((shop.activation, zeros, zeros)),
        keeps=np.concatenate((zeros, stash - shop.activation, -stash)),
        alone=_alone(shop, stash),
        work=shop.closing + np.bincount(shop.rank, weights=duration, minlength=shop.ranks),
    )


def _ranks(problem: Problem) -> Ints:
    """The rank of each stage (row) and microbatch (column)."""
    stage, microbatch = np.indices((problem.stages, problem.microbatches))
    return problem.placement.ranks_of(stage, microbatch)


def _ways(stages: int, microbatches: int) -> tuple[Ints, Ints]:
    """The node before and the node after each."""
    node = np.arange(3 * stages * microbatches).reshape(3, stages, microbatches)
    after = np.full_like(node, -1)
    after[0, :-1], after[0, -1] = node[0, 1:], node[1, -1]
    after[1, 1:] = node[1, :-1]
    before = np.full(node.size, -1, dtype=np.int64)
    going = after.ravel() >= 0
    before[after.ravel()[going]] = node.ravel()[going]
    before[node[2].ravel()] = node[1].ravel()
    return before, after.ravel()


def _hops(problem: Problem) -> Floats:
    """What the message from each stage to the next takes, and the one back."""
    costs, shape = problem.costs, (problem.stages, problem.microbatches)
    size = costs.table("output", *shape)
    return costs.latency + (np.zeros(shape) if costs.bandwidth is None else size / costs.bandwidth)


def _links(problem: Problem, ranks: Ints, after: Ints, hops: Floats) -> tuple[Floats, Ints, int]:
    """Each message's time and link.

    A link is a channel, or with less of them what shares one: then messages of one sender go in its order, as in a simulation, and
    only those of different senders may come otherwise.
    """
    costs, count = problem.costs, ranks.size
    source, there = np.tile(ranks.ravel(), 3), after >= 0
    target = np.where(there, source[after], source)
    crosses = source != target
    lower = np.where(np.arange(3 * count) < count, np.arange(3 * count), after) % count
    travel = np.where(crosses, hops.ravel()[lower], 0.0)
    backward = (np.arange(3 * count) >= count).astype(np.int64)
    pair = source * problem.ranks + target
    channel = {"independent": pair * 2 + backward, "pair": pair, "duplex": source, "rank": source}
    keys, index = np.unique(channel[costs.contention][crosses], return_inverse=True)
    link = np.full(3 * count, -1, dtype=np.int64)
    link[crosses] = index
    return travel, link, len(keys)


def _limits(problem: Problem, reserve: Sequence[float]) -> Floats:
    limits, static = np.array(problem.limits), np.array(problem.static_memory)
    room = np.where(np.isinf(limits), limits, limits * (1 + SLACK)) - static
    return np.asarray(room - np.array(reserve) if len(reserve) else room, dtype=np.float64)


def _alone(shop: Shop, stash: Floats) -> Floats:
    """What one microbatch alone holds at most: all its activations of the rank, and the stash of one while the others are held."""
    shape = (shop.stages, shop.microbatches)
    activation, kept = shop.activation.reshape(shape).max(axis=1), stash.reshape(shape).max(axis=1)
    most = np.zeros(shop.ranks)
    for rank in range(shop.ranks):
        stages = shop.stage_of[shop.stage_at[rank] : shop.stage_at[rank + 1]]
        total = np.cumsum(activation[stages])
        most[rank] = max((total - activation[stages] + np.maximum(activation, kept)[stages]).max(initial=0.0), 0.0)
    return most


def order_of(shop: Shop, schedule: Schedule) -> tuple[Ints, Flags]:
    """A schedule's order, and which cells have a full backward; actions that overlap come one after the other.

    The W of a full backward stands right behind it.
    """
    rows, cells = schedule.rows, shop.stages * shop.microbatches
    cell = rows.stage * shop.microbatches + rows.microbatch
    whole = rows.is_kind(Kind.B)
    kind = np.where(rows.is_kind(Kind.F), 0, np.where(rows.is_kind(Kind.W), 2, 1))
    node = kind * cells + cell
    order = np.insert(node, np.flatnonzero(whole) + 1, 2 * cells + cell[whole])
    full = np.zeros(cells, dtype=np.int8)
    full[cell[whole]] = 1
    return order, full


def schedule_of(problem: Problem, order: Ints, full: Flags, name: str = "searched") -> Schedule:
    """The order as a schedule."""
    cells = len(full)
    kind, cell = order // cells, order % cells
    stage, microbatch = cell // problem.microbatches, cell % problem.microbatches
    whole = full[cell] > 0
    code = np.where(kind == 0, int(Kind.F), np.where(kind == 2, int(Kind.W), np.where(whole, int(Kind.B), int(Kind.I))))
    kept = ~((kind == 2) & whole)
    ranks = problem.placement.ranks_of(stage, microbatch)
    entries = codes.pack(stage, code, microbatch)[kept]
    return Schedule.from_rows(Rows.sorted_by(entries, ranks[kept], problem.ranks), problem.placement, problem.microbatches, name=name)
