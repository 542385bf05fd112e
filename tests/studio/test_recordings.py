"""Recorded runs that are laid over a schedule in the page, compared with the library's reading of the same files."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

import penstock as ps
from penstock.integrations.profiler_traces import read_traces
from penstock.ir.action import Action
from penstock.studio.document import document
from studio.page import Page

SOURCE = {"kind": "file", "name": "drawn"}
COLUMNS = ("start", "end", "depart", "arrive")


def write_traces(timeline: ps.Timeline, folder: Path, seed: int, *, gpu: str, form: str) -> list[Path]:
    """Traces as `torch.profiler` writes them, of two steps by clocks of their own, with nested ranges and other events among them."""
    random, paths = Random(seed), []
    for rank in range(timeline.ranks):
        events: list[Any] = [None, {"ph": "M", "name": "process_name"}, {"ph": "X", "name": "PP:0SEND_F0", "ts": 1.0, "dur": 1.0}]
        ahead = random.uniform(-50, 50) + (1e9 if rank % 2 else 0)
        for step in range(2):
            begin = ahead + 3e6 * step
            for span in timeline.spans(rank):
                noise = random.uniform(0, 0.4)
                entered, start, end = begin + span.start - span.wait, begin + span.start + noise, begin + span.end + noise
                ident = {"args": {"External id": len(events)}} if gpu == "numbered" else {}
                events += [_slice("user_annotation", _name(span.action, form), entered, end) | ident]
                events += [_slice("user_annotation", form.format(part), start, end) for part in span.action.parts if part != span.action]
                events += [_slice("cpu_op", "gloo:recv", entered, start), _slice("cpu_op", "aten::mm", start, end)]
                for stream, kernel, late in ((7, "gemm", 0.5), (20, "ncclDevKernel_SendRecv", 0.9)) if gpu else ():
                    place = {"pid": 0, "tid": stream}
                    events.append(_slice("gpu_user_annotation", _name(span.action, form), start + late, end + late) | place | ident)
                    events.append(_slice("kernel", kernel, start + late, end + late) | place)
        path = folder / f"worker_{rank}.json"
        path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}, "baseTimeNanoseconds": 5_000_000 * rank}))
        paths.append(path)
    return paths


def _name(action: Action, form: str) -> str:
    if form == "numbered":
        return f"{'Forward' if action.kind is ps.Kind.F else 'Backward'} {action.microbatch}"
    return form.format(action)


def _slice(category: str, name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start}


@pytest.mark.parametrize("gpu", ["", "in turn", "numbered"])
@pytest.mark.parametrize(
    ("name", "form"),
    [("1f1b", "numbered"), ("interleaved-1f1b", "PP:{}"), ("zbv", "penstock::{}"), ("dualpipe-v", "PP:{}"), ("dualpipe", "PP:{}")],
)
def test_traces_of_a_profiler_are_read_as_the_library_does(tmp_path: Path, page: Page, name: str, form: str, gpu: str) -> None:
    schedule = ps.schedule(name, ranks=4 if name == "dualpipe" else 3, microbatches=8 if name == "dualpipe" else 6)
    costs = ps.Costs(f=10.0, i=12.0, w=8.0, b=20.0, latency=1.0)
    paths = write_traces(ps.simulate(ps.lower(schedule), costs), tmp_path, seed=7, gpu=gpu, form=form)
    ours = read_traces(paths)
    files = [(path.name, path.read_text()) for path in paths]
    said = page.lay(document(ours.table, source=SOURCE), files)
    assert "error" not in said, said
    for column in COLUMNS:
        assert said[column] == pytest.approx(getattr(ours, column).tolist(), abs=1e-11), column
    above = page.lay(document(schedule, source=SOURCE), files)
    assert above["end"] == pytest.approx(ours.end[ours.computes].tolist(), abs=1e-11)


def test_a_recorded_run_of_slices_is_found_by_its_names(page: Page) -> None:
    program = ps.lower(ps.schedule("seq1f1b", ranks=2, microbatches=2, slices=3))
    run = ps.simulate(program, ps.Costs(latency=0.25))
    text = json.dumps({**run.to_json(), "source": "measured"})
    exact = page.lay(document(program, source=SOURCE), [("run.json", text)])
    assert exact["arrive"] == run.arrive.tolist()
    by_name = page.lay(document(program.schedule(), source=SOURCE), [("run.json", text)])
    assert by_name["end"] == run.end[run.computes].tolist()
