"""Times and sizes as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.planner.request import Request

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Units:
    """The unit of times, and whether sizes are bytes."""

    time_unit: str = ""
    in_bytes: bool = False

    @classmethod
    def of(cls, request: Request) -> Units:
        return cls(request.profile.time_unit, request.in_bytes)

    def time(self, value: float) -> str:
        """
        >>> Units("s").time(0.00123), Units().time(12.5)
        ('1.23 ms', '12.5')
        """
        if self.time_unit not in _SECONDS:
            return f"{value:.6g} {self.time_unit}".rstrip()
        seconds = value * _SECONDS[self.time_unit]
        name, each = next(((name, each) for name, each in _SECONDS.items() if abs(seconds) >= each), ("ns", 1e-9))
        return f"{seconds / each:.5g} {name}"

    def size(self, value: float, up: bool = False) -> str:
        """Four digits; with `up` none that is less.

        >>> Units(in_bytes=True).size(1.5 * 2**30), Units().size(2.5)
        ('1.5GiB', '2.5')
        """
        prefixes = ("B", "KiB", "MiB", "GiB", "TiB", "PiB") if self.in_bytes else ("",)
        step = 0
        while step + 1 < len(prefixes) and abs(value) >= 1024:
            value /= 1024
            step += 1
        return f"{_rounded_up(value) if up else value:.4g}{prefixes[step]}"


def _rounded_up(value: float) -> float:
    """To the next number of four digits."""
    if value <= 0:
        return value
    last = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / last * (1 - 1e-12)) * last


def table(rows: Sequence[tuple[str, ...]], left: Sequence[int]) -> Iterator[str]:
    """Columns as wide as they need to be; those named in `left` begin there, numbers end at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) if at in left else text.rjust(width) for at, (text, width) in enumerate(zip(row, widths, strict=True))]
        yield ("  " + "  ".join(cells)).rstrip()
