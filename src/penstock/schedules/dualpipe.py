"""DualPipe, and the phases that it shares with dualpipe-v.

Each rank holds two chunks. Chunk 0 is nearer to the start of its microbatches, chunk 1 nearer to the end of its own; a
forward of one runs together with a backward of the other, so that the messages of each hide behind the other's work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.errors import ScheduleError
from penstock.ir.codes import B, F, I, W, overlap
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


@dataclass
class Chunk:
    """One of a rank's chunks and how far its microbatches, `first` and every `stride`-th after it, have come."""

    number: int
    first: int = 0
    stride: int = 1
    forwards: int = field(default=0, init=False)
    backwards: int = field(default=0, init=False)

    def forward(self) -> int:
        self.forwards += 1
        return F(self.number, self._microbatch(self.forwards))

    def backward(self) -> int:
        self.backwards += 1
        return B(self.number, self._microbatch(self.backwards))

    def split(self) -> tuple[int, int]:
        """The next backward, split into I and W."""
        self.backwards += 1
        microbatch = self._microbatch(self.backwards)
        return I(self.number, microbatch), W(self.number, microbatch)

    def _microbatch(self, count: int) -> int:
        return self.first + self.stride * (count - 1)


def dual_phases(zero: Chunk, one: Chunk, ranks: int, rank: int, microbatches: int) -> Iterator[int]:
    """One rank of a V of `ranks`, for at least `2 * ranks` microbatches per chunk."""
    inner = ranks - rank - 1
    yield from _fill(zero, one, inner, rank)
    for step in range(microbatches - 2 * ranks + rank + 1):  # nF0&B1 F1&B0
        pair = zero.forward(), one.backward()
        # The turn of the V waits for nothing here: side by side its first pair would only delay the backward.
        yield from pair if step == 0 and inner == 0 else overlap(*pair)
        yield from overlap(one.forward(), zero.backward())
    for _ in range(inner):  # nB1 F1&B0
        yield one.backward()
        yield from overlap(one.forward(), zero.backward())
    yield from _drain(zero, one, inner, rank)


def _fill(zero: Chunk, one: Chunk, inner: int, rank: int) -> Iterator[int]:
    for _ in range(2 * inner):  # nF0
        yield zero.forward()
    for _ in range(rank + 1):  # nF0 F1
        yield zero.forward()
        yield one.forward()
    for _ in range(inner):  # nI1 W1 F1
        yield from one.split()
        yield one.forward()


def _drain(zero: Chunk, one: Chunk, inner: int, rank: int) -> Iterator[int]:
    weights: deque[int] = deque()
    for k in range(2 * (rank + 1)):  # nB1 B0, the second half of them split
        chunk = (one, zero)[k % 2]
        if k <= rank:
            yield chunk.backward()
            continue
        for_input, for_weights = chunk.split()
        weights.append(for_weights)
        yield for_input
    for _ in range(inner):  # nW I0
        yield weights.popleft()
        for_input, for_weights = zero.split()
        weights.append(for_weights)
        yield for_input
    yield from weights  # nW
