"""Processes on this machine that run functions as the ranks of a group."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from penstock.errors import LostRankError, PipelineError, ScheduleError
from penstock.runtime.launch.pipe_protocol import Start, Task, read, write
from penstock.runtime.transport.failures import Told, serializer
from penstock.runtime.transport.store import Notices, PrefixStore, TCPStore

GRACE = 10.0
"""Seconds that the other ranks have to end by themselves once one has failed."""
_STOP = 10.0
"""Seconds that processes have to end once they are told to."""


class Workers:
    """Some processes, started once, that call one function after another. Use it with `with`, so that they end."""

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
        out, into = os.pipe()
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.ranks))}
        command = [sys.executable, "-m", "penstock.runtime.launch.worker", str(into)]
        with _deaf():
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[into], env=threads | dict(os.environ) | _reachable())
        os.close(into)
        threading.Thread(target=self._listen, args=(rank, out), daemon=True).start()
        self._tell(process, pickle.dumps(Start(sys.path, "127.0.0.1", self._store.port, rank)))
        return process

    def _listen(self, rank: int, out: int) -> None:
        with os.fdopen(out, "rb") as stream:
            while (data := read(stream)) is not None:
                self._answers.put((rank, data))
        self._answers.put((rank, None))

    def _tell(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its listener tells
            assert process.stdin is not None
            write(process.stdin, data)

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), *, ranks: int | None = None) -> list[Any]:
        """Call `fn(*args)` on the first so many ranks; the results by rank, or the first failure."""
        count = self.ranks if ranks is None else ranks
        if not 1 <= count <= self.ranks:
            raise ScheduleError(f"{count} ranks: there are 1 to {self.ranks}")
        if self._lost:
            raise PipelineError("a process has been lost: start others")
        self._count += 1
        seed = io.BytesIO()
        torch.save(torch.get_rng_state(), seed)
        name = f"task/{self._count}"
        task = pickle.dumps(Task(name, count, serializer().dumps((fn, tuple(args))), seed.getvalue()))
        for process in self.processes:
            self._tell(process, task)
        return self._collect(count, PrefixStore(name, self._store))

    def _collect(self, count: int, store: Any) -> list[Any]:
        results: dict[int, Any] = {}
        failed: list[tuple[int, BaseException]] = []
        until = float("inf")
        try:
            while len(results) + len(failed) < self.ranks:
                rank, answer = self._answers.get(timeout=None if until == float("inf") else max(0.0, until - time.monotonic()))
                good, value = (False, self._death(rank, store)) if answer is None else pickle.loads(answer)
                if good:
                    results[rank] = value
                    continue
                failed.append((rank, value.error() if isinstance(value, Told) else value))
                until = min(until, time.monotonic() + GRACE)
        except queue.Empty:  # some do not come to an end
            self.stop()
        except BaseException:
            self.stop()
            raise
        raise_first(failed, count)
        return [results[rank] for rank in range(count)]

    def _death(self, rank: int, store: Any) -> LostRankError:
        """A process has ended: those that wait for it need wait no longer."""
        self._lost = True
        store.set(f"ended/{rank}", b"")
        store.set("ended", b"")
        Notices(store).post(f"the process of rank {rank} ended")
        code = self.processes[rank].wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return LostRankError(f"the process of rank {rank} {how}")

    def stop(self) -> None:
        """End all processes, whatever they do."""
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
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def close(self) -> None:
        """Let them end."""
        for process in self.processes:
            if process.poll() is None:
                self._tell(process, b"")
        self._reap()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close() if error is None else self.stop()


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """What is started here does not hear Ctrl-C, from its first moment on: whoever started it says when to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reachable() -> dict[str, str]:
    """The environment in which a worker finds this package, also where it runs from its source tree."""
    source = str(Path(__file__).resolve().parents[2])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")]))}


def raise_first(failed: Sequence[tuple[int, BaseException]], ranks: int) -> None:
    """The failure that came first: a rank's own error rather than a lost rank, and both rather than the report of another's."""
    if failed:
        rank, error = min(failed, key=lambda each: (isinstance(each[1], PipelineError), not isinstance(each[1], LostRankError)))
        error.add_note(f"raised on rank {rank} of {ranks}")
        if isinstance(error, LostRankError):
            raise error from next((other for _, other in failed if other is not error), None)
        raise error
