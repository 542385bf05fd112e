"""Half the memory of 1f1b on a V."""

from __future__ import annotations

from penstock.ir.kind import Kind
from penstock.schedules._blocks import Cycle, shortest
from penstock.schedules.registry import Shape, register, v


@register("v-half", placement=v, whole=True)
def v_half(shape: Shape) -> list[list[int]]:
    """Fold the pipeline into a V and time its halves so that a rank holds half of what it does in 1f1b.

    Going down a forward or an input backward takes two slots a rank, going up one: a rank that holds its first chunk for
    long holds its second briefly. Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Bubble: (3p-7)F/2 where F = I = W, p is even and at least 4; (3p-4)F/2 for odd p
    Memory: (p+2)//2, counted to W
    Needs: any ranks, any microbatches

    >>> import penstock as ps
    >>> print(ps.schedule("v-half", ranks=4, microbatches=4).grid())
    """
    p, cycles = shape.ranks, [Cycle() for _ in range(shape.ranks)]
    gap = 0 if p % 2 else 3  # keeps the backwards out of the forwards' slots
    for rank, cycle in enumerate(cycles):
        cycle.put(Kind.F, 0, 2 * rank)
        cycle.put(Kind.F, 1, 3 * p - 2 - rank)
        one = cycle.put(Kind.I, 1, 3 * p + gap - 1 + 2 * rank)
        zero = cycle.put(Kind.I, 0, 6 * p + gap - 2 - rank)
        cycle.put(Kind.W, 1, one)
        cycle.put(Kind.W, 0, zero)
    return shortest(cycles, shape.microbatches)
