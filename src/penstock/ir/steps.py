"""Walk every rank's row as far as its waits allow, one step per action."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.dependencies import Needs
from penstock.ir.rows import Ints, Rows, find_first


@dataclass(frozen=True)
class Walk:
    """The step in which each group runs, -1 if it never can; and how many groups of each rank run."""

    step: Ints
    done: Ints

    @property
    def complete(self) -> bool:
        return bool((self.step >= 0).all())


def walk(rows: Rows, waits: Needs, lag: Ints | None = None) -> Walk:
    """Run each group in the first step after the rank's previous group in which everything it waits for is done.

    `lag[k]` is how many steps after `waits.before[k]` the waiting group may run (default 1: the step after).
    Time is linear in groups and waits.
    """
    waiting, head, following, target, lags = (column.tolist() for column in _list_successors(rows, waits, lag))
    ready = [0] * len(waiting)
    bounds = rows.group_offsets.tolist()
    rank_of = np.repeat(np.arange(len(rows)), np.diff(rows.group_offsets)).tolist()
    at, clock = bounds[:-1], [0] * len(rows)
    step = [-1] * bounds[-1]
    stack = list(range(len(rows) - 1, -1, -1))
    while stack:
        rank = stack.pop()
        group, end, now = at[rank], bounds[rank + 1], clock[rank]
        while group < end and not waiting[group]:
            if ready[group] > now:
                now = ready[group]
            step[group] = now
            edge = head[group]
            while edge >= 0:
                other = target[edge]
                waiting[other] -= 1
                if now + lags[edge] > ready[other]:
                    ready[other] = now + lags[edge]
                if not waiting[other] and at[rank_of[other]] == other and rank_of[other] != rank:
                    stack.append(rank_of[other])
                edge = following[edge]
            now += 1
            group += 1
        at[rank], clock[rank] = group, now
    return Walk(np.array(step, dtype=np.int64), np.array(at, dtype=np.int64) - rows.group_offsets[:-1])


def _list_successors(rows: Rows, waits: Needs, lag: Ints | None) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The waits between groups as linked lists of successors.

    For each group, how many waits it has and its first successor; for each successor, the next one, its group and its lag.
    """
    num_groups = int(rows.group_offsets[-1])
    before, after = rows.group[waits.before], rows.group[waits.after]
    in_order = (rows.rank[waits.before] == rows.rank[waits.after]) & (before < after)
    open_ = ~in_order  # an order on one rank holds by itself, unless it is the wrong way round
    before, after = before[open_], after[open_]
    lags = np.ones(len(before), dtype=np.int64) if lag is None else lag[open_]
    order = np.argsort(before, kind="stable")
    before, after, lags = before[order], after[order], lags[order]
    following = np.arange(1, len(before) + 1)
    following[np.append(before[1:] != before[:-1], True)[: len(before)]] = -1
    head = find_first(before, np.arange(len(before)), num_groups)
    return np.bincount(after, minlength=num_groups), head, following, after, lags
