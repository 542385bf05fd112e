"""Zero bubble with twice the memory of 1f1b."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedules.registry import Shape, linear, register
from penstock.schedules.zb_h1 import alternate_split


@register("zb-h2", placement=linear, slices=1)
def zb_h2(shape: Shape, rank: int) -> Iterator[int]:
    """Fill the warm-up with more forwards and the drain with weight backwards, until no bubble is left.

    zb-h1 with twice the warm-up and twice the delay of the weight backwards: with equal times each rank works without
    a gap from its first forward to its last weight backward. Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Bubble: (p-1)(F+I-2W) of the span, if W <= F and 2W <= F+I
    Memory: min(2p-1, m), counted to W
    Needs: any ranks, any microbatches
    Slices: the bubble is divided by q, the memory is min((2p-2+q)/q, m)

    >>> import penstock as ps
    >>> print(ps.schedule("zb-h2", ranks=4, microbatches=7).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4  0F4     1F3     2F2     3I0
     5  0F5     1F4     2I0     3F1
     6  0F6     1I0     2F3     3I1
     7  0I0     1F5     2I1     3F2
     8  0W0     1I1     2F4     3I2
     9  0I1     1F6     2I2     3F3
    10  0W1     1I2     2F5     3I3
    11  0I2     1W0     2I3     3F4
    12  0W2     1I3     2F6     3I4
    13  0I3     1W1     2I4     3F5
    14  0W3     1I4     2W0     3I5
    15  0I4     1W2     2I5     3F6
    16  0W4     1I5     2W1     3I6
    17  0I5     1W3     2I6     3W0
    18  0W5     1I6     2W2     3W1
    19  0I6     1W4     2W3     3W2
    20  0W6     1W5     2W4     3W3
    21          1W6     2W5     3W4
    22                  2W6     3W5
    23                          3W6
    """
    return alternate_split(shape, warm_up=2 * (shape.ranks - rank - 1), delay=2 * rank)
