"""Interleaved in groups smaller than the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.schedules._interleaved import check_group_size
from penstock.schedules.registry import Shape, looped, register
from penstock.schedules.zb_h1 import alternate_split
from penstock.text.numbers import format_count


def _half(shape: Shape) -> int:
    return (shape.ranks + 1) // 2


def _between_half_and_all(shape: Shape, group_size: Any = None) -> None:
    advice = ": a smaller group would leave ranks idle, for a larger one take interleaved-zb"
    check_group_size(group_size, _half(shape), shape.ranks, f"{format_count(shape.ranks, 'rank')}", advice)


def _whole_groups(shape: Shape, group_size: int | None = None) -> int:
    group = group_size or _half(shape)
    return -(-shape.microbatches // group) * group


@register("grouped-interleaved", placement=looped, accepts=_whole_groups, check=_between_half_and_all)
def grouped_interleaved(shape: Shape, rank: int, *, group_size: int | None = None) -> Iterator[int]:
    """Interleave chunks in groups of fewer microbatches than there are ranks, and hold so much less.

    Microbatches pass the chunks of a rank in groups of g = `group_size`, by default half the ranks. The backward is
    split, so that a rank waits only for the half that it needs. PipeOffload, arXiv 2503.01328.

    Bubble: ((p-1)(F+I)+(v-1)(p-g)F)/v if F = I = W and the groups are whole
    Memory: g(v-1)+p-r chunks, counted to W
    Needs: any ranks, any chunks, any microbatches; group_size from ceil(p/2) to p

    >>> import penstock as ps
    >>> print(ps.schedule("grouped-interleaved", ranks=4, microbatches=4, chunks=2).grid())
        rank 0  rank 1  rank 2  rank 3
     0  0F0
     1  0F1     1F0
     2          1F1     2F0
     3                  2F1     3F0
     4  4F0                     3F1
     5  4F1     5F0
     6  0F2     5F1     6F0
     7  0F3     1F2     6F1     7F0
     8                          7I0
     9                  6I0     7W0
    10          5I0     6W0     7F1
    11  4I0     5W0     2F2     7I1
    12  4W0     1F3     6I1     7W1
    13          5I1     6W1     3F2
    14  4F2     5W1     2F3     3I0
    15  4I1     5F2     2I0     3W0
    16  4W1     1I0     2W0     3F3
    17  4F3     1W0     6F2     3I1
    18  0I0     5F3     2I1     3W1
    19  0W0     1I1     2W1     7F2
    20  0I1     1W1     6F3     7I2
    21  0W1             6I2     7W2
    22          5I2     6W2     7F3
    23  4I2     5W2             7I3
    24  4W2             6I3     7W3
    25          5I3     6W3     3I2
    26  4I3     5W3     2I2     3W2
    27  4W3     1I2     2W2     3I3
    28  0I2     1W2     2I3     3W3
    29  0W2     1I3     2W3
    30  0I3     1W3
    31  0W3
    """
    group = group_size or _half(shape)
    return alternate_split(shape, warm_up=group * (shape.chunks - 1) + shape.ranks - rank - 1, delay=0, group=group)
