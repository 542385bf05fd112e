"""A third of the memory of 1f1b on a V."""

from __future__ import annotations

from penstock.ir.kind import Kind
from penstock.schedules._blocks import Cycle, shortest
from penstock.schedules.registry import Shape, register, v


@register("v-min", placement=v, whole=True, slices=1)
def v_min(shape: Shape) -> list[list[int]]:
    """Fold the pipeline into a V and pass everything on at once, so that a rank holds a third of what it does in 1f1b.

    Every microbatch goes down, up, and back the same way at one slot per rank: the least time that it can be held.
    Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Bubble: (4p-7)F/2, or (4p-5)F/2 for p = 4, 7, 10 and so on, if F = I = W and m >= p > 1
    Memory: (p+4)//3, counted to W
    Needs: any ranks, any microbatches
    Slices: at most the bubble divided by q; memory M becomes (M-1+q)/q

    >>> import penstock as ps
    >>> print(ps.schedule("v-min", ranks=4, microbatches=4).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3          1F2     2F1     3F0
     4                          4F0
     5                  5F0     3F1
     6          6F0             4F1
     7  7F0             5F1
     8  7I0
     9  7W0     6I0
    10          6W0     5I0
    11          6F1     5W0     4I0
    12  7F1             2F2     3I0
    13  7I1             2I0     4W0
    14  7W1     1I0     2W0     3W0
    15  0I0     6I1             3F2
    16  0W0     6W1     5I1     4F2
    17  0F3     1W0     5F2     4I1
    18          6F2     5W1     3I1
    19  7F2     1F3     2I1     4W1
    20  7I2     1I1     2F3     3W1
    21  0I1     6I2     2W1     3F3
    22  7W2     6W2     5I2     4F3
    23  0W1     1W1     5F3     4I2
    24          6F3     5W2     3I2
    25  7F3             2I2     4W2
    26  7I3     1I2     2W2     3W2
    27  0I2     6I3
    28  7W3     6W3     5I3
    29  0W2     1W2     5W3     4I3
    30                          3I3
    31                  2I3     4W3
    32          1I3     2W3     3W3
    33  0I3     1W3
    34  0W3
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
    return shortest(cycles, shape)
