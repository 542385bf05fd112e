"""Reading traces: clocks, steps, forms of ranges, and files that are none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import FileFormatError
from penstock.integrations.profiler_traces import align_clocks, build_timeline, find_slow_rank, read_traces, stage_profile

COSTS = ps.Costs(f=10.0, i=12.0, w=8.0, b=20.0, latency=1.0)


def simulated(name: str, ranks: int = 3, microbatches: int = 4) -> ps.Timeline:
    return ps.simulate(ps.lower(ps.schedule(name, ranks=ranks, microbatches=microbatches)), COSTS)


def write_traces(
    timeline: ps.Timeline, folder: Path, *, form: Callable[[Any], str] = "PP:{}".format, ahead: tuple[float, ...] = (), repeats: int = 1
) -> list[Path]:
    """Write traces as a profiler would: a range is entered when the rank is free, and its first operator comes when its input is there."""
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
                events.append({"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": begin + span.start, "dur": 0.1})
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}}))
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
    from penstock.integrations.profiler_traces import read_trace

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


def test_a_rank_is_slow_only_by_its_own_work(tmp_path: Path) -> None:
    assert find_slow_rank(simulated("1f1b")) is None
    slow = ps.simulate(ps.lower(ps.schedule("1f1b", ranks=3, microbatches=4)), ps.Costs(f=(1.0, 1.5, 1.0), i=(1.0, 1.5, 1.0)))
    found = find_slow_rank(slow)
    assert found is not None
    assert found.rank == 1


def spoil(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        (spoil("{"), "not a trace of torch.profiler"),
        (spoil("[]"), "the data must be an object, got a list"),
        (
            spoil('{"traceEvents": [7, {"ph": "X"}, {"ph": "X", "name": "PP:0F0", "ts": "early"}], "distributedInfo": {"rank": 0}}'),
            "no range of a pipeline",
        ),
        (
            spoil('{"traceEvents": [{"ph": "X", "name": "PP:0F0", "ts": 1, "dur": 1}], "distributedInfo": {"rank": 7}}'),
            "must be of ranks 0 to 2",
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
