"""The page's changes to a schedule, compared with the library: the same timing graph and the same findings in the same words."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.ir.action import Action
from penstock.ir.formats import json_form
from penstock.ir.formats.action_text import format_action
from penstock.ir.kind import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.studio.document import document
from penstock.verifier.verify import check
from simulator.draws import orders, zoo
from studio.page import Page

SOURCE = {"kind": "file", "name": "drawn"}
DTYPES = {"i8": "<i1", "i32": "<i4"}
drawn = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def mutate(rows: list[list[Action]], slices: int, random: Random) -> str:
    """Change rows in place by one random change; returns it as the page writes it, microbatch and slice as one number."""
    kinds = [Kind.B, Kind.I]
    where = [(rank, at) for rank, row in enumerate(rows) for at, action in enumerate(row) if action.kind in kinds]
    choice = random.random()
    rank = random.choice([rank for rank, row in enumerate(rows) if row])
    row = rows[rank]
    if where and choice < 0.3:
        home, place = random.choice(where)
        chosen = rows[home][place]
        full, of_input, of_weights = (replace(chosen, kind=kind) for kind in (Kind.B, Kind.I, Kind.W))
        if chosen == full:
            for each in rows:
                each[:] = [part for action in each for part in ((of_input, of_weights) if action == full else (action,))]
            return f"s{chosen.stage}.{chosen.unit(slices)}"
        if of_weights in rows[home]:
            for each in rows:
                if of_input in each and of_weights in each:
                    each[:] = [full if action == of_input else action for action in each if action != of_weights]
            return f"j{chosen.stage}.{chosen.unit(slices)}"
    if choice < 0.8:
        source, target = random.randrange(len(row)), random.randrange(len(row))
        row.insert(target, row.pop(source))
        return f"m{rank}.{source}.{target}"
    at = random.randrange(len(row))
    if choice < 0.9 and len(row) > 1:
        row.pop(at)
        return f"d{rank}.{at}"
    single = [action for action in row if action.kind is not Kind.OVERLAP_F_B]
    if not single:
        return f"m{rank}.0.0"
    copied = random.choice(single)
    row.insert(at, copied)
    return f"a{rank}.{at}.{format_action(copied, slices)}"


def unpacked(column: dict[str, str]) -> list[int]:
    [(name, text)] = column.items()
    return np.frombuffer(base64.b64decode(text), DTYPES[name]).tolist()


def check_same(table: Table, said: dict[str, Any]) -> None:
    """The page's view of the changed order is the document that the library would write."""
    assert "error" not in said, said
    findings = check(table)
    ours = document(table, source=SOURCE, findings=findings)
    assert [(f["rule"], f["severity"], f["rank"], f["step"], f["action"], f["message"], f["remedy"]) for f in said["findings"]] == [
        (f.rule, f.severity.name.lower(), f.rank, f.step, f.action, f.message, f.remedy) for f in findings
    ]
    for theirs, finding in zip(said["findings"], ours["findings"], strict=True):
        if finding["rule"] == "deadlock":
            assert theirs.get("cycle", []) == finding["cycle"]
    assert said["timed"] == ours["timed"]
    for name, column in ours["entries"].items():
        assert said["entries"]["unit" if name == "microbatch" else name] == unpacked(column), name
    if not said["timed"]:
        return
    for group in ("graph", "local", "messages"):
        for name, column in ours[group].items():
            assert said[group][name] == unpacked(column), name
    assert said["channels"] == ours["channels"]


def changed(page: Page, schedule: Schedule, seed: int, count: int) -> None:
    random, rows = Random(seed), [list(row) for row in schedule]
    edits = "_".join(mutate(rows, schedule.slices, random) for _ in range(count))
    shape = {"microbatches": schedule.microbatches, "graph": schedule.graph, "name": schedule.name, "slices": schedule.slices}
    table = Schedule.from_actions(rows, schedule.placement, **shape)
    said = page.edit(json.loads(json.dumps(document(schedule, source=SOURCE))), edits)
    check_same(table, said)
    assert said["json"] == json_form.encode(table)


@pytest.mark.slow
@drawn
@given(schedule=zoo(), seed=st.integers(0, 1 << 32), count=st.integers(0, 4))
def test_changes_to_named_schedules_are_judged_as_the_verifier_does(page: Page, schedule: Schedule, seed: int, count: int) -> None:
    changed(page, schedule, seed, count)


@pytest.mark.slow
@drawn
@given(schedule=orders(), seed=st.integers(0, 1 << 32), count=st.integers(0, 4))
def test_changes_to_any_order_are_judged_as_the_verifier_does(page: Page, schedule: Schedule, seed: int, count: int) -> None:
    changed(page, schedule, seed, count)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-1f1b", "dualpipe", "seq1f1b", "seq-zb-h1"])
def test_a_few_changes_to_a_schedule(page: Page, name: str, seed: int) -> None:
    slices = {"slices": 4} if name.startswith("seq") else {}
    changed(
        page,
        ps.schedule(name, ranks=4, microbatches={"zbv": 6, **dict.fromkeys(("seq1f1b", "seq-zb-h1"), 2)}.get(name, 8), **slices),
        seed,
        3,
    )


def test_slices_out_of_order_are_found(page: Page) -> None:
    schedule = ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=4)
    row = [str(action) for action in schedule[1]]
    one, other = row.index("1F1.0"), row.index("1F1.1")
    said = page.edit(document(schedule, source=SOURCE), f"m1.{other}.{one}")
    assert [finding["message"] for finding in said["findings"]] == [f"1F1.1 needs 1F1.0, which rank 1 runs only in step {one + 1}"]
    assert not said["timed"]
    assert said["json"]["slices"] == 4
    assert said["json"]["microbatches"] == 2
    assert check(json_form.decode(said["repaired"])) == []


@pytest.mark.parametrize(("stage", "rank"), [(1, 0), (6, 3), (0, 2)])
def test_a_stage_on_another_rank_keeps_the_schedule_free_of_deadlock(page: Page, stage: int, rank: int) -> None:
    schedule = ps.schedule("zbv", ranks=4, microbatches=6)
    said = page.edit(document(schedule, source=SOURCE), f"p{stage}.{rank}")
    table = json_form.decode(said["json"])
    assert table.placement.rank_of(stage) == rank
    assert [table.placement.rank_of(other) for other in range(8) if other != stage] == [
        schedule.placement.rank_of(other) for other in range(8) if other != stage
    ]
    assert said["findings"] == []
    check_same(table, said)


def shuffled(seed: int) -> Table:
    random, schedule = Random(seed), ps.schedule("1f1b", ranks=4, microbatches=6)
    rows = [list(row) for row in schedule]
    for _ in range(3):
        rank = random.randrange(4)
        rows[rank].insert(random.randrange(12), rows[rank].pop(random.randrange(12)))
    return Schedule.from_actions(rows, schedule.placement, microbatches=6)


REMEDY = re.compile(r"Let rank (\d+) run (\w+)(, and what that needs,)? before its step (\d+)|Move (\w+) before step (\d+) of rank (\d+)")


@pytest.mark.parametrize("seed", range(30))
def test_applying_a_remedy_makes_the_change_that_it_names(page: Page, seed: int) -> None:
    table = shuffled(seed)
    findings = check(table)
    said = page.edit(document(table, source=SOURCE, findings=findings), "")
    for finding, applied in zip(findings, said["applied"], strict=True):
        match = REMEDY.match(finding.remedy)
        assert match is not None
        rank, step = (int(match[1] or match[7]), int(match[4] or match[6]))
        stop, moved = str(table[rank][step]), match[2] or match[5]
        row = applied["rows"][rank]
        assert row.index(moved) < row.index(stop)
        assert [action for action in row if action != moved][:step] == [str(action) for action in table[rank]][:step]


@pytest.mark.parametrize("seed", range(30))
def test_a_repaired_order_is_proved_by_the_verifier(page: Page, seed: int) -> None:
    table = shuffled(seed)
    said = page.edit(document(table, source=SOURCE, findings=check(table)), "")
    repaired = json_form.decode(said["repaired"])
    assert check(repaired) == []
    assert sorted(map(str, repaired[0])) == sorted(map(str, table[0]))


@pytest.mark.slow
@drawn
@given(schedule=orders(), seed=st.integers(0, 1 << 32))
def test_any_changed_order_can_be_repaired(page: Page, schedule: Schedule, seed: int) -> None:
    random, rows = Random(seed), [list(row) for row in schedule]
    edits = "_".join(mutate(rows, schedule.slices, random) for _ in range(3))
    said = page.edit(document(schedule, source=SOURCE), edits)
    overlapped = any("OVERLAP" in finding["action"] for finding in said["findings"])
    if said["repaired"] is None:
        assert overlapped
    else:
        assert check(json_form.decode(said["repaired"])) == []


@pytest.mark.slow
@drawn
@given(schedule=st.one_of(zoo(), orders()), seed=st.integers(0, 1 << 32), count=st.integers(1, 5))
def test_moved_actions_can_always_be_repaired(page: Page, schedule: Schedule, seed: int, count: int) -> None:
    """The dependencies stay those of an order that runs, so there is one, also of actions that run together."""
    random, moves = Random(seed), []
    for _ in range(count):
        rank = random.choice([rank for rank, row in enumerate(schedule) if row])
        moves.append(f"m{rank}.{random.randrange(len(schedule[rank]))}.{random.randrange(len(schedule[rank]))}")
    said = page.edit(document(schedule, source=SOURCE), "_".join(moves))
    repaired = json_form.decode(said["repaired"])
    assert check(repaired) == []
    assert [sorted(map(str, row)) for row in repaired] == [sorted(map(str, row)) for row in schedule]


def test_a_hang_is_repaired_where_it_came_from(page: Page) -> None:
    """One forward was moved too far back: it is moved forward again, and no other rank is touched."""
    schedule = ps.schedule("1f1b", ranks=8, microbatches=16)
    said = page.edit(document(schedule, source=SOURCE), f"m0.{[str(action) for action in schedule[0]].index('0F3')}.12")
    assert [finding["severity"] for finding in said["findings"]] == ["hang"]
    assert said["repairs"].split("_") == ["m0.12.7"]
    assert check(json_form.decode(said["repaired"])) == []


@pytest.mark.parametrize("text", ["x", "m0.1", "m0.1.2.3", "s1", "a0.0.0X0", "p0.x", "m0.-1.2", "i0.0_", "m0.99.0", "s0.0", "p0.9", "d7.0"])
def test_changes_that_are_none_are_refused(page: Page, text: str) -> None:
    said = page.edit(document(ps.schedule("zbv", ranks=2, microbatches=2), source=SOURCE), text)
    assert "EditError" in said["error"] or said["error"].startswith("Error: ")


def test_a_program_is_changed_as_the_schedule_of_its_computations(page: Page) -> None:
    schedule = ps.schedule("zbv", ranks=4, microbatches=6)
    said = page.edit(document(ps.lower(schedule, fsdp=True), source=SOURCE), "")
    assert json_form.decode(said["json"]) == schedule
    check_same(schedule, said)
