"""DualPipe on a V."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedules.dualpipe import Chunk, dual_phases
from penstock.schedules.registry import Shape, register, v


def _at_least_stages(shape: Shape) -> int:
    return max(2 * shape.ranks, shape.microbatches)


@register("dualpipe-v", placement=v, accepts=_at_least_stages)
def dualpipe_v(shape: Shape, rank: int) -> Iterator[int]:
    """Run a forward of one half of the V together with a backward of the other, each hiding the other's messages.

    Half of DualPipe, folded: no second copy of the parameters is needed. `(4F1;0B0)OVERLAP_F_B` is one action that runs
    both parts. DualPipe, arXiv 2412.19437; the V after the authors' DualPipeV.

    Bubble: (P/2-1)(F&B+B-3W), P = 2p stages, F, B, W those of one stage
    Memory: P+1 stages
    Needs: any ranks, any microbatches (built for at least 2p)

    >>> import penstock as ps
    >>> print(ps.schedule("dualpipe-v", ranks=4, microbatches=8).grid())
        rank 0                rank 1                rank 2                rank 3
     0  0F0
     1  0F1                   1F0
     2  0F2                   1F1                   2F0
     3  0F3                   1F2                   2F1                   3F0
     4  0F4                   1F3                   2F2                   4F0
     5  0F5                   1F4                   5F0                   3F1
     6  0F6                   6F0                   2F3                   4F1
     7  7F0                   1F5                   5F1                   3F2
     8  7I0                   6F1                   2F4                   4F2
     9  7W0                   6I0                   5F2                   3F3
    10  7F1                   6W0                   5I0                   4F3
    11  7I1                   6F2                   5W0                   3F4
    12  7W1                   6I1                   5F3                   4B0
    13  7F2                   6W1                   (2F5;5B1)OVERLAP_F_B  (4F4;3B0)OVERLAP_F_B
    14  7I2                   6F3                   (5F4;2B0)OVERLAP_F_B  (3F5;4B1)OVERLAP_F_B
    15  7W2                   (1F6;6B2)OVERLAP_F_B                        (4F5;3B1)OVERLAP_F_B
    16  7F3                   (6F4;1B0)OVERLAP_F_B  (2F6;5B2)OVERLAP_F_B
    17  (0F7;7B3)OVERLAP_F_B                        (5F5;2B1)OVERLAP_F_B  (3F6;4B2)OVERLAP_F_B
    18  (7F4;0B0)OVERLAP_F_B  (1F7;6B3)OVERLAP_F_B                        (4F6;3B2)OVERLAP_F_B
    19  7B4                   (6F5;1B1)OVERLAP_F_B  (2F7;5B3)OVERLAP_F_B
    20  (7F5;0B1)OVERLAP_F_B  6B4                   (5F6;2B2)OVERLAP_F_B  (3F7;4B3)OVERLAP_F_B
    21  7B5                   (6F6;1B2)OVERLAP_F_B  5B4                   (4F7;3B3)OVERLAP_F_B
    22  (7F6;0B2)OVERLAP_F_B  6B5                   (5F7;2B3)OVERLAP_F_B  4B4
    23  7B6                   (6F7;1B3)OVERLAP_F_B  5B5                   3B4
    24  (7F7;0B3)OVERLAP_F_B  6B6                   2B4                   4B5
    25  7B7                   1B4                   5B6                   3B5
    26  0I4                   6I7                   2I5                   4I6
    27  0W4                   1I5                   5I7                   3I6
    28  0I5                   6W7                   2I6                   4I7
    29  0W5                   1I6                   2W5                   3I7
    30  0I6                   1W5                   2I7                   4W6
    31  0W6                   1I7                   5W7                   3W6
    32  0I7                   1W6                   2W6                   4W7
    33  0W7                   1W7                   2W7                   3W7
    """
    return dual_phases(Chunk(0), Chunk(1), shape.ranks, rank, shape.microbatches)
