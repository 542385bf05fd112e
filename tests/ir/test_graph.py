"""Stage graphs: chains and the edges that skip stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ir.strategies import graphs
from penstock.errors import PlacementError
from penstock.ir.graph import StageGraph


@given(st.integers(1, 12))
def test_a_chain_feeds_each_stage_from_the_one_before(stages: int) -> None:
    graph = StageGraph.chain(stages)
    assert graph.is_chain
    assert graph.skips == ()
    for stage in range(stages):
        assert graph.inputs_of(stage) == ((stage - 1,) if stage else ())
        assert graph.outputs_of(stage) == ((stage + 1,) if stage + 1 < stages else ())


@given(st.integers(1, 7).flatmap(graphs))
def test_inputs_and_outputs_are_the_two_ends_of_the_edges(graph: StageGraph) -> None:
    assert {(a, b) for b in range(graph.stages) for a in graph.inputs_of(b)} == set(graph.edges)
    assert {(a, b) for a in range(graph.stages) for b in graph.outputs_of(a)} == set(graph.edges)
    assert set(graph.edges) == set(graph.skips) | {(s, s + 1) for s in range(graph.stages - 1)}
    assert graph.is_chain == (not graph.skips)
    assert StageGraph.chain(graph.stages, graph.skips) == graph


@given(st.integers(1, 7).flatmap(graphs))
def test_the_tables_hold_the_inputs_and_outputs(graph: StageGraph) -> None:
    for table, ask in ((graph.input_table, graph.inputs_of), (graph.output_table, graph.outputs_of)):
        assert len(table) == graph.stages
        for stage, row in enumerate(table.tolist()):
            assert sorted(other for other in row if other >= 0) == list(ask(stage))


def test_a_graph_without_a_chain_is_not_one() -> None:
    graph = StageGraph(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
    assert not graph.is_chain
    assert graph.inputs_of(3) == (1, 2)
    assert graph.outputs_of(0) == (1, 2)


@given(st.lists(st.sampled_from([(0, 1), (1, 2), (0, 2)]), max_size=6))
def test_edges_count_once_in_any_order(edges: list[tuple[int, int]]) -> None:
    assert StageGraph(3, tuple(edges)) == StageGraph(3, tuple(reversed(edges * 2)))


@pytest.mark.parametrize("edge", [(1, 1), (2, 1), (-1, 1), (0, 3), (3, 4)])
def test_an_edge_goes_from_a_lower_to_a_higher_stage(edge: tuple[int, int]) -> None:
    with pytest.raises(PlacementError, match=rf"edge {edge[0]} -> {edge[1]}: .* of 0\.\.2"):
        StageGraph.chain(3, [edge])
