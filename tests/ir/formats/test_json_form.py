"""JSON files: everything a table is, and nothing that is not one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from ir.strategies import graphs, packed, placements, row_lists
from penstock.errors import FileFormatError
from penstock.ir.formats.files import save
from penstock.ir.formats.json_form import decode, encode
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import BufferCounts, Program
from penstock.ir.schedule import Schedule


@given(st.data(), placements(3), st.booleans())
def test_plain_data_and_back(data: st.DataObject, placement: Placement, lowered: bool) -> None:
    """Any rows, also wrong ones: the file says what there is, the verifier whether it is right. Ranks may have nothing to do."""
    rows = data.draw(row_lists(placement.ranks, placement.stages, 3))
    graph = data.draw(graphs(placement.stages))
    if data.draw(st.booleans()):
        graph = StageGraph(placement.stages, graph.edges[::2])
    table = (
        Program(packed(rows), placement, 3, graph=graph, name="x", passes="shard")
        if lowered
        else Schedule.from_rows(packed(rows), placement, 3, graph=graph, name="x")
    )
    back = decode(json.loads(json.dumps(encode(table))))
    assert back == table
    assert (type(back), back.name, back.placement.copies, back.graph) == (type(table), "x", placement.copies, graph)


def test_a_program_keeps_its_passes_and_buffers(tmp_path: Path) -> None:
    held = BufferCounts(({0: 2}, {1: 1}), ({0: 1}, {}), {(0, 1, Kind.SEND_F): 3, (1, 0, Kind.SEND_B): 1})
    program = Program(packed([[], []]), Placement.linear(2), 1, passes="reduce-grad,send-receive{receive=paired}", buffers=held)
    save(program, tmp_path / "p.json")
    back = ps.load(tmp_path / "p.json")
    assert isinstance(back, Program)
    assert (back.passes, back.buffers, back.lowered) == (program.passes, held, True)


def test_a_program_half_way_through_lowering_stays_so(tmp_path: Path) -> None:
    save(Program.start(ps.schedule("gpipe", 2, 2)), tmp_path / "p.json")
    back = ps.load(tmp_path / "p.json")
    assert isinstance(back, Program)
    assert not back.lowered


def test_the_file_of_a_schedule_loads_by_its_suffix(tmp_path: Path) -> None:
    schedule = ps.schedule("1f1b", 3, 4, graph=StageGraph.chain(3, [(0, 2)]))
    save(schedule, tmp_path / "s.JSON")
    assert ps.load(tmp_path / "s.JSON") == schedule
    assert json.loads((tmp_path / "s.JSON").read_text()) == schedule.to_json()


def good() -> dict[str, Any]:
    return ps.schedule("gpipe", 2, 2).to_json()


def test_the_good_data_is_good() -> None:
    assert decode(good()) == ps.schedule("gpipe", 2, 2)


def changed(*path: Any, to: Any) -> Callable[[dict[str, Any]], Any]:
    """Put a value at a place of the good data."""

    def change(data: dict[str, Any]) -> Any:
        inner: Any = data
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = to
        return data

    return change


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: {name: value for name, value in data.items() if name != key}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: [], "not a Penstock schedule or program"),
        (lambda data: 7, "not a Penstock schedule or program"),
        (without("format"), "not a Penstock schedule or program"),
        (changed("format", to="torch"), "not a Penstock schedule or program"),
        (changed("type", to="plan"), "not a Penstock schedule or program"),
        (changed("version", to=99), "version 99: this Penstock reads version 1"),
        (without("version"), "version None"),
        *((without(key), f"'{key}' is missing") for key in ("rows", "placement", "microbatches", "edges", "name")),
        (changed("type", to="program"), "'passes', 'lowered', 'buffers' are missing"),
        (changed("rows", 1, 2, to="1F0junk"), "row 2 (rank 1), cell 3: '1F0junk' is not an action"),
        (changed("rows", 1, 2, to=7), "row 2 (rank 1), cell 3: 7 is not an action"),
        (changed("rows", 1, to=None), "row 2 (rank 1): "),
        (changed("rows", 1, to="1F0"), "row 2 (rank 1): "),
        (changed("rows", to={}), "'rows'"),
        (changed("rows", to=[]), "there are 0 rows for 2 ranks"),
        (changed("rows", to=[["0F0"]] * 3), "there are 3 rows for 2 ranks"),
        *((changed("microbatches", to=value), "microbatches") for value in (0, -1, "2", None, 2.5, 2.0, True, [2], 2**40)),
        (changed("placement", to=None), "placement"),
        (changed("placement", "copies", to=[]), "needs the rank of each stage"),
        (changed("placement", "copies", to=[[0, 5]]), "rank 5 in a placement over 2 ranks"),
        (changed("placement", "copies", to=[[0, "x"]]), "placement"),
        (changed("placement", "copies", to=[[0, 0.5]]), "placement"),
        (changed("placement", "copies", to=7), "placement"),
        (changed("placement", "ranks", to="two"), "placement"),
        (changed("edges", to=[[1, 0]]), "edge 1 -> 0"),
        (changed("edges", to=[[0, 7]]), "edge 0 -> 7"),
        (changed("edges", to=[[0]]), "edges"),
        (changed("edges", to=3), "edges"),
        (changed("name", to=3), "name"),
    ],
)
def test_bad_data_gives_one_error_that_names_the_file(tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(change(good())))
    with pytest.raises(FileFormatError) as caught:
        ps.load(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("buffers", 3),
        ("buffers", {}),
        ("buffers", {"activations": [], "gradients": [], "channels": [[0, 1, "SEND", 1]]}),
        ("buffers", {"activations": [{"x": 1}], "gradients": [], "channels": []}),
        ("buffers", {"activations": [], "gradients": [], "channels": [[0, 1]]}),
        ("passes", 3),
        ("lowered", "yes"),
    ],
)
def test_bad_fields_of_a_program_are_refused_by_name(tmp_path: Path, key: str, value: object) -> None:
    data = Program.from_actions([["0F0"]], Placement.linear(1)).to_json()
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**data, key: value}))
    with pytest.raises(FileFormatError) as caught:
        ps.load(path)
    assert str(caught.value).startswith(str(path))
    assert key in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"{]", b"\xff\xfe{}", b"0F0,0B0\n", b"[" * 100_000])
def test_what_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(FileFormatError, match="not a JSON file"):
        ps.load(tmp_path / "bad.json")
