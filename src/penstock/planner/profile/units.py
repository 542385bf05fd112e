"""Times and sizes as people read them, and text tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Units:
    """The unit of times, and whether sizes are bytes."""

    time_unit: str = ""
    in_bytes: bool = False

    def time(self, value: float) -> str:
        """
        >>> Units("s").time(0.00123), Units().time(12.5)
        ('1.23 ms', '12.5')
        """
        if self.time_unit not in _SECONDS:
            return f"{value:.6g} {self.time_unit}".rstrip()
        seconds = value * _SECONDS[self.time_unit]
        name, unit = next(((name, unit) for name, unit in _SECONDS.items() if abs(seconds) >= unit), ("ns", 1e-9))
        return f"{seconds / unit:.5g} {name}"

    def size(self, value: float, up: bool = False) -> str:
        """Four digits, rounded up with `up`.

        >>> Units(in_bytes=True).size(1.5 * 2**30), Units().size(2.5)
        ('1.5GiB', '2.5')
        """
        prefixes = ("B", "KiB", "MiB", "GiB", "TiB", "PiB") if self.in_bytes else ("",)
        step = 0
        while step + 1 < len(prefixes) and abs(value) >= 1024:
            value /= 1024
            step += 1
        return f"{_round_up(value) if up else value:.4g}{prefixes[step]}"


def _round_up(value: float) -> float:
    """Round up to four digits."""
    if value <= 0:
        return value
    last = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / last * (1 - 1e-12)) * last


def table(rows: Sequence[tuple[str, ...]], left: Sequence[int]) -> Iterator[str]:
    """Lines of aligned columns; the columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) if at in left else text.rjust(width) for at, (text, width) in enumerate(zip(row, widths, strict=True))]
        yield ("  " + "  ".join(cells)).rstrip()
