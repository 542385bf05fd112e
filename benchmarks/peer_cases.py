"""What the installed torch's own pipelining does in cases that torch 2.13 got wrong, and what Penstock does: one table.

    python benchmarks/peer_cases.py [case ...] [--limit SECONDS] [--json FILE]

Each case runs on torch's own package, on `Pipeline` and on the drop-in with torch's names, in new processes over gloo. Hanging or crashing
is a result. Rows are judged by numbers, most of them against the unpipelined model, never by torch's version. The exit code is 1 if
Penstock or its drop-in gets a case wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("penstock") is None:
    sys.path.insert(1, str(ROOT / "src"))

import torch  # noqa: E402 - found by the lines above
import torch.distributed as dist  # noqa: E402
from benchmarks.cases import gradients, orders, steps, waste  # noqa: E402
from benchmarks.cases.engines import DEADLINE, ENGINES  # noqa: E402
from benchmarks.cases.outcome import CRASHES, HANGS, RAISES, RIGHT, Case, Outcome  # noqa: E402

CASES: tuple[Case, ...] = tuple(
    sorted((*gradients.CASES, *steps.CASES, *orders.CASES, *waste.CASES), key=lambda case: (int(case.number.rstrip("abc")), case.number))
)
STATES = {True: "fixed", False: "still wrong", None: "changed"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    chosen = [case for case in CASES if not options.cases or case.number in options.cases or case.number.rstrip("abc") in options.cases]
    rows = []
    for case in chosen:
        outcomes = {engine.name: run_case(case, engine, options.limit) for engine in ENGINES}
        rows.append((case, outcomes))
        print(f"{case.number} {case.title}: " + "; ".join(f"{name}: {outcome.text}" for name, outcome in outcomes.items()), file=sys.stderr)
    print(write_table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(_data(rows), indent=1) + "\n", encoding="utf-8")
    wrong = [
        f"{name} is wrong in case {case.number}: {outcome.text}"
        for case, outcomes in rows
        for name, outcome in outcomes.items()
        if name != "torch" and outcome.symptom not in (RIGHT, case.admitted.get(name))
    ]
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/peer_cases.py", description="Run each case on torch's own package and on Penstock."
    )
    parser.add_argument(
        "cases", nargs="*", metavar="case", help=f"which to run, instead of all: {', '.join(case.number for case in CASES)}"
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a case may take on one engine (default: 120)")
    parser.add_argument("--json", help="a file for the results")
    options = parser.parse_args(arguments)
    known = {number for case in CASES for number in (case.number, case.number.rstrip("abc"))}
    unknown = [number for number in options.cases if number not in known]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(case.number for case in CASES)}")
    return options


# Results --------------------------------------------------------------------------------------------------------------


def judge(case: Case, outcome: Outcome) -> str:
    """What became of torch's behaviour: right is fixed, the recorded symptom is still wrong, another one is a change."""
    return STATES[True if outcome.right else False if outcome.symptom == case.recorded else None]


def write_table(rows: Sequence[tuple[Case, dict[str, Outcome]]]) -> str:
    """The results as a Markdown table."""
    names = {"torch": f"torch {torch.__version__}", "drop-in": "drop-in"}
    heads = ["case", "", *(names.get(engine.name, engine.name) for engine in ENGINES), "torch's state"]
    cells = [
        [case.number, case.title, *(_mark(outcomes[engine.name]) for engine in ENGINES), judge(case, outcomes["torch"])]
        for case, outcomes in rows
    ]
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _mark(outcome: Outcome) -> str:
    return outcome.text if outcome.right else f"**{outcome.text}**"


def _data(rows: Sequence[tuple[Case, dict[str, Outcome]]]) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "cases": {
            case.number: {
                "title": case.title,
                "state": judge(case, outcomes["torch"]),
                **{name: {"symptom": outcome.symptom, "text": outcome.text} for name, outcome in outcomes.items()},
            }
            for case, outcomes in rows
        },
    }


# Processes ------------------------------------------------------------------------------------------------------------


def run_case(case: Case, engine: Any, limit: float) -> Outcome:
    """Run a case on new processes, one per rank. The first rank to fail decides; ranks that are left after the limit are killed."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ends: dict[Any, Any] = {}
        for rank in range(case.ranks):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(case, engine, rank, f"{folder}/store", theirs), daemon=True)
            process.start()
            theirs.close()
            ends[mine] = process
        try:
            return _collect(case, ends, time.monotonic() + limit)
        finally:
            for process in ends.values():
                process.kill()
                process.join()


def _collect(case: Case, ends: dict[Any, Any], deadline: float) -> Outcome:
    """Wait for the ranks' outcomes. The first error decides; if there is none, the first rank whose numbers are wrong."""
    waiting, outcomes = list(ends), dict[Any, Outcome]()
    while waiting:
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return next(
                (outcome for outcome in outcomes.values() if not outcome.right),
                Outcome(HANGS, f"{len(waiting)} of {case.ranks} ranks hang"),
            )
        for end in ready:
            waiting.remove(end)
            outcomes[end] = _receive(end, ends[end])
            if outcomes[end].symptom in (RAISES, HANGS, CRASHES):
                return outcomes[end]
    in_order = [outcomes[end] for end in ends]
    return next((outcome for outcome in in_order if not outcome.right), max(in_order, key=lambda outcome: len(outcome.text)))


def _receive(end: Connection, process: Any) -> Outcome:
    try:
        outcome: Outcome = end.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Outcome(CRASHES, f"the process crashes: {name}")
    return outcome


def _work(case: Case, engine: Any, rank: int, store: str, end: Connection) -> None:
    """One rank: runs the case, reports, and lives on until it is killed, so that its end is no failure of the others."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, case.ranks), rank=rank, world_size=case.ranks, timeout=timedelta(seconds=DEADLINE)
        )
        outcome = case.run(engine)
    except BaseException as error:
        end.send(_describe(error))
        os._exit(1)
    end.send(outcome)
    time.sleep(3600)


def _describe(error: BaseException) -> Outcome:
    """An error in a few words; one that ends a wait for another rank is a hang."""
    chain = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    words = " ".join("".join(traceback.format_exception_only(chain[-1])).split())
    text = re.sub(r"(\w+\.)+(?=\w+Error)|\[/[^]]*\] *", "", words)[:90]  # without modules and source files
    if any(word in str(part) for part in chain for word in ("Timed out waiting", "timed out", "Application timeout")):
        return Outcome(HANGS, f"hangs until the timeout: {text}")
    return Outcome(RAISES, f"raises {text}")


if __name__ == "__main__":
    raise SystemExit(main())
