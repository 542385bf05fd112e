"""A bound for a vocabulary that is spread over the ranks: the way to a rank and back, and the rank's own work with its S and T."""

from __future__ import annotations

import numpy as np

from penstock.planner.problem import Problem


def bound_spread(problem: Problem, whole_backward: bool = False) -> float:
    """The least time of any order of the problem with S and T on every rank; with `whole_backward`, of orders that split none.

    No action of the blocks runs before the first embedding is there, for which every rank has run its S. A rank's first forward needs the
    forwards of all earlier stages, and all S of the head need one of the last stage. Behind the last backward of a rank follow those of all
    earlier stages, the first rank's T of the embedding and its update; before it, the rank has run all its forwards and backwards and every
    S of the head, because each backward of the last stage needs its S on every rank. Its W and T may also run behind, but within the same
    time in all.
    """
    placement, costs, microbatches = problem.placement, problem.costs, problem.microbatches
    names = ("f", "b", "w") if whole_backward else ("f", "i", "w")
    factor = min(1.0, costs.overlap)
    f, back, w = (factor * costs.table(name, problem.stages, 1)[:, 0] for name in names)
    broadcast, combine, update = (costs.table(name, problem.stages, 1)[:, 0] for name in ("broadcast", "combine", "optimizer"))
    s, t = (costs.share_table(name, problem.stages, problem.ranks) for name in ("s", "t"))
    first = placement.rank_of(0, 0)
    ahead, behind = (np.concatenate([[0.0], np.cumsum(times)[:-1]]) for times in (f, back))
    is_embedding_spread = bool((s[:, 0] + t[:, 0]).any())
    early = (s[:, 0].max() + combine[0]) * is_embedding_spread
    late = max(broadcast[0] * is_embedding_spread, 0.0 if whole_backward else w[0]) + t[first, 0]
    late += update[list(placement.stages_of(first))].sum()
    best = 0.0
    for rank in range(placement.ranks):
        stages = list(placement.stages_of(rank))
        start = early + ahead[min(stages)]
        needed = float(f[stages].sum() + back[stages].sum()) + s[rank, 1]
        whole = needed + t[rank, 1] + (0.0 if whole_backward else float(w[stages].sum()))
        own = update[stages].sum()
        through = start + microbatches * needed + behind[min(stages)] + late
        best = max(best, through, start + microbatches * whole + own, microbatches * (whole + s[rank, 0] + t[rank, 0]) + own)
    return float(best)
