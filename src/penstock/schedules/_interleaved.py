"""Shared parts of the interleaved schedules: the order in which a rank goes over its chunks, and the group sizes that work.

Microbatches go in groups of N: a group passes the first chunk, then the second, and so on. Without `group_size` N is the
least that fits the batch, from `ranks` up: m // max(1, m // p). With q slices ceil(p/q) microbatches fill the pipeline, so that they take
the place of p. A count that N does not divide is built for the next multiple and the rest dropped; that order always runs to the end
and is never slower than a short last group run as it is.
"""

from __future__ import annotations

import operator
from itertools import count
from typing import Any

from penstock.errors import ScheduleError
from penstock.schedules.registry import Shape
from penstock.text.numbers import format_count


def group_of(shape: Shape, group_size: int | None) -> int:
    """The group size: the one asked for, or the one whose rounds come nearest to one microbatch a rank."""
    return group_size or shape.microbatches // _rounds(shape.microbatches, least_group(shape))


def least_group(shape: Shape) -> int:
    """The fewest microbatches that give every rank something to do: one per rank, or one slice per rank."""
    return -(-shape.ranks // shape.slices)


def next_count(shape: Shape, group_size: int | None = None) -> int:
    """The next microbatch count that whole groups make up."""
    if group_size is not None:
        return -(-shape.microbatches // group_size) * group_size
    return next(m for m in count(shape.microbatches) if m % _rounds(m, least_group(shape)) == 0)


def _rounds(microbatches: int, least: int) -> int:
    return max(1, microbatches // least)


def check_group(shape: Shape, group_size: Any = None) -> None:
    """Refuse a group that is shorter than the pipeline or longer than the batch."""
    least, most = min(least_group(shape), shape.microbatches), shape.microbatches
    slices = f" of {shape.slices} slices" if shape.slices > 1 else ""
    check_group_size(group_size, least, most, f"{format_count(shape.ranks, 'rank')} and {format_count(most, 'microbatch')}{slices}")


def check_group_size(group_size: Any, least: int, most: int, counts: str, advice: str = "") -> None:
    """Refuse a group size that is given and is not a whole number in this range."""
    if group_size is None:
        return
    try:
        fits = not isinstance(group_size, bool) and least <= operator.index(group_size) <= most
    except TypeError:
        fits = False
    if not fits:
        raise ScheduleError(f"group_size must be a whole number from {least} to {most} for {counts}, got {group_size!r}{advice}")


def check_group_ends(shape: Shape, group_size: Any = None) -> None:
    """Refuse also a group size that leaves a last group on which one-forward-one-backward hangs.

    Built for the next multiple such a size would run too, but with a larger bubble than the nearest size that fits. With slices it is
    built so.
    """
    check_group(shape, group_size)
    if group_size is None or shape.slices > 1 or not deadlocks(shape, group_size):
        return
    sizes = (n for away in count(1) for n in (group_size - away, group_size + away) if shape.ranks <= n <= shape.microbatches)
    fitting = next(n for n in sizes if not 0 < shape.microbatches % n < shape.ranks)
    raise ScheduleError(
        f"group_size={group_size} leaves a last group of {shape.microbatches % group_size} of the {shape.microbatches} microbatches, "
        f"on which {shape.ranks} ranks with {shape.chunks} chunks each wait for one another: "
        f"take a size that leaves none or at least {shape.ranks}, such as {fitting}, or leave group_size out"
    )


def deadlocks(shape: Shape, group: int) -> bool:
    """Whether a short last group, run as it is after warm-ups of 2(p-r-1)+(v-1)N, hangs.

    A forward of the last group, of R microbatches, follows another that is R units earlier on the last rank. There a
    backward of the group before comes first, which follows one that is N units earlier on rank 0. Rank 0 runs ahead by
    2(p-1) units more than the last rank: if N+R+1 <= 2(p-1), the forward that all this waits for stands behind it.
    The first forward of the last group for which that holds is the second one after chunk 0.
    """
    rest = shape.microbatches % group
    return rest > 0 and group + rest + 1 <= 2 * (shape.ranks - 1) and (shape.chunks - 1) * rest >= 2
