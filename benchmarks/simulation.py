"""Simulation: flattening, the compiled and the plain loop, a thousand ranks end to end, and torch's own simulation of the same program."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measure import Row, best_of
from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute

import penstock as ps
from penstock.simulator.engine import run as run_engine
from penstock.simulator.flat import Flat

COSTS = ps.Costs(latency=0.1)
MEMORY_GB = 4.0

_END_TO_END = """
import time
import penstock as ps
ps.simulate(ps.schedule("1f1b", 2, 2))
start = time.perf_counter()
timeline = ps.simulate(ps.schedule("1f1b", 1024, 4096))
makespan, bubble = timeline.makespan, timeline.bubble
seconds = time.perf_counter() - start
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(seconds, int(peak) / 1024**2, len(timeline.start), makespan)
"""


def _fresh(ranks: int, microbatches: int) -> ps.Program:
    """A lowered program with nothing worked out yet."""
    program = ps.PassList.parse("send-receive").apply(ps.schedule("1f1b", ranks, microbatches))
    return ps.Program(program.rows, program.placement, program.microbatches)


def _engine(ranks: int, microbatches: int) -> list[Row]:
    program = _fresh(ranks, microbatches)
    actions = len(program.rows.codes)

    def flatten() -> Flat:
        flat = Flat(ps.Program(program.rows, program.placement, program.microbatches))
        flat.graph()
        flat.durations(COSTS)
        return flat

    flattening, flat = best_of(3, flatten)
    graph, takes = flat.graph(), flat.durations(COSTS)
    run_engine(graph, takes, "independent", "compiled")
    compiled, _ = best_of(5, lambda: run_engine(graph, takes, "independent", "compiled"))
    plain, _ = best_of(2, lambda: run_engine(graph, takes, "independent", "plain"))
    shape = f"{actions:,} lowered actions ({ranks} x {microbatches})"
    return [
        Row(f"flatten {shape}", flattening, wanted_seconds=actions / 2e6, note=f"{actions / flattening / 1e6:.1f} million a second"),
        Row(f"compiled loop, {shape}", compiled, wanted_seconds=actions / 20e6, note=f"{actions / compiled / 1e6:.1f} million a second"),
        Row(f"plain loop, {shape}", plain, wanted_seconds=actions / 0.5e6, note=f"{actions / plain / 1e6:.2f} million a second"),
    ]


def _against_torch(ranks: int, microbatches: int) -> list[Row]:
    program = _fresh(ranks, microbatches)
    rows = {rank: [_Action.from_str(str(action)) for action in program[rank]] for rank in range(ranks)}
    theirs, _ = best_of(1, lambda: _simulate_comms_compute(rows, lambda stage: stage, ranks))
    flat = Flat(program)
    graph, takes = flat.graph(), flat.durations(COSTS)
    run_engine(graph, takes, "independent")
    loop, _ = best_of(5, lambda: run_engine(graph, takes, "independent"))
    whole, _ = best_of(3, lambda: ps.simulate(ps.Program(program.rows, program.placement, program.microbatches), COSTS).makespan)
    shape = f"{ranks} x {microbatches}, {len(program.rows.codes):,} actions"
    return [
        Row(f"simulate {shape}, flattening left out", loop, theirs, 50.0),
        Row(f"simulate {shape}, flattening and figures included", whole, theirs, 10.0),
    ]


def _end_to_end() -> Row:
    done = subprocess.run([sys.executable, "-c", _END_TO_END], check=True, capture_output=True, text=True)
    seconds, gigabytes, actions, _ = (float(value) for value in done.stdout.split())
    small = gigabytes < MEMORY_GB
    note = f"process peak {gigabytes:.1f} GB{'' if small else f' (over {MEMORY_GB:g})'}"
    return Row(
        f"generate and simulate 1f1b, 1024 x 4096 ({actions:,.0f} actions)", seconds, wanted_seconds=15.0 if small else 0.0, note=note
    )


def run() -> list[Row]:
    return [*_engine(64, 2700), *_against_torch(64, 512), _end_to_end()]
