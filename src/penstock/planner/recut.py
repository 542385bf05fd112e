"""Shift the cuts under a schedule while it takes less time: what a partition's loads say of that is not all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from penstock.planner.setting import Setting, Trial
from penstock.planner.shifting import neighbours
from penstock.planner.spans import Cutting, Ints, Spans

_MOST = 80
"""Cuts that are timed for one schedule."""
_EVEN = 1e-9


def recut(trial: Trial, stop: Callable[[], bool]) -> Trial:
    """The same order on the quickest cuts that fit and that shifting leads to, from a trial that fits."""
    cutting, left = _cutting(trial.setting), _MOST
    best, tried = trial, {trial.setting.sizes}
    while left > 0 and not stop():
        todo = [sizes for sizes in _promising(cutting, best) if sizes not in tried][:left]
        found = min((best, *_quicker(best, todo, stop)), key=lambda each: each.objective)
        left -= len(todo)
        if found is best:
            break
        tried.update(todo)
        best = found
    return best


def _cutting(setting: Setting) -> Cutting:
    return Cutting(Spans(setting.profile), setting.placement, setting.recompute, setting.limits, ())


def _promising(cutting: Cutting, trial: Trial) -> list[tuple[int, ...]]:
    """Cuts next to those of a trial on which the work alone is not as much as it takes, the least load first."""
    cuts: Ints = np.concatenate(([0], np.cumsum(trial.setting.sizes)))
    near = neighbours(cuts)
    if not len(near):
        return []
    loads = cutting.loads(near).max(axis=1)
    good = (loads * trial.setting.microbatches < trial.objective * (1 - _EVEN)) & ~cutting.excesses(near).any(axis=1)
    order = np.lexsort((cutting.squares(near), loads))
    return [tuple(np.diff(near[row]).tolist()) for row in order if good[row]]


def _quicker(trial: Trial, cuts: list[tuple[int, ...]], stop: Callable[[], bool]) -> Iterator[Trial]:
    for sizes in cuts:
        if stop():
            return
        again = trial.again(replace(trial.setting, sizes=sizes))
        if again.objective < trial.objective * (1 - _EVEN) and again.fits:
            yield again
