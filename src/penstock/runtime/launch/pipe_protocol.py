"""What a process is told by the one that started it, and how both write it to a pipe."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import IO

LENGTH = struct.Struct("<q")


def write(stream: IO[bytes], data: bytes) -> None:
    """One message: its length, then itself."""
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = stream.read(size)
    return data if len(data) == size else None


@dataclass(frozen=True)
class Start:
    """What a worker is told once."""

    path: list[str]
    host: str
    port: int
    rank: int


@dataclass(frozen=True)
class Task:
    """A function to call on the first so many ranks. The call is pickled apart, so that one that cannot be read is an answer too."""

    name: str
    ranks: int
    call: bytes
    seed: bytes
