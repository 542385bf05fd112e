"""Zero bubble over several chunks per rank."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedules._interleaved import check_group, group_of, next_count
from penstock.schedules.registry import Shape, looped, register
from penstock.schedules.zb_h1 import alternate_split


@register("interleaved-zb", placement=looped, accepts=next_count, check=check_group, slices=1)
def interleaved_zb(shape: Shape, rank: int, *, group_size: int | None = None) -> Iterator[int]:
    """Split the backward of interleaved-1f1b and fill the drain with weight backwards.

    zb-h1 over several chunks: rank r runs each weight backward r input backwards late. The shorter warm-up also holds
    less than interleaved-1f1b. Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    Bubble: (p-1)(F+I-W)/v if W <= F and the groups are whole
    Memory: (v-1)N+p chunks, counted to W
    Needs: any ranks, any chunks, any microbatches; group_size from ranks to microbatches
    Slices: bubble (p-1)(F+I-W)/(qv), memory (p-1+q)/q+(v-1)N chunks, N from ceil(p/q) up

    >>> import penstock as ps
    >>> print(ps.schedule("interleaved-zb", ranks=4, microbatches=4, chunks=2).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4  4F0     1F3     2F2     3F1
     5  4F1     5F0     2F3     3F2
     6  4F2     5F1     6F0     3F3
     7  4F3     5F2     6F1     7F0
     8                          7I0
     9                  6I0     7F1
    10          5I0     6F2     7I1
    11  4I0     5F3     6I1     7F2
    12  4W0     5I1     6F3     7I2
    13  4I1     5W0     6I2     7F3
    14  4W1     5I2     6W0     7I3
    15  4I2     5W1     6I3     7W0
    16  4W2     5I3     6W1     3I0
    17  4I3     5W2     2I0     7W1
    18  4W3     1I0     6W2     3I1
    19  0I0     5W3     2I1     7W2
    20  0W0     1I1     6W3     3I2
    21  0I1     1W0     2I2     7W3
    22  0W1     1I2     2W0     3I3
    23  0I2     1W1     2I3     3W0
    24  0W2     1I3     2W1     3W1
    25  0I3     1W2     2W2     3W2
    26  0W3     1W3     2W3     3W3
    """
    group = group_of(shape, group_size)
    return alternate_split(shape, warm_up=shape.ranks - rank - 1 + (shape.chunks - 1) * group * shape.slices, delay=rank, group=group)
