"""Simulation: flattening, the compiled and the plain loop, a thousand ranks end to end, and torch's own simulation of the same program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import peer
from benchmarks.measure import once, seconds_of
from benchmarks.rows import Case, Row, within

import penstock as ps
from penstock.simulator.event_loops.flat import Flat
from penstock.simulator.event_loops.loops import run as run_engine

COSTS = ps.Costs(latency=0.1)

_END_TO_END = """
import time
import penstock as ps
ps.simulate(ps.schedule("1f1b", 2, 2))
start = time.perf_counter()
timeline = ps.simulate(ps.schedule("1f1b", {ranks}, {microbatches}))
makespan, bubble = timeline.makespan, timeline.bubble
seconds = time.perf_counter() - start
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(seconds, int(peak) / 1024**2, len(timeline.start))
"""


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    large, middle, huge, rounds = ((8, 30), (4, 16), (16, 32), 2) if short else ((64, 2700), (64, 512), (1024, 4096), 3)
    yield [
        Case("the engine", lambda: _engine(*large, rounds)),
        Case("against torch", lambda: _against_torch(*middle, rounds)),
        Case("end to end", lambda: _end_to_end(*huge)),
    ]


def _fresh(ranks: int, microbatches: int) -> ps.Program:
    """A lowered program with nothing worked out yet."""
    program = ps.PassList.parse("send-receive").apply(ps.schedule("1f1b", ranks, microbatches))
    return ps.Program(program.rows, program.placement, program.microbatches)


def _engine(ranks: int, microbatches: int, rounds: int) -> list[Row]:
    program = _fresh(ranks, microbatches)
    actions = len(program.rows.codes)

    def flatten() -> Flat:
        flat = Flat(ps.Program(program.rows, program.placement, program.microbatches))
        flat.graph()
        flat.durations(COSTS)
        return flat

    _, flat = once(flatten)
    graph, takes = flat.graph(), flat.durations(COSTS)
    run_engine(graph, takes, "independent", "compiled")
    parts = {
        "flatten": (flatten, 2.0),
        "compiled loop": (lambda: run_engine(graph, takes, "independent", "compiled"), 20.0),
        "plain loop": (lambda: run_engine(graph, takes, "independent", "plain"), 0.5),
    }
    times = seconds_of(rounds, *(work for work, _ in parts.values()))
    shape = f"{actions:,} lowered actions ({ranks} x {microbatches})"
    return [
        within(f"{name}, {shape}", found, actions / (wanted * 1e6), note=f"{wanted:g} million a second wanted")
        for (name, (_, wanted)), found in zip(parts.items(), times, strict=True)
    ]


def _against_torch(ranks: int, microbatches: int, rounds: int) -> list[Row]:
    program = _fresh(ranks, microbatches)
    rows = peer.actions_of(program)
    flat = Flat(program)
    graph, takes = flat.graph(), flat.durations(COSTS)
    run_engine(graph, takes, "independent")
    loop, whole, theirs = seconds_of(
        rounds,
        lambda: run_engine(graph, takes, "independent"),
        lambda: ps.simulate(ps.Program(program.rows, program.placement, program.microbatches), COSTS).makespan,
        lambda: peer.simulate(rows, ranks),
    )
    shape = f"{ranks} x {microbatches}, {len(program.rows.codes):,} actions"
    return [
        Row(f"simulate {shape}, flattening left out", loop, theirs, limit=1 / 50),
        Row(f"simulate {shape}, flattening and figures included", whole, theirs, limit=1 / 10),
    ]


def _end_to_end(ranks: int, microbatches: int) -> list[Row]:
    code = _END_TO_END.format(ranks=ranks, microbatches=microbatches)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, gigabytes, actions = (float(value) for value in done.stdout.split())
    case = f"generate and simulate 1f1b, {ranks} x {microbatches} ({actions:,.0f} actions)"
    return [within(case, seconds, 15.0), within(f"{case}: peak memory", gigabytes, 4.0, "GB")]
