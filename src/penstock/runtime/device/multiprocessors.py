"""A GPU's multiprocessors split among streams, so that one GPU stands for several smaller ones.

The driver's own functions split the device once for all streams, so that no two streams share a multiprocessor. torch's green
contexts (`torch.cuda.green_contexts`) are not suitable: each is made from the whole device, and two of them may overlap.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from penstock.errors import ScheduleError

_SIZE, _COUNT_AT = 144, 96
"""The driver's resource structure: its size in bytes, and the offset of the number of multiprocessors."""
_MULTIPROCESSORS = 1
_DEFAULT_STREAM = 1
_NON_BLOCKING = 1


@cache
def split_multiprocessors(parts: int, size: int, device: int) -> tuple[int, ...]:
    """One stream per part, on `size` multiprocessors that no other part uses. The streams last as long as the process."""
    driver = _driver()
    number = ctypes.c_int()
    _check(driver, "cuDeviceGet", ctypes.byref(number), device)
    whole, rest = (ctypes.create_string_buffer(_SIZE) for _ in range(2))
    _check(driver, "cuDeviceGetDevResource", number, whole, _MULTIPROCESSORS)
    if _count(whole, 0) < parts * size:
        raise ScheduleError(f"{parts} parts of {size} multiprocessors, but the device has {_count(whole, 0)}")
    split, made = ctypes.create_string_buffer(_SIZE * parts), ctypes.c_uint(parts)
    _check(driver, "cuDevSmResourceSplitByCount", split, ctypes.byref(made), whole, rest, 0, size)
    sizes = [_count(split, part) for part in range(made.value)]
    if sizes != [size] * parts:
        raise ScheduleError(
            f"the device gives parts of {sizes} multiprocessors, but {parts} parts of {size} were requested: request a size that it gives"
        )
    return tuple(_create_stream(driver, number, ctypes.byref(split, part * _SIZE)) for part in range(parts))


def _count(resources: Any, place: int) -> int:
    """The number of multiprocessors of one of the driver's resources."""
    return int.from_bytes(resources.raw[place * _SIZE + _COUNT_AT :][:4], "little")


def _create_stream(driver: Any, device: Any, resource: Any) -> int:
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver, "cuDevResourceGenerateDesc", ctypes.byref(description), resource, 1)
    _check(driver, "cuGreenCtxCreate", ctypes.byref(context), description, device, _DEFAULT_STREAM)
    _check(driver, "cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, 0)
    return stream.value or 0


def _driver() -> Any:
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
