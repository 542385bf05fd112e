"""What holds for every file of the zoo."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import penstock as ps
from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.schedules.registry import algorithms

CORE = {
    "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-h1", "zb-h2", "zbv", "dualpipe-v", "dualpipe",
    "inference", "data-parallel",
}  # fmt: skip


def test_the_core_is_there() -> None:
    assert set(ps.available()) >= CORE


@pytest.mark.parametrize("name", sorted(algorithms()))
def test_each_says_what_it_costs_and_needs(name: str) -> None:
    algorithm = algorithms()[name]
    assert algorithm.summary.endswith(".")
    assert algorithm.bubble
    assert algorithm.memory
    doc = algorithm.generate.__doc__ or ""
    assert "Needs: " in doc
    assert ".grid())" in doc


def test_listing_loads_nothing_heavy() -> None:
    code = (
        "import sys, penstock; penstock.available(); print(sorted({'numpy', 'torch', 'numba', 'matplotlib', 'ortools'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(CORE - {"data-parallel"}))
def test_one_rank_of_many_is_made_alone(name: str) -> None:
    """Closed form: the row of one of 1024 ranks does not need the others'."""
    algorithm = algorithms()[name]
    options = {} if algorithm.layout.fixed else {"chunks": 2}
    schedule = ps.schedule(name, ranks=1024, microbatches=4096, **options)
    row = schedule.row(512)
    assert "rows" not in vars(schedule)
    forwards = np.count_nonzero(codes.kind_of(row) == Kind.F)
    assert forwards == 4096 * len(schedule.placement.stages_of(512)) // len(schedule.placement.copies)


def test_dualpipe_sends_even_microbatches_down_and_odd_ones_up() -> None:
    schedule = ps.schedule("dualpipe", ranks=4, microbatches=8)
    for rank, row in enumerate(schedule):
        for part in (part for action in row for part in action.parts):
            assert part.stage == (3 - rank if part.microbatch % 2 else rank)


def test_dualpipe_is_its_own_mirror() -> None:
    """Seen from the other end, with odd and even microbatches exchanged, the order is the same."""
    schedule = ps.schedule("dualpipe", ranks=6, microbatches=14)
    for rank in range(6):
        there, here = ([[(p.stage, p.kind, p.microbatch) for p in action.parts] for action in schedule[r]] for r in (5 - rank, rank))
        assert [[(s, k, m ^ 1) for s, k, m in action] for action in there] == here


def test_dualpipe_is_two_folded_pipelines() -> None:
    """The first half of the ranks runs dualpipe-v's order, an end for a turn."""
    ranks, pairs = 3, 8
    both, folded = (
        ps.schedule("dualpipe", ranks=2 * ranks, microbatches=2 * pairs),
        ps.schedule("dualpipe-v", ranks=ranks, microbatches=pairs),
    )
    for rank in range(ranks):
        assert [[(p.stage, p.kind, p.microbatch // 2) for p in action.parts] for action in both[rank]] == [
            [(p.stage, p.kind, p.microbatch) for p in action.parts] for action in folded[rank]
        ]


def test_zero_bubble_is_the_formula() -> None:
    """`p-r` forwards; then I, W once the I's lead by more than the delay, F while any; then the other W's."""
    for name, depth in (("zb-h1", 1), ("zb-h2", 2)):
        for p in range(1, 7):
            for m in range(1, 3 * p + 1):
                schedule = ps.schedule(name, ranks=p, microbatches=m)
                for r in range(p):
                    f = min(p - r if depth == 1 else 2 * p - 2 * r - 1, m)
                    i = w = 0
                    want = [f"{r}F{k}" for k in range(f)]
                    while i < m:
                        want.append(f"{r}I{i}")
                        i += 1
                        if i - w > depth * r:
                            want.append(f"{r}W{w}")
                            w += 1
                        if f < m:
                            want.append(f"{r}F{f}")
                            f += 1
                    want += [f"{r}W{k}" for k in range(w, m)]
                    assert [str(a) for a in schedule[r]] == want
