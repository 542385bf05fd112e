"""One rank's process: takes functions to call from the process that started it. `python -m penstock.runtime.worker`."""

from __future__ import annotations

import gc
import io
import os
import pickle
import queue
import signal
import sys
import threading
from typing import IO, Any

from penstock.runtime.launch.pipe_protocol import Start, Task, read, write


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this one says when to stop
    orders = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(int(sys.argv[1]), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    start: Start = pickle.loads(read(orders) or b"")
    sys.path[:] = start.path
    tasks: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_listen, args=(orders, tasks), daemon=True).start()
    serve(start, tasks, answers)


def _listen(orders: IO[bytes], tasks: queue.Queue[bytes | None]) -> None:
    """An empty message is the end; a pipe that closes before it means that nobody is left to work for."""
    while True:
        data = read(orders)
        if data is None:
            os._exit(1)
        tasks.put(data or None)
        if not data:
            return


def serve(start: Start, tasks: queue.Queue[bytes | None], answers: IO[bytes]) -> None:
    from penstock.runtime.transport.failures import Told, serializer

    stores: list[Any] = []
    while (data := tasks.get()) is not None:
        task: Task = pickle.loads(data)
        try:
            made, well = run(start, task, stores)
            answer = serializer().dumps((True, made))
        except BaseException as error:
            answer, well = pickle.dumps((False, Told.of(error))), False
        made = None
        write(answers, answer)
        if not well:
            gc.collect()  # a torch group with something under way ends only when the other ranks have let go of theirs


def run(start: Start, task: Task, stores: list[Any]) -> tuple[Any, bool]:
    """Call the function as a rank of a group of its own; what it returns, and whether nothing has failed on the way.

    `stores` is kept for the next one: where names of hosts are slow to be had, as torch wants them, so is connecting to a store.
    """
    if start.rank >= task.ranks:
        return None, True
    import torch
    import torch.distributed as dist

    from penstock.runtime.transport import current_group as here
    from penstock.runtime.transport.processes import CONNECT, Processes
    from penstock.runtime.transport.store import PrefixStore, TCPStore

    while len(stores) < 2:
        stores.append(TCPStore(start.host, start.port, is_master=False, wait_for_workers=False))
    ours, theirs = (PrefixStore(task.name, store) for store in stores)
    dist.init_process_group("gloo", store=PrefixStore("torch", theirs), rank=start.rank, world_size=task.ranks)
    group = Processes(ours, start.rank, task.ranks, CONNECT)
    here.stand(group, start.rank)
    try:
        torch.set_rng_state(torch.load(io.BytesIO(task.seed)))
        call, args = pickle.loads(task.call)
        return call(*args), group.well
    except BaseException as error:
        group.fail(start.rank, error, fatal=True)
        here.part(error)
        raise
    finally:
        here.stand(None, 0)
        here.part()
        group.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
