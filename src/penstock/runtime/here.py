"""Which rank of which group this code runs on."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PipelineError, ScheduleError, UnknownNameError, nearest
from penstock.runtime.group import Group
from penstock.runtime.processes import CONNECT, TRANSPORTS, Processes
from penstock.runtime.stores import PrefixStore
from penstock.runtime.virtual import VirtualGroup


class _Here(threading.local):
    group: Group | None = None
    rank: int = 0


_here = _Here()
_joined: dict[str, Processes] = {}


def stand(group: Group | None, rank: int) -> None:
    """This thread is a rank of a group from here on."""
    _here.group, _here.rank = group, rank


def rank() -> int:
    """The rank that this code runs on; 0 outside `launch` and `torchrun`."""
    if _here.group is None and under_torchrun():
        return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    return _here.rank


def under_torchrun() -> bool:
    """Whether processes were started by `torchrun` or torch.distributed is set up already."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def current(within: Any = None, transport: str = "auto") -> tuple[Group, int]:
    """The group and rank that this code runs on: of `launch`, else of torch.distributed, else a group of one.

    `within` is a process group or a device mesh of one dimension whose ranks are the pipeline's.
    """
    if within is None and _here.group is not None:
        return _here.group, _here.rank
    if within is None and not under_torchrun():
        return VirtualGroup(1), 0
    joined = join(within, transport)
    return joined, joined.rank


def join(within: Any = None, transport: str = "auto") -> Processes:
    """The ranks of a process group of torch.distributed, or all of them; `transport` is that of `Processes`."""
    if transport not in TRANSPORTS:
        raise UnknownNameError(f"unknown transport {transport!r}; {nearest(transport, TRANSPORTS)}")
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    group = _process_group(within)
    return _kept(f"{group.group_name}/{transport}", group.rank(), group.size(), transport)


def _kept(name: str, rank: int, ranks: int, transport: str) -> Processes:
    """The group of this name, connected when it is first asked for."""
    if name not in _joined or _joined[name].closed:
        store = PrefixStore(f"penstock/{name}", dist.distributed_c10d._get_default_store())
        _joined[name] = Processes(store, rank, ranks, CONNECT, transport)
        atexit.register(_joined[name].close)
    return _joined[name]


def join_ranks(ranks: Sequence[int], transport: str = "auto") -> Processes:
    """Some of the processes of torch.distributed by their numbers, in this order: those of a device mesh."""
    if isinstance(_here.group, VirtualGroup):
        raise ScheduleError("a device mesh is of processes: launch with backend='gloo' or torchrun rather than on threads")
    everyone = list(ranks) == list(range(dist.get_world_size()))
    if everyone and isinstance(_here.group, Processes) and transport in ("auto", _here.group.transport):
        return _here.group
    if everyone:
        return join(None, transport)
    name = f"{'-'.join(map(str, ranks))}/{transport}"
    return _kept(name, ranks.index(dist.get_rank()), len(ranks), transport)


def leave() -> None:
    """Leave all groups that were joined, when all of their ranks are through."""
    for group in _joined.values():
        atexit.unregister(group.close)
        group.close()
    _joined.clear()


def _process_group(within: Any) -> Any:
    if within is None:
        return dist.group.WORLD
    if hasattr(within, "get_group"):
        if within.ndim != 1:
            raise ScheduleError(f"a device mesh of {within.ndim} dimensions: give the pipeline's own, mesh['pp'] say")
        return within.get_group()
    if within == dist.GroupMember.NON_GROUP_MEMBER:
        raise PipelineError(f"process {dist.get_rank()} is not in the group that it was given for the pipeline")
    return within
