"""Zero bubble on a V."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice

from penstock.ir.codes import F, I, W
from penstock.schedules.registry import Shape, register, v


def _at_least_one_round(shape: Shape) -> int:
    least = 2 * shape.ranks - 1 + shape.slices - 1  # units
    return max(-(-least // shape.slices), shape.microbatches)


@register("zbv", placement=v, accepts=_at_least_one_round, slices=1)
def zbv(shape: Shape, rank: int) -> Iterator[int]:
    """Fold the pipeline into a V, so that zero bubble needs no more memory than 1f1b.

    Each rank holds one stage of the way down and one of the way up: the first rank computes the loss and starts the
    backward itself. With equal times no rank waits between its first and its last action.
    ZB-V of Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Bubble: 0 of the span if F = I = W; (p-1)F/2 of the makespan, F that of a rank's two stages
    Memory: p (2p stages)
    Needs: any ranks, any microbatches (built for at least 2p-1)
    Slices: the bubble is divided by q if mq >= 2p+q-2, the memory is (p-1+q)/q

    >>> import penstock as ps
    >>> print(ps.schedule("zbv", ranks=4, microbatches=3).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3          1F2     2F1     3F0
     4                  2F2     4F0
     5                  5F0     3F1
     6          6F0             4F1
     7  7F0             5F1     3F2
     8  7I0     6F1             4F2
     9  7W0     6I0     5F2
    10  7F1     6W0     5I0
    11  7I1     6F2     5W0     4I0
    12  7W1     6I1             4W0
    13  7F2     6W1     5I1     3I0
    14  7I2             5W1     3W0
    15  7W2     6I2     2I0     4I1
    16          6W2     2W0     4W1
    17          1I0     5I2     3I1
    18  0I0     1W0     5W2     3W1
    19  0W0             2I1     4I2
    20          1I1     2W1     4W2
    21  0I1     1W1             3I2
    22  0W1             2I2     3W2
    23          1I2     2W2
    24  0I2     1W2
    25  0W2
    """
    up, others = shape.ranks - rank, shape.slices - 1  # the slices that a microbatch's first backward waits for
    backwards = [shape.mirror(unit) for unit in range(shape.units)]
    f0, f1 = (map(partial(F, chunk), range(shape.units)) for chunk in (0, 1))
    i0, w0, i1, w1 = (map(partial(kind, chunk), backwards) for chunk in (0, 1) for kind in (I, W))
    for _ in range(2 * up - 1):  # nF0
        yield next(f0)
    for _ in range(rank + others):  # nF1 F0
        yield next(f1)
        yield next(f0)
    for _ in range(up):  # nF1 I1 W1
        yield from (next(f1), next(i1), next(w1))
    for _ in range(shape.units - shape.ranks - up + 1 - others):  # nF0 I0 W0 F1 I1 W1
        yield from (next(f0), next(i0), next(w0), next(f1), next(i1), next(w1))
    for _ in range(up - 1):  # nI0 W0 F1 I1 W1
        yield from (next(i0), next(w0), next(f1), next(i1), next(w1))
    for _ in range(others):  # nI0 W0 I1 W1
        yield from (next(i0), next(w0), next(i1), next(w1))
    for _ in range(rank):  # nI0 I1
        yield next(i0)
        yield next(i1)
    for _ in range(up):  # nI0 W0
        yield next(i0)
        yield next(w0)
    yield from islice(w1, rank)  # nW1
    yield from islice(w0, rank)  # nW0
