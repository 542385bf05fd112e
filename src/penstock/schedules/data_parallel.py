"""No pipeline at all."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.ir.codes import B, F
from penstock.schedules.registry import Shape, linear, register


def _one_rank(shape: Shape) -> None:
    if shape.ranks != 1:
        raise ScheduleError(
            f"data-parallel has one rank with the whole model, got ranks={shape.ranks}: take ranks=1, or a pipeline such as 1f1b"
        )


@register("data-parallel", placement=linear, check=_one_rank)
def data_parallel(shape: Shape, rank: int) -> Iterator[int]:
    """Run each microbatch forward and backward on one rank: gradient accumulation without a pipeline.

    What a model that fits on one device does; the replicas around it are not part of the schedule.
    DeepSpeed's DataParallelSchedule.

    Bubble: 0
    Memory: 1
    Needs: ranks = 1, any microbatches

    >>> import penstock as ps
    >>> print(ps.schedule("data-parallel", ranks=1, microbatches=2).grid())
       rank 0
    0  0F0
    1  0B0
    2  0F1
    3  0B1
    """
    for microbatch in range(shape.microbatches):  # nF B
        yield F(0, microbatch)
        yield B(0, microbatch)
