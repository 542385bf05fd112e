"""The process of one rank: calls the functions that `Workers` sends it over a pipe."""

from __future__ import annotations

import gc
import io
import os
import pickle
import queue
import signal
import struct
import sys
import threading
from dataclasses import dataclass
from typing import IO, Any

_LENGTH = struct.Struct("<q")


def write_message(stream: IO[bytes], data: bytes) -> None:
    """Write one message: its length, then its bytes."""
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the pipe."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


@dataclass(frozen=True)
class Start:
    """The first message: `sys.path`, the address of the store that connects the ranks, and the worker's rank."""

    path: list[str]
    host: str
    port: int
    rank: int


@dataclass(frozen=True)
class Task:
    """A function to call on the first `ranks` ranks.

    The call is pickled by itself, so that a worker that cannot unpickle it can still answer with the error.
    """

    name: str
    ranks: int
    call: bytes
    seed: bytes
    returning: bool = False
    """Whether the worker takes the place of one that has ended."""
    losses: int = 0
    """How many workers may be lost."""


def main() -> None:
    """Serve the process that has started this one, which disables the garbage collector for the imports.

    What they have made stays to the end: later collections leave it out, and so take less time in each step.
    """
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process decides when to stop
    orders = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(int(sys.argv[1]), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    start: Start = pickle.loads(read_message(orders) or b"")
    sys.path[:] = start.path
    tasks: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_listen, args=(orders, tasks), daemon=True).start()
    serve(start, tasks, answers)


def _listen(orders: IO[bytes], tasks: queue.Queue[bytes | None]) -> None:
    """Queue the tasks. An empty message is the end; a pipe that closes before it means that the parent is gone."""
    while True:
        data = read_message(orders)
        if data is None:
            os._exit(1)
        tasks.put(data or None)
        if not data:
            return


def serve(start: Start, tasks: queue.Queue[bytes | None], answers: IO[bytes]) -> None:
    """Run one task after the other, and answer each with its result or its error."""
    from penstock.runtime.tensors.boundary import load_pickler
    from penstock.runtime.transport.failures import PickledError

    stores: list[Any] = []
    while (data := tasks.get()) is not None:
        task: Task = pickle.loads(data)
        try:
            result, healthy = run(start, task, stores)
            answer = load_pickler().dumps((True, result))
        except BaseException as error:
            answer, healthy = pickle.dumps((False, PickledError.of(error))), False
        result = None
        write_message(answers, answer)
        if not healthy:
            gc.collect()  # a process group with messages in progress ends only when the other ranks have dropped theirs


def run(start: Start, task: Task, stores: list[Any]) -> tuple[Any, bool]:
    """Call the function as a rank of a new group; returns its result, and whether nothing has failed on the way.

    `stores` keeps the connections to the store for the next task: connecting is slow on machines with slow name resolution.
    """
    if start.rank >= task.ranks:
        return None, True
    import torch
    import torch.distributed as dist

    from penstock.runtime.transport.current_group import initialise_alone, leave_joined, set_group
    from penstock.runtime.transport.failures import PrefixStore, TCPStore
    from penstock.runtime.transport.processes import CONNECT, Processes

    while len(stores) < 2:
        stores.append(TCPStore(start.host, start.port, is_master=False, wait_for_workers=False))
    own_store, torch_store = (PrefixStore(task.name, store) for store in stores)
    if task.returning:
        initialise_alone(PrefixStore("torch", torch_store), start.rank, task.ranks)
    else:
        dist.init_process_group("gloo", store=PrefixStore("torch", torch_store), rank=start.rank, world_size=task.ranks)
    places = {"RANK": start.rank, "LOCAL_RANK": start.rank, "WORLD_SIZE": task.ranks, "LOCAL_WORLD_SIZE": task.ranks}
    os.environ |= {name: str(value) for name, value in places.items()}  # as torchrun sets them, for libraries that look there
    group = Processes(own_store, start.rank, task.ranks, CONNECT, returning=task.returning)
    group.expects_losses = task.losses > 0
    set_group(group, start.rank)
    try:
        torch.set_rng_state(torch.load(io.BytesIO(task.seed)))
        call, args = pickle.loads(task.call)
        return call(*args), group.healthy
    except BaseException as error:
        group.fail(start.rank, error, fatal=True)
        leave_joined(error)
        raise
    finally:
        set_group(None, 0)
        leave_joined()
        group.close()
        dist.destroy_process_group()
