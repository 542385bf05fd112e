"""Interleaved in groups smaller than the pipeline."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from penstock.errors import ScheduleError
from penstock.ir.codes import F, I, W
from penstock.schedules._interleaved import units
from penstock.schedules._zero_bubble import alternate_split
from penstock.schedules.registry import Shape, looped, register


def _half(shape: Shape) -> int:
    return (shape.ranks + 1) // 2


def _between_half_and_all(shape: Shape, group_size: Any = None) -> None:
    if group_size is None:
        return
    try:
        fits = not isinstance(group_size, bool) and _half(shape) <= operator.index(group_size) <= shape.ranks
    except TypeError:
        fits = False
    if not fits:
        raise ScheduleError(
            f"group_size must be a whole number from {_half(shape)} to {shape.ranks} for {shape.ranks} ranks, got {group_size!r}: "
            "a smaller group would leave ranks idle, for a larger one take interleaved-zb"
        )


def _whole_groups(shape: Shape, group_size: int | None = None) -> int:
    group = group_size or _half(shape)
    return -(-shape.microbatches // group) * group


@register("grouped-interleaved", placement=looped, accepts=_whole_groups, check=_between_half_and_all)
def grouped_interleaved(shape: Shape, rank: int, *, group_size: int | None = None) -> Iterator[int]:
    """Interleave chunks in groups of fewer microbatches than there are ranks, and hold so much less.

    Microbatches pass the chunks of a rank in groups of g = `group_size`, half the ranks unless given. The backward is
    split, so that a rank waits only for the half that it needs. PipeOffload, arXiv 2503.01328.

    Bubble: ?
    Memory: g(v-1)+p-r chunks, counted to W
    Needs: any ranks, any chunks, any microbatches; group_size from ceil(p/2) to p

    >>> import penstock as ps
    >>> print(ps.schedule("grouped-interleaved", ranks=4, microbatches=4, chunks=2).grid())
        rank 0  rank 1  rank 2  rank 3
    """
    group, last = group_size or _half(shape), shape.chunks - 1
    forwards = [F(chunk, microbatch) for chunk, microbatch in units(shape, group)]
    inputs = [I(last - chunk, microbatch) for chunk, microbatch in units(shape, group)]
    weights = [W(last - chunk, microbatch) for chunk, microbatch in units(shape, group)]
    return alternate_split(forwards, inputs, weights, warm_up=group * last + shape.ranks - rank - 1, delay=0)
