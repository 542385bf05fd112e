"""One forward, one backward."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.codes import B, F
from penstock.schedules.registry import Shape, linear, register


@register("1f1b", placement=linear)
def one_f_one_b(shape: Shape, rank: int) -> Iterator[int]:
    """Run each backward as soon as it can, so that a rank holds at most its distance to the end.

    The bubble of GPipe with the memory of the pipeline's depth instead of the batch. PipeDream-Flush, arXiv 2006.09503.

    Bubble: (p-1)(F+B)
    Memory: min(p-r, m)
    Needs: any ranks, any microbatches

    >>> import penstock as ps
    >>> print(ps.schedule("1f1b", ranks=4, microbatches=5).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4                          3B0
     5                  2B0     3F1
     6          1B0     2F2     3B1
     7  0B0     1F3     2B1     3F2
     8  0F4     1B1     2F3     3B2
     9  0B1     1F4     2B2     3F3
    10          1B2     2F4     3B3
    11  0B2             2B3     3F4
    12          1B3             3B4
    13  0B3             2B4
    14          1B4
    15  0B4
    """
    return alternate(shape, warm_up=shape.ranks - rank - 1)


def alternate(shape: Shape, warm_up: int, group: int | None = None) -> Iterator[int]:
    """The phases of every schedule that alternates: forwards alone, one forward and one backward in turn, backwards alone.

    The backwards take the chunks in reverse. With slices the first backward is that of a microbatch's last slice, so every rank warms up
    with the other slices first.
    """
    forwards = [F(*unit) for unit in shape.forwards(group)]
    backwards = [B(*unit) for unit in shape.backwards(group)]
    warm_up = min(warm_up + shape.slices - 1, len(forwards))
    steady = len(forwards) - warm_up
    yield from forwards[:warm_up]  # nF
    for forward, backward in zip(forwards[warm_up:], backwards[:steady], strict=True):  # nF B
        yield forward
        yield backward
    yield from backwards[steady:]  # nB
