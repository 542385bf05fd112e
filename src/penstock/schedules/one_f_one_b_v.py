"""One forward, one backward, on a V."""

from __future__ import annotations

from penstock.ir.kind import Kind
from penstock.schedules._blocks import Cycle, Squeeze
from penstock.schedules.registry import Shape, register, v


@register("1f1b-v", placement=v, whole=True)
def one_f_one_b_v(shape: Shape) -> list[list[int]]:
    """Fold 1f1b into a V, with full backwards in two thirds of its memory.

    Forwards pass on at once. A backward takes the first two slots together that every round leaves free: over three
    ranks it waits for one slot pair down and one up. Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Bubble: at most (p-1)(F+B) where B = 2F
    Memory: 2p//3+1
    Needs: any ranks, any microbatches

    >>> import penstock as ps
    >>> print(ps.schedule("1f1b-v", ranks=4, microbatches=4).grid())
    """
    p, cycles = shape.ranks, [Cycle() for _ in range(shape.ranks)]
    for rank, cycle in enumerate(cycles):
        cycle.put(Kind.F, 0, rank)
        cycle.put(Kind.F, 1, 2 * p - 1 - rank)
    slot = 2 * p
    for chunk, way in ((1, cycles), (0, cycles[::-1])):
        for cycle in way:
            slot = cycle.put(Kind.B, chunk, slot)
    return Squeeze(cycles, shape.microbatches).rows
