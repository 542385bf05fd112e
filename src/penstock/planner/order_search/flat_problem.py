"""A problem as flat arrays, and orders to and from schedules.

A *node* is one compute action, numbered `(kind * stages + stage) * microbatches + microbatch`; kind 0 is F, 1 is I and 2 is W.
A *cell* is a stage and microbatch: a node without its kind. A full backward is an I with its duration and a W that takes no
time and no memory. An *order* is one array of nodes, rank after rank, cut at the offsets of `FlatProblem.bounds`.

If microbatches are cut into slices, each slice counts as a microbatch. Their forwards come in order on every stage, and so do their
backwards, but those of a microbatch's slices the other way round: the k-th is that of `timing.find_backward(k, slices)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.ir.memory_ledger import tabulate_kept
from penstock.ir.rows import Floats, Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.planner.problem import SLACK, Problem

Flags = NDArray[np.int8]

# Lists in the plain loops, arrays in the compiled ones.
Column = Any


class FlatProblem(NamedTuple):
    """The columns that the loops read; `duration`, `takes` and `keeps` depend on which backwards are full."""

    ranks: int
    stages: int
    microbatches: int
    slices: int
    """How many microbatches in a row are slices of one."""
    rank: Column
    """Rank of each node."""
    duration: Column
    before: Column
    """The node whose output each node needs; -1 for none."""
    after: Column
    """The next node on the microbatch's way through the stages, -1 for none; every I is also followed by its W."""
    travel: Column
    link: Column
    """Time of each node's message, and the link that it occupies; -1 within a rank."""
    num_links: int
    takes: Column
    """Memory that each node takes when it starts."""
    keeps: Column
    """Memory that each node adds when it ends."""
    limit: Column
    """Memory limit of each rank, beyond what it always holds."""
    closing: Column
    """Optimizer time of each rank."""
    reduce: Column
    """Gradient reduction time of each stage."""
    any_reduce: bool
    full: Column
    """Whether each cell has a full backward."""
    is_alike: bool
    """Whether microbatches keep their order on every stage: all have the same times and sizes, or they are slices."""
    is_span: bool
    """Whether the longest rank span counts instead of the makespan."""
    is_split: bool
    """Whether backwards may be split."""
    may_merge: bool
    """Whether full backwards among split ones can be useful."""
    input_time: Column
    weight_time: Column
    full_time: Column
    activation: Column
    opened: Column
    freed: Column
    stash: Column
    """Backward times of each cell, and its memory: what F takes, what I takes when it starts and frees when it ends, and the stash."""
    bounds: Column
    """First place of each rank in an order, and the number of nodes."""
    stage_at: Column
    stage_of: Column
    """Rank r holds the stages `stage_of[stage_at[r] : stage_at[r + 1]]`."""
    alone: Column
    """Peak memory of one microbatch alone on each rank."""
    work: Column
    """Total time of each rank's nodes and its optimizer."""


def flatten(problem: Problem, reserve: Sequence[float] = ()) -> FlatProblem:
    """The problem with split backwards if they are allowed; `reserve` is memory to leave free on each rank."""
    stages, microbatches, costs = problem.stages, problem.units, problem.costs
    tables = {name: costs.table(name, stages, microbatches) for name in ("f", "i", "w", "b", "activation", "weight_stash")}
    kept = tabulate_kept(costs, stages, microbatches, problem.slices)
    times = np.concatenate([tables[name].ravel() for name in ("f", "i", "w")])
    ranks = problem.placement.ranks_of(*np.indices((stages, microbatches)))
    before, after = _list_neighbours(stages, microbatches)
    travel, link, num_links = _number_links(problem, ranks, after)
    reduce = np.array(costs.per_stage("reduce", stages))
    stages_of_ranks = [problem.placement.stages_of(rank) for rank in range(problem.ranks)]
    activation, freed = ((tables["activation"] + more).ravel() for more in (kept.taken, kept.freed))
    stash = tables["weight_stash"].ravel()
    cells, limits = stages * microbatches, np.array(problem.limits)
    room = np.where(np.isinf(limits), limits, limits * (1 + SLACK)) - np.array(problem.static_memory)
    merges = bool((tables["b"] < tables["i"] + tables["w"]).any() or (stash > activation).any())
    flat = FlatProblem(
        ranks=problem.ranks,
        stages=stages,
        microbatches=microbatches,
        slices=problem.slices,
        rank=np.tile(ranks.ravel(), 3),
        duration=times,
        before=before,
        after=after,
        travel=travel,
        link=link,
        num_links=num_links,
        takes=np.zeros(3 * cells),
        keeps=np.zeros(3 * cells),
        limit=room - np.array(reserve) if len(reserve) else room,
        closing=costs.per_rank("optimizer", problem.placement),
        reduce=reduce,
        any_reduce=bool(reduce.any()),
        full=np.zeros(cells, dtype=np.int8),
        is_alike=problem.slices > 1 or all((table == table[:, :1]).all() for table in (*tables.values(), *kept, *problem.hops)),
        is_span=not problem.barrier,
        is_split=problem.split,
        may_merge=problem.split and merges,
        input_time=tables["i"].ravel(),
        weight_time=tables["w"].ravel(),
        full_time=tables["b"].ravel(),
        activation=activation,
        opened=kept.opened.ravel(),
        freed=freed,
        stash=stash,
        bounds=np.concatenate(([0], np.cumsum(np.bincount(np.tile(ranks.ravel(), 3), minlength=problem.ranks)))),
        stage_at=np.concatenate(([0], np.cumsum([len(stages_of) for stages_of in stages_of_ranks]))),
        stage_of=np.array([stage for stages_of in stages_of_ranks for stage in stages_of], dtype=np.int64),
        alone=np.zeros(problem.ranks),
        work=np.zeros(problem.ranks),
    )
    return replace_full_backwards(flat, np.full(cells, not problem.split, dtype=np.int8))


def replace_full_backwards(flat: FlatProblem, full: Flags) -> FlatProblem:
    """A copy with full backwards in the cells of the mask, and split ones in the others."""
    whole = full.astype(bool)
    stash = np.where(whole, 0.0, flat.stash)
    forward = flat.duration[: len(full)]
    backward, weights = np.where(whole, flat.full_time, flat.input_time), np.where(whole, 0.0, flat.weight_time)
    duration = np.concatenate((forward, backward, weights))
    zeros = np.zeros(len(full))
    return flat._replace(
        duration=duration,
        full=full.copy(),
        takes=np.concatenate((flat.activation, flat.opened, zeros)),
        keeps=np.concatenate((zeros, stash - flat.freed, -stash)),
        alone=_find_peak_alone(flat, stash),
        work=flat.closing + np.bincount(flat.rank, weights=duration, minlength=flat.ranks),
    )


def _list_neighbours(stages: int, microbatches: int) -> tuple[Ints, Ints]:
    """The nodes before and after each node."""
    node = np.arange(3 * stages * microbatches).reshape(3, stages, microbatches)
    after = np.full_like(node, -1)
    after[0, :-1], after[0, -1] = node[0, 1:], node[1, -1]
    after[1, 1:] = node[1, :-1]
    before = np.full(node.size, -1, dtype=np.int64)
    going = after.ravel() >= 0
    before[after.ravel()[going]] = node.ravel()[going]
    before[node[2].ravel()] = node[1].ravel()
    return before, after.ravel()


def _number_links(problem: Problem, ranks: Ints, after: Ints) -> tuple[Floats, Ints, int]:
    """Time and link of each message.

    A link is a channel, or several channels that contend for it. Messages of one sender go in its order, as in the simulation;
    only those of different senders may go in another order. Of the two lanes that a message occupies, only the first is known here.
    """
    costs, count = problem.costs, ranks.size
    source, there = np.tile(ranks.ravel(), 3), after >= 0
    target = np.where(there, source[after], source)
    crosses = source != target
    up, back = problem.hops
    travel = np.concatenate([np.roll(up, -1, axis=0).ravel(), back.ravel(), np.zeros(count)])
    backward = (np.arange(3 * count) >= count).astype(np.int64)
    pair = source * problem.ranks + target
    channel = {"independent": pair * 2 + backward, "pair": pair, "duplex": source, "rank": source}
    if costs.lanes is not None:
        channel["links"] = np.array(costs.lanes, dtype=np.int64)[source, target, 0]
    keys, index = np.unique(channel[costs.contention][crosses], return_inverse=True)
    link = np.full(3 * count, -1, dtype=np.int64)
    link[crosses] = index
    return travel, link, len(keys)


def _find_peak_alone(flat: FlatProblem, stash: Floats) -> Floats:
    """Peak memory of one microbatch alone: all its activations on the rank, and the stash of one stage while the others are held."""
    shape = (flat.stages, -1, flat.slices)
    taken, opened, freed, kept = (column.reshape(shape) for column in (flat.activation, flat.opened, flat.freed, stash))
    whole = taken.sum(axis=2)
    holds, peak = whole.copy(), whole.copy()
    for slice_ in reversed(range(flat.slices)):
        holds += opened[:, :, slice_]
        peak = np.maximum(peak, holds)
        holds -= freed[:, :, slice_]
        peak = np.maximum(peak, holds + kept[:, :, slice_])
    most, whole, peak = np.zeros(flat.ranks), whole.max(axis=1), peak.max(axis=1)
    for rank in range(flat.ranks):
        stages = flat.stage_of[flat.stage_at[rank] : flat.stage_at[rank + 1]]
        most[rank] = max((np.cumsum(whole[stages]) - whole[stages] + peak[stages]).max(initial=0.0), 0.0)
    return most


def read_order(flat: FlatProblem, schedule: Schedule) -> tuple[Ints, Flags]:
    """A schedule's order, and which cells have a full backward; overlapped actions come one after the other.

    The W of a full backward comes right after it.
    """
    rows, cells = schedule.rows, flat.stages * flat.microbatches
    cell = rows.stage * flat.microbatches + rows.microbatch
    whole = rows.is_kind(Kind.B)
    kind = np.where(rows.is_kind(Kind.F), 0, np.where(rows.is_kind(Kind.W), 2, 1))
    node = kind * cells + cell
    order = np.insert(node, np.flatnonzero(whole) + 1, 2 * cells + cell[whole])
    full = np.zeros(cells, dtype=np.int8)
    full[cell[whole]] = 1
    return order, full


def build_schedule(problem: Problem, order: Ints, full: Flags, name: str = "searched") -> Schedule:
    """The order as a schedule."""
    cells = len(full)
    kind, cell = order // cells, order % cells
    stage, microbatch = cell // problem.units, cell % problem.units
    whole = full[cell] > 0
    code = np.where(kind == 0, int(Kind.F), np.where(kind == 2, int(Kind.W), np.where(whole, int(Kind.B), int(Kind.I))))
    stays = ~((kind == 2) & whole)
    ranks = problem.placement.ranks_of(stage, microbatch)
    entries = codes.pack(stage, code, microbatch)[stays]
    rows = Rows.sorted_by(entries, ranks[stays], problem.ranks)
    return Schedule.from_rows(rows, problem.placement, problem.microbatches, name=name, slices=problem.slices)
