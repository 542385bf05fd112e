"""Slices of the sequence over several chunks per rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from penstock.ir.codes import B, F
from penstock.schedules._interleaved import least_group
from penstock.schedules.registry import Shape, looped, register


def _whole_groups(shape: Shape) -> int:
    group = least_group(shape)
    return -(-shape.microbatches // group) * group


@register("slimpipe", placement=looped, accepts=_whole_groups, slices=8)
def slimpipe(shape: Shape, rank: int) -> Iterator[int]:
    """Interleave chunks over slices of one microbatch at a time, so that a rank holds little more than one microbatch.

    The slices of a microbatch pass the chunks in groups of about p; the backwards return exactly the way that the forwards came. With fewer
    slices than ranks, several microbatches make up a group. For causal attention. SlimPipe, arXiv 2504.14519, without its exchange of
    attention work between ranks: slices of equal time take its place.

    Bubble: (p-1)(F+B)/(qv) if the slices take equal times and q >= p, F and B those of a microbatch on a rank
    Memory: min(1+2(p-r-1)/(qv), m) if q >= p and v > 1; that of seq1f1b if v = 1
    Needs: any ranks, any chunks, any slices, any microbatches; at least as many slices as ranks for the memory of one microbatch

    >>> import penstock as ps
    >>> print(ps.schedule("slimpipe", ranks=2, microbatches=2, chunks=2, slices=4).grid())
        rank 0  rank 1
     0  0F0.0
     1  0F0.1   1F0.0
     2  2F0.0   1F0.1
     3  2F0.1   3F0.0
     4  0F0.2   3F0.1
     5  0F0.3   1F0.2
     6  2F0.2   1F0.3
     7  2F0.3   3F0.2
     8  0F1.0   3F0.3
     9  0F1.1   3B0.3
    10  2B0.3   1F1.0
    11  2F1.0   3B0.2
    12  2B0.2   1F1.1
    13  2F1.1   1B0.3
    14  0B0.3   3F1.0
    15  0F1.2   1B0.2
    16  0B0.2   3F1.1
    17  0F1.3   3B0.1
    18  2B0.1   1F1.2
    19  2F1.2   3B0.0
    20  2B0.0   1F1.3
    21  2F1.3   1B0.1
    22  0B0.1   3F1.2
    23          1B0.0
    24  0B0.0   3F1.3
    25          3B1.3
    26  2B1.3   3B1.2
    27  2B1.2   1B1.3
    28  0B1.3   1B1.2
    29  0B1.2   3B1.1
    30  2B1.1   3B1.0
    31  2B1.0   1B1.1
    32  0B1.1   1B1.0
    33  0B1.0
    """
    forwards, backwards = _order(shape)
    ahead = forwards.index(backwards[0])  # what comes before the forward of the first backward
    hops = shape.ranks - rank - 1
    warm_up = min(ahead + (hops if shape.chunks == 1 else 2 * hops), len(forwards))
    yield from (F(*unit) for unit in forwards[:warm_up])  # nF
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):  # nF B
        yield F(*forward)
        yield B(*backward)
    yield from (B(*unit) for unit in backwards[len(forwards) - warm_up :])  # nB


def _order(shape: Shape) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (chunk, unit) of all forwards and of all backwards."""
    if shape.slices < shape.ranks:
        group = least_group(shape)
        return shape.forwards(group), shape.backwards(group)
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    groups = shape.slices // shape.ranks
    edges = [shape.slices * group // groups for group in range(groups + 1)]  # as equal as can be, none shorter than the pipeline
    for first in range(0, shape.units, shape.slices):
        passes = [(chunk, first + part) for begin, end in pairwise(edges) for chunk in range(shape.chunks) for part in range(begin, end)]
        forwards += passes
        backwards += reversed(passes)
    return forwards, backwards
