"""The GPU of this process: whether there is one, which one it is, and torch's functions for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


def device_name(device: torch.device) -> str:
    """The product name of a GPU, or the type of any other device."""
    return str(cuda.get_device_name(device)) if device.type == "cuda" else device.type
