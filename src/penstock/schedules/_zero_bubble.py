"""What the zero-bubble schedules share: the backward split in two, and its weight half kept for the gaps of the drain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def alternate_split(forwards: Sequence[int], inputs: Sequence[int], weights: Sequence[int], warm_up: int, delay: int) -> Iterator[int]:
    """As `alternate`, each weight backward `delay` input backwards behind its own.

    The later ranks delay more: they reach their last input backward earlier and have the longer drain to fill.
    """
    total = len(forwards)
    warm_up = min(warm_up, total)
    yield from forwards[:warm_up]  # nF
    for k in range(total):  # nF I W, without F when they run out and without W until they are due
        if warm_up + k < total:
            yield forwards[warm_up + k]
        yield inputs[k]
        if k >= delay:
            yield weights[k - delay]
    yield from weights[max(0, total - delay) :]  # nW
