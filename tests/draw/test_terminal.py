"""The terminal's grid, compared with the plain text grid."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.draw.palette import TONES, paint, plain_text
from penstock.draw.terminal import grid_legend, grid_lines
from penstock.ir.grid import Grid

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
TABLES = [
    ps.schedule("zbv", ranks=4, microbatches=8),
    ps.lower(ps.schedule("1f1b", ranks=5, microbatches=3), fsdp=True),
    ps.schedule("gpipe", ranks=12, microbatches=2),
]


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_plain_lines_equal_the_grid(table):
    assert "\n".join(plain_text(grid_lines(Grid.spaced(table)))) == table.grid()


def test_overlapped_actions_are_joined():
    schedule = ps.schedule("dualpipe-v", ranks=2, microbatches=8)
    grid = Grid.spaced(schedule)
    shown = "\n".join(plain_text(grid_lines(grid)))
    overlapped = [action for row in schedule for action in row if action.sub_actions]
    assert overlapped
    assert all("&".join(map(str, action.sub_actions)) in shown for action in overlapped)
    assert "OVERLAP" not in shown
    assert "& run together" in "\n".join(plain_text(grid_legend(grid)))


@given(st.integers(1, 200), st.sampled_from(TABLES))
def test_blocks_fit_the_width_and_keep_every_action(width, table):
    grid = Grid.spaced(table)
    text = "\n".join(plain_text(grid_lines(grid, width=width)))
    blocks = [block.splitlines() for block in text.split("\n\n")]
    shown = [rank for block in blocks for rank in re.findall(r"rank \d+", block[0])]
    assert shown == [f"rank {rank}" for rank in range(table.ranks)]
    for block in blocks:
        ranks = [int(rank.removeprefix("rank ")) for rank in re.findall(r"rank \d+", block[0])]
        assert block == grid.text(ranks=ranks).splitlines()
        assert len(ranks) == 1 or max(map(len, block)) <= width


@given(st.integers(1, 200), st.sampled_from(TABLES))
def test_legend_names_each_kind_once_in_lines_that_fit(width, table):
    grid = Grid.spaced(table)
    lines = list(plain_text(grid_legend(grid, width=width)))
    entries = [f"{tone.sample} {tone.means}" for tone in dict.fromkeys(TONES[action.kind] for row in table for action in row)]
    assert sorted("  ".join(lines).split("  ")) == sorted(entries)
    assert all(len(line) <= width or line in entries for line in lines)


@pytest.mark.parametrize("colours", ["truecolor", "256", "standard"])
@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_colour_does_not_change_the_text(table, colours):
    lines = list(paint(grid_lines(Grid.spaced(table)), colours))
    assert [ESCAPE.sub("", line).rstrip() for line in lines] == table.grid().splitlines()


def test_one_terminal_does_not_colour_the_next():
    grid = Grid.spaced(TABLES[0])
    first = list(paint(grid_lines(grid), "256"))
    list(paint(grid_lines(grid), "standard"))
    assert any("48;5;" in line for line in first)
    assert list(paint(grid_lines(grid), "256")) == first


def test_each_cell_has_the_fill_and_ink_of_its_kind():
    """Read back: every coloured run of text is an action, in the colours of its tone."""
    table = TABLES[1]
    text = "\n".join(paint(grid_lines(Grid.spaced(table)), "truecolor"))
    runs = re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m([^\x1b]*)\x1b\[0m", text)
    assert len(runs) == sum(len(row) for row in table)
    for *numbers, cell in runs:
        tone = TONES[ps.Action.parse(cell).kind]
        colours = bytes(map(int, numbers)).hex()
        assert (f"#{colours[:6]}", f"#{colours[6:]}") == (tone.ink, tone.fill)


def test_columns_may_be_other_ranks():
    grid = Grid((TABLES[0][2],))
    header, first, *_ = plain_text(grid_lines(grid, ranks=[2]))
    assert header.split() == ["rank", "2"]
    assert first.split() == ["0", str(TABLES[0][2][0])]
