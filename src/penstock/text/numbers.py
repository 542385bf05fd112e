"""Numbers, shares and counts as people read them."""

from __future__ import annotations

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_number(value: float) -> str:
    """Write four significant digits, with a prefix instead of more than five digits before the point.

    >>> format_number(33.0), format_number(1 / 3), format_number(24576.0), format_number(1.5e9)
    ('33', '0.3333', '24576', '1.5G')
    """
    if abs(value) < 99999.5:
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    size, prefix = next(known for known in _PREFIXES if abs(value) >= known[0] * 0.99995)
    return f"{value / size:.4g}{prefix}"


def format_signed(value: float) -> str:
    """
    >>> format_signed(1.5), format_signed(-0.25)
    ('+1.5', '-0.25')
    """
    return f"{'-' if value < 0 else '+'}{format_number(abs(value))}"


def format_percent(share: float) -> str:
    """
    >>> format_percent(0.2727)
    '27.3%'
    """
    return f"{share:.1%}"


def format_count(value: int, word: str) -> str:
    """
    >>> format_count(1, "rank"), format_count(8, "microbatch"), format_count(4, "process")
    ('1 rank', '8 microbatches', '4 processes')
    """
    return f"{value} {word}" if value == 1 else f"{value} {word}{'es' if word.endswith(('ch', 's')) else 's'}"
