"""One rank's own program in a huge pipeline, and verification of a million actions."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.measure import Row, best_of

import penstock as ps
from penstock.schedules.registry import algorithms

RANKS, CHUNKS, MICROBATCHES = 1024, 2, 4096
MEMORY_MB = 200

_ONE_RANK = """
import time
import penstock as ps
from penstock.passes.lower import lower_rank
from penstock.schedules.registry import algorithm
layout = algorithm({name!r}).layout
start = time.perf_counter()
schedule = ps.schedule({name!r}, {ranks}, {microbatches}, chunks=None if layout.fixed else {chunks})
actions = lower_rank(schedule, {rank})
seconds = time.perf_counter() - start
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(seconds, int(peak) / 1024, len(actions))
"""


def _one_rank(name: str, rank: int) -> Row:
    """In a process of its own, so that the peak memory is that of this work (Linux: the highest resident size)."""
    code = _ONE_RANK.format(name=name, ranks=RANKS, chunks=CHUNKS, microbatches=MICROBATCHES, rank=rank)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    seconds, megabytes, actions = done.stdout.split()
    small = float(megabytes) < MEMORY_MB
    note = f"{int(actions):,} actions, process peak {float(megabytes):.0f} MB{'' if small else f' (over {MEMORY_MB})'}"
    case = f"{name}: rank {rank} of {RANKS} x {MICROBATCHES} microbatches, lowered"
    return Row(case, float(seconds), wanted_seconds=1.0 if small else 0.0, note=note)


def _verification() -> Row:
    program = ps.lower(ps.schedule("1f1b", 64, 2700))
    fresh = ps.Program(program.rows, program.placement, program.microbatches, buffers=program.buffers)
    seconds, _ = best_of(1, lambda: ps.verify(fresh))
    return Row(f"verify {len(program.rows.codes):,} actions", seconds, wanted_seconds=10.0)


def run() -> list[Row]:
    closed_form = [name for name, each in algorithms().items() if not each.whole and name != "data-parallel"]
    return [*(_one_rank(name, RANKS // 2) for name in closed_form), _verification()]
