"""The proof as a whole: arguments, order of findings, the report and the certificate."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import CostsError, ScheduleError, UnknownNameError
from penstock.ir.program import Program
from penstock.ir.rows import Rows
from penstock.passes.buffers import Buffers
from penstock.passes.wait_send import WaitSend
from penstock.verifier.finding import Severity
from penstock.verifier.rules.table import RULES
from penstock.verifier.verify import MOST_FINDINGS, check, verify
from verifier.build import FIRST, SECOND, program, schedule

# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"semantics": "chanels"}, UnknownNameError, "did you mean 'channels'"),
        ({"semantics": None}, UnknownNameError, "None"),
        ({"memory_limit": -1}, CostsError, "memory_limit of rank 0: .* at least 0, got -1"),
        ({"memory_limit": "40 apples"}, CostsError, "'40 apples' is not a size"),
        ({"memory_limit": [1.0, float("nan")]}, CostsError, "memory_limit of rank 1"),
        ({"memory_limit": [1.0, 2.0, 3.0]}, CostsError, "3 values for 2 ranks"),
        ({"memory_limit": object()}, CostsError, "must be a number"),
        ({"costs": ps.Costs(activation=[1.0])}, CostsError, "1 values for 2 stages"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], error: type[Exception], said: str) -> None:
    for function in (check, verify):
        with pytest.raises(error, match=said) as caught:
            function(program(FIRST, SECOND), **options)
        assert isinstance(caught.value, ValueError)


def test_something_else_than_a_table() -> None:
    with pytest.raises(ScheduleError, match="a Schedule or a Program, got list"):
        verify([["0F0"]])  # type: ignore[arg-type]


def test_limits_as_an_array() -> None:
    assert check(ps.schedule("gpipe", 2, 4), memory_limit=np.array([4.0, 4.0])) == []  # type: ignore[arg-type]


# Findings -------------------------------------------------------------------------------------------------------------


def test_all_findings_the_worst_first() -> None:
    """A hang, a missing backward, an activation too many and a stage left unsharded."""
    first = "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1"
    second = "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1RESHARD"
    table = program(first, second, "", microbatches=2)
    found = check(table, memory_limit=1)
    assert [f.severity for f in found] == sorted(f.severity for f in found)
    assert {f.severity for f in found} == set(Severity)
    assert found[0].rule == "deadlock"
    with pytest.raises(ps.VerifyError) as caught:
        verify(table, memory_limit=1)
    assert list(caught.value.findings) == found


def test_the_report_has_message_remedy_and_excerpt() -> None:
    table = program(FIRST, SECOND.replace("1RECV_F1 ", ""))
    with pytest.raises(ps.VerifyError) as caught:
        verify(table)
    (found,), text = caught.value.findings, str(caught.value)
    assert text.startswith("1 finding in linear, 2 ranks, 2 stages, 2 microbatches (channels):")
    for part in (found.message, found.remedy, *found.excerpt.splitlines()):
        assert part in text


def test_a_long_report_is_cut_short() -> None:
    table = schedule("0F0", microbatches=51)
    with pytest.raises(ps.VerifyError) as caught:
        verify(table)
    assert len(caught.value.findings) == 50
    assert str(caught.value).endswith("and 30 more")


def test_a_table_that_is_wrong_everywhere_is_bounded() -> None:
    good = ps.lower(ps.schedule("1f1b", 8, 2000), receive="just-in-time")
    backwards = Program(Rows.join([row[::-1] for row in map(good.row, range(8))]), good.placement, good.microbatches)
    with pytest.raises(ps.VerifyError) as caught:
        verify(backwards, semantics="rendezvous")
    by_rule = [sum(f.rule == rule.name for f in caught.value.findings) for rule in RULES]
    assert max(by_rule) == MOST_FINDINGS


# The proof ------------------------------------------------------------------------------------------------------------


def test_the_certificate_of_a_program() -> None:
    schedule = ps.spread_vocabulary(ps.schedule("zbv", 4, 8), vocabulary=ps.Vocabulary(ahead=0))
    table = WaitSend(outstanding=8).apply(ps.lower(schedule, fsdp=True, offload=50))
    table = Buffers().apply(table)
    proof = verify(table, memory_limit=8, host_memory_limit=8, costs=ps.Costs(), max_outstanding_sends=8)
    assert list(proof.rules) == [rule.name for rule in RULES]
    assert proof.actions == sum(map(len, table))
    assert proof.messages == 2 * 6 * 8  # of the 7 edges of 8 stages one is within a rank
    assert proof.slots
    assert proof.peak_memory is not None
    assert max(proof.peak_memory) <= 8
    text = str(proof)
    assert "'zbv', a program on 4 ranks" in text
    assert "with the slots of the buffers" in text
    assert "of 8 allowed" in text
    for name, holds in proof.rules.items():
        assert name in text
        assert holds in text
    assert json.loads(json.dumps(proof.to_json()))["messages"] == 96


def test_only_rules_that_apply_are_claimed() -> None:
    bare = verify(program(FIRST, SECOND))
    assert not {"sharding", "reduction", "memory"} & set(bare.rules)
    assert (bare.slots, bare.peak_memory) == (False, None)
    assert "slots unlimited" in str(bare)
    of_schedule = verify(ps.schedule("1f1b", 2, 3), costs=ps.Costs())
    assert "matching" not in of_schedule.rules
    assert of_schedule.peak_memory == (2.0, 1.0)
    assert "semantics" not in str(of_schedule)
    assert "peak memory: 2, on rank 0" in str(of_schedule)
    assert "rendezvous" in str(verify(ps.lower(ps.schedule("1f1b", 2, 3)), semantics="rendezvous"))


@pytest.mark.parametrize("name", sorted(ps.available()))
def test_every_schedule_is_proved(name: str) -> None:
    ranks = 1 if name == "data-parallel" else 4
    for microbatches in (1, 2, 5, 8):
        built = ps.schedule(name, ranks, microbatches)
        assert check(built) == []
        assert check(ps.lower(built, fsdp=True)) == []
        assert check(ps.lower(built), semantics="rendezvous") == []
        assert check(ps.lower(built, receive="just-in-time")) == []


@pytest.mark.slow
def test_a_million_actions() -> None:
    built = ps.lower(ps.schedule("zb-h1", 16, 9300), fsdp=True, receive="just-in-time")
    assert built.rows.group_offsets[-1] > 1_000_000
    fresh = Program(Rows(built.rows.codes, built.rows.offsets), built.placement, built.microbatches, buffers=built.buffers)
    assert verify(fresh, memory_limit=9300).actions > 1_000_000
