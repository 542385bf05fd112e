"""One forward, one backward, on a V."""

from __future__ import annotations

from penstock.ir.kind import Kind
from penstock.schedules._blocks import Cycle, Squeeze
from penstock.schedules.registry import Shape, register, v


@register("1f1b-v", placement=v, whole=True, slices=1)
def one_f_one_b_v(shape: Shape) -> list[list[int]]:
    """Fold 1f1b into a V, with full backwards in two thirds of its memory.

    Forwards pass on at once. A backward takes the first two slots together that every round leaves free, which makes it
    wait three slots in three ranks, down and up. Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Bubble: at most (p-1)(F+B) if B = 2F
    Memory: 2p//3+1
    Needs: any ranks, any microbatches
    Slices: at most the bubble divided by q; memory M becomes (M-1+q)/q

    >>> import penstock as ps
    >>> print(ps.schedule("1f1b-v", ranks=4, microbatches=4).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4          1F3     2F2     4F0
     5                  5F0     3F1
     6          6F0     2F3     4F1
     7  7F0             5F1     3F2
     8  7B0     6F1             4F2
     9  7F1     6B0
    10  7B1             5B0
    11          6B1     5F2     4B0
    12          6F2     5B1     3B0
    13  7F2             2B0     3F3
    14  7B2                     4F3
    15          6B2     5F3     4B1
    16          6F3     5B2     3B1
    17  7F3     1B0     2B1     4B2
    18  7B3                     3B2
    19  0B0     6B3
    20          1B1     5B3
    21  0B1             2B2     4B3
    22          1B2             3B3
    23  0B2             2B3
    24          1B3
    25  0B3
    """
    p, cycles = shape.ranks, [Cycle() for _ in range(shape.ranks)]
    for rank, cycle in enumerate(cycles):
        cycle.put(Kind.F, 0, rank)
        cycle.put(Kind.F, 1, 2 * p - 1 - rank)
    slot = 2 * p
    for chunk, way in ((1, cycles), (0, cycles[::-1])):
        for cycle in way:
            slot = cycle.put(Kind.B, chunk, slot)
    return Squeeze(cycles, shape).rows
