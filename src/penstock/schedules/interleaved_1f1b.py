"""One forward, one backward, over several chunks per rank."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedules._interleaved import check_group_ends, group_of, next_count
from penstock.schedules.one_f_one_b import alternate
from penstock.schedules.registry import Shape, looped, register


@register("interleaved-1f1b", placement=looped, accepts=next_count, check=check_group_ends, slices=1)
def interleaved_1f1b(shape: Shape, rank: int, *, group_size: int | None = None) -> Iterator[int]:
    """Run 1f1b over several chunks per rank, so that the pipeline fills and drains a chunk at a time.

    Microbatches go in groups of N = `group_size`: a group passes all chunks of the rank before the next group starts.
    N = p goes depth first and holds least, N = m breadth first. Megatron-LM, arXiv 2104.04473.

    Bubble: (p-1)(F+B)/v if the last group has no fewer than p microbatches
    Memory: 2(p-r-1)+(v-1)N+1 chunks, pv+p-1 on rank 0 with N = p
    Needs: any ranks, any chunks, any microbatches; group_size from ranks to microbatches
    Slices: bubble (p-1)(F+B)/(qv), memory (2(p-r-1)+q)/q+(v-1)N chunks, N from ceil(p/q) up

    >>> import penstock as ps
    >>> print(ps.schedule("interleaved-1f1b", ranks=4, microbatches=4, chunks=2).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2  0F2     1F1     2F0
     3  0F3     1F2     2F1     3F0
     4  4F0     1F3     2F2     3F1
     5  4F1     5F0     2F3     3F2
     6  4F2     5F1     6F0     3F3
     7  4F3     5F2     6F1     7F0
     8          5F3     6F2     7B0
     9                  6B0     7F1
    10          5B0     6F3     7B1
    11  4B0             6B1     7F2
    12          5B1             7B2
    13  4B1             6B2     7F3
    14          5B2             7B3
    15  4B2             6B3     3B0
    16          5B3     2B0     3B1
    17  4B3     1B0     2B1     3B2
    18  0B0     1B1     2B2     3B3
    19  0B1     1B2     2B3
    20  0B2     1B3
    21  0B3
    """
    group = group_of(shape, group_size)
    return alternate(shape, warm_up=2 * (shape.ranks - rank - 1) + (shape.chunks - 1) * group * shape.slices, group=group)
