"""One forward, one backward, over slices of the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedules.one_f_one_b import alternate
from penstock.schedules.registry import Shape, linear, register


@register("seq1f1b", placement=linear, slices=4)
def seq1f1b(shape: Shape, rank: int) -> Iterator[int]:
    """Run 1f1b over slices of the sequences, so that the pipeline fills and drains a slice at a time.

    Each microbatch is cut into q = `slices` parts along the sequence. A slice attends to the earlier ones only, so forwards ascend through
    them and backwards descend. For causal attention. Seq1F1B, arXiv 2406.03488.

    Bubble: (p-1)(F+B)/q if the slices take equal times, F and B those of a microbatch
    Memory: min((p-r-1+q)/q, m)
    Needs: any ranks, any slices, any microbatches; with one slice it is 1f1b

    >>> import penstock as ps
    >>> print(ps.schedule("seq1f1b", ranks=4, microbatches=2, slices=3).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0.0
     1  0F0.1   1F0.0
     2  0F0.2   1F0.1   2F0.0
     3  0F1.0   1F0.2   2F0.1   3F0.0
     4  0F1.1   1F1.0   2F0.2   3F0.1
     5  0F1.2   1F1.1   2F1.0   3F0.2
     6                          3B0.2
     7                  2B0.2   3F1.0
     8          1B0.2   2F1.1   3B0.1
     9  0B0.2   1F1.2   2B0.1   3F1.1
    10          1B0.1   2F1.2   3B0.0
    11  0B0.1           2B0.0   3F1.2
    12          1B0.0           3B1.2
    13  0B0.0           2B1.2   3B1.1
    14          1B1.2   2B1.1   3B1.0
    15  0B1.2   1B1.1   2B1.0
    16  0B1.1   1B1.0
    17  0B1.0
    """
    return alternate(shape, warm_up=shape.ranks - rank - 1)
