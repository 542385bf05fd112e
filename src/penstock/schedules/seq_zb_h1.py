"""Zero bubble over slices of the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedules.registry import Shape, linear, register
from penstock.schedules.zb_h1 import alternate_split


@register("seq-zb-h1", placement=linear, slices=4)
def seq_zb_h1(shape: Shape, rank: int) -> Iterator[int]:
    """Split the backward of seq1f1b and fill the drain with weight backwards, in the memory of seq1f1b's first rank.

    zb-h1 over slices: rank r keeps the weight halves of r slices back and runs them at the end. A slice's weight half waits for nothing but
    its own input half. Zero Bubble Pipeline Parallelism, arXiv 2401.10241, on the slices of Seq1F1B, arXiv 2406.03488.

    Bubble: (p-1)(F+I-W)/q if W <= F and the slices take equal times, F, I and W those of a microbatch
    Memory: min((p-1+q)/q, m), counted to W
    Needs: any ranks, any slices, any microbatches; with one slice it is zb-h1

    >>> import penstock as ps
    >>> print(ps.schedule("seq-zb-h1", ranks=4, microbatches=2, slices=2).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0.0
     1  0F0.1   1F0.0
     2  0F1.0   1F0.1   2F0.0
     3  0F1.1   1F1.0   2F0.1   3F0.0
     4          1F1.1   2F1.0   3F0.1
     5                          3I0.1
     6                  2I0.1   3F1.0
     7          1I0.1   2F1.1   3I0.0
     8  0I0.1           2I0.0   3F1.1
     9  0W0.1   1I0.0           3I1.1
    10  0I0.0   1W0.1   2I1.1   3I1.0
    11  0W0.0   1I1.1   2W0.1   3W0.1
    12  0I1.1   1W0.0   2I1.0   3W0.0
    13  0W1.1   1I1.0   2W0.0   3W1.1
    14  0I1.0   1W1.1   2W1.1   3W1.0
    15  0W1.0   1W1.0   2W1.0
    """
    return alternate_split(shape, warm_up=shape.ranks - rank - 1, delay=rank)
