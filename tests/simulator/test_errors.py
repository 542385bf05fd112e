"""What cannot be timed is refused, and says why and where."""

from __future__ import annotations

import math

import pytest

import penstock as ps
from penstock.errors import CostsError, ScheduleError
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.table import Table
from verifier.build import FIRST, SECOND, program, schedule

TWO = ps.schedule("1f1b", ranks=2, microbatches=3)


def refused(table: Table, costs: Costs | None = None) -> str:
    """The one message, the same from a single simulation, from each engine and from many."""
    said = set()
    for timed in (
        lambda: ps.simulate(table, costs),
        lambda: ps.simulate(table, costs, engine="plain"),
        lambda: ps.simulate_many(table, costs, scenarios=2),
    ):
        with pytest.raises(ScheduleError) as caught:
            timed()
        said.add(str(caught.value))
    (message,) = said
    return message


@pytest.mark.parametrize("contention", ["independent", "pair", "duplex", "rank"])
def test_ranks_that_wait_for_each_other(contention: str) -> None:
    table = schedule("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1")
    message = refused(table, Costs(contention=contention))
    assert "2 of 2 ranks" in message
    assert "rank 0 stops at 0B0" in message


@pytest.mark.parametrize("contention", ["independent", "pair", "duplex", "rank"])
def test_a_send_without_a_slot(contention: str) -> None:
    """Rank 1 takes no third message before its second gradient is sent, nor rank 0 a gradient before its fourth message is."""
    first = " ".join([f"0F{m} 0SEND_F{m}" for m in range(4)] + [f"0RECV_B{m} 0B{m}" for m in range(4)])
    second = " ".join(f"1RECV_F{m} 1F{m} 1B{m} 1SEND_B{m}" for m in range(4))
    channels = {(0, 1, Kind.SEND_F): 1, (1, 0, Kind.SEND_B): 1}
    message = refused(program(first, second, channels=channels), Costs(contention=contention))
    assert "2 of 2 ranks" in message
    assert "rank 0 stops at 0SEND_F3" in message
    assert ps.simulate(program(first, second, channels=dict.fromkeys(channels, 2)), Costs(contention=contention)).makespan > 0


@pytest.mark.parametrize(
    ("rows", "action", "needed"),
    [
        (["0B0 0F0"], "0B0", "0F0"),
        (["0F0 0W0 0I0"], "0W0", "0I0"),
        (["(0F0;0B0)OVERLAP_F_B"], "(0F0;0B0)OVERLAP_F_B", "0F0"),
    ],
)
def test_an_action_before_what_it_needs_of_its_own_rank(rows: list[str], action: str, needed: str) -> None:
    assert f"{action} on rank 0 does not come after {needed}" in refused(schedule(*rows))


def test_a_program_that_sends_or_uses_too_early() -> None:
    early = FIRST.replace("0F0 0SEND_F0", "0SEND_F0 0F0")
    assert "0SEND_F0 on rank 0 does not come after 0F0" in refused(program(early, SECOND))
    late = SECOND.replace("1RECV_F1 1F1", "1F1 1RECV_F1")
    assert "1F1 on rank 1 does not come after 1RECV_F1" in refused(program(FIRST, late))


@pytest.mark.parametrize(
    ("table", "action", "needed"),
    [
        (schedule("0F0 0B0", "1F0"), "0B0 on rank 0", "1I0"),
        (schedule("0W0"), "0W0 on rank 0", "0I0"),
        (program(FIRST, SECOND.replace("1RECV_F1 ", "")), "1F1 on rank 1", "1RECV_F1"),
        (program(FIRST.replace(" 0SEND_F1", ""), SECOND), "1F1 on rank 1", "0SEND_F1"),
    ],
)
def test_an_action_that_needs_what_nobody_makes(table: Table, action: str, needed: str) -> None:
    message = refused(table)
    assert f"{action} needs {needed}" in message


@pytest.mark.parametrize("name", ["f", "i", "w", "b", "activation", "weight_stash", "output"])
def test_costs_of_the_wrong_length_are_refused_by_name(name: str) -> None:
    timeline = ps.simulate(TWO)
    for wrong, said in (
        ([1, 1, 1], rf"^{name} has 3 values for 2 stages"),
        ([[1, 1, 1], [1, 1]], rf"^{name}\[1\] has 2 values for 3 microbatches"),
    ):
        costs = Costs(**{name: wrong})  # type: ignore[arg-type]
        with pytest.raises(CostsError, match=said):
            ps.simulate(TWO, costs)
        with pytest.raises(CostsError, match=said):
            ps.retime(timeline, costs)
        with pytest.raises(CostsError, match=said):
            ps.simulate_many(TWO, costs, scenarios=1)


@pytest.mark.parametrize("name", ["parameters", "shard", "unshard", "reduce", "optimizer"])
def test_costs_of_a_stage_of_the_wrong_length_are_refused_by_name(name: str) -> None:
    with pytest.raises(CostsError, match=rf"^{name} has 1 values for 2 stages"):
        ps.simulate(TWO, Costs(**{name: [1.0]}))  # type: ignore[arg-type]
    with pytest.raises(CostsError, match=rf"^{name}\[0\] must be a number"):
        Costs(**{name: [[1.0, 2.0], 1.0]})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf])
def test_costs_that_are_no_amounts_never_reach_the_clock(wrong: float) -> None:
    with pytest.raises(CostsError, match=r"^f\[1\]\[0\] must be a finite number"):
        Costs(f=[1.0, [wrong, 1.0]])  # type: ignore[arg-type]
