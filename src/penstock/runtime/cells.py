"""Where a rank keeps what it has made or received until it is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.runtime.result import Share


class _Empty:
    """What is in a cell that nothing has been put into."""

    def __repr__(self) -> str:
        return "empty"


EMPTY = _Empty()


@dataclass
class Feed:
    """What one step is fed with: inputs, keyword arguments and targets by microbatch, and how much each counts."""

    args: list[tuple[Any, ...]]
    kwargs: dict[int, list[dict[str, Any]]]
    targets: list[Any] | None
    scales: list[float]
    seed: str | None = None
    """What the random streams of this step are derived from; None leaves random numbers to torch."""
    outputs: bool = False
    losses: bool = True
    share: Share = field(default_factory=Share)


NOTHING = Feed([], {}, None, [])
