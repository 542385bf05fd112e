"""Half the memory of 1f1b on a V."""

from __future__ import annotations

from penstock.ir.kind import Kind
from penstock.schedules._blocks import Cycle, shortest
from penstock.schedules.registry import Shape, register, v


@register("v-half", placement=v, whole=True, slices=1)
def v_half(shape: Shape) -> list[list[int]]:
    """Fold the pipeline into a V and time its halves so that a rank holds half of what it does in 1f1b.

    Going down a forward or an input backward takes two slots per rank, going up one: a rank that holds its first chunk for
    long holds its second briefly. Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Bubble: (3p-7)F/2 for even p >= 4, (3p-4)F/2 for odd p >= 3, if F = I = W and m >= p
    Memory: (p+2)//2, counted to W
    Needs: any ranks, any microbatches
    Slices: at most the bubble divided by q; memory M becomes (M-1+q)/q

    >>> import penstock as ps
    >>> print(ps.schedule("v-half", ranks=4, microbatches=4).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4          1F3     2F2     4F0
     5                  5F0     3F1
     6          6F0     2F3     4F1
     7  7F0             5F1     3F2
     8  7I0     6F1             4F2
     9  7F1     6I0
    10  7I1     6W0     5I0
    11  7W0     6I1     5W0     4I0
    12  7W1     6W1     5F2     4W0
    13          6F2     5I1     3I0
    14  7F2             2I0     3W0
    15  7I2     1I0     5W1     3F3
    16  0I0     6I2     2W0     4F3
    17  7W2     1W0     5F3     4I1
    18  0W0     6F3     5I2     3I1
    19  7F3     6W2     2I1     4I2
    20  7I3     1I1     5W2     3I2
    21  0I1     6I3     2I2     4W1
    22  7W3     1I2     5I3     3W1
    23  0I2     1W1     2W1     4I3
    24  0W1     6W3     5W3     3I3
    25  0W2     1W2     2I3     4W2
    26          1I3     2W2     3W2
    27  0I3     1W3     2W3     4W3
    28  0W3                     3W3
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
    return shortest(cycles, shape)
