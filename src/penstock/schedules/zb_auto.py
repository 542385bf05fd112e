"""Zero bubble fitted to costs and memory."""

from __future__ import annotations

from typing import Any

from penstock.errors import ScheduleError
from penstock.ir.costs import Costs
from penstock.schedules._zb_search import StageCosts, rehearse, search
from penstock.schedules.registry import Shape, linear, register
from penstock.text.units import parse_size


def _stages(shape: Shape, costs: Costs) -> list[StageCosts]:
    names = ("f", "i", "w", "activation", "weight_stash")
    f, i, w, activation, stash = (costs.table(name, shape.ranks, shape.microbatches).tolist() for name in names)
    hop = costs.table("output", shape.ranks, shape.microbatches) / (costs.bandwidth or float("inf")) + costs.latency
    return [StageCosts(*of_stage) for of_stage in zip(f, i, w, hop.tolist(), activation, stash, strict=True)]


def _least(stages: list[StageCosts]) -> float:
    """The memory of one microbatch at a time on the stage that needs most."""
    return max(max(map(max, (stage.activation, stage.weight_stash))) for stage in stages)


def _limit(stages: list[StageCosts], memory_limit: float | str | None) -> float:
    if memory_limit is not None:
        return parse_size(memory_limit)
    return max(_least(stages), len(stages) * max(max(stage.activation) for stage in stages))


def _check(shape: Shape, costs: Any = None, memory_limit: Any = None) -> None:
    if costs is not None and not isinstance(costs, Costs):
        raise ScheduleError(f"costs must be a penstock.Costs, got {costs!r}")
    stages = _stages(shape, costs or Costs())
    limit, least = _limit(stages, memory_limit), _least(stages)
    if limit < least:
        raise ScheduleError(
            f"memory_limit={memory_limit!r} does not hold one microbatch of every stage: the smallest that works is {least:g}, "
            "the largest activation or weight_stash"
        )


@register("zb-auto", placement=linear, check=_check, whole=True)
def zb_auto(shape: Shape, *, costs: Costs | None = None, memory_limit: float | str | None = None) -> list[list[int]]:
    """Fit zero bubble to given costs and memory: as many forwards ahead and weight backwards kept back as pay on each rank.

    zb-h1 and zb-h2 fix both for equal times; here they are searched for `costs` (by default equal times), and the order
    whose worst rank has the shortest span is kept. No rank ever holds more than `memory_limit`, in the unit of the costs'
    `activation` and `weight_stash`; by default, it is one activation per rank. Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Bubble: searched, that of zb-h1 or zb-h2 or less if they fit
    Memory: the limit, counted to W
    Needs: any ranks, any microbatches; a memory_limit that holds one microbatch

    >>> import penstock as ps
    >>> print(ps.schedule("zb-auto", ranks=4, microbatches=6, costs=ps.Costs(f=2, i=2, w=1), memory_limit=6).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4  0F4     1F3     2F2     3I0
     5  0F5     1F4     2I0     3F1
     6          1I0     2F3     3I1
     7  0I0     1F5     2I1     3F2
     8  0W0     1I1     2F4     3I2
     9  0I1     1W0     2I2     3F3
    10  0W1     1W1     2F5     3I3
    11          1I2     2I3     3F4
    12  0I2     1W2     2W0     3I4
    13  0W2     1I3     2W1     3F5
    14  0I3     1W3     2I4     3I5
    15  0W3     1I4     2W2     3W0
    16  0I4     1W4     2W3     3W1
    17  0W4             2I5     3W2
    18          1I5     2W4     3W3
    19  0I5     1W5     2W5     3W4
    20  0W5                     3W5
    """
    stages = _stages(shape, costs or Costs())
    limit = _limit(stages, memory_limit)
    order = search(stages, shape.microbatches, limit)
    return [rank.row for rank in rehearse(stages, shape.microbatches, order, limit)]
