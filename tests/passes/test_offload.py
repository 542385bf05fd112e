"""The pass that moves activations to the host: which, and where the copies stand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import PassError
from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.program import Program
from penstock.ir.table import Table
from penstock.passes.offload import Offload
from penstock.passes.pass_list import PassList
from penstock.verifier.rules.memory import peak_memory
from penstock.verifier.verify import verify
from simulator.draws import schedules_of_any_kind


def moved(table: Table, rank: int) -> list[str]:
    return [f"{action.stage}.{action.microbatch}" for action in table[rank] if action.kind is Kind.OFFLOAD]


def test_offloads_and_reloads_alternate_in_1f1b() -> None:
    program = Offload().apply(Program.start(ps.schedule("1f1b", ranks=4, microbatches=8)))
    assert " ".join(map(str, program[0])) == (
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0OFFLOAD2 0F3 0OFFLOAD3 0B0 0RELOAD1 0F4 0OFFLOAD4 0B1 0RELOAD2 0F5 0OFFLOAD5 0B2 "
        "0RELOAD3 0F6 0OFFLOAD6 0B3 0RELOAD4 0F7 0RELOAD5 0B4 0RELOAD6 0B5 0B6 0B7"
    )
    assert moved(program, 3) == []  # an activation of the last rank is used at once


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_1f1b_holds_three_activations_however_many_ranks_there_are(ranks: int) -> None:
    schedule = ps.schedule("1f1b", ranks=ranks, microbatches=3 * ranks)
    assert max(peak_memory(ps.lower(schedule))) == ranks
    assert max(peak_memory(ps.lower(schedule, offload=100))) == 3


def test_a_share_takes_the_stage_with_the_longest_lives_first() -> None:
    """In zbv, chunk 0 of the first rank waits for a whole round trip, chunk 1 for nothing."""
    schedule = ps.schedule("zbv", ranks=4, microbatches=8)
    program = ps.lower(schedule, offload=50)
    stages = [action.stage for action in program[0] if action.kind is Kind.OFFLOAD]
    assert stages == [0] * 8  # half of the rank's 16


@pytest.mark.parametrize(("share", "kept"), [(25, 6), (50, 4), (75, 2), (100, 0)])
def test_shares_of_1f1b(share: int, kept: int) -> None:
    """Of 8 activations that are alive at once, a share is away, but for up to three: just made, just leaving, or just back."""
    peak = max(peak_memory(ps.lower(ps.schedule("1f1b", ranks=8, microbatches=32), offload=share)))
    assert kept < peak <= min(kept + 3, 7)


def test_a_part_of_a_stage_is_spread_evenly() -> None:
    schedule = ps.schedule("1f1b", ranks=4, microbatches=40)
    numbers = [int(unit.split(".")[1]) for unit in moved(ps.lower(schedule, offload=25), 0)]
    steady = [b - a for a, b in pairwise(numbers)]
    assert len(numbers) == 10
    assert max(steady) - min(steady) <= 1


def test_one_share_per_rank_and_a_limit_to_stages() -> None:
    schedule = ps.schedule("interleaved-1f1b", ranks=2, microbatches=6)
    program = ps.lower(schedule, offload=(0, 100))
    assert not moved(program, 0)
    assert moved(program, 1)
    program = ps.lower(schedule, offload=Offload(stages=(0,)))
    assert {unit.split(".")[0] for unit in moved(program, 0)} == {"0"}
    assert not moved(program, 1)


def test_reloads_further_ahead() -> None:
    schedule = ps.schedule("1f1b", ranks=4, microbatches=8)
    for ahead in range(4):
        row = ps.lower(schedule, offload=Offload(ahead=ahead))[0]
        names = [str(action) for action in row]
        between = [action for action in row[names.index("0RELOAD3") : names.index("0B3")] if action.kind in COMPUTE]
        assert len(between) == ahead


@given(schedules_of_any_kind, st.integers(0, 100), st.integers(0, 4))
def test_any_schedule_stays_valid(schedule: ps.Schedule, share: int, ahead: int) -> None:
    program = Offload(share, ahead).apply(Program.start(schedule))
    verify(program)
    assert program.rows.is_kind(Kind.OFFLOAD).sum() == program.rows.is_kind(Kind.RELOAD).sum()
    assert program.schedule().rows.keep(program.rows.is_kind(*COMPUTE)) == schedule.rows
    assert ps.lower(program.schedule()).rows == ps.lower(schedule, offload=Offload(share, ahead)).rows


def test_the_text_form() -> None:
    text = "offload{share=50+100,ahead=2},reduce-grad,send-receive,buffers"
    passes = PassList.parse(text)
    assert str(passes) == text
    assert passes.apply(ps.schedule("1f1b", ranks=2, microbatches=4)).passes == text
    assert str(Offload()) == "offload"
    assert PassList.parse("offload{stages=0+2}").passes == (Offload(stages=(0, 2)),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("offload{share=101}", "share of pass offload, a percentage, must be a whole number of at least 0 and at most 100, got 101"),
        ("offload{share=half}", "a percentage, must be a whole number"),
        ("offload{ahead=-1}", "ahead of pass offload must be .*, got -1"),
        ("offload{stages=9}", "limited to stage 9"),
        ("offload{share=1+2+3}", "3 percentages for 4 ranks"),
        ("offload,offload", "already"),
    ],
)
def test_refusals(text: str, reason: str) -> None:
    with pytest.raises(PassError, match=reason):
        PassList.parse(text).apply(ps.schedule("1f1b", ranks=4, microbatches=8))
