"""What the browser tests need: exported pages, files to open, and the figures that the page must show."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.cli.main import main
from penstock.ir.formats.csv_form import read_csv
from penstock.verifier.verify import check

PAGES = {
    "zbv.html": ("zbv", "-p", "4", "-m", "8"),
    "three.html": ("zbv", "1f1b", "gpipe", "-p", "4", "-m", "8"),
    "large.html": ("zbv", "-p", "64", "-m", "280"),
    "slices.html": ("seq1f1b{slices=4}", "-p", "2", "-m", "2"),
    "offload.html": ("1f1b", "-p", "4", "-m", "8", "--offload", "100", "--costs", "host_bandwidth=0.6"),
}
BAD = "0F0,0F1,0B0,0B1\n,1F0,1B0,1B0\n"
SKEWED = [1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0]


SPREAD = ps.Costs(s=[0, 0, 0, 1.0], t=[0, 0, 0, 0.5], broadcast=0.25, combine=0.5, logits=2.0)


def spread() -> ps.Schedule:
    """A schedule whose head is spread over the ranks."""
    return ps.spread_vocabulary(ps.schedule("1f1b", ranks=4, microbatches=8), SPREAD, ps.Vocabulary(embedding=False))


def figures(timeline: Any) -> dict[str, float]:
    peak = max(timeline.peak_memory)
    return {"makespan": timeline.makespan, "bubble": timeline.bubble, "peak": peak, "messages": timeline.num_messages}


def expected(bad: Path) -> dict[str, Any]:
    """The library's own figures."""
    zbv = ps.schedule("zbv", ranks=4, microbatches=8)
    chunked = ps.schedule("interleaved-1f1b", ranks=4, microbatches=8, chunks=4)
    half, slow = ps.Costs(f=0.5, i=0.5, w=0.5, activation=0.5), ps.Costs(i=2.0)
    auto = ps.schedule("zb-auto", ranks=4, microbatches=8, costs=slow)
    timed = {
        "zbv": ps.simulate(zbv),
        "moved": ps.simulate(zbv, ps.Costs(f=1.5, latency=0.25)),
        "skewed": ps.simulate(zbv, ps.Costs(f=[1.5 * each for each in SKEWED], i=SKEWED, w=SKEWED, latency=0.25)),
        "half": ps.simulate(zbv, half),
        "1f1b": ps.simulate(ps.schedule("1f1b", ranks=4, microbatches=8)),
        "chunked": ps.simulate(chunked),
        "sharded": ps.simulate(ps.lower(chunked, fsdp=True)),
        "auto": ps.simulate(auto, slow),
        "spread": ps.simulate(spread(), SPREAD),
        "slower": ps.simulate(spread(), replace(SPREAD, combine=1.5)),
        "offload": ps.simulate(ps.lower(ps.schedule("1f1b", ranks=4, microbatches=8), offload=100), ps.Costs(host_bandwidth=0.6)),
    }
    found = [
        {"rule": each.rule, "rank": each.rank, "step": each.step, "message": each.message} for each in check(read_csv(bad, strict=False))
    ]
    return {**{name: figures(timeline) for name, timeline in timed.items()}, "findings": found}


def measured() -> dict[str, Any]:
    """A run in which everything takes a quarter more than predicted."""
    timeline = ps.simulate(ps.lower(ps.schedule("1f1b", ranks=4, microbatches=8)), ps.Costs(latency=0.1)).to_json()
    for name in ("start", "end", "depart", "arrive", "collective_start", "collective_end"):
        timeline[name] = [time if time < 0 else 1.25 * time for time in timeline[name]]
    return {**timeline, "source": "measured"}


def recorded() -> dict[str, Any]:
    """A run of zbv as predicted, except for 2F3, which takes three times as long and delays what needs it."""
    schedule = ps.schedule("zbv", ranks=4, microbatches=8)
    forwards = [[3.0 if (stage, microbatch) == (2, 3) else 1.0 for microbatch in range(8)] for stage in range(8)]
    return {**ps.simulate(schedule, ps.Costs(f=forwards)).to_json(), "source": "measured"}


def profiled() -> dict[str, Any]:
    """The same run as `torch.profiler` would trace it, one file per rank: ranges that cover waits, and operators inside them."""
    forwards = [[3.0 if (stage, microbatch) == (2, 3) else 1.0 for microbatch in range(8)] for stage in range(8)]
    run = ps.simulate(ps.schedule("zbv", ranks=4, microbatches=8), ps.Costs(f=forwards))
    traces = {}
    for rank in range(4):
        events: list[dict[str, Any]] = []
        for span in run.spans(rank):
            entered, start, end = (1e6 * time for time in (span.start - span.wait, span.start, span.end))
            events.append({"ph": "X", "cat": "user_annotation", "name": f"PP:{span.action}", "ts": entered, "dur": end - entered})
            events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": start, "dur": 1.0})
        traces[f"trace_{rank}.json"] = {"traceEvents": events}
    return traces


def waiting() -> dict[str, Any]:
    """A program whose ranks wait for their sends."""
    return ps.lower(ps.schedule("1f1b", ranks=4, microbatches=8), max_outstanding_sends=1).to_json()


def prepare(folder: Path) -> None:
    for name, args in PAGES.items():
        if main(["export", *args, "-o", str(folder / name)]):
            sys.exit(f"{name} cannot be exported")
    (folder / "bad.csv").write_text(BAD)
    (folder / "garbage.csv").write_text("hello,world\n")
    (folder / "measured.json").write_text(json.dumps(measured()))
    (folder / "recorded.json").write_text(json.dumps(recorded()))
    (folder / "waits.json").write_text(json.dumps(waiting()))
    (folder / "spread.json").write_text(json.dumps(ps.simulate(spread(), SPREAD).to_json()))
    for name, trace in profiled().items():
        packed = json.dumps(trace).encode()
        (folder / name).write_bytes(packed if name != "trace_3.json" else gzip.compress(packed))
    (folder / "expected.json").write_text(json.dumps(expected(folder / "bad.csv")))


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
