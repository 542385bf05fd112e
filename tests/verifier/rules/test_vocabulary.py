"""A spread vocabulary: a missing, repeated or reordered action on any rank is found, and told in words."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

import penstock as ps
from penstock.ir.action import Action
from penstock.ir.kind import JOINS, SPREAD, Kind
from penstock.ir.schedule import Schedule
from penstock.passes.vocabulary import Vocabulary, spread_vocabulary
from penstock.verifier.finding import Severity
from penstock.verifier.verify import check, verify
from verifier.build import rules

WHOLE = spread_vocabulary(ps.schedule("1f1b", ranks=3, microbatches=3))
ROWS = [list(row) for row in WHOLE]
PLACES = [(rank, at) for rank, row in enumerate(ROWS) for at, action in enumerate(row) if action.kind in SPREAD]


def changed(rank: int, row: list[Action]) -> Schedule:
    return Schedule.from_actions([row if r == rank else other for r, other in enumerate(ROWS)], WHOLE.placement, microbatches=3)


def test_the_rules_are_part_of_the_proof() -> None:
    proof = verify(WHOLE)
    assert proof.rules["joined"] == "every rank joins every collective once, in the same order"
    assert proof.rules["vocabulary"] == "every rank runs its share of the vocabulary once per microbatch"
    assert not {"joined", "vocabulary"} & set(verify(ps.schedule("1f1b", ranks=3, microbatches=3)).rules)


@pytest.mark.parametrize(("rank", "at"), PLACES, ids=str)
def test_every_action_is_missed(rank: int, at: int) -> None:
    row = ROWS[rank]
    action = row[at]
    findings = check(changed(rank, row[:at] + row[at + 1 :]))
    own = [finding for finding in findings if finding.rule == ("joined" if action.kind in JOINS else "vocabulary")]
    assert [(finding.rank, finding.action) for finding in own] == [(rank, str(action))]
    assert (own[0].severity is Severity.HANG) == (action.kind in JOINS)


@pytest.mark.parametrize("kind", SPREAD)
def test_twice_is_once_too_often(kind: Kind) -> None:
    row = ROWS[1]
    at = next(at for at, action in enumerate(row) if action.kind is kind)
    findings = check(changed(1, [*row, row[at]]))
    assert any("runs twice on rank 1" in finding.message for finding in findings)


def test_collectives_in_another_order_hang() -> None:
    row = ROWS[2]
    joins = [at for at, action in enumerate(row) if action.kind in JOINS]
    swaps = 0
    for one, other in pairwise(joins):
        swapped = list(row)
        swapped[one], swapped[other] = row[other], row[one]
        findings = check(changed(2, swapped))
        assert findings
        if any(finding.rule == "joined" for finding in findings):
            found = next(finding for finding in findings if finding.rule == "joined")
            assert found.severity is Severity.HANG
            assert "but rank 0 joins" in found.message
            swaps += 1
    assert swaps


@pytest.mark.parametrize(("before", "after"), [("S", "COMBINE"), ("BROADCAST", "S"), ("COMBINE", "T")])
def test_the_order_within_a_rank(before: str, after: str) -> None:
    row = [str(action) for action in ROWS[1]]
    one, other = row.index(f"2{before}1"), row.index(f"2{after}1")
    row[one], row[other] = row[other], row[one]
    findings = check(changed(1, [Action.parse(text) for text in row]))
    assert any(finding.rule == "order" and f"2{after}1 needs 2{before}1" in finding.message for finding in findings)


def test_a_stage_between_has_no_share() -> None:
    findings = check(changed(0, [*ROWS[0], Action(1, Kind.S, 0)]))
    assert [finding.rule for finding in findings] == ["vocabulary"]
    assert "names stage 1, which has no share of the vocabulary" in findings[0].message


def test_a_rank_that_waits_for_a_collective_that_waits_for_it() -> None:
    """Rank 1 joins the broadcast of microbatch 0 behind its own S of it: every rank waits for it."""
    rows = [[str(action) for action in row] for row in spread_vocabulary(ps.schedule("1f1b", 2, 1), vocabulary=Vocabulary(embedding=False))]
    rows[1] = ["1F0", "1S0", "1BROADCAST0", "1COMBINE0", "1T0", "1B0"]
    assert "order" in rules(Schedule.from_actions(rows))


def test_inference_has_no_gradients() -> None:
    forward = Schedule.from_actions([["0F0", "0F1"], ["1F0", "1F1"]])
    spread = spread_vocabulary(forward)
    verify(spread)
    rows = [[*row, Action(1, Kind.T, 0)] for row in spread]
    findings = check(Schedule.from_actions(rows, spread.placement, microbatches=2))
    assert {finding.message.split(" makes ")[1] for finding in findings} == {"weight gradients, but nothing here trains"}


def test_one_stage_has_no_head_of_its_own() -> None:
    findings = check(Schedule.from_actions([["0F0", "0S0", "0B0"]]))
    assert "embedding and head cannot be told apart" in findings[0].message


# A second opinion -----------------------------------------------------------------------------------------------------


def runs_to_the_end(rows: list[list[Action]], stages: int) -> bool:
    """Run the rows of a schedule, one stage per rank: every rank posts its joins to one communicator, which takes them in turn.

    Written from the meaning of the actions: a compute action waits for what it reads, and a rank goes on after a join at once. A collective
    is done when all ranks have posted it as their next one; ranks that post different ones never get on.
    """
    at, posted, last = [0] * len(rows), [list[Action]() for _ in rows], stages - 1
    made: set[tuple[int, Action]] = set()
    met: set[Action] = set()

    def has(rank: int, kind: Kind, stage: int, unit: int | None) -> bool:
        return (rank, Action(stage, kind, unit)) in made

    def can_run(rank: int, action: Action) -> bool:
        kind, stage, unit = action.kind, action.stage, action.microbatch
        before = {  # of what the rank itself has made, or its neighbour
            Kind.F: [(stage - 1, Kind.F, stage - 1)] if stage else [],
            Kind.B: [(stage, Kind.F, stage), *([(stage + 1, Kind.B, stage + 1)] if stage < last else [])],
            Kind.COMBINE: [(rank, Kind.S, stage)],
            Kind.BROADCAST: [(rank, Kind.F if stage else Kind.B, stage)] if stage == rank else [],
        }
        waits = {(Kind.F, 0): Kind.COMBINE, (Kind.B, last): Kind.COMBINE, (Kind.S, last): Kind.BROADCAST}
        waits |= {(Kind.T, last): Kind.COMBINE, (Kind.T, 0): Kind.BROADCAST}
        awaited = waits.get((kind, stage))
        joined = awaited is None or Action(stage, awaited, unit) in met
        return joined and all(has(other, needed, of, unit) for other, needed, of in before.get(kind, []))

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] < len(row) and can_run(rank, row[at[rank]]):
                action = row[at[rank]]
                made.add((rank, action))
                posted[rank] += [action] if action.kind in JOINS else []
                at[rank], moved = at[rank] + 1, True
        following = {posts[len(met)] if len(posts) > len(met) else None for posts in posted}
        if len(following) == 1 and (collective := following.pop()) is not None:
            met.add(collective)
            moved = True
    return all(place == len(row) for place, row in zip(at, rows, strict=True))


@pytest.mark.parametrize("rank", range(3))
def test_a_swap_is_found_if_and_only_if_it_never_ends(rank: int) -> None:
    """Every two actions of a rank, exchanged."""
    whole = spread_vocabulary(ps.schedule("1f1b", ranks=3, microbatches=2))
    rows = [list(row) for row in whole]
    assert runs_to_the_end(rows, 3)
    wrong = 0
    for one, other in combinations(range(len(rows[rank])), 2):
        row = list(rows[rank])
        row[one], row[other] = row[other], row[one]
        swapped = [row if place == rank else theirs for place, theirs in enumerate(rows)]
        good = runs_to_the_end(swapped, 3)
        findings = check(Schedule.from_actions(swapped, whole.placement, microbatches=2))
        assert good == (not findings), (row[one], row[other], findings)
        wrong += not good
    assert 0 < wrong < len(rows[rank]) * (len(rows[rank]) - 1) // 2
