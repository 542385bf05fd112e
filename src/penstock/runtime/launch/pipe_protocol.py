"""What `Workers` sends to a worker process, and how both write messages to a pipe."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import IO

LENGTH = struct.Struct("<q")


def write_message(stream: IO[bytes], data: bytes) -> None:
    """Write one message: its length, then its bytes."""
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the pipe."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
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
