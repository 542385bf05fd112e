"""All that differs between devices."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def on_host(tensor: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The tensor in the host's memory, laid out like this."""
    laid = torch.empty_strided(shape, stride, dtype=tensor.dtype)
    return laid.copy_(tensor.detach())


def placed(tensor: Tensor, device: str) -> Tensor:
    """A tensor that came from another process, on this rank's device of that type."""
    return tensor.to(device)


def local_device() -> str | None:
    """What tells this rank's device from others; None without one."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else None


def is_direct(devices: list[Any]) -> bool:
    """Whether tensors go between the ranks' devices by NCCL: each must have one of its own. Through the host otherwise."""
    return None not in devices and len(set(devices)) == len(devices) > 1 and dist.is_nccl_available()


def direct_connection(store: Any, rank: int, ranks: int, deadline: float) -> Any:
    """A connection for tensors as they are: NCCL, whose sends and receives wait on the device; without one gloo, to test with."""
    if not torch.cuda.is_available():
        return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=deadline))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline)
    return dist.ProcessGroupNCCL(store, rank, ranks, options)


def direct_tensor() -> Tensor:
    """Something small to send on a new connection."""
    return torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")


def stop(connection: Any) -> None:
    """End what is under way on the devices."""
    if torch.cuda.is_available():
        connection.abort()
