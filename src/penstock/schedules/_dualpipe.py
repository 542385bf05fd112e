"""The phases that dualpipe and dualpipe-v share.

Each rank holds two chunks. Chunk 0 is nearer to the start of its microbatches, chunk 1 nearer to the end of its own; a
forward of one runs together with a backward of the other, so that the messages of each hide behind the other's work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.ir.codes import B, F, I, W, overlap


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
