"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

GAP = "  "
"""Between two columns."""


def format_table(rows: Sequence[Sequence[str]], *, left: Collection[int] | None = (0,), indent: str = "") -> Iterator[str]:
    """Give one line per row, with every column as wide as its longest cell.

    Columns in `left` are aligned left and all others right, as numbers should be; None aligns every column left.

    >>> print(*format_table([("stage", "takes"), ("0", "12.5"), ("10", "3")]), sep="\\n")
    stage  takes
    0       12.5
    10         3
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if left is None or place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield (indent + GAP.join(cells)).rstrip()
