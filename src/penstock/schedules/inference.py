"""Forwards only."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.codes import F
from penstock.schedules.registry import Shape, linear, register


@register("inference", placement=linear, slices=1)
def inference(shape: Shape, rank: int) -> Iterator[int]:
    """Run the forwards alone, for evaluation and inference.

    Nothing is kept for a backward: one buffer receives while the other is used. DeepSpeed's InferenceSchedule.

    Bubble: (p-1)F
    Memory: 2 buffers
    Needs: any ranks, any microbatches

    >>> import penstock as ps
    >>> print(ps.schedule("inference", ranks=4, microbatches=3).grid())
       rank 0  rank 1  rank 2  rank 3
    0  0F0
    1  0F1     1F0
    2  0F2     1F1     2F0
    3          1F2     2F1     3F0
    4                  2F2     3F1
    5                          3F2
    """
    yield from (F(*unit) for unit in shape.forwards())  # nF
