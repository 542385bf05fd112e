"""CUDA streams: one per virtual rank, two for a rank that overlaps work, and the order between them.

Without a GPU every function here does nothing, because the host's work is in order by itself.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.device.gpu import cuda, is_initialized
from penstock.runtime.torch_internals import pytree
from penstock.text.units import check_count


class _SideStream(threading.local):
    """The second stream that this thread runs work on, if any."""

    stream: Any = None


_side = _SideStream()


def create_streams(ranks: int, sms: int | Sequence[int] | None = None) -> list[Any]:
    """One stream per virtual rank, each on `sms` multiprocessors of its own if given; None for each rank without a GPU.

    `sms` is one number, or one per rank.
    """
    sizes = None if sms is None else check_sizes(ranks, sms)
    if not cuda.is_available():
        if sms is not None:
            raise ScheduleError(f"sms={sms}: there is no GPU to split")
        return [None] * ranks
    if sizes is None:
        return [cuda.Stream() for _ in range(ranks)] if ranks > 1 else [cuda.current_stream()]
    cuda.init()
    return [cuda.ExternalStream(stream) for stream in split_multiprocessors(sizes, cuda.current_device())]


def check_sizes(ranks: int, sms: int | Sequence[int]) -> tuple[int, ...]:
    """The multiprocessors of each rank."""
    sizes = tuple(sms) if isinstance(sms, Sequence) else (sms,) * ranks
    if len(sizes) != ranks:
        raise ScheduleError(f"sms has {len(sizes)} values for {ranks} ranks: give one number, or one per rank")
    return tuple(check_count("sms", size, error=ScheduleError) for size in sizes)


def get_current_stream() -> Any:
    """The stream that this thread's work goes to; None without a GPU.

    To find the device by itself takes `torch.cuda.current_stream` most of its time, which matters for events around every action.
    """
    return cuda.current_stream(cuda.current_device()) if is_initialized() else None


def use_stream(stream: Any) -> None:
    """Send this thread's work to a stream from now on."""
    if stream is not None:
        cuda.set_stream(stream)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Send this thread's work to a stream within a block; None without a GPU."""
    return nullcontext() if stream is None else cuda.stream(stream)


def record_event() -> Any:
    """Mark the present point of this thread's stream, for other streams to wait for; None without a GPU."""
    stream = get_current_stream()
    if stream is None:
        return None
    event = cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def wait_event(event: Any) -> None:
    """Let this thread's stream continue only after a recorded event."""
    if event is not None:
        event.wait(get_current_stream())


def record_use(value: Any) -> None:
    """Keep the memory of tensors that another stream made until this thread's streams have used them."""
    current = get_current_stream()
    if current is None:
        return
    for tensor in list_tensors(value):
        if tensor.is_cuda:
            tensor.record_stream(current)
            if _side.stream is not None:
                tensor.record_stream(_side.stream)


def list_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a tree, and in the fields of dataclasses in it.

    Tensors, tuples, lists and dataclasses are taken apart here, because pytree takes several times as long.
    """
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list):
        for part in value:
            yield from list_tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for name in value.__dataclass_fields__:
            yield from list_tensors(getattr(value, name))
    elif value is not None:
        for leaf in pytree.tree_leaves(value):
            if leaf is not value:
                yield from list_tensors(leaf)


class StreamPair:
    """Two streams of one rank: its own, and a second one beside it. Without a GPU all work runs in order on the host."""

    def __init__(self) -> None:
        self.streams: list[Any] = [None, None]
        if cuda.is_available():
            self.streams = [cuda.current_stream(), cuda.Stream()]
            _side.stream = self.streams[1]
            quiet = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
            if quiet is not None:  # one parameter's gradients are added up from both streams, and autograd orders that
                quiet(False)

    def run_on(self, number: int, work: Callable[[], None]) -> None:
        """Run work on stream 0 or 1."""
        with on_stream(self.streams[number]):
            work()

    def join(self) -> None:
        """Let whatever follows on either stream wait for everything on both."""
        own, side = self.streams
        if own is not None:
            own.wait_stream(side)
            side.wait_stream(own)


# Multiprocessors ------------------------------------------------------------------------------------------------------

_SIZE, _COUNT_AT = 144, 96
"""The driver's resource structure: its size in bytes, and the offset of the number of multiprocessors."""
_MULTIPROCESSORS = 1
_DEFAULT_STREAM = 1
_NON_BLOCKING = 1


@cache
def split_multiprocessors(sizes: tuple[int, ...], device: int) -> tuple[int, ...]:
    """One stream per size, on so many multiprocessors that no other part uses. The streams last as long as the process.

    The driver's own functions split the device once for all streams, into equal units; a part is one unit or several in a row. torch's
    green contexts (`torch.cuda.green_contexts`) are not suitable: each is made from the whole device, and two of them may overlap.
    """
    driver, unit, total = _load_driver(), math.gcd(*sizes), sum(sizes)
    number = ctypes.c_int()
    _check(driver, "cuDeviceGet", ctypes.byref(number), device)
    whole, rest = (ctypes.create_string_buffer(_SIZE) for _ in range(2))
    _check(driver, "cuDeviceGetDevResource", number, whole, _MULTIPROCESSORS)
    asked = f"{len(sizes)} parts of {_list_sizes(sizes)} multiprocessors"
    if _count(whole, 0) < total:
        raise ScheduleError(f"{asked}, but the device has {_count(whole, 0)}")
    units = total // unit
    split, count = ctypes.create_string_buffer(_SIZE * units), ctypes.c_uint(units)
    _check(driver, "cuDevSmResourceSplitByCount", split, ctypes.byref(count), whole, rest, 0, unit)
    counts = [_count(split, place) for place in range(count.value)]
    if counts != [unit] * units:
        raise ScheduleError(
            f"the device gives units of {counts} multiprocessors, but {asked} need {units} units of {unit}: request multiples of a size "
            "that it gives"
        )
    firsts = [first // unit for first in accumulate(sizes[:-1], initial=0)]
    return tuple(
        _create_stream(driver, number, ctypes.byref(split, first * _SIZE), size // unit) for first, size in zip(firsts, sizes, strict=True)
    )


def _list_sizes(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else ", ".join(map(str, sizes))


def _count(resources: Any, place: int) -> int:
    """The number of multiprocessors of one of the driver's resources."""
    return int.from_bytes(resources.raw[place * _SIZE + _COUNT_AT :][:4], "little")


def _create_stream(driver: Any, device: Any, resources: Any, count: int) -> int:
    """A stream on so many resources in a row."""
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver, "cuDevResourceGenerateDesc", ctypes.byref(description), resources, count)
    _check(driver, "cuGreenCtxCreate", ctypes.byref(context), description, device, _DEFAULT_STREAM)
    _check(driver, "cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, 0)
    return stream.value or 0


def _load_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ScheduleError(f"splitting a GPU's multiprocessors needs CUDA's driver, which cannot be loaded: {error}") from error


def _check(driver: Any, name: str, *args: Any) -> None:
    function = getattr(driver, name, None)
    if function is None:
        raise ScheduleError(f"CUDA's driver has no {name}: splitting multiprocessors needs the driver of CUDA 12.4 or later")
    status = function(*args)
    if status:
        raise ScheduleError(f"CUDA's driver answered {name} with error {status}")
