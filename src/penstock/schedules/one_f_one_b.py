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
    """
    warm_up = min(shape.ranks - rank - 1, shape.microbatches)
    steady = shape.microbatches - warm_up
    for microbatch in range(warm_up):  # nF
        yield F(0, microbatch)
    for microbatch in range(steady):  # nF B
        yield F(0, warm_up + microbatch)
        yield B(0, microbatch)
    for microbatch in range(steady, shape.microbatches):  # nB
        yield B(0, microbatch)
