"""Tables in plain text: nothing is lost, and columns stand below each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.text.table import GAP, format_table

WORDS = st.text("abc123", min_size=1, max_size=8)
ROWS = st.integers(1, 5).flatmap(lambda columns: st.lists(st.lists(WORDS, min_size=columns, max_size=columns), min_size=1, max_size=6))


@given(ROWS)
def test_every_cell_stands_in_its_column(rows):
    for left in ((), (0,), None):
        lines = list(format_table(rows, left=left))
        assert [line.split() for line in lines] == rows
        start = 0
        for place, column in enumerate(zip(*rows, strict=True)):
            width = max(map(len, column))
            cells = [line[start : start + width] for line in lines]
            at_left = left is None or place in left
            assert [cell.ljust(width) for cell in cells] == [text.ljust(width) if at_left else text.rjust(width) for text in column]
            start += width + len(GAP)


def test_the_indent_and_trailing_blanks():
    assert list(format_table([("a", ""), ("bb", "1")], left=None, indent="  ")) == ["  a", "  bb  1"]
