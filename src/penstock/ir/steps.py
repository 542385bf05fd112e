"""Walk every rank's row as far as its waits allow, one step per action."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.ir.dependencies import Needs
from penstock.ir.rows import Ints, Rows


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
    edges = _Edges.build(rows, waits, lag)
    waiting, ready, head, following, target, lags = edges.lists()
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


@dataclass(frozen=True)
class _Edges:
    """The waits between groups, as linked lists of successors."""

    waiting: Ints
    head: Ints
    following: Ints
    target: Ints
    lags: Ints

    @classmethod
    def build(cls, rows: Rows, waits: Needs, lag: Ints | None) -> _Edges:
        num_groups = int(rows.group_offsets[-1])
        before, after = rows.group[waits.before], rows.group[waits.after]
        held = (rows.rank[waits.before] == rows.rank[waits.after]) & (before < after)
        open_ = ~held  # an order on one rank holds by itself, unless it is the wrong way round
        before, after = before[open_], after[open_]
        lags = np.ones(len(before), dtype=np.int64) if lag is None else lag[open_]
        order = np.argsort(before, kind="stable")
        before, after, lags = before[order], after[order], lags[order]
        head = np.full(num_groups, -1, dtype=np.int64)
        head[before[::-1]] = np.arange(len(before) - 1, -1, -1)
        following = np.arange(1, len(before) + 1)
        if len(before):
            following[np.append(before[1:] != before[:-1], True)] = -1
        return cls(np.bincount(after, minlength=num_groups), head, following, after, lags)

    def lists(self) -> tuple[list[int], list[int], list[int], list[int], list[int], list[int]]:
        return (
            self.waiting.tolist(),
            [0] * len(self.waiting),
            self.head.tolist(),
            self.following.tolist(),
            self.target.tolist(),
            self.lags.tolist(),
        )
