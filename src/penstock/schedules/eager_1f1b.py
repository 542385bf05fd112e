"""One forward, one backward, with twice the warm-up."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedules.one_f_one_b import alternate
from penstock.schedules.registry import Shape, linear, register


@register("eager-1f1b", placement=linear, slices=1)
def eager_1f1b(shape: Shape, rank: int) -> Iterator[int]:
    """Run 1f1b with twice the warm-up, so that messages travel while the ranks compute.

    Two forwards a hop lie between a rank's first forward and its first backward, one to compute and one to hide the
    latency of the hop; the price is almost double the activations. Eager 1F1B, arXiv 2211.05322.

    Bubble: (p-1)(F+B)
    Memory: min(2(p-r)-1, m)
    Needs: any ranks, any microbatches
    Slices: bubble (p-1)(F+B)/q, memory min((2(p-r)-2+q)/q, m)

    >>> import penstock as ps
    >>> print(ps.schedule("eager-1f1b", ranks=4, microbatches=5).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4  0F4     1F3     2F2     3B0
     5          1F4     2B0     3F1
     6          1B0     2F3     3B1
     7  0B0             2B1     3F2
     8          1B1     2F4     3B2
     9  0B1             2B2     3F3
    10          1B2             3B3
    11  0B2             2B3     3F4
    12          1B3             3B4
    13  0B3             2B4
    14          1B4
    15  0B4
    """
    return alternate(shape, warm_up=2 * (shape.ranks - rank - 1))
