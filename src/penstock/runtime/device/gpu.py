"""The GPU of this process: whether there is one, which one it is, its allocated memory, and torch's functions for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from penstock.runtime.torch_internals.lookup import find_private

cuda: Any = torch.cuda  # much of it has no types
is_initialized: Callable[[], bool] = cuda.is_initialized
"""Whether this process has used a GPU. If it has not, there is nothing to wait for on one."""


def default_device_type() -> str:
    """The type of device to use when the user names none."""
    return "cuda" if cuda.is_available() else "cpu"


def claim_gpu(rank: int) -> torch.device:
    """Make one GPU of this machine the rank's own: its work goes there from now on."""
    gpu = torch.device("cuda", rank % cuda.device_count())
    cuda.set_device(gpu)
    return gpu


def claim_device(kind: str, rank: int) -> torch.device:
    """The rank's device of this kind; for `cuda`, a GPU of its own on this machine."""
    return claim_gpu(rank) if kind == "cuda" else torch.device(kind)


def device_name(device: torch.device) -> str:
    """The product name of a GPU, or the type of any other device."""
    return str(cuda.get_device_name(device)) if device.type == "cuda" else device.type


def finish_work() -> None:
    """Wait until the GPU has done all that was asked of it; returns at once without one."""
    if is_initialized():
        cuda.synchronize()


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory, or of this machine's."""
    if device.type == "cuda":
        return int(cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """The most that was allocated since this object was made, beyond what was allocated then; 0 without a GPU."""

    def __init__(self) -> None:
        self._before = 0
        if is_initialized():
            self._before = int(cuda.memory_allocated())
            cuda.reset_peak_memory_stats()

    def bytes(self) -> int:
        return int(cuda.max_memory_allocated()) - self._before if is_initialized() else 0


def keep_device_guard() -> None:
    """Have torch 2.11 create its stand-in for a GPU's device guard on the calling thread, which has to outlive all others that compile.

    Without a GPU, each compilation asks torch for that stand-in. In 2.11 it belongs to the thread that asked first, and the next
    compilation after the end of that thread is a segmentation fault. Later versions keep it for the whole process.
    """
    if torch.__version__.startswith("2.11.") and not cuda.is_available():
        find_private("torch._C._ensureCUDADeviceGuardSet")()
