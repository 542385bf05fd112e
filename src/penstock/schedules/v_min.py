"""A third of the memory of 1f1b on a V."""

from __future__ import annotations

from penstock.ir.kind import Kind
from penstock.schedules._blocks import Cycle, shortest
from penstock.schedules.registry import Shape, register, v


@register("v-min", placement=v, whole=True)
def v_min(shape: Shape) -> list[list[int]]:
    """Fold the pipeline into a V and pass everything on at once, so that a rank holds a third of what it does in 1f1b.

    Every microbatch goes down, up, and back the same way at one slot a rank: the least time that it can be held.
    Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Bubble: (4p-7)F/2 where F = I = W; (4p-5)F/2 for p = 4, 7, 10, ...
    Memory: (p+4)//3, counted to W
    Needs: any ranks, any microbatches

    >>> import penstock as ps
    >>> print(ps.schedule("v-min", ranks=4, microbatches=4).grid())
    """
    p, cycles = shape.ranks, [Cycle() for _ in range(shape.ranks)]
    gap = 0 if p % 3 else 2  # keeps the backwards out of the forwards' slots
    for rank, cycle in enumerate(cycles):
        cycle.put(Kind.F, 0, rank)
        cycle.put(Kind.F, 1, 2 * p - 1 - rank)
        one = cycle.put(Kind.I, 1, 2 * p + gap + rank)
        zero = cycle.put(Kind.I, 0, 4 * p + gap - 1 - rank)
        cycle.put(Kind.W, 1, one)
        cycle.put(Kind.W, 0, zero)
    return shortest(cycles, shape.microbatches)
