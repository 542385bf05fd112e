"""Numbers and units as people read them."""

from __future__ import annotations

from penstock.errors import UsageError

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""The units of time, in seconds."""
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """Four digits, with a prefix where plain digits would be too many.

    >>> number(33.0), number(1 / 3), number(24576.0), number(1.5e9)
    ('33', '0.3333', '24576', '1.5G')
    """
    if abs(value) < 99999.5:
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    size, prefix = next(each for each in _PREFIXES if abs(value) >= each[0] * 0.99995)
    return f"{value / size:.4g}{prefix}"


def percent(share: float) -> str:
    """One digit behind the point.

    >>> percent(0.2727)
    '27.3%'
    """
    return f"{share:.1%}"


def count(value: int, word: str) -> str:
    """
    >>> count(1, "rank"), count(8, "microbatch")
    ('1 rank', '8 microbatches')
    """
    return f"{value} {word}" if value == 1 else f"{value} {word}{'es' if word.endswith('ch') else 's'}"


def seconds(unit: str) -> float:
    """What one unit of time is in seconds."""
    if unit not in SECONDS:
        raise UsageError(f"unit must be one of {', '.join(SECONDS)}, got {unit!r}")
    return SECONDS[unit]
