"""Breadth first over several chunks per rank."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.codes import B, F
from penstock.schedules.registry import Shape, looped, register


@register("looped-bfs", placement=looped, slices=1)
def looped_bfs(shape: Shape, rank: int) -> Iterator[int]:
    """Run the whole batch through each chunk in turn, then back in reverse.

    GPipe over several chunks: each chunk's parameters are used in one stretch forward and one backward, so that
    sharded parameters are gathered only twice. Breadth-First Pipeline Parallelism, arXiv 2211.05953.

    Bubble: (p-1)(F+B)/v if m >= p
    Memory: mv chunks
    Needs: any ranks, any chunks, any microbatches
    Slices: bubble (p-1)(F+B)/(qv) if mq >= p, memory mv chunks

    >>> import penstock as ps
    >>> print(ps.schedule("looped-bfs", ranks=4, microbatches=4, chunks=2).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4  4F0     1F3     2F2     3F1
     5  4F1     5F0     2F3     3F2
     6  4F2     5F1     6F0     3F3
     7  4F3     5F2     6F1     7F0
     8          5F3     6F2     7F1
     9                  6F3     7F2
    10                          7F3
    11                          7B3
    12                  6B3     7B2
    13          5B3     6B2     7B1
    14  4B3     5B2     6B1     7B0
    15  4B2     5B1     6B0     3B3
    16  4B1     5B0     2B3     3B2
    17  4B0     1B3     2B2     3B1
    18  0B3     1B2     2B1     3B0
    19  0B2     1B1     2B0
    20  0B1     1B0
    21  0B0
    """
    for chunk in range(shape.chunks):  # nF, chunk by chunk
        for unit in range(shape.units):
            yield F(chunk, unit)
    for chunk in reversed(range(shape.chunks)):  # nB, all of it in reverse
        for unit in reversed(range(shape.units)):
            yield B(chunk, unit)
