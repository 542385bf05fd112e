"""Processes on this machine that call functions as the ranks of a group."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from penstock.errors import LostRankError, PipelineError, ScheduleError
from penstock.runtime.launch.worker import Start, Task, read_message, write_message
from penstock.runtime.tensors.boundary import load_pickler
from penstock.runtime.transport.failures import Notices, PickledError, PrefixStore, TCPStore

logger = logging.getLogger(__name__)

GRACE = 10.0
"""Seconds for the other ranks to end by themselves after one has failed."""
_STOP = 10.0
"""Seconds for processes to end when they are told to."""

_START = "import gc; gc.disable(); from penstock.runtime.launch.worker import main; main()"
"""Starts a worker. Collecting garbage between imports would find nothing, and take an eighth of their time."""


class Workers:
    """Processes that are started once and then call one function after another. Use `with`, so that they end."""

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ScheduleError(f"{ranks} ranks: at least 1 is needed")
        self.ranks = ranks
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._answers: queue.Queue[tuple[int, bytes | None]] = queue.Queue()
        self._count = 0
        self._lost = False
        self.processes = [self._start(rank) for rank in range(ranks)]

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        answers, child_answers = os.pipe()
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.ranks))}
        command = [sys.executable, "-c", _START, str(child_answers)]
        with _block_interrupts():
            # A worker finds this package also when it runs from its source tree.
            paths = filter(None, [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")])
            environment = threads | dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[child_answers], env=environment)
        os.close(child_answers)
        threading.Thread(target=self._listen, args=(rank, answers), daemon=True).start()
        self._send(process, pickle.dumps(Start(sys.path, "127.0.0.1", self._store.port, rank)))
        return process

    def _listen(self, rank: int, answers: int) -> None:
        with os.fdopen(answers, "rb") as stream:
            while (data := read_message(stream)) is not None:
                self._answers.put((rank, data))
        self._answers.put((rank, None))

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the process has ended, which its listener notices
            assert process.stdin is not None
            write_message(process.stdin, data)

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), *, ranks: int | None = None, losses: int = 0, restart: bool = False
    ) -> list[Any]:
        """Call `fn(*args)` on the first `ranks` ranks, or on all; returns the results by rank, or raises the first failure.

        Up to `losses` processes may end early: the others go on, and the result of a lost rank is None. With `restart` a new process takes
        the place of each.
        """
        count = self.ranks if ranks is None else ranks
        if not 1 <= count <= self.ranks:
            raise ScheduleError(f"{count} ranks: there are {self.ranks} processes")
        if self._lost:
            raise PipelineError("a process has been lost: start new workers")
        self._count += 1
        seed = io.BytesIO()
        torch.save(torch.get_rng_state(), seed)
        name = f"task/{self._count}"
        task = Task(name, count, load_pickler().dumps((fn, tuple(args))), seed.getvalue(), losses=losses)
        for process in self.processes:
            self._send(process, pickle.dumps(task))
        return self._collect(task, PrefixStore(name, self._store), restart)

    def _collect(self, task: Task, store: Any, restart: bool) -> list[Any]:
        results: dict[int, Any] = {}
        failed: list[tuple[int, BaseException]] = []
        lost: list[tuple[int, BaseException]] = []
        until, deaths = float("inf"), 0
        try:
            while len(results) + len(failed) + len(lost) < self.ranks:
                rank, answer = self._answers.get(timeout=None if until == float("inf") else max(0.0, until - time.monotonic()))
                succeeded, value = (False, self._record_death(rank, store)) if answer is None else pickle.loads(answer)
                if succeeded:
                    results[rank] = value
                    continue
                error = value.rebuild() if isinstance(value, PickledError) else value
                may_be_lost = task.losses > 0 and rank < task.ranks and (answer is not None or deaths < task.losses)
                if may_be_lost and isinstance(error, LostRankError) and error.lost is None:
                    deaths += answer is None
                    logger.warning("%s; the others go on", error)
                    if answer is None and restart:
                        _close_input(self.processes[rank])
                        self.processes[rank] = self._start(rank)
                        self._send(self.processes[rank], pickle.dumps(replace(task, returning=True)))
                    else:
                        lost.append((rank, error))
                    continue
                if answer is None and deaths >= task.losses > 0:
                    error = LostRankError(f"{error}, and more processes have ended than losses={task.losses} allows: give a higher number")
                failed.append((rank, error))
                until = min(until, time.monotonic() + GRACE)
        except queue.Empty:  # some ranks do not end
            self.stop()
        except BaseException:
            self.stop()
            raise
        raise_first(failed or ([] if results else lost), task.ranks)
        return [results.get(rank) for rank in range(task.ranks)]

    def _record_death(self, rank: int, store: Any) -> LostRankError:
        """Tell the other ranks that a process has ended, so that they stop waiting for it; returns the error to raise."""
        self._lost = True
        store.set(f"ended/{rank}", b"")
        store.set("ended", b"")
        Notices(store).post(f"the process of rank {rank} ended")
        code = self.processes[rank].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return LostRankError(f"the process of rank {rank} {how}")

    def stop(self) -> None:
        """End all processes at once."""
        self._lost = True
        for process in self.processes:
            process.terminate()
        self._reap()

    def _reap(self) -> None:
        until = time.monotonic() + _STOP
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _close_input(process)

    def close(self) -> None:
        """Let all processes finish."""
        for process in self.processes:
            if process.poll() is None:
                self._send(process, b"")
        self._reap()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close() if error is None else self.stop()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Start child processes that ignore Ctrl-C from their first moment on: this process tells them when to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_first(failed: Sequence[tuple[int, BaseException]], ranks: int) -> None:
    """Raise the first failure, if any: rather a rank's own error than a lost rank, and both rather than a report of another rank's."""
    if failed:
        rank, error = min(failed, key=lambda failure: (isinstance(failure[1], PipelineError), not isinstance(failure[1], LostRankError)))
        error.add_note(f"raised on rank {rank} of {ranks}")
        if isinstance(error, LostRankError):
            raise error from next((other for _, other in failed if other is not error), None)
        raise error
