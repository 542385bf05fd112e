"""One rank's own program in a huge pipeline: the start-up cost of a rank, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.rows import Case, Row, within

from penstock.schedules.registry import algorithms

CHUNKS, SECONDS, MEMORY_MB = 2, 1.0, 200.0

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


@contextmanager
def suite(short: bool) -> Iterator[list[Case]]:
    names = [name for name, each in algorithms().items() if not each.whole and name != "data-parallel"]
    ranks, microbatches, rounds = (8, 16, 1) if short else (1024, 4096, 3)
    shown = ["1f1b", "zbv"] if short else names
    yield [Case(name, lambda name=name: _one_rank(name, ranks, microbatches, rounds)) for name in shown]


def _one_rank(name: str, ranks: int, microbatches: int, rounds: int) -> list[Row]:
    """In a process of its own, so that the peak memory is that of this work (Linux: the highest resident size)."""
    code = _ONE_RANK.format(name=name, ranks=ranks, chunks=CHUNKS, microbatches=microbatches, rank=ranks // 2)
    found = [subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True) for _ in range(rounds)]
    seconds, megabytes, actions = zip(*(map(float, done.stdout.split()) for done in found), strict=True)
    case = f"{name}: rank {ranks // 2} of {ranks} x {microbatches} microbatches, lowered"
    note = f"{actions[0]:,.0f} actions"
    return [within(case, seconds, SECONDS, note=note), within(f"{case}: peak memory", megabytes, MEMORY_MB, "MB")]
