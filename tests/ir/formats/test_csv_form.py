"""CSV files: ours and PyTorch's, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

import penstock as ps
from ir.naive import lowered_rows
from ir.peers import lowered, order_of, runtime, texts, write_order
from penstock.errors import FileFormatError
from penstock.ir.action import Action
from penstock.ir.formats.csv_form import read_csv, write_whole
from penstock.ir.formats.files import save
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.table import Table

MULTI = [
    ("Interleaved1F1B", 2, 4, 2),
    ("Interleaved1F1B", 4, 8, 3),
    ("LoopedBFS", 3, 5, 2),
    ("InterleavedZeroBubble", 4, 8, 2),
    ("ZBVZeroBubble", 4, 8, 2),
    ("DualPipeV", 3, 7, 2),
    ("DualPipeV", 1, 4, 2),
]
STYLES = {"ZBVZeroBubble": "v", "DualPipeV": "v"}


def strings(table: Table) -> list[list[str]]:
    return [list(map(str, row)) for row in table]


def program_of(schedule: Schedule) -> Program:
    """A schedule with messages, written out plainly."""
    rows = lowered_rows([list(row) for row in schedule], schedule.placement, schedule.graph)
    return Program.from_actions(rows, schedule.placement, microbatches=schedule.microbatches, graph=schedule.graph)


# PyTorch's files load here --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), MULTI)
def test_pytorchs_compute_only_files_load(tmp_path: Path, name: str, ranks: int, microbatches: int, chunks: int) -> None:
    theirs = lowered(name, ranks, microbatches, chunks)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    ours = ps.load(tmp_path / "theirs.csv")
    assert isinstance(ours, Schedule)
    assert strings(ours) == texts(theirs.pipeline_order)
    assert (ours.ranks, ours.microbatches, ours.stages) == (ranks, microbatches, ranks * chunks)
    if ranks > 1:
        assert ours.placement.kind == STYLES.get(name, "looped")


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), [*MULTI, ("GPipe", 4, 6, 1), ("GPipe", 1, 3, 1)])
def test_pytorchs_lowered_files_load(tmp_path: Path, name: str, ranks: int, microbatches: int, chunks: int) -> None:
    theirs = lowered(name, ranks, microbatches, chunks)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), format="compute_comms")
    ours = ps.load(tmp_path / "theirs.csv")
    assert isinstance(ours, Program)
    assert strings(ours) == texts(theirs.pipeline_order_with_comms)  # type: ignore[arg-type]
    assert not len(ours.links.missing.after)
    assert ours.microbatches == microbatches
    assert ours.name == "theirs"


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8), (5, 2)])
def test_reductions_in_pytorchs_compute_only_gpipe_are_left_to_lowering(tmp_path: Path, ranks: int, microbatches: int) -> None:
    """PyTorch puts REDUCE_GRAD into the order of its single-stage schedules; the order is still a schedule."""
    order = order_of("GPipe", ranks, microbatches)
    assert any("REDUCE_GRAD" in text for row in texts(order) for text in row)
    write_order(order, tmp_path / "gpipe.csv")
    ours = ps.load(tmp_path / "gpipe.csv")
    assert isinstance(ours, Schedule)
    assert ours == ps.schedule("gpipe", ranks, microbatches)


def test_reductions_on_one_rank_make_a_program(tmp_path: Path) -> None:
    """With nothing to send, a program is told by its reductions alone."""
    write_order(order_of("GPipe", 1, 3), tmp_path / "one.csv")
    ours = ps.load(tmp_path / "one.csv")
    assert isinstance(ours, Program)
    ends = ["0REDUCE_GRAD", "0WAIT_REDUCE_GRAD"] if hasattr(schedules, "_add_wait_send") else ["0REDUCE_GRAD"]
    assert strings(ours) == [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2", *ends]]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 4), (4, 8)])
def test_pytorchs_1f1b_is_refused_where_its_last_rank_counts_from_one(tmp_path: Path, ranks: int, microbatches: int) -> None:
    """Its last rank runs F1 to F(M) of a batch whose last microbatch is M - 1. The same file with that put right loads."""
    order = order_of("1F1B", ranks, microbatches)
    write_order(order, tmp_path / "theirs.csv")
    with pytest.raises(FileFormatError) as caught:
        ps.load(tmp_path / "theirs.csv")
    assert f"microbatch {microbatches if ranks > 1 else 0}" in str(caught.value)
    if ranks > 2:
        assert (caught.value.row, f"{ranks - 1}F{microbatches} is beyond" in str(caught.value)) == (ranks - 1, True)
    last = order[ranks - 1]
    order[ranks - 1] = [
        a._replace(microbatch_index=a.microbatch_index - 1) if a is not None and repr(a).startswith(f"{ranks - 1}F") else a for a in last
    ]
    write_order(order, tmp_path / "right.csv")
    ours = ps.load(tmp_path / "right.csv")
    compute = ours.schedule() if isinstance(ours, Program) else ours
    assert compute == ps.schedule("1f1b", ranks, microbatches)


# Ours load in PyTorch -------------------------------------------------------------------------------------------------


OURS = ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb", "zb-h1", "zbv", "dualpipe-v"]
SHAPES = [(1, 3), (2, 2), (4, 8), (5, 2)]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_our_schedules_load_in_pytorch(tmp_path: Path, name: str, ranks: int, microbatches: int) -> None:
    ours = ps.schedule(name, ranks, microbatches)
    ours.to_csv(tmp_path / "ours.csv")
    theirs = runtime(ranks, microbatches, ours.chunks)
    theirs._load_csv(str(tmp_path / "ours.csv"), format="compute_only")
    assert texts(theirs.pipeline_order) == strings(ours)
    assert theirs.stage_index_to_group_rank == {stage: ours.placement.rank_of(stage) for stage in range(ours.stages)}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_our_programs_load_in_pytorch(tmp_path: Path, name: str, ranks: int, microbatches: int) -> None:
    """Since 2.15, PyTorch wants a wait for each send and reduction."""
    waits = hasattr(schedules, "_add_wait_send")
    passes = "shard,reduce-grad{wait=now},send-receive,wait-send" if waits else "shard,reduce-grad,send-receive,buffers"
    ours = ps.PassList.parse(passes).apply(ps.schedule(name, ranks, microbatches))
    ours.to_csv(tmp_path / "ours.csv")
    theirs = runtime(ranks, microbatches, ours.chunks)
    theirs._load_csv(str(tmp_path / "ours.csv"), format="compute_comms")
    assert texts(theirs.pipeline_order_with_comms) == strings(ours)  # type: ignore[arg-type]
    assert ps.load(tmp_path / "ours.csv") == ours


def test_overlapped_and_split_actions_load_in_pytorch(tmp_path: Path) -> None:
    ours = Schedule.from_actions([["0F0", "0F1", "0I0", "0W0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1I1", "1W1"]], Placement.linear(2))
    ours.to_csv(tmp_path / "ours.csv")
    theirs = runtime(2, 2)
    theirs._load_csv(str(tmp_path / "ours.csv"))
    assert texts(theirs.pipeline_order) == strings(ours)


# Ours load here -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), MULTI)
def test_a_round_trip_keeps_schedules_and_programs(tmp_path: Path, name: str, ranks: int, microbatches: int, chunks: int) -> None:
    write_order(order_of(name, ranks, microbatches, chunks), tmp_path / "theirs.csv")
    schedule = ps.load(tmp_path / "theirs.csv")
    assert isinstance(schedule, Schedule)
    for table in (schedule, program_of(schedule)) if ranks > 1 else (schedule,):
        save(table, tmp_path / "ours.csv")
        assert ps.load(tmp_path / "ours.csv") == table


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 5), st.integers(1, 6))
def test_a_schedule_is_written_spaced_by_step(tmp_path_factory: pytest.TempPathFactory, name: str, ranks: int, microbatches: int) -> None:
    schedule = ps.schedule(name, ranks, microbatches)
    path = tmp_path_factory.getbasetemp() / "spaced.csv"
    schedule.to_csv(path)
    rows = [line.split(",") for line in path.read_text().splitlines()]
    for step, row in enumerate(read_grid(schedule.grid(), ranks)):
        assert [cells[step] if step < len(cells) else "" for cells in rows] == row
    assert ps.load(path) == schedule


def read_grid(text: str, ranks: int) -> list[list[str]]:
    lines = text.split("\n")
    starts = [lines[0].index(f"rank {rank}") for rank in range(ranks)]
    return [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines[1:]]


def test_bidirectional_and_skipping_programs_come_back(tmp_path: Path) -> None:
    both = Schedule.from_actions([["0F0", "1F1", "1B1", "0B0"], ["0F1", "1F0", "1B0", "0B1"]], Placement.bidirectional(2))
    graph = StageGraph.chain(3, [(0, 2)])
    skip = Schedule.from_actions([[f"{r}F0", f"{r}B0"] for r in range(3)], Placement.linear(3), graph=graph)
    for schedule in (both, skip):
        program = program_of(schedule)
        program.to_csv(tmp_path / "p.csv")
        back = ps.load(tmp_path / "p.csv")
        assert back == program
        assert (back.placement, back.graph) == (schedule.placement, schedule.graph)


def test_a_one_rank_program_comes_back(tmp_path: Path) -> None:
    program = Program.from_actions([["0UNSHARD", "0F0", "0B0", "0RESHARD", "0REDUCE_GRAD"]], Placement.linear(1))
    program.to_csv(tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_bytes() == b"0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\r\n"
    assert ps.load(tmp_path / "p.csv") == program


def test_idle_cells_spaces_and_a_byte_order_mark_are_taken(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_bytes(b"\xef\xbb\xbf0F0, 0F1 ,,0B0,,0B1\r\n,1F0,1B0,1F1,1B1\r\n\r\n,,\r\n")
    assert strings(ps.load(tmp_path / "s.csv")) == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


# Bad files ------------------------------------------------------------------------------------------------------------

GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


def refused(path: Path, content: bytes | str) -> FileFormatError:
    """The one error that a bad file gives; it names the file."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileFormatError) as caught:
        ps.load(path)
    assert str(caught.value).startswith(str(path))
    return caught.value


def test_the_good_file_is_good(tmp_path: Path) -> None:
    (tmp_path / "good.csv").write_text(GOOD)
    assert ps.load(tmp_path / "good.csv").microbatches == 2


@pytest.mark.parametrize(
    ("content", "row", "cell", "reason"),
    [
        ("", None, None, "the file is empty"),
        ("\n\n,,,\n", None, None, "the file is empty"),
        ("0F0,0B0\n\n1F0,1B0\n", 1, None, "the row is empty"),
        ("0F0,0B0\n,,\n1F0,1B0\n", 1, None, "the row is empty"),
        (GOOD.replace("1B0", "1B0junk"), 1, 2, "'1B0junk' is not an action"),
        (GOOD.replace("1B0", "1Q0"), 1, 2, "there is no kind 'Q'"),
        (GOOD.replace("0F1", "0F99999999"), 0, 1, "microbatch 99999999 of stage 0"),
        (GOOD.replace("1F0", "0F0"), 1, 1, "0F0 is there twice; the first is in row 1, cell 1"),
        (GOOD.replace("0F1", "0F0"), 0, 1, "0F0 is there twice; the first is in row 1, cell 1"),
        ("0F0,0F1,0F2\n,1F0,1F1\n,,,1F2\n", 2, 3, "1F2 is on rank 2, but stage 1 is on rank 1"),
        ("0F0,0B1,0F1\n1F0,1F1,1B0,0B0,1B1\n", 1, 3, "0B0 is on rank 1, but stage 0 is on rank 0"),
        (GOOD.replace(",0B1", ""), 0, None, "stage 0 has no B, or I and W, for microbatch 1 of 0..1; the row ends after 4 cells"),
        (GOOD.replace("1F1,", ","), 1, None, "stage 1 has no F for microbatch 1 of 0..1"),
        (GOOD.replace("0B1", "0I1"), 0, None, "stage 0 has no B, or I and W, for microbatch 1"),
        ("0F0\n2F0\n", 1, 0, "2F0 cannot belong to a file of only 2 compute actions"),
        ("0F0,0F1\n2F0,2F1\n", None, None, "stage 1 is on no rank, though stages go up to 2"),
        (GOOD.replace("1F1,1B1", "1F7,1B7"), 1, 3, "1F7 is beyond the others: no stage has an F for microbatch 2"),
        (GOOD.replace("1F1,1B1", "1F9,1B9"), 1, 3, "1F9 cannot belong to a file of only 8 compute actions"),
        (GOOD.replace("1B1", "1F1,1B1,1F2,1B2"), 1, 4, "1F1 is there twice"),
        (GOOD.replace("1B1", "1B1,1F2,1B2"), 0, None, "stage 0 has no F for microbatch 2 of 0..2; the row ends after 5 cells"),
        ("0F0,0B0\n1F0,1F1,1B0,1B1\n2F0,2B0", 1, 1, "1F1 is beyond the others: only 1 of 3 stages have an F for microbatch 1"),
        (GOOD.replace("1F1,1B1", "1F1,1B1,9F0"), 1, 5, "9F0 cannot belong to a file of only 9 compute actions"),
        ("0SEND_F0\n1RECV_F0\n", None, None, "there is no compute action"),
        (b"0F0,\xff\xfe\n", None, None, "not a CSV file"),
        (b"0F0,\x00\n", 0, 1, "is not an action"),
        (b"P\x00K\x03\x04" * 20, 0, 0, "is not an action"),
        (f"0F0,{'x' * 200_000}\n", None, None, "not a CSV file"),
    ],
)
def test_a_bad_file_gives_one_error_that_names_the_place(
    tmp_path: Path, content: bytes | str, row: int | None, cell: int | None, reason: str
) -> None:
    error = refused(tmp_path / "bad.csv", content)
    assert reason in str(error)
    assert (error.row, error.cell) == (row, cell)
    place = ("" if row is None else f", row {row + 1} (rank {row})") + ("" if cell is None else f", cell {cell + 1}")
    assert str(error).startswith(f"{tmp_path / 'bad.csv'}{place}: ")


def test_a_microbatch_beyond_the_count_is_named_by_its_cell(tmp_path: Path) -> None:
    """PyTorch's validator counts microbatches and takes any numbers for them."""
    (tmp_path / "m.csv").write_text(GOOD.replace("1F1,1B1", "1F2,1B2").replace("0F1", "0F2").replace("0B1", "0B2"))
    runtime(2, 2)._load_csv(str(tmp_path / "m.csv"))
    error = refused(tmp_path / "m.csv", (tmp_path / "m.csv").read_bytes())
    assert (error.row, error.cell) == (0, 1)
    assert "0F2 is beyond the others: no stage has an F for microbatch 1" in str(error)


def test_messages_of_stages_that_do_not_exist_are_left_to_the_verifier(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("0F0,0SEND_F0\n9RECV_F0,1RECV_F0,1F0\n")
    assert strings(ps.load(tmp_path / "p.csv"))[1][0] == "9RECV_F0"


def test_a_lenient_load_leaves_repeats_holes_and_wrong_ranks_to_the_verifier(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("0F0,0SEND_F0,0F0,1F1\n1RECV_F0,1F0,0F1\n")
    table = ps.load(tmp_path / "p.csv", strict=False)
    assert strings(table) == [["0F0", "0SEND_F0", "0F0", "1F1"], ["1RECV_F0", "1F0", "0F1"]]


def test_a_missing_file_is_the_systems_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_csv(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("name", ["schedule.txt", "schedule"])
def test_an_unknown_suffix_is_refused(tmp_path: Path, name: str) -> None:
    for act in (ps.load, lambda path: save(ps.schedule("gpipe", 2, 2), path)):
        with pytest.raises(FileFormatError, match=r"is not one of \.csv, \.json"):
            act(tmp_path / name)


# All or nothing -------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.csv"
    ps.schedule("gpipe", 2, 2).to_csv(path)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        ps.schedule("gpipe", 4, 4).to_csv(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_table_that_cannot_be_written_out_leaves_the_old_file(tmp_path: Path) -> None:
    def source(rank: int) -> object:
        raise RuntimeError("no such row")

    (tmp_path / "s.csv").write_text("old")
    with pytest.raises(RuntimeError, match="no such row"):
        Schedule(Placement.linear(2), 1, source).to_csv(tmp_path / "s.csv")  # type: ignore[arg-type]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_whole_file_is_written_in_place_of_the_old(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.txt", "one\r\n")
    write_whole(tmp_path / "a.txt", "two\n")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a.txt", b"two\n")]


def test_every_kind_survives_a_file(tmp_path: Path) -> None:
    program = Program.from_actions(
        [
            [
                "0UNSHARD",
                "0S0",
                "0COMBINE0",
                "0F0",
                "0SEND_F0",
                "0F1",
                "0SEND_F1",
                "0OFFLOAD0",
                "0RECV_B0",
                "0RELOAD0",
                "0I0",
                "0W0",
                "0WAIT_SEND_F0",
                "0RECV_B1",
                "0B1",
                "0BROADCAST1",
                "0T1",
                "0RESHARD",
                "0REDUCE_GRAD",
                "0WAIT_REDUCE_GRAD",
                "0WAIT_SEND_F1",
            ],
            ["1RECV_F0", "1F0", "1RECV_F1", "(1F1;1B0)OVERLAP_F_B", "1SEND_B0", "1B1", "1SEND_B1", "1WAIT_SEND_B0", "1WAIT_SEND_B1"],
        ],
        Placement.linear(2),
    )
    assert {a.kind for row in program for a in row} == set(Kind)
    program.to_csv(tmp_path / "p.csv")
    assert ps.load(tmp_path / "p.csv") == program
    assert [Action.parse(cell) for cell in (tmp_path / "p.csv").read_text().split("\n")[0].strip().split(",")] == list(program[0])
