"""Connections that carry tensors from device to device: NCCL, and gloo in its place on machines without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.runtime.device.gpu import cuda, default_device_type
from penstock.runtime.torch_internals.lookup import check_private


def device_id() -> str | None:
    """The identity of this rank's GPU among all GPUs of all machines; None without one."""
    return str(cuda.get_device_properties(cuda.current_device()).uuid) if cuda.is_available() else None


def can_use_nccl(device_ids: Sequence[str | None]) -> bool:
    """Whether NCCL can connect ranks with these devices: each rank needs a GPU of its own."""
    return None not in device_ids and len(set(device_ids)) == len(device_ids) > 1 and dist.is_nccl_available()


def connect_devices(store: Any, rank: int, ranks: int, deadline: float) -> Any:
    """A process group for tensors: NCCL, whose sends and receives wait on the device; gloo without a GPU, to test with."""
    if not cuda.is_available():
        return dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=deadline))
    options = dist.ProcessGroupNCCL.Options()
    check_private(options, "_timeout")
    options._timeout = timedelta(seconds=deadline)
    return dist.ProcessGroupNCCL(store, rank, ranks, options)


def broadcast_options(root: int) -> Any:
    """The options of a broadcast from this rank of a process group."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def abort_connection(connection: Any) -> None:
    """End the messages in progress on the devices. Gloo needs no such call: it stops when nothing refers to the connection."""
    if cuda.is_available():
        connection.abort()


def wait_for_send(work: Any, timeout: timedelta) -> None:
    """Let this rank's next work on the device come after a send, so that the memory that was sent can be used again.

    Without a GPU the host waits. NCCL's works make the host wait too if they are given a timeout, so they get none.
    """
    if cuda.is_available():
        work.wait()
    else:
        work.wait(timeout)


def probe_tensor() -> Tensor:
    """A small tensor to send over a new connection."""
    return torch.zeros(1, device=default_device_type())


def default_backend() -> str:
    """The backend with which torch.distributed is initialised if the user has not done it."""
    return "cpu:gloo,cuda:nccl" if cuda.is_available() else "gloo"
