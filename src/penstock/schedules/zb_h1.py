"""Zero bubble with the memory of 1f1b, and the phases of every schedule that splits the backward and keeps its weight half back."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.codes import F, I, W
from penstock.schedules.registry import Shape, linear, register


@register("zb-h1", placement=linear)
def zb_h1(shape: Shape, rank: int) -> Iterator[int]:
    """Split the backward of 1f1b and fill the drain with weight backwards, in the memory of 1f1b.

    Only the input's half of a backward is waited for by another rank. Rank r keeps r weight halves back and runs them
    at the end, where 1f1b is idle. Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Bubble: (p-1)(F+I-W) if W <= F
    Memory: min(p, m), counted to W
    Needs: any ranks, any microbatches

    >>> import penstock as ps
    >>> print(ps.schedule("zb-h1", ranks=4, microbatches=4).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4                          3I0
     5                  2I0     3F1
     6          1I0     2F2     3I1
     7  0I0     1F3     2I1     3F2
     8  0W0     1I1     2F3     3I2
     9  0I1     1W0     2I2     3F3
    10  0W1     1I2     2W0     3I3
    11  0I2     1W1     2I3     3W0
    12  0W2     1I3     2W1     3W1
    13  0I3     1W2     2W2     3W2
    14  0W3     1W3     2W3     3W3
    """
    return alternate_split(shape, warm_up=shape.ranks - rank - 1, delay=rank)


def alternate_split(shape: Shape, warm_up: int, delay: int, group: int | None = None) -> Iterator[int]:
    """As `alternate`, each weight backward `delay` input backwards behind its own.

    The later ranks delay more: they reach their last input backward earlier and have the longer drain to fill.
    """
    forwards, backwards = shape.forwards(group), shape.backwards(group)
    total = len(forwards)
    warm_up = min(warm_up + shape.slices - 1, total)
    yield from (F(*unit) for unit in forwards[:warm_up])  # nF
    for k in range(total):  # nF I W, without F when they run out and without W until they are due
        if warm_up + k < total:
            yield F(*forwards[warm_up + k])
        yield I(*backwards[k])
        if k >= delay:
            yield W(*backwards[k - delay])
    yield from (W(*unit) for unit in backwards[max(0, total - delay) :])  # nW
