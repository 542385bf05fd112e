"""Shift the cuts under a schedule while that makes it faster: loads alone do not tell how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from penstock.ir.rows import Ints
from penstock.planner.candidate import Candidate
from penstock.planner.partition.any_placement import list_neighbours
from penstock.planner.partition.layer_runs import Cutting, LayerRuns
from penstock.simulator.simulate import retime

_MOST = 80
"""Cuts that are timed for one schedule."""
_EVEN = 1e-9


def recut(candidate: Candidate, stop: Callable[[], bool]) -> Candidate:
    """The same order on the fastest cuts that fit and that shifting leads to, from a candidate that fits."""
    problem = candidate.problem
    assert problem.profile is not None
    cutting = Cutting(LayerRuns(problem.profile), problem.placement, problem.recompute, problem.memory_limit, ())
    best, left, tried = candidate, _MOST, {problem.sizes}
    while left > 0 and not stop():
        todo = [sizes for sizes in _list_promising(cutting, best) if sizes not in tried][:left]
        fastest = min((best, *_list_faster(best, todo, stop)), key=lambda option: option.time_or_inf)
        left -= len(todo)
        if fastest is best:
            break
        tried.update(todo)
        best = fastest
    return best


def _list_promising(cutting: Cutting, candidate: Candidate) -> list[tuple[int, ...]]:
    """Neighbouring cuts on which the work alone takes less than the candidate, the least load first."""
    cuts: Ints = np.concatenate(([0], np.cumsum(candidate.problem.sizes)))
    near = list_neighbours(cuts)
    if not len(near):
        return []
    loads = cutting.loads(near).max(axis=1)
    good = (loads * candidate.microbatches < candidate.time_or_inf * (1 - _EVEN)) & ~cutting.excesses(near).any(axis=1)
    order = np.lexsort((cutting.squares(near), loads))
    return [tuple(np.diff(near[row]).tolist()) for row in order if good[row]]


def _list_faster(candidate: Candidate, cuts: list[tuple[int, ...]], stop: Callable[[], bool]) -> Iterator[Candidate]:
    for sizes in cuts:
        if stop():
            return
        problem = candidate.problem.recut(sizes)
        timeline = retime(candidate.timeline, problem.costs)
        if problem.objective(timeline) < candidate.time_or_inf * (1 - _EVEN) and problem.fits(timeline):
            yield Candidate.of_timeline(candidate.name, problem, candidate.schedule, timeline)
