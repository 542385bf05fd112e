"""All-gather of small Python values between processes, in log2(ranks) rounds."""

from __future__ import annotations

import ctypes
import io
import pickle
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.runtime.device.timing import clock
from penstock.runtime.tensors.boundary import load_pickler
from penstock.runtime.transport.message_format import LENGTH, OVERFLOW, TRAILER, allocate_bytes, trailer

if TYPE_CHECKING:
    from penstock.runtime.transport.processes import Processes

CONTROL_TAG = 2
"""The tag of the messages of all ranks. Longer values follow under the next tag, here and in every subgroup."""
_FRAME = 1024
"""Bytes of a frame. Longer values follow in a message of their own."""
_SENDS = 64
"""How many sends are kept before the oldest is waited for."""


class AllGather:
    """All-gathers between some ranks of a group of processes: its `members`, in this order, each making the same calls."""

    def __init__(self, group: Processes, members: Sequence[int], tag: int) -> None:
        self.group, self.members, self.tag = group, members, tag
        self.number = 0
        """How many all-gathers were begun on the present connection."""
        self._activity = group.activity(group.rank)
        self._sends: deque[tuple[Any, Tensor]] = deque()
        self._posted: dict[int, tuple[Any, Tensor]] = {}
        """The next receive from each rank that sends to this one, posted ahead."""

    def run(self, name: str, value: Any, deadline: float) -> list[Any]:
        """Every member's value, in the order of members.

        In each round a rank passes all values that it has to a rank twice as far away as in the round before.
        """
        group, members, distance = self.group, self.members, 1
        place, count = members.index(group.rank), len(members)
        values = [dumps(value)]  # of this rank, the one before it, and so on
        self.number += 1
        timeout = timedelta(seconds=deadline)
        while distance < count:
            passed = values[: min(distance, count - distance)]
            target, source = members[(place + distance) % count], members[(place - distance) % count]
            self._send(target, pickle.dumps((name, self.number, passed)), name)
            their_name, number, more = pickle.loads(self._receive(source, name, timeout))
            if (their_name, number) != (name, self.number):
                here, there = group.describe_rank(group.rank), group.describe_rank(source)
                text = f"{here} is at {name!r}, but {there} at {their_name!r}: every rank must make the same calls in the same order"
                raise group.report_failure(group.rank, text)
            values += more
            distance *= 2
        return [pickle.loads(values[(place - other) % count]) for other in range(count)]

    def _send(self, target: int, data: bytes, name: str) -> None:
        frame = allocate_bytes(_FRAME)
        words, fits = trailer(frame), len(data) <= _FRAME - TRAILER
        words[LENGTH], words[OVERFLOW] = len(data), 0 if fits else len(data)
        if fits:
            ctypes.memmove(frame.data_ptr(), data, len(data))
        try:
            while len(self._sends) > _SENDS:  # received long ago, because the other ranks have answered since
                self._sends.popleft()[0].wait()
            send, parts = self.group.connection.send, [frame]
            if not fits:
                parts.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            for place, part in enumerate(parts):
                self._sends.append((send([part], target, self.tag + place), part))  # the work does not hold the memory
        except (RuntimeError, AttributeError, IndexError) as error:
            self.group.raise_lost(target, f"all ranks to reach {name!r}", error)

    def _receive(self, source: int, name: str, timeout: timedelta) -> bytes:
        activity, posted = self._activity, self._posted
        activity.since, activity.waits = clock(), f"all ranks to reach {name!r}"
        try:
            if source not in posted:
                self._post(source)
            work, frame = posted.pop(source)
            work.wait(timeout)
            words = trailer(frame)
            length, overflow = words[LENGTH], words[OVERFLOW]
            if overflow:
                frame = allocate_bytes(overflow)
                self.group.connection.recv([frame], source, self.tag + 1).wait(timeout)
            self._post(source)
        except (RuntimeError, AttributeError, KeyError) as error:  # the latter two: the connection was closed meanwhile
            work = None  # the raised error keeps this frame, and the work would keep the connection open
            self.group.raise_lost(source, f"all ranks to reach {name!r}", error)
        activity.waits = None
        return ctypes.string_at(frame.data_ptr(), length)

    def _post(self, source: int) -> None:
        frame = allocate_bytes(_FRAME)
        self._posted[source] = self.group.connection.recv([frame], source, self.tag), frame

    def drop(self) -> None:
        """Let go of all messages in progress, so that the connection can close. May be called from another thread."""
        self._sends.clear()
        self._posted.clear()
        self.number = 0


class _Pickler(pickle.Pickler):
    """Pickles tensors as their bytes, which is many times quicker than torch's own way."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
        return _rebuild_tensor, (data, obj.dtype, tuple(obj.shape), obj.device.type)


def _rebuild_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).to(device)


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError):  # a class of a script or notebook
        return bytes(load_pickler().dumps(value))
    return buffer.getvalue()
