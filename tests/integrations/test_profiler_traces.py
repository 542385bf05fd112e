"""Reading traces: clocks, steps, forms of ranges, and files that are none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import FileFormatError
from penstock.integrations.profiler_traces import (
    align_clocks,
    build_timeline,
    find_busiest_rank,
    find_slow_rank,
    read_step,
    read_trace,
    read_traces,
    stage_profile,
)

COSTS = ps.Costs(f=10.0, i=12.0, w=8.0, b=20.0, latency=1.0)


def simulated(name: str, ranks: int = 3, microbatches: int = 4) -> ps.Timeline:
    return ps.simulate(ps.lower(ps.schedule(name, ranks=ranks, microbatches=microbatches)), COSTS)


def write_traces(
    timeline: ps.Timeline,
    folder: Path,
    *,
    form: Callable[[Any], str] = "PP:{}".format,
    ahead: tuple[float, ...] = (),
    repeats: int = 1,
    processes: Sequence[int] | None = None,
    head: str = "aten::linear",
) -> list[Path]:
    """Write traces as a profiler would: a range is entered when the rank is free, and its first operator comes when its input is there.

    The last stage runs the operator `head`. `processes` are the ranks among all processes.
    """
    paths = []
    for rank in range(timeline.ranks):
        offset = 1e6 + (ahead[rank] if ahead else 0.0)
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        for step in range(repeats):
            begin = offset + step * 2 * timeline.makespan
            for span in timeline.spans(rank):
                entered = begin + span.start - span.wait
                events.append(
                    {"ph": "X", "cat": "user_annotation", "name": form(span.action), "ts": entered, "dur": begin + span.end - entered}
                )
                events.append({"ph": "X", "cat": "cpu_op", "name": "gloo:recv", "ts": entered, "dur": 0.1})
                operator = head if span.action.parts[-1].stage == timeline.table.stages - 1 else "aten::linear"
                events.append({"ph": "X", "cat": "cpu_op", "name": operator, "ts": begin + span.start, "dur": 0.1})
        process = rank if processes is None else processes[rank]
        path = folder / f"rank{process}.json"
        path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": process}}))
        paths.append(path)
    return paths


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "dualpipe-v"])
@pytest.mark.parametrize("form", ["PP:{}", "penstock::{}"])
def test_the_timeline_is_the_one_that_was_traced(tmp_path: Path, name: str, form: str) -> None:
    wanted = simulated(name)
    traced = read_traces(write_traces(wanted, tmp_path, form=form.format))
    assert traced.makespan == pytest.approx(wanted.makespan / 1e6)
    assert traced.bubble == pytest.approx(wanted.bubble)
    for rank in range(wanted.ranks):
        assert [(span.action, span.start) for span in traced.spans(rank)] == [
            (span.action, pytest.approx(span.start / 1e6, abs=1e-12)) for span in wanted.spans(rank)
        ]
    assert stage_profile(traced).layers[0].f == pytest.approx(10e-6)


def test_ranges_with_a_microbatch_alone_are_of_the_ranks_stage(tmp_path: Path) -> None:
    wanted = simulated("1f1b")

    def form(action: Any) -> str:
        return f"{'Forward' if action.kind is ps.Kind.F else 'Backward'} {action.microbatch}"

    traced = read_traces(write_traces(wanted, tmp_path, form=form))
    assert traced.bubble == pytest.approx(wanted.bubble)
    assert stage_profile(traced).layers[1].i == pytest.approx(10e-6)


def test_clocks_of_other_machines_are_aligned(tmp_path: Path) -> None:
    """Rank 1 is an hour ahead and rank 2 behind: what must come before what leaves a range of the size of the latency."""
    wanted = simulated("1f1b")
    traced = read_traces(write_traces(wanted, tmp_path, ahead=(0.0, 3.6e9, -50.0)))
    assert traced.makespan == pytest.approx(wanted.makespan / 1e6, abs=4e-6)
    assert traced.bubble == pytest.approx(wanted.bubble, abs=0.03)
    for transfer in traced.transfers():
        assert transfer.end >= transfer.start


def test_a_clock_that_can_be_right_is_left_alone(tmp_path: Path) -> None:
    wanted = simulated("1f1b")
    ranges = [read_trace(path).steps[0] for path in write_traces(wanted, tmp_path)]
    assert align_clocks(build_timeline(ranges).table, ranges) == [0.0, 0.0, 0.0]  # type: ignore[arg-type]


def test_steps_are_told_apart_by_actions_that_come_again(tmp_path: Path) -> None:
    paths = write_traces(simulated("zbv"), tmp_path, repeats=3)
    assert read_traces(paths, step=0).bubble == pytest.approx(read_traces(paths, step=2).bubble)
    assert np.allclose(read_traces(paths).start, read_traces(paths, step=2).start)
    with pytest.raises(FileFormatError, match="no step 3: the traces hold steps 0 to 2"):
        read_traces(paths, step=3)


def test_compressed_traces(tmp_path: Path) -> None:
    paths = write_traces(simulated("1f1b"), tmp_path)
    packed = [path.with_suffix(".json.gz") for path in paths]
    for path, target in zip(paths, packed, strict=True):
        target.write_bytes(gzip.compress(path.read_bytes()))
    assert read_traces(packed).bubble == read_traces(paths).bubble


def slow_on(rank: int, factor: float = 1.5) -> ps.Timeline:
    times = tuple(factor if stage == rank else 1.0 for stage in range(3))
    return ps.simulate(ps.lower(ps.schedule("1f1b", ranks=3, microbatches=4)), ps.Costs(f=times, i=times, w=times))


def test_a_rank_is_slow_only_for_work_that_others_have_too(tmp_path: Path) -> None:
    assert find_slow_rank(read_step(write_traces(simulated("1f1b"), tmp_path))) is None
    slow = find_slow_rank(read_step(write_traces(slow_on(1), tmp_path)))
    assert slow is not None
    assert (slow.rank, slow.factor) == (1, pytest.approx(1.5))
    assert str(slow) == "rank 1 is slow: it takes 1.50 times as long as other ranks for the same operators"


def test_a_stage_with_more_to_do_is_busy_and_not_slow(tmp_path: Path) -> None:
    """The last stage has a head, which takes as long again as the layers."""
    step = read_step(write_traces(slow_on(2, 2.0), tmp_path, head="aten::cross_entropy_loss"))
    assert find_slow_rank(step) is None
    busiest = find_busiest_rank(step.timeline)
    assert busiest is not None
    assert (busiest.rank, busiest.factor) == (2, pytest.approx(2.0))
    assert "busiest" in str(busiest)


@pytest.mark.parametrize("form", [str, lambda action: f"{'Forward' if action.kind is ps.Kind.F else 'Backward'} {action.microbatch}"])
def test_files_of_one_pipeline_among_several(tmp_path: Path, form: Any) -> None:
    """With two data-parallel copies, a pipeline has the processes 0, 2 and 4; its files may come in any order."""
    wanted = simulated("1f1b")
    paths = write_traces(wanted, tmp_path, form=(lambda action: f"PP:{action}") if form is str else form, processes=(0, 2, 4))
    step = read_step([paths[2], paths[0], paths[1]])
    assert step.processes == (0, 2, 4)
    assert step.timeline.bubble == pytest.approx(wanted.bubble)
    assert [span.action for span in step.timeline.spans(1)] == [span.action for span in wanted.spans(1)]


def test_ranks_are_those_of_their_stages(tmp_path: Path) -> None:
    """Processes that are numbered against the order of the stages, and stages that two ranks have."""
    wanted = simulated("zbv")
    step = read_step(write_traces(wanted, tmp_path, processes=(9, 5, 1)))
    assert step.processes == (9, 5, 1)
    assert step.timeline.table.placement == wanted.table.placement
    both = ps.simulate(ps.lower(ps.schedule("dualpipe", ranks=4, microbatches=8)), COSTS)
    assert read_traces(write_traces(both, tmp_path)[::-1]).table.placement == both.table.placement


def test_copies_of_a_pipeline_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    paths = [*write_traces(simulated("1f1b"), first, processes=(0, 2, 4)), *write_traces(simulated("1f1b"), second, processes=(1, 3, 5))]
    with pytest.raises(FileFormatError, match=r"rank 0\) and .*rank 1\) both ran 0F0: give the files of one pipeline"):
        read_traces(paths)


def test_different_numbers_of_steps_are_refused(tmp_path: Path) -> None:
    """A rank that profiled other steps: the last ones are not the same step."""
    longer, shorter = tmp_path / "longer", tmp_path / "shorter"
    longer.mkdir()
    shorter.mkdir()
    paths = write_traces(simulated("1f1b"), shorter, repeats=2)
    paths[1] = write_traces(simulated("1f1b"), longer, repeats=3)[1]
    for step in (None, 0):
        with pytest.raises(FileFormatError, match=r"2 in .*\(rank 0\), 3 in .*\(rank 1\), 2 in .*\(rank 2\). Profile the same steps"):
            read_traces(paths, step)


def write_gpu_trace(path: Path, *, numbered: bool, shuffled: bool = True) -> None:
    """Two steps of one stage: the host enters ranges early; the GPU runs them later, on two streams and with messages on a third."""
    events: list[dict[str, Any]] = []
    clock = 100.0
    for turn in range(2):
        for number, name in enumerate(["PP:0F0", "PP:0F1", "PP:0B0", "PP:0B1"]):
            ident = {"External id": 10 * turn + number} if numbered else {}
            host = {"ph": "X", "pid": 77, "tid": 1, "ts": 40.0 * turn + 2 * number, "dur": 1.0, "args": ident}
            events.append({**host, "cat": "user_annotation", "name": name})
            for stream, begin, length in ((7, clock, 8.0), (20, clock + 5, 5.0), (33, clock - 50, 90.0)):
                gpu = {"ph": "X", "pid": 0, "tid": stream, "ts": begin, "dur": length, "args": ident}
                events.append({**gpu, "cat": "gpu_user_annotation", "name": name})
                kernel = "ncclDevKernel_SendRecv" if stream == 33 else "gemm"
                events.append({**gpu, "cat": "kernel", "name": kernel})
            clock += 10.0
    if shuffled:
        events = events[::-2] + events[::2]
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0}}))


@pytest.mark.parametrize("numbered", [True, False], ids=["by their number", "by their turn"])
def test_times_of_a_gpu_belong_to_their_ranges(tmp_path: Path, numbered: bool) -> None:
    """In a file in any order, with an event per stream: compute streams count together, the stream of messages does not."""
    write_gpu_trace(tmp_path / "rank0.json", numbered=numbered)
    first, second = read_trace(tmp_path / "rank0.json").steps
    for turn, step in enumerate((first, second)):
        assert [str(each.action) for each in step] == ["0F0", "0F1", "0B0", "0B1"]
        assert [(each.start, each.end) for each in step] == [(100.0 + at, 110.0 + at) for at in range(40 * turn, 40 * turn + 40, 10)]
        assert all(each.entered <= each.start for each in step)
    assert read_traces([tmp_path / "rank0.json"]).makespan == pytest.approx(40e-6)


def spoil(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (spoil("{"), "not a trace of torch.profiler"),
        (spoil("[]"), "the data must be an object, got a list"),
        (
            spoil('{"traceEvents": [7, {"ph": "X"}, {"ph": "X", "name": "PP:0F0", "ts": "early"}], "distributedInfo": {"rank": 0}}'),
            "no range of a pipeline in it: .* Schedule1F1B writes no ranges: .* penstock.compat.torch",
        ),
        (
            spoil('{"traceEvents": [{"ph": "X", "name": "PP:0F0", "ts": NaN, "dur": 1}], "distributedInfo": {"rank": 0}}'),
            "'PP:0F0' has the time nan",
        ),
        (
            spoil('{"traceEvents": [{"ph": "X", "name": "Forward 0", "ts": 1, "dur": Infinity}], "distributedInfo": {"rank": 0}}'),
            "'Forward 0' has the time inf",
        ),
        (
            spoil('{"traceEvents": [], "baseTimeNanoseconds": -Infinity, "distributedInfo": {"rank": 0}}'),
            "baseTimeNanoseconds has the time -inf",
        ),
        (
            spoil('{"traceEvents": [{"ph": "X", "name": "Forward 0", "ts": 1, "dur": 1}], "distributedInfo": {"rank": 0}}'),
            "they are of different runs",
        ),
        (
            spoil('{"traceEvents": [{"ph": "X", "name": "PP:0F0", "ts": 1, "dur": 1}], "distributedInfo": {"rank": 0}}'),
            "not a whole schedule",
        ),
        (Path.unlink, "cannot be read"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, spoilt: Callable[[Path], None], reason: str) -> None:
    paths = write_traces(simulated("1f1b"), tmp_path)
    spoilt(paths[0])
    with pytest.raises(FileFormatError, match=reason):
        read_traces(paths)


def test_no_traces_at_all() -> None:
    with pytest.raises(FileFormatError, match="one file per rank"):
        read_traces([])
