"""The grid: one row per step, one column per rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from ir.naive import naive_links, naive_walk
from ir.strategies import row_lists
from penstock.ir.action import Action
from penstock.ir.dependencies import needs
from penstock.ir.grid import Grid
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule


def read(text: str) -> list[list[str]]:
    """The cells of a printed grid, cut at the header's columns."""
    lines = text.split("\n")
    starts = [k for k in range(len(lines[0])) if lines[0].startswith("rank ", k)]
    ends = [*starts[1:], None]
    return [[line[a:b].strip() for a, b in zip(starts, ends, strict=True)] for line in lines[1:]]


@given(st.integers(1, 5), st.integers(1, 6))
def test_the_grid_of_gpipe_follows_its_formula(ranks: int, microbatches: int) -> None:
    """F(s, m) in step s + m; B(s, m) in step (p + m' - 1) + (p - 1 - s) + m, with m' the microbatches."""
    cells = read(ps.schedule("gpipe", ranks, microbatches).grid())
    wanted = [[""] * ranks for _ in range(2 * (ranks + microbatches - 1))]
    for s in range(ranks):
        for m in range(microbatches):
            wanted[s + m][s] = f"{s}F{m}"
            wanted[2 * ranks + microbatches - 2 - s + m][s] = f"{s}B{m}"
    assert cells == wanted


@given(st.integers(2, 9))
def test_fewer_steps_than_ranks_can_be_drawn(ranks: int) -> None:
    """PyTorch's formatter raises IndexError if there are fewer steps than ranks."""
    schedule = Schedule.from_actions([[f"{rank}F0"] for rank in range(ranks)], Placement.linear(ranks))
    assert Grid.dense(schedule).steps == 1
    assert read(Grid.dense(schedule).text()) == [[f"{rank}F0" for rank in range(ranks)]]
    short = Grid.spaced(schedule).text(steps=range(ranks - 1))
    assert read(short) == [[f"{rank}F0" if rank == step else "" for rank in range(ranks)] for step in range(ranks - 1)]


@given(st.data(), st.integers(1, 3))
def test_every_action_is_in_the_grid_once_and_in_its_step(data: st.DataObject, ranks: int) -> None:
    """Also if actions can never run: they follow at the end of their column."""
    placement = Placement.linear(ranks)
    rows = [[action for action in row if action.is_compute] for row in data.draw(row_lists(ranks, ranks - 1, 2))]
    schedule = Schedule.from_actions(rows, placement, microbatches=3)
    links = naive_links(rows, placement, schedule.graph, 3, lowered=False)
    group = schedule.rows.group.tolist()
    steps = naive_walk(list(map(len, rows)), [(group[b], group[a], 1) for b, a in links.local | links.data])
    grid = Grid.spaced(schedule)
    for rank, row in enumerate(rows):
        column = grid.columns[rank]
        assert [action for action in column if action is not None] == row
        own = steps[sum(map(len, rows[:rank])) :][: len(row)]
        assert all(column[step] == action for action, step in zip(row, own, strict=True) if step >= 0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 3), (4, 4)])
def test_spacing_keeps_every_action_on_its_rank_and_after_its_needs(name: str, ranks: int, microbatches: int) -> None:
    """PyTorch's spacing fails for GPipe and 1F1B and puts actions of ZBV on wrong ranks."""
    schedule = ps.schedule(name, ranks, microbatches)
    cells = read(schedule.grid())
    at = {text: (step, rank) for step, row in enumerate(cells) for rank, text in enumerate(row) if text}
    assert len(at) == sum(map(len, schedule))
    for text, (step, rank) in at.items():
        action = Action.parse(text)
        assert rank == schedule.placement.rank_of(action.stage)
        for need in needs(action, schedule.graph):
            maker = at.get(str(need)) or at[str(need).replace("I", "B")]
            assert maker[0] < step


def test_the_marked_step_ends_in_an_arrow() -> None:
    schedule = ps.schedule("gpipe", 2, 2)
    plain, marked = schedule.grid().split("\n"), schedule.grid(mark=3).split("\n")
    assert marked[1 + 3] == plain[1 + 3] + "  <-- here"
    assert [line for k, line in enumerate(marked) if k != 4] == [line for k, line in enumerate(plain) if k != 4]
    assert schedule.grid(mark=99) == schedule.grid()


def test_an_excerpt_is_cut_out_of_the_whole() -> None:
    grid = Grid.spaced(ps.schedule("1f1b", 4, 6))
    whole = read(grid.text())
    part = grid.text(steps=range(3, 7), mark=5, ranks=[1, 3])
    assert part.split("\n")[0].split() == ["rank", "1", "rank", "3"]
    assert [row[:2] for row in read(part.replace("  <-- here", ""))] == [[row[1], row[3]] for row in whole[3:7]]
    assert [line.split()[0] for line in part.split("\n")[1:]] == ["3", "4", "5", "6"]
    assert [line.endswith("<-- here") for line in part.split("\n")[1:]] == [False, False, True, False]
    assert read(grid.text(steps=range(98, 100))) == [[""] * 4] * 2


@pytest.mark.parametrize(("rank", "step", "cell"), [(0, 0, "0F0"), (1, 0, None), (1, 1, "1F0"), (0, 99, None)])
def test_cells_beyond_a_column_are_idle(rank: int, step: int, cell: str | None) -> None:
    found = Grid.spaced(ps.schedule("gpipe", 2, 1)).cell(rank, step)
    assert found == (None if cell is None else Action.parse(cell))
