"""Activations on the host: each finding with its words and its place, and every small mistake is found."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.errors import CostsError, VerifyError
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.verifier.finding import Severity
from penstock.verifier.rules.offload import peak_host_memory
from penstock.verifier.verify import check, verify
from verifier.build import only, rules, schedule

ROW = "0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B0 0B1 0B2"
"""One rank: microbatch 0 is on the host while 2 runs forward."""


def test_moves_are_part_of_the_proof() -> None:
    proof = verify(schedule(ROW), memory_limit=3, host_memory_limit=1)
    assert proof.rules["offload"] == "every activation that is moved to the host comes back once, before its backward"
    assert proof.rules["host memory"] == "no rank has more on the host than its limit"
    assert proof.host_memory == (1.0,)
    assert "host memory: 1 of 1 allowed, on rank 0" in str(proof)
    assert "offload" not in verify(schedule("0F0 0B0")).rules
    assert verify(schedule("0F0 0B0"), memory_limit=1).host_memory is None


def test_memory_is_free_from_the_end_of_the_offload_to_the_start_of_the_reload() -> None:
    assert verify(schedule("0F0 0OFFLOAD0 0F1 0F2 0B1 0RELOAD0 0B0 0B2"), memory_limit=2).peak_memory == (2.0,)
    assert verify(schedule(ROW), costs=ps.Costs()).peak_memory == (3.0,)  # back before any other is gone


def test_memory_is_held_until_a_forward_waits_for_the_copy() -> None:
    """The next action runs beside the copy, whatever it is."""
    early = schedule("0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0")
    assert verify(early, costs=ps.Costs()).peak_memory == (2.0,)
    assert only(early, memory_limit=1).rule == "memory"


def test_an_offload_that_is_never_brought_back() -> None:
    finding = only(schedule("0F0 0OFFLOAD0 0F1 0B0 0B1"))
    assert (finding.rule, finding.rank, finding.action) == ("offload", 0, "0RELOAD0")
    assert "nothing brings it back" in finding.message


def test_a_reload_of_what_never_left() -> None:
    finding = only(schedule("0F0 0F1 0RELOAD0 0B0 0B1"))
    assert (finding.rule, finding.step) == ("offload", 2)
    assert "no OFFLOAD has moved" in finding.message


@pytest.mark.parametrize("kind", ["OFFLOAD", "RELOAD"])
def test_the_same_copy_twice(kind: str) -> None:
    finding = only(schedule(ROW.replace(f"0{kind}0", f"0{kind}0 0{kind}0")))
    assert finding.rule == "offload"
    assert "a second time" in finding.message


@pytest.mark.parametrize(
    ("row", "needs"),
    [
        ("0OFFLOAD0 0F0 0F1 0RELOAD0 0B0 0B1", "0OFFLOAD0 needs 0F0"),
        ("0F0 0RELOAD0 0OFFLOAD0 0F1 0B0 0B1", "0RELOAD0 needs 0OFFLOAD0"),
        ("0F0 0OFFLOAD0 0F1 0B0 0RELOAD0 0B1", "0B0 needs 0RELOAD0"),
    ],
)
def test_copies_out_of_order(row: str, needs: str) -> None:
    finding = only(schedule(row))
    assert finding.rule == "order"
    assert needs in finding.message


def test_a_copy_on_a_rank_without_the_stage() -> None:
    assert "placed" in rules(schedule("0F0 0B0", "1F0 0OFFLOAD0 0RELOAD0 1B0"))


def test_an_activation_that_no_backward_needs() -> None:
    finding = only(schedule("0F0 0OFFLOAD0 0RELOAD0"))
    assert (finding.rule, finding.severity) == ("offload", Severity.UNTIDY)


def test_too_much_on_the_host() -> None:
    finding = only(schedule("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2"), host_memory_limit="1", costs=ps.Costs())
    assert (finding.rule, finding.step, finding.severity) == ("host memory", 3, Severity.MEMORY)
    assert "has 2 on the host at its peak, 1 over its limit of 1" in finding.message


def test_the_host_holds_an_activation_until_its_backward_begins() -> None:
    table = schedule("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0B0 0RELOAD1 0B1 0B2", microbatches=3)
    assert peak_host_memory(table, ps.Costs(activation=((5.0, 2.0, 1.0),))) == [7.0]


def test_one_limit_per_rank() -> None:
    program = ps.lower(ps.schedule("1f1b", ranks=4, microbatches=8), offload=100)
    peaks = peak_host_memory(program)
    assert verify(program, host_memory_limit=peaks).host_memory == tuple(peaks)
    with pytest.raises(VerifyError, match="rank 0 has 4 on the host"):
        verify(program, host_memory_limit=[3, *peaks[1:]])
    with pytest.raises(CostsError, match="host_memory_limit has 2 values for 4 ranks"):
        verify(program, host_memory_limit=[1, 2])


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 3), ("zbv", 2), ("interleaved-1f1b", 2)])
def test_mutants_of_copies_are_refused(name: str, ranks: int) -> None:
    """Each copy left out, repeated, moved across what it needs or what needs it, or given to another microbatch."""
    program = ps.lower(ps.schedule(name, ranks=ranks, microbatches=6), offload=100)
    copies = [(rank, at) for rank in range(ranks) for at, action in enumerate(program[rank]) if action.kind.is_copy]
    assert copies
    assert not check(program)
    for rank, at in copies:
        row = list(program[rank])
        copy = row[at]
        unit = copy.stage, copy.microbatch
        forward = next(k for k, action in enumerate(row) if (action.kind, action.stage, action.microbatch) == (Kind.F, *unit))
        backward = next(k for k, action in enumerate(row) if action.kind in (Kind.B, Kind.I) and (action.stage, action.microbatch) == unit)
        without = row[:at] + row[at + 1 :]
        other = Action(copy.stage, copy.kind, (copy.microbatch or 0) + 1)
        mutants = [without, [*row[:at], copy, *row[at:]], [*without[:forward], copy, *without[forward:]]]
        mutants += [[*without[:backward], copy, *without[backward:]], [*row[:at], other, *row[at + 1 :]]]
        for mutant in mutants:
            rows = [mutant if number == rank else list(program[number]) for number in range(ranks)]
            assert check(Program.from_actions(rows, program.placement, microbatches=6)), (copy, mutant)
