"""DualPipe."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedules._dualpipe import Chunk, dual_phases
from penstock.schedules.registry import Shape, bidirectional, register


def _even_ranks(shape: Shape) -> None:
    if shape.ranks % 2:
        raise ScheduleError(
            f"dualpipe pairs each rank with its mirror and needs an even number of ranks, got {shape.ranks}: "
            f"take {shape.ranks + 1}, or dualpipe-v, which takes any"
        )


def _even_count(shape: Shape) -> int:
    return max(2 * shape.ranks, shape.microbatches + shape.microbatches % 2)


@register("dualpipe", placement=bidirectional, accepts=_even_count, check=_even_ranks)
def dualpipe(shape: Shape, rank: int) -> Iterator[int]:
    """Feed the pipeline from both ends and run a forward of one direction together with a backward of the other.

    Each rank holds a stage of two copies of the model; even microbatches go down the ranks and odd ones up, so that a
    rank near one end is near the start for one direction and near the loss for the other. DualPipe, arXiv 2412.19437.

    Bubble: (p/2-1)(F&B+B-3W)
    Memory: p+1, parameters twice
    Needs: even ranks, any microbatches (built for an even count of at least 2p)

    >>> import penstock as ps
    >>> print(ps.schedule("dualpipe", ranks=4, microbatches=8).grid())
        rank 0                rank 1                rank 2                rank 3
     0  0F0                                                               0F1
     1  0F2                   1F0                   1F1                   0F3
     2  0F4                   2F1                   2F0                   0F5
     3  3F1                   1F2                   1F3                   3F0
     4  3I1                   2F3                   2F2                   3I0
     5  3W1                   1F4                   1F5                   3W0
     6  3F3                   2B1                   2B0                   3F2
     7  (0F6;3B3)OVERLAP_F_B  (2F5;1B0)OVERLAP_F_B  (2F4;1B1)OVERLAP_F_B  (0F7;3B2)OVERLAP_F_B
     8  (3F5;0B0)OVERLAP_F_B  (1F6;2B3)OVERLAP_F_B  (1F7;2B2)OVERLAP_F_B  (3F4;0B1)OVERLAP_F_B
     9  3B5                   (2F7;1B2)OVERLAP_F_B  (2F6;1B3)OVERLAP_F_B  3B4
    10  (3F7;0B2)OVERLAP_F_B  2B5                   2B4                   (3F6;0B3)OVERLAP_F_B
    11  3B7                   1B4                   1B5                   3B6
    12  0I4                   2I7                   2I6                   0I5
    13  0W4                   1I6                   1I7                   0W5
    14  0I6                   2W7                   2W6                   0I7
    15  0W6                   1W6                   1W7                   0W7
    """
    down, up = Chunk(0, first=0, stride=2), Chunk(1, first=1, stride=2)
    zero, one = (down, up) if rank < shape.ranks // 2 else (up, down)
    return dual_phases(zero, one, shape.ranks // 2, min(rank, shape.ranks - 1 - rank), shape.microbatches // 2)
