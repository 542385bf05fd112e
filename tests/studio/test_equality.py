"""The page compared with the library on random programs: the same times to the last bit, memory, gaps, critical path and files."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.draw.save import build_trace
from penstock.errors import ScheduleError
from penstock.ir.costs import CONTENTION, Costs
from penstock.ir.formats import json_form
from penstock.ir.formats.csv_form import csv_text
from penstock.ir.kind import COPIES
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table
from penstock.simulator import timeline_json
from penstock.simulator.event_loops.flat import Flat
from penstock.simulator.simulate import simulate
from penstock.simulator.timeline import Timeline
from penstock.studio.document import document, timeline_document
from penstock.verifier.rules.offload import peak_host_memory
from simulator.draws import contentions, copied, costs, programs, real_costs, tables
from studio.page import Page

SOURCE = {"kind": "file", "name": "drawn"}
COLUMNS = {
    "start": "start",
    "end": "end",
    "depart": "depart",
    "arrive": "arrive",
    "collectiveStart": "collective_start",
    "collectiveEnd": "collective_end",
    "heldBy": "held_by",
    "optimizer": "optimizer",
}
drawn = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def asked(page: Page, document: dict[str, Any], costs: Costs | None) -> dict[str, Any]:
    """What the page computes from a document that went through JSON text."""
    return page.ask(json.loads(json.dumps(document)), None if costs is None else costs.to_json())


def check(timeline: Timeline, said: dict[str, Any]) -> None:
    """Everything that the page shows of a timeline."""
    assert "error" not in said, said
    for name, ours in COLUMNS.items():
        assert said["timing"][name] == getattr(timeline, ours).tolist(), name
    check_memory(timeline, said["memory"])
    check_host_memory(timeline, said["host"])
    check_gaps(timeline, said["gaps"])
    assert [(s["what"], s["rank"], s["action"], s["start"], s["end"]) for s in said["path"]] == [
        (s.what, s.rank, None if s.action is None else str(s.action), s.start, s.end) for s in timeline.critical_path
    ]
    check_numbers(timeline, said["numbers"])
    check_files(timeline, said)
    check_links(timeline.table, said)


def check_memory(timeline: Timeline, said: list[dict[str, Any]]) -> None:
    for rank, theirs in enumerate(said):
        ours = timeline.memory(rank)
        assert (theirs["fixed"], theirs["peak"], theirs["peakTime"]) == (ours.static, ours.peak, ours.peak_time)
        assert theirs["times"] == ours.times.tolist()
        assert theirs["total"] == ours.total.tolist()
        assert theirs["held"] == {name: values.tolist() for name, values in ours.held.items()}


def check_host_memory(timeline: Timeline, said: list[dict[str, Any]] | None) -> None:
    moves = timeline.table.rows.is_kind(*COPIES).any()
    assert (said is not None) == moves
    for rank, theirs in enumerate(said or []):
        ours = timeline.host_memory(rank)
        assert (theirs["peak"], theirs["peakTime"]) == (ours.peak, ours.peak_time)
        assert theirs["times"] == ours.times.tolist()
        assert theirs["total"] == ours.total.tolist()


def check_gaps(timeline: Timeline, said: list[list[dict[str, Any]]]) -> None:
    for rank, theirs in enumerate(said):
        ours = timeline.gaps(rank)
        assert [(g["start"], g["end"], g["cause"], g["action"], g["rank"]) for g in theirs] == [
            (g.start, g.end, g.cause, None if g.action is None else str(g.action), g.rank) for g in ours
        ]
        assert [g["text"] for g in theirs] == [str(g).split(": ", 1)[1] for g in ours]


def check_numbers(timeline: Timeline, said: dict[str, Any]) -> None:
    assert said["makespan"] == timeline.makespan
    assert said["bubble"] == timeline.bubble
    assert said["spanBubble"] == timeline.span_bubble
    assert said["peaks"] == timeline.peak_memory
    assert said["messages"] == timeline.num_messages
    assert said["bytes"] == timeline.flat.sizes(timeline.costs).sum()
    assert said["busy"] == timeline.busy.tolist()
    assert said["idle"] == {"overhead": 0.0, "slot": 0.0, **timeline.idle_by_cause}


def check_files(timeline: Timeline, said: dict[str, Any]) -> None:
    table = timeline.table
    assert said["csv"] == csv_text(table)
    assert said["json"] == json_form.encode(table)
    again = timeline_json.decode(said["timeline"])
    assert again.table == table
    assert again.costs == timeline.costs
    assert said["timeline"] == {"units": {"time": "", "bytes": False}} | timeline.to_json()
    theirs, ours = said["trace"], json.loads(json.dumps(build_trace(timeline)))
    assert theirs["traceEvents"] == ours["traceEvents"]
    assert theirs["otherData"] == ours["otherData"]


def check_links(table: Table, said: dict[str, Any]) -> None:
    """What an action needs and unblocks, from the rules themselves."""
    rows, links = table.rows, table.links
    pairs = {(int(rows.group[a]), int(rows.group[b])) for part in (links.local, links.data) for a, b in zip(*part, strict=True)}
    needed = {(link["node"], node) for node, found in enumerate(said["needs"]) for link in found}
    unblocked = {(node, link["node"]) for node, found in enumerate(said["unblocks"]) for link in found}
    assert needed == unblocked == pairs
    assert said["actions"] == [str(action) for row in table for action in row]


def simulated(table: Table, costs: Costs) -> Timeline:
    try:
        return simulate(table, costs, engine="plain")
    except ScheduleError:  # too few slots
        assume(False)
        raise


@pytest.mark.slow
@drawn
@given(table=tables, data=st.data())
def test_any_program_is_timed_the_same(page: Page, table: Table, data: st.DataObject) -> None:
    chosen = data.draw(costs(table, contention=data.draw(contentions)))
    timeline = simulated(table, chosen)
    check(timeline, asked(page, document(table, source=SOURCE), chosen))


@pytest.mark.slow
@drawn
@given(table=tables, seed=st.integers(0, 1 << 32), contention=contentions)
def test_floating_point_sums_are_in_the_same_order(page: Page, table: Table, seed: int, contention: str) -> None:
    chosen = real_costs(table, Random(seed), contention)
    timeline = simulated(table, chosen)
    check(timeline, asked(page, document(table, chosen, source=SOURCE), chosen))


@pytest.mark.slow
@drawn
@given(pair=copied())
def test_copies_to_the_host_are_timed_the_same(page: Page, pair: tuple[Table, Costs]) -> None:
    table, chosen = pair
    check(simulated(table, chosen), asked(page, document(table, chosen, source=SOURCE), chosen))


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "seq1f1b"])
def test_copies_that_do_not_hide_are_named_as_causes(page: Page, name: str, shared: int) -> None:
    """Slow copies: forwards wait until memory is free, backwards until their activation is back, and all of it is on the critical path."""
    slices = {"slices": 2} if name == "seq1f1b" else {}
    program = ps.lower(ps.schedule(name, ranks=4, microbatches=6, **slices), offload=100)
    chosen = keeping(program, real_costs(program, Random(1), "independent"), Random(2))
    chosen = replace(chosen, host_bandwidth=0.3, host_latency=0.2, host_link_shared=shared)
    timeline = simulate(program, chosen, engine="plain")
    said = asked(page, document(program, chosen, source=SOURCE), chosen)
    check(timeline, said)
    waited = {gap["text"] for gaps in said["gaps"] for gap in gaps}
    assert any("waits for the copy of" in text and "OFFLOAD" in text for text in waited)
    assert any("waits for the copy of" in text and "RELOAD" in text for text in waited)
    assert {"collective"} <= {step["what"] for step in said["path"]}
    assert [curve["peak"] for curve in said["host"]] == pytest.approx(peak_host_memory(program, chosen))


@pytest.mark.slow
@drawn
@given(program=programs(), seed=st.integers(0, 1 << 32))
def test_measured_times_are_explained_the_same_way(page: Page, program: Program, seed: int) -> None:
    random = Random(seed)
    chosen = real_costs(program, random, "independent")
    timeline = measured(simulated(program, chosen), np.random.default_rng(seed))
    said = asked(page, timeline_document(timeline, source=SOURCE), None)
    check(timeline, said)


def measured(timeline: Timeline, chance: np.random.Generator) -> Timeline:
    """Times as a run might have them: everything half as late again, plus a random delay, small or large."""
    little = chance.choice([0.002, 0.03, 0.3])

    def later(times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.where(times < 0, times, times * 1.5 + chance.uniform(0, little, len(times)))

    columns = [getattr(timeline, name) for name in ("start", "end", "depart", "arrive", "collective_start", "collective_end")]
    times = [later(column) for column in columns]
    for start, end in zip(times[::2], times[1::2], strict=True):
        np.maximum(start, end, out=end)
    return Timeline(timeline.table, timeline.costs, *times, source="measured")


@pytest.mark.parametrize(("lowered", "contention"), [(False, CONTENTION[0]), *((True, contention) for contention in CONTENTION)])
def test_a_schedule_of_many_ranks_is_timed_the_same(page: Page, lowered: bool, contention: str) -> None:
    """Long sums are computed pairwise, which matters only with many ranks."""
    schedule = ps.schedule("dualpipe-v", 10, 22)
    table = ps.lower(schedule, fsdp=True) if lowered else schedule
    timeline = simulate(table, real_costs(table, Random(3), contention), engine="plain")
    said = asked(page, document(table, source=SOURCE), timeline.costs)
    check(timeline, said)


def keeping(table: Table, costs: Costs, random: Random) -> Costs:
    """The same costs, and what slices keep for later ones with the sums of its gradients."""
    kept, sums = ([[random.uniform(0, 1) for _ in range(table.units)] for _ in range(table.stages)] for _ in range(2))
    return replace(costs, kept=kept, kept_gradients=sums)


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("name", ["seq1f1b", "seq-zb-h1", "slimpipe", "zbv"])
def test_sliced_schedules_are_timed_and_named_the_same(page: Page, name: str, lowered: bool) -> None:
    schedule = ps.schedule(name, ranks=3, microbatches=2, slices=3)
    table = ps.lower(schedule) if lowered else schedule
    timeline = simulate(table, keeping(table, real_costs(table, Random(5), "independent"), Random(6)), engine="plain")
    view = timeline_document(timeline, source=SOURCE)
    assert (view["slices"], view["microbatches"]) == (3, 2)
    said = asked(page, view, timeline.costs)
    check(timeline, said)
    assert {"0F0.0", "0F1.2"} <= set(said["actions"])
    assert asked(page, said["view"], timeline.costs) == said


RANKS = ("rank_logits", "rank_s", "rank_t")
SPREADS = {
    "both": ps.Vocabulary(),
    "head": ps.Vocabulary(embedding=False),
    "embedding": ps.Vocabulary(head=False),
}


def spread(name: str, vocabulary: str, seed: int, contention: str = "independent", **shape: Any) -> tuple[Schedule, Costs]:
    """A schedule with its vocabulary on all ranks, and costs with a share, collectives and logits of random sizes."""
    schedule = ps.schedule(name, ranks=3, microbatches=4, **shape)
    random = Random(seed)
    chosen = real_costs(schedule, random, contention)
    tables = {
        field: [[random.uniform(0.1, 2) for _ in range(schedule.units)] for _ in range(schedule.stages)]
        for field in ("s", "t", "broadcast", "combine", "logits")
    }
    shares = {field: [random.choice([random.uniform(0, 3), (random.uniform(0, 3), 1.5)]) for _ in range(3)] for field in RANKS[: seed + 1]}
    chosen = replace(chosen, **tables, **shares)
    return ps.spread_vocabulary(schedule, chosen, SPREADS[vocabulary]), chosen


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("vocabulary", SPREADS)
@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved-1f1b"])
def test_a_spread_vocabulary_is_timed_the_same(page: Page, name: str, vocabulary: str, lowered: bool) -> None:
    for seed, contention in enumerate(("independent", "pair", "rank")):
        schedule, chosen = spread(name, vocabulary, seed, contention)
        table = ps.lower(schedule, fsdp=seed == 1) if lowered else schedule
        timeline = simulate(table, chosen, engine="plain")
        said = asked(page, document(table, chosen, source=SOURCE), chosen)
        check(timeline, said)
        assert any("of all ranks" in gap["text"] for gaps in said["gaps"] for gap in gaps)
        assert asked(page, said["view"], chosen) == said


def test_collectives_of_all_ranks_that_wait_for_each_other_are_on_the_critical_path(page: Page) -> None:
    schedule, chosen = spread("1f1b", "both", 5)
    chosen = replace(chosen, broadcast=20.0, combine=20.0)
    timeline = simulate(schedule, chosen)
    assert [step.what for step in timeline.critical_path].count("collective") > 3
    check(timeline, asked(page, document(schedule, chosen, source=SOURCE), chosen))


def test_a_spread_vocabulary_of_slices_and_of_forwards_alone_is_timed_the_same(page: Page) -> None:
    schedule, chosen = spread("seq1f1b", "both", 3, slices=2)
    check(simulate(schedule, chosen), asked(page, document(schedule, chosen, source=SOURCE), chosen))
    kept = {"F", "S", "BROADCAST", "COMBINE"}
    whole, chosen = spread("1f1b", "head", 4)
    rows = [[str(action) for action in row if action.kind.name in kept] for row in whole]
    forwards = ps.Schedule.from_actions(rows, whole.placement)
    check(simulate(forwards, chosen), asked(page, document(forwards, chosen, source=SOURCE), chosen))


def test_times_of_three_overlapped_actions_are_added_as_in_the_library(page: Page) -> None:
    rows = [["0F0", "0F1", "(0F2;0B0;0F3)OVERLAP_F_B", "(0B1;0B2;0B3)OVERLAP_F_B"]]
    table = ps.Schedule.from_actions(rows, ps.Placement.linear(1))
    for seed in range(20):
        chosen = real_costs(table, Random(seed), "independent")
        check(simulate(table, chosen), asked(page, document(table, source=SOURCE), chosen))


def test_collectives_that_wait_for_each_other_are_on_the_critical_path(page: Page) -> None:
    passes = ps.PassList.parse("shard{lookahead=3},reduce-grad,send-receive,buffers")
    table = passes.apply(ps.schedule("interleaved-1f1b", 2, 4))
    timeline = simulate(table, Costs(reduce=[10.0, 11.0, 12.0, 13.0], unshard=100.0))
    assert [step.what for step in timeline.critical_path].count("collective") > 1
    check(timeline, asked(page, document(table, source=SOURCE), timeline.costs))


def test_a_document_without_its_costs_has_the_default_ones(page: Page) -> None:
    table = ps.schedule("zbv", 4, 8)
    check(simulate(table), asked(page, document(table, source=SOURCE), Costs()))


def test_the_page_knows_every_cost(page: Page) -> None:
    """A field that is added to `Costs` must be added to `web/src/core/costs.ts`, with what it changes."""
    table = ps.lower(ps.schedule("seq1f1b", 2, 2, slices=2), fsdp=True, offload=100)
    for field in fields(Costs):
        special: dict[str, Any] = {"contention": "rank", "host_link_shared": 2, "lanes": [[[0, 0], [0, 0]], [[0, 0], [0, 0]]]}
        with_it: dict[str, Any] = {"lanes": {"contention": "links", "latency": 0.75}}
        chosen = Costs(**{field.name: special.get(field.name, 0.75), **with_it.get(field.name, {})})
        said = asked(page, document(table, chosen, source=SOURCE), chosen)
        check(simulate(table, chosen, engine="plain"), said)


def test_forwards_only_hold_no_activations(page: Page) -> None:
    table = ps.Schedule.from_actions([["0F0", "0F1"], ["1F0", "1F1"]], ps.Placement.linear(2))
    timeline = simulate(table, Costs(output=2.0, latency=0.5))
    assert Flat(table).num_nodes == 4
    check(timeline, asked(page, document(table, source=SOURCE), timeline.costs))
