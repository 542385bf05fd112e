"""The linker against a search through all entries, on tables of every sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.naive import NaiveLinks, lowered_rows, naive_links, shared_rows
from ir.strategies import graphs, packed, placements, row_lists
from penstock.ir.action import Action, pack_action, unpack_actions
from penstock.ir.dependencies import Linker, Links, find_direction, message_code, needs, peer_stages
from penstock.ir.graph import StageGraph
from penstock.ir.kind import RECEIVES, SENDS, Kind
from penstock.ir.placement import Placement


def as_sets(links: Links, rows: list[list[Action]]) -> NaiveLinks:
    """The library's links in the form of the search."""
    ranks = np.repeat(np.arange(len(rows)), [sum(len(action.parts) for action in row) for row in rows])
    columns = (links.local, links.data, links.messages, links.retired, links.meetings.list_waits(ranks))
    found = NaiveLinks(*({(int(b), int(a)) for b, a in zip(*pairs, strict=True)} for pairs in columns))
    for after, code in zip(*links.missing, strict=True):
        found.missing.add((int(after), name_of(code)))
    return found


def name_of(code: object) -> str:
    return str(next(unpack_actions([int(code)])))  # type: ignore[call-overload]


@st.composite
def whole_rows(draw: st.DrawFn, placement: Placement, microbatches: int) -> list[list[Action]]:
    """Every action of a training step on its own rank, in any order, some backwards split."""
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    for stage in range(placement.stages):
        for microbatch in range(microbatches):
            kinds = draw(st.sampled_from(((Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W))))
            rows[placement.rank_of(stage, microbatch)] += [Action(stage, kind, microbatch) for kind in kinds]
    return [list(draw(st.permutations(row))) for row in rows]


def slices_for(data: st.DataObject, placement: Placement) -> int:
    """Slices need one copy of the model."""
    return data.draw(st.integers(1, 3)) if len(placement.copies) == 1 else 1


@settings(max_examples=120)
@given(st.data(), placements(3), st.integers(1, 3), st.booleans())
def test_whole_tables_link_as_the_search_does(data: st.DataObject, placement: Placement, microbatches: int, lowered: bool) -> None:
    graph, slices = data.draw(graphs(placement.stages)), slices_for(data, placement)
    microbatches *= slices
    rows = data.draw(whole_rows(placement, microbatches))
    if lowered:
        rows = data.draw(st.sampled_from((lowered_rows, shared_rows)))(rows, placement, graph)
    links = Linker(packed(rows).cut_into(slices), placement, graph, microbatches, lowered).links()
    found = as_sets(links, rows)
    assert found == naive_links(rows, placement, graph, microbatches, lowered, slices)
    assert not found.missing
    assert len(found.local) == len(links.local.before)
    assert len(found.data) == len(links.data.before)


@settings(max_examples=200)
@given(st.data(), placements(3), st.integers(1, 2), st.booleans())
def test_broken_tables_link_as_the_search_does(data: st.DataObject, placement: Placement, microbatches: int, lowered: bool) -> None:
    """Anything anywhere: missing and repeated actions, wrong ranks, odd peers, stages and microbatches beyond the counts."""
    graph, slices = data.draw(graphs(placement.stages)), slices_for(data, placement)
    microbatches *= slices
    with_messages = data.draw(st.sampled_from((lowered_rows, shared_rows)))
    whole = with_messages(data.draw(whole_rows(placement, microbatches)), placement, graph)
    strange = data.draw(row_lists(placement.ranks, placement.stages, microbatches))
    rows = [data.draw(st.permutations(row + more)) for row, more in zip(whole, strange, strict=True)]
    rows = [row[: data.draw(st.integers(0, len(row)))] for row in rows]
    links = Linker(packed(rows).cut_into(slices), placement, graph, microbatches, lowered).links()
    assert as_sets(links, rows) == naive_links(rows, placement, graph, microbatches, lowered, slices)


def test_a_message_the_wrong_way_is_not_an_end_of_the_edge() -> None:
    """Stage 0 cannot receive an activation from stage 2, though there is an edge between them."""
    graph = StageGraph.chain(3, [(0, 2)])
    rows = [[Action.parse("0F0"), Action.parse("0RECV_F0<2")], [Action.parse("1F0")], [Action.parse("2F0")]]
    links = Linker(packed(rows), Placement.linear(3), graph, 1, lowered=True).links()
    missing = {name_of(code) for code in links.missing.code}
    assert {"0SEND_F0>2", "2RECV_F0<0"} <= missing


@pytest.mark.parametrize(
    ("action", "wanted"),
    [
        ("0F5", []),
        ("2F5", ["1F5"]),
        ("3F5", ["0F5", "2F5"]),
        ("3B5", ["3F5"]),
        ("2I5", ["2F5", "3I5"]),
        ("0B5", ["0F5", "1I5", "3I5"]),
        ("1W5", ["1I5"]),
        ("(1F7;0B5)OVERLAP_F_B", ["0F7", "0F5", "1I5", "3I5"]),
        ("1SEND_F5", []),
        ("1UNSHARD", []),
        ("3BROADCAST5", ["3F5"]),
        ("3S5", ["3BROADCAST5"]),
        ("3COMBINE5", ["3S5"]),
        ("3T5", ["3COMBINE5"]),
        ("0S5", []),
        ("0COMBINE5", ["0S5"]),
        ("0BROADCAST5", ["0I5"]),
        ("0T5", ["0BROADCAST5"]),
    ],
)
def test_the_rules_in_words(action: str, wanted: list[str]) -> None:
    graph = StageGraph.chain(4, [(0, 3)])
    assert [str(need) for need in needs(Action.parse(action), graph)] == wanted


@given(st.sampled_from((*SENDS, *RECEIVES)), st.integers(1, 9), st.integers(0, 9), st.integers(0, 5))
def test_the_peer_is_written_only_where_it_is_not_the_neighbour(kind: Kind, stage: int, other: int, microbatch: int) -> None:
    if stage == other:
        other += 1
    neighbour = stage + find_direction(kind)
    code = int(message_code(kind, stage, other, microbatch))
    wanted = Action(stage, kind, microbatch, peer=None if other == neighbour else other)
    assert code == pack_action(wanted)[0]
    assert peer_stages(packed([[wanted]])).tolist() == [other]


def test_the_two_copies_of_a_bidirectional_pipeline_do_not_meet() -> None:
    """Microbatch 1 runs the other way, so its messages go from rank 1 to rank 0."""
    placement, graph = Placement.bidirectional(2), StageGraph.chain(2)
    rows = [
        [Action.parse(t) for t in ("0F0", "0SEND_F0", "1RECV_F1", "1F1")],
        [Action.parse(t) for t in ("0F1", "0SEND_F1", "1RECV_F0", "1F0")],
    ]
    links = Linker(packed(rows), placement, graph, 2, lowered=True).links()
    found = as_sets(links, rows)
    assert found.messages == {(1, 6), (5, 2)}
    assert found.data == {(1, 7), (5, 3)}
    assert not found.missing
