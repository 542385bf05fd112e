"""GPipe."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.codes import B, F
from penstock.schedules.registry import Shape, linear, register


@register("gpipe", placement=linear, slices=1)
def gpipe(shape: Shape, rank: int) -> Iterator[int]:
    """Run all forwards, then all backwards.

    The simplest schedule: every rank keeps the activations of the whole batch until the first backward reaches it.
    GPipe, arXiv 1811.06965.

    Bubble: (p-1)(F+B)
    Memory: m
    Needs: any ranks, any microbatches
    Slices: bubble (p-1)(F+B)/q, memory m; the order of TeraPipe, arXiv 2102.07988

    >>> import penstock as ps
    >>> print(ps.schedule("gpipe", ranks=4, microbatches=3).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3          1F2     2F1     3F0
     4                  2F2     3F1
     5                          3F2
     6                          3B0
     7                  2B0     3B1
     8          1B0     2B1     3B2
     9  0B0     1B1     2B2
    10  0B1     1B2
    11  0B2
    """
    yield from (F(*unit) for unit in shape.forwards())  # nF
    yield from (B(*unit) for unit in shape.backwards())  # nB
