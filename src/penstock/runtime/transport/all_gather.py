"""Small values from every process to every other, in as many rounds as the number of ranks has binary digits."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.runtime.transport.activity import clock
from penstock.runtime.transport.failures import serializer
from penstock.runtime.transport.framed_channels import TAGS
from penstock.runtime.transport.message_format import LENGTH, OVERFLOW, TRAILER, empty, trailer

if TYPE_CHECKING:
    from penstock.runtime.transport.processes import Processes
    from penstock.runtime.transport.subgroup import Slice

ROOM = 1024
"""Bytes of a frame; what is longer follows apart."""
_KEPT = 64
"""How many sends are held before it is seen to that the oldest is through."""


class Exchange:
    """Messages between ranks that belong to no program."""

    def __init__(self, group: Processes | Slice, tag: int = TAGS["control"]) -> None:
        self.group, self.tag = group, tag
        self._flight: deque[tuple[Any, Tensor]] = deque()
        self._posted: dict[int, tuple[Any, Tensor]] = {}
        """The next receive from each rank that passes on to this one, posted ahead."""
        self.number = 0
        """How many exchanges were begun on this connection."""

    def gather(self, name: str, value: Any, deadline: float) -> list[Any]:
        """Everyone's value, in the order of ranks.

        In each round a rank passes on all it has to one that is twice as far as in the round before.
        """
        group, distance = self.group, 1
        rank, ranks = group.rank, group.ranks
        values = [dumps(value)]  # of this rank, the one before it, and so on
        self.number += 1
        timeout = timedelta(seconds=deadline)
        while distance < ranks:
            passed = values[: min(distance, ranks - distance)]
            there, back = (rank + distance) % ranks, (rank - distance) % ranks
            self._send(there, pickle.dumps((name, self.number, passed)), name)
            theirs, number, more = pickle.loads(self._receive(back, name, timeout))
            if (theirs, number) != (name, self.number):
                here, other = group.called(rank), group.called(back)
                text = f"{here} is at {name!r}, but {other} at {theirs!r}: every rank must make the same calls in the same order"
                raise group.report_failure(rank, text)
            values += more
            distance *= 2
        return [loads(values[(rank - other) % ranks]) for other in range(ranks)]

    def _send(self, target: int, data: bytes, name: str) -> None:
        frame = empty(ROOM)
        words, fits = trailer(frame), len(data) <= ROOM - TRAILER
        words[LENGTH], words[OVERFLOW] = len(data), 0 if fits else len(data)
        if fits:
            ctypes.memmove(frame.data_ptr(), data, len(data))
        try:
            while len(self._flight) > _KEPT:  # taken long ago, for the other ranks have answered since
                self._flight.popleft()[0].wait()
            self._dispatch(frame, target, self.tag)
            if not fits:
                self._dispatch(torch.frombuffer(bytearray(data), dtype=torch.uint8), target, self.tag + 1)
        except (RuntimeError, AttributeError, IndexError) as error:
            self.group.lost(target, f"all ranks to reach {name!r}", error)

    def _dispatch(self, frame: Tensor, target: int, tag: int) -> None:
        self._flight.append((self.group.connection.send([frame], target, tag), frame))  # the work does not hold the memory

    def _receive(self, source: int, name: str, timeout: timedelta) -> bytes:
        activity, posted = self.group.mine, self._posted
        activity.since, activity.waits = clock(), f"all ranks to reach {name!r}"
        try:
            if source not in posted:
                self._post(source)
            work, frame = posted.pop(source)
            work.wait(timeout)
            words = trailer(frame)
            length, overflow = words[LENGTH], words[OVERFLOW]
            if overflow:
                frame = empty(overflow)
                self.group.connection.recv([frame], source, self.tag + 1).wait(timeout)
            self._post(source)
        except (RuntimeError, AttributeError, KeyError) as error:  # the latter two: the connection was closed meanwhile
            work = None  # the raised error keeps this frame, and the work would keep the connection open
            self.group.lost(source, f"all ranks to reach {name!r}", error)
        activity.waits = None
        return ctypes.string_at(frame.data_ptr(), length)

    def _post(self, source: int) -> None:
        frame = empty(ROOM)
        self._posted[source] = self.group.connection.recv([frame], source, self.tag), frame

    def drop(self) -> None:
        self._flight.clear()
        self._posted.clear()
        self.number = 0


class _Pickler(pickle.Pickler):
    """Tensors as their bytes, which is many times quicker than their own way."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
        return _rebuilt, (data, obj.dtype, tuple(obj.shape), obj.device.type)


def _rebuilt(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).to(device)


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError):  # a class of a script or notebook
        return bytes(serializer().dumps(value))
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    return pickle.loads(data)
