"""Run one case and judge it."""

from __future__ import annotations

import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fuzz.batches import count_of
from fuzz.case import Case, is_exact
from fuzz.compare import EXACT, list_differences
from fuzz.orders import build_table, replace_count, sums_in_order
from fuzz.pipelined import RanksDisagreeError, run_on_processes, run_on_threads
from fuzz.plain import run_plain
from fuzz.records import Record
from fuzz.refusals import find_rule
from penstock import errors
from penstock.errors import PenstockError
from penstock.ir.table import Table
from penstock.runtime.launch.workers import Workers

LIMIT = 60.0
"""Seconds that a case may take."""


class CaseTimeoutError(Exception):
    """A case took longer than it may."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended: `equal`, `refused` (by a known rule), `torch refuses` (the plain loop raises), `impossible` (no such schedule),
    or `failure`."""

    result: str
    kind: str = ""
    """Of a failure, what a smaller case must share to count as the same; of a refusal, the rule."""
    text: str = ""
    errors: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.result == "failure"


Start = Callable[[], Workers]
"""Gives a pool of processes, a new one if the last was lost."""


def check_case(case: Case, start_workers: Start | None = None) -> Outcome:
    """Run a case by the plain loop and on its transports, and compare them all."""
    with warnings.catch_warnings(), _one_thread():
        warnings.simplefilter("ignore")
        try:
            with limit_time(LIMIT):
                return _check(case, start_workers)
        except CaseTimeoutError:
            return Outcome("failure", "hang", f"no end after {LIMIT:.0f} s")


def _check(case: Case, start_workers: Start | None) -> Outcome:
    try:
        table = build_table(case)
    except PenstockError as error:
        return Outcome("impossible", text=str(error))
    wanted = _try(lambda: run_plain(case, table.stages, table.graph))
    runs: dict[str, Record | BaseException] = {}
    if case.transport in ("threads", "both"):
        runs["threads"] = _try(lambda: run_on_threads(case, table))
    if case.transport in ("gloo", "both"):
        assert start_workers is not None, "processes are needed"
        workers = start_workers()
        runs["gloo"] = _try(lambda: run_on_processes(case, table, workers))
    outcomes = {name: _judge(case, table, run, wanted, f"{name} and the plain loop") for name, run in runs.items()}
    failed = [outcome for outcome in outcomes.values() if outcome.failed]
    if failed:
        return failed[0]
    if len(runs) == 2:
        apart = _compare_transports(case, table, runs, outcomes)
        if apart is not None:
            return apart
    return next(iter(outcomes.values()))


def _try(run: Callable[[], Record]) -> Record | BaseException:
    try:
        return run()
    except CaseTimeoutError:
        raise
    except Exception as error:
        return error


def _judge(case: Case, table: Table, found: Record | BaseException, wanted: Record | BaseException, what: str) -> Outcome:
    if isinstance(found, RanksDisagreeError):
        return Outcome("failure", "ranks disagree", f"{what}: {found}")
    if isinstance(found, BaseException):
        return _judge_error(case, found, wanted, what)
    if isinstance(wanted, BaseException):
        return Outcome("torch refuses", text=first_line(wanted))
    differences = list(list_differences(found, wanted, find_tolerance(case, table)))
    if not differences:
        return Outcome("equal")
    shown = "; ".join(f"{name}: {text}" for name, text in differences[:4])
    kinds = {
        re.sub(r"^(state\.)?\d*\.?(\w+\.)?(grad|strides|parameter|buffer|counter|hook|losses|loss|outputs|norm).*", r"\3", name)
        for name, _ in differences
    }
    return Outcome("failure", f"numbers: {_first_kind(kinds)}", f"{what} differ in {len(differences)} values: {shown}")


_ORDER = ("loss", "losses", "outputs", "grad", "norm", "parameter", "buffer", "counter", "hook", "strides")


def _first_kind(kinds: set[str]) -> str:
    """Coarse, so that shrinking may move a difference: wrong values of training, state besides, or strides only."""
    if kinds & {"loss", "losses", "outputs", "grad", "norm", "parameter"}:
        return "values"
    return next((kind for kind in _ORDER if kind in kinds), "structure")


def _judge_error(case: Case, error: BaseException, wanted: Record | BaseException, what: str) -> Outcome:
    if isinstance(wanted, BaseException):
        return Outcome("torch refuses", text=first_line(wanted))
    rule = find_rule(case, first_line(error)) if _is_refusal(error) else None
    if rule is not None:
        return Outcome("refused", rule.name, first_line(error))
    kind = f"error {type(error).__name__}: {core_of(error)[:60]}"
    return Outcome("failure", kind, f"{what.partition(' ')[0]} raised {type(error).__name__}: {error}")


def _is_refusal(error: BaseException) -> bool:
    """Whether the library raised it on purpose, be it inside a step, of which all ranks report; not torch's errors that it reports."""
    if not isinstance(error, PenstockError):
        return False
    inner = re.match(r".*?(?:failed on rank|refused its input).*?: (\w+)(?:: |$)", first_line(error))
    return inner is None or issubclass(getattr(errors, inner[1], Exception), PenstockError)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def core_of(error: BaseException) -> str:
    """The first line of an error without the numbers and the places that change from case to case."""
    line = re.sub(r"^.*? failed on rank \d+[^:]*: ", "", first_line(error))
    return re.sub(r"'[^']*'|\d+(\.\d+)?", "#", line)


def _compare_transports(case: Case, table: Table, runs: dict[str, Any], outcomes: dict[str, Outcome]) -> Outcome | None:
    """Threads and processes must give the same numbers or the same refusal."""
    one, other = runs["threads"], runs["gloo"]
    raised = [isinstance(run, BaseException) for run in (one, other)]
    if all(raised):
        same = type(one) is type(other) and core_of(one) == core_of(other)
        if same or outcomes["threads"].result == "torch refuses":
            return None
        return Outcome(
            "failure",
            "transports",
            f"threads raise {type(one).__name__}: {first_line(one)}; gloo {type(other).__name__}: {first_line(other)}",
        )
    if any(raised):
        error = one if raised[0] else other
        if outcomes["threads"].result == "torch refuses":
            return None
        name = "threads" if raised[0] else "gloo"
        return Outcome("failure", "transports", f"only {name} raises {type(error).__name__}: {first_line(error)}")
    differences = list(list_differences(other, one, find_tolerance(case, table)))
    if not differences:
        return None
    shown = "; ".join(f"{name}: {text}" for name, text in differences[:4])
    return Outcome("failure", "transports", f"gloo and threads differ in {len(differences)} values: {shown}")


def find_tolerance(case: Case, table: Table) -> float:
    """How much values may differ, relative to the largest: nothing if sums are made in the order of the plain loop."""
    counts = {count_of(case, call) for call in case.script}
    if is_exact(case) and all(sums_in_order(replace_count(table, count)) for count in counts):
        return EXACT
    updated = any(call in case.script for call in ("sgd", "adamw"))
    if case.dtype == "float64":
        return 1e-10 if updated else 1e-12
    return 1e-3 if updated else 1e-4


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise `CaseTimeoutError` in the main thread after so many seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise CaseTimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch, so that sums are the same every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
