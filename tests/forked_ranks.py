"""Ranks that are forked from one process which has imported torch. Starting each anew would take two seconds of CPU time.

A `RankServer` takes the place of the module `subprocess` in `penstock.runtime.launch.workers`. The forked process goes on as the
started one does after its imports, with the same pipes, environment, folder and output.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runtime.launch.workers import Workers

_LONGEST = 1 << 18
"""Bytes of a request, which holds the environment."""


def serve_pools(server: RankServer | None = None) -> Iterator[Callable[[], Workers]]:
    """Yield a function that gives a pool of four ranks: the same again, or a new one if a process of it has ended.

    Tests of another folder get a new one too: what ranks have imported and compiled makes their garbage collections slow. The ranks are
    forked from `server`, by default as all others are.
    """
    import pytest  # not in the process that ranks are forked from

    from penstock.runtime.launch import workers

    with ExitStack() as open_pools:
        pool, used_by = None, ""

        def start() -> Workers:
            nonlocal pool, used_by
            folder = os.environ["PYTEST_CURRENT_TEST"].split("/")[1]
            if pool is None or folder != used_by or any(process.poll() is not None for process in pool.processes):
                open_pools.close()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(workers, "subprocess", server or workers.subprocess)
                    pool, used_by = open_pools.enter_context(workers.Workers(4)), folder
            return pool

        yield start


class ForkedProcess:
    """The part of the interface of `subprocess.Popen` that `Workers` uses."""

    def __init__(self, pid: int, stdin: int, status: int) -> None:
        self.pid, self.stdin, self.returncode = pid, os.fdopen(stdin, "wb"), None
        self._status = status

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            status = select.poll()
            status.register(self._status, select.POLLIN)
            if not status.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"forked rank {self.pid}", timeout or 0.0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class RankServer:
    """The process that ranks are forked from, started for the first. It ends when its socket is closed, or with this process."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        """What the ranks of its tests import besides."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [
            sys.executable,
            "-c",
            "import gc; gc.disable(); from forked_ranks import serve; serve()",
            str(theirs.fileno()),
            *self._modules,
        ]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        return ours

    def Popen(self, command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], env: dict[str, str]) -> ForkedProcess:
        """Fork a rank; `stdin` is a pipe."""
        (answers,) = pass_fds
        assert stdin == subprocess.PIPE
        assert command[-1] == str(answers)
        (input_end, input_begin), (status_end, status_begin) = os.pipe(), os.pipe()
        with self._lock:
            if self._socket is None:
                self._socket = self._start()
            files = [input_end, 1, 2, answers, status_begin]
            socket.send_fds(self._socket, [pickle.dumps((env, os.getcwd()))], files)
            pid = int(self._socket.recv(16))
        os.close(input_end)
        os.close(status_begin)
        return ForkedProcess(pid, input_begin, status_end)

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait()


def serve() -> None:
    """Fork ranks and tell how they end, until the socket is closed."""
    import gc
    import importlib

    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor

    from penstock.runtime.launch.worker import main

    for module in sys.argv[2:]:
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    requests = socket.socket(fileno=int(sys.argv[1]))
    ranks: dict[int, tuple[int, int]] = {}
    while True:
        for ready in select.select([requests, *ranks], [], [])[0]:
            if ready is not requests:
                pid, status = ranks.pop(ready)
                os.close(ready)
                os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(status)
                continue
            data, files, _, _ = socket.recv_fds(requests, _LONGEST, 5)
            if not data:
                return
            pid = os.fork()
            if not pid:
                requests.close()
                for handle, (_, status) in ranks.items():
                    os.close(handle)
                    os.close(status)
                answers = _take_over(*pickle.loads(data), files)
                torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
                sys.argv = ["-c", str(answers)]
                main()
                return
            for file in files[:-1]:
                os.close(file)
            ranks[os.pidfd_open(pid)] = pid, files[-1]
            requests.send(str(pid).encode())


def _take_over(environment: dict[str, str], folder: str, files: Sequence[int]) -> int:
    """Take the environment, the folder and the files of a new process; returns the pipe for its answers."""
    *standard, answers, status = files
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    os.close(status)
    os.environ.clear()
    os.environ |= environment
    os.chdir(folder)
    return answers
