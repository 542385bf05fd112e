"""A bound that looks at one link: messages of several channels that share it go one after the other."""

from __future__ import annotations

import math

from penstock.planner.bounds.terms import ModelCopy, Terms


def bound_links(terms: Terms) -> float:
    """The first message's way to its link, the times of all messages on it, and what follows the last of them.

    Links of a single channel count too, but for them the chains of events say more. Without a barrier it says nothing: a rank's span need
    not include all messages.
    """
    if not terms.problem.barrier or terms.problem.costs.contention == "independent":
        return 0.0
    totals: dict[object, float] = {}
    firsts: dict[object, float] = {}
    lasts: dict[object, float] = {}
    for copy in terms.copies:
        for stage in range(1, copy.stages):
            source, target = copy.ranks[stage - 1], copy.ranks[stage]
            if source == target:
                continue
            up = float(copy.travel[stage].sum()), *_find_ends_of_forward(copy, stage)
            back = float(copy.travel_back[stage].sum()), *_find_ends_of_gradient(copy, stage)
            ways = (up, terms.problem.costs.name_links(source, target, False)), (back, terms.problem.costs.name_links(target, source, True))
            for (time, before, after), links in ways:
                for link in links:
                    totals[link] = totals.get(link, 0.0) + time
                    firsts[link] = min(firsts.get(link, math.inf), before)
                    lasts[link] = min(lasts.get(link, math.inf), after)
    return max((firsts[link] + total + lasts[link] for link, total in totals.items()), default=0.0)


def _find_ends_of_forward(copy: ModelCopy, stage: int) -> tuple[float, float]:
    """The earliest departure of a message to this stage, and the least time from its arrival to the end of everything."""
    least = copy.least
    departure = float((least.heads[stage] - least.travel[stage])[0])
    return departure, float((least.turns[stage] + least.feet[stage])[0]) + float(least.gradient[0, 0])


def _find_ends_of_gradient(copy: ModelCopy, stage: int) -> tuple[float, float]:
    """The same for a gradient from this stage."""
    least = copy.least
    departure = float((least.heads[stage] + least.turns[stage] + least.gradient[stage])[0])
    return departure, float(least.feet[stage - 1, 0]) + float(least.gradient[0, 0])
