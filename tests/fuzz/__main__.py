"""`python -m fuzz`: run many cases, or one that is given as JSON. `make fuzz` does so with the right environment."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fuzz.case import Case, list_features
from fuzz.check import Outcome, Start, check_case
from fuzz.draw import draw_case
from fuzz.shrink import shrink
from penstock.runtime.launch.workers import Workers


def main() -> int:
    """Run the command; 1 if any case failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description="Compare pipelines with the plain loop on random cases.")
    parser.add_argument("case", nargs="?", help="one case as JSON; random ones unless given")
    parser.add_argument("--cases", type=int, default=2000, help="how many cases to draw (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first case; each further case has the next (default 0)")
    parser.add_argument("--transport", choices=("threads", "gloo", "both"), default=None, help="where ranks run (default threads)")
    parser.add_argument("--failures", type=int, default=5, help="stop after this many failures (default 5)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to shrink each failure (default 60)")
    chosen = parser.parse_args()
    with pool_of_workers() as start:
        if chosen.case is not None:
            case = Case.from_json(chosen.case)
            return run_one(case if chosen.transport is None else replace(case, transport=chosen.transport), start)
        cases = (draw_case(seed, chosen.transport or "threads") for seed in range(chosen.seed, chosen.seed + chosen.cases))
        return run_many(cases, chosen.cases, chosen.seed, chosen.failures, chosen.seconds, start)


@contextmanager
def pool_of_workers() -> Iterator[Start]:
    """Four processes that are started when they are first needed, and again when one is lost."""
    pools: list[Workers] = []

    def start() -> Workers:
        if not pools or any(process.poll() is not None for process in pools[-1].processes):
            pools.append(Workers(4))
        return pools[-1]

    try:
        yield start
    finally:
        for pool in pools:
            pool.close()


def run_one(case: Case, start: Start) -> int:
    outcome = check_case(case, start)
    print(outcome.result, outcome.kind, outcome.text, sep="\n")
    return int(outcome.failed)


def run_many(cases: Iterator[Case], count: int, first: int, most: int, seconds: float, start: Start) -> int:
    """Check cases until there are too many failures; print progress, failures and coverage."""
    began, failures = time.monotonic(), 0
    coverage = Coverage()
    for number, case in enumerate(cases, start=1):
        outcome = check_case(case, start)
        coverage.add(case, outcome)
        if outcome.failed:
            failures += 1
            print(f"\nseed {first + number - 1} failed: {outcome.kind}\n{case.to_json()}\n{outcome.text}")
            print(describe_smallest(shrink(case, lambda smaller: check_case(smaller, start), outcome.kind, seconds), start))
        show_progress(number, count, failures, number / (time.monotonic() - began))
        if failures >= most:
            break
    print(f"\n{coverage}")
    return int(failures > 0)


def show_progress(number: int, count: int, failures: int, pace: float) -> None:
    line = f"{number:,} of {count:,} cases, {pace:.1f} per second, {failures} failures"
    if sys.stdout.isatty():
        print(f"\r{line}", end="", flush=True)
    elif number % 500 == 0 or number == count:
        print(line, flush=True)


def describe_smallest(case: Case, start: Start | None) -> str:
    """The smallest case on one line, how it fails, and the command that runs it again."""
    text = check_case(case, start).text
    return f"smallest case: {case.to_json()}\n{text}\nrun it again:  make fuzz CASE='{case.to_json()}'"


class Coverage:
    """How many cases had what, and how they ended."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.schedules: Counter[str] = Counter()
        self.features: Counter[str] = Counter()

    def add(self, case: Case, outcome: Outcome) -> None:
        self.outcomes[outcome.result if outcome.result != "refused" else f"refused: {outcome.kind}"] += 1
        self.schedules[case.schedule] += 1
        self.features.update(feature for feature in list_features(case) if not feature.startswith("schedule:"))

    def __str__(self) -> str:
        parts = {"outcomes": self.outcomes, "schedules": self.schedules, "features": self.features}
        return "\n".join(f"{name}: {', '.join(f'{key} {counts[key]}' for key in sorted(counts))}" for name, counts in parts.items())


if __name__ == "__main__":
    sys.exit(main())
