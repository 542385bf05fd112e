"""Chimera."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.ir.codes import B, F
from penstock.schedules.registry import Shape, bidirectional, register


def _even_ranks(shape: Shape) -> None:
    if shape.ranks % 2:
        raise ScheduleError(
            f"chimera sends half of the microbatches up the ranks that the others go down and needs an even number of ranks, "
            f"got {shape.ranks}: take {shape.ranks + 1}, or 1f1b, which takes any"
        )


def _whole_units(shape: Shape) -> int:
    return -(-shape.microbatches // shape.ranks) * shape.ranks


@register("chimera", placement=bidirectional, accepts=_whole_units, check=_even_ranks)
def chimera(shape: Shape, rank: int) -> Iterator[int]:
    """Run two opposite 1f1b pipelines on the same ranks, each in the idle slots of the other.

    Each rank holds a stage of two copies of the model; even microbatches go down the ranks and odd ones up. A unit is one
    microbatch per rank, half of them each way: if F and B take a slot each, the two ways never want the same slot, and
    the next unit starts where the forwards of this one leave off. Chimera, arXiv 2107.06925.

    Bubble: p-2 slots, (p-2)/(2m+p-2) of the time, if F = B and m is a multiple of p
    Memory: p/2+1 on the outer ranks to p on the inner, parameters twice
    Needs: even ranks, any microbatches (built for the next multiple of the ranks)

    >>> import penstock as ps
    >>> print(ps.schedule("chimera", ranks=4, microbatches=4).grid())
       rank 0  rank 1  rank 2  rank 3
    0  0F0                     0F1
    1  0F2     1F0     1F1     0F3
    2          2F1     2F0
    3  3F1     1F2     1F3     3F0
    4  3B1     2F3     2F2     3B0
    5  3F3     2B1     2B0     3F2
    6  3B3     1B0     1B1     3B2
    7  0B0     2B3     2B2     0B1
    8          1B2     1B3
    9  0B2                     0B3
    """
    slots: list[tuple[int, int]] = []
    for way, stage in enumerate((rank, shape.ranks - 1 - rank)):
        for k in range(shape.microbatches // 2):
            unit, place = divmod(k, shape.ranks // 2)
            begin = 2 * shape.ranks * unit + 2 * place
            slots.append((begin + stage, F(way, 2 * k + way)))
            slots.append((begin + 2 * shape.ranks - 1 - stage, B(way, 2 * k + way)))
    return (action for _, action in sorted(slots))
