"""A GPU's multiprocessors shared out to streams, so that one GPU stands for several smaller ones.

The device is cut once for all parts, by the driver's own functions, so that no two streams share a multiprocessor. torch's own
green contexts (`torch.cuda.green_contexts`) are made one by one from the whole device, and nothing keeps two of them apart.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from penstock.errors import ScheduleError

_SIZE, _COUNT_AT = 144, 96
"""A resource of the driver's: its bytes, and where among them the number of multiprocessors stands."""
_MULTIPROCESSORS = 1
_DEFAULT_STREAM = 1
_NON_BLOCKING = 1


@cache
def partition(parts: int, each: int, device: int) -> tuple[int, ...]:
    """A stream for each part, on `each` multiprocessors that no other part uses. They last as long as the process."""
    driver = _driver()
    number = ctypes.c_int()
    _check(driver, "cuDeviceGet", ctypes.byref(number), device)
    whole, rest = (ctypes.create_string_buffer(_SIZE) for _ in range(2))
    _check(driver, "cuDeviceGetDevResource", number, whole, _MULTIPROCESSORS)
    if count(whole, 0) < parts * each:
        raise ScheduleError(f"{parts} parts of {each} multiprocessors, but the device has {count(whole, 0)}")
    cut, found = ctypes.create_string_buffer(_SIZE * parts), ctypes.c_uint(parts)
    _check(driver, "cuDevSmResourceSplitByCount", cut, ctypes.byref(found), whole, rest, 0, each)
    sizes = [count(cut, part) for part in range(found.value)]
    if sizes != [each] * parts:
        raise ScheduleError(
            f"the device gives parts of {sizes} multiprocessors where {parts} of {each} were asked for: ask for what it gives"
        )
    return tuple(_stream(driver, number, ctypes.byref(cut, part * _SIZE)) for part in range(parts))


def count(resources: Any, place: int) -> int:
    """How many multiprocessors one of the driver's resources has."""
    return int.from_bytes(resources.raw[place * _SIZE + _COUNT_AT :][:4], "little")


def _stream(driver: Any, device: Any, resource: Any) -> int:
    described, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver, "cuDevResourceGenerateDesc", ctypes.byref(described), resource, 1)
    _check(driver, "cuGreenCtxCreate", ctypes.byref(context), described, device, _DEFAULT_STREAM)
    _check(driver, "cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, 0)
    return stream.value or 0


def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ScheduleError(f"multiprocessors are shared out by CUDA's driver, which cannot be loaded: {error}") from error


def _check(driver: Any, name: str, *args: Any) -> None:
    function = getattr(driver, name, None)
    if function is None:
        raise ScheduleError(f"CUDA's driver has no {name}: sharing out multiprocessors needs that of CUDA 12.4 or later")
    status = function(*args)
    if status:
        raise ScheduleError(f"CUDA's driver answered {name} with error {status}")
