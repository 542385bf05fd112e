"""The group and rank that this code runs on, and the groups of torch.distributed that this process has joined."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.errors import PipelineError, ScheduleError, UnknownNameError, nearest
from penstock.runtime.device.connections import default_backend
from penstock.runtime.torch_internals.lookup import find_private
from penstock.runtime.transport.failures import PrefixStore
from penstock.runtime.transport.group import Group
from penstock.runtime.transport.processes import CONNECT, TRANSPORTS, Processes
from penstock.runtime.transport.threads import VirtualGroup

logger = logging.getLogger(__name__)


class _CurrentRank(threading.local):
    """The group that `launch` runs this thread in, if any, and its rank there."""

    group: Group | None = None
    rank: int = 0


_current = _CurrentRank()
_joined: dict[str, Processes] = {}
_initialised: list[str] = []
"""The starts of the processes in which torch.distributed was initialised here."""
_STARTED = time.time_ns()
"""Tells this process from an earlier one with the same number."""
_returned: list[int] = []
"""The rank whose place this process takes, if another process had it before."""


def set_group(group: Group | None, rank: int) -> None:
    """Make this thread a rank of a group; None ends it."""
    _current.group, _current.rank = group, rank


def get_group(within: Any = None, transport: str = "auto") -> tuple[Group, int]:
    """The group and rank that this code runs on: those of `launch`, else of torch.distributed, else a group of one rank.

    `within` is a process group, or a device mesh of one dimension, whose ranks are the pipeline's.
    """
    if within is None and _current.group is not None:
        return _current.group, _current.rank
    if within is None and not is_under_torchrun():
        return VirtualGroup(1), 0
    joined = join(within, transport)
    return joined, joined.rank


def rank() -> int:
    """The rank that this code runs on; 0 outside `launch` and `torchrun`."""
    if _current.group is None and is_under_torchrun():
        return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
    return _current.rank


def is_under_torchrun() -> bool:
    """Whether the processes were started by `torchrun`, or torch.distributed is initialised already."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


# Groups of torch.distributed ------------------------------------------------------------------------------------------


def join(within: Any = None, transport: str = "auto") -> Processes:
    """Connect the ranks of a process group of torch.distributed, or all of them; `transport` is that of `Processes`."""
    if transport not in TRANSPORTS:
        raise UnknownNameError(f"unknown transport {transport!r}; {nearest(transport, TRANSPORTS)}")
    initialise()
    group: Any = dist.group.WORLD if within is None else within
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ScheduleError(f"a device mesh of {group.ndim} dimensions: give the pipeline's own, mesh['pp'] say")
        group = group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise PipelineError(f"process {dist.get_rank()} is not in the group that it was given for the pipeline")
    return _connect_once(f"{group.group_name}/{transport}", group.rank(), group.size(), transport)


def join_ranks(ranks: Sequence[int], transport: str = "auto") -> Processes:
    """Connect some processes of torch.distributed by their ranks there, in this order: the processes of a device mesh."""
    refuse_threads()
    everyone = list(ranks) == list(range(dist.get_world_size()))
    if everyone and isinstance(_current.group, Processes) and transport in ("auto", _current.group.transport):
        return _current.group
    if everyone:
        return join(None, transport)
    name = f"{'-'.join(map(str, ranks))}/{transport}"
    return _connect_once(name, ranks.index(dist.get_rank()), len(ranks), transport)


def leave_joined(error: BaseException | None = None) -> None:
    """Leave all groups that were joined. With an error, their other ranks are told of it, so that they need not wait."""
    for joined in _joined.values():
        if error is not None:
            joined.fail(joined.rank, error, fatal=True)
        joined.close()
    _joined.clear()


atexit.register(lambda: leave_joined(getattr(sys, "last_value", None)))


def _connect_once(name: str, rank: int, ranks: int, transport: str) -> Processes:
    """The group of this name, connected when it is first asked for."""
    if name not in _joined or _joined[name].closed:
        _warn_of_restarts(rank)
        store: Any = PrefixStore(
            f"penstock/{_name_start()}/{name}", find_private("torch.distributed.distributed_c10d._get_default_store")()
        )
        _joined[name] = Processes(store.clone(), rank, ranks, CONNECT, transport, returning=bool(_returned))
        _joined[name].expects_losses = getattr(_current.group, "expects_losses", False)
    return _joined[name]


def refuse_threads() -> None:
    """Refuse a device mesh if the ranks are threads, or there is only this process."""
    if isinstance(_current.group, VirtualGroup) or not is_under_torchrun():
        raise ScheduleError("a device mesh is of processes: launch with backend='gloo' or torchrun rather than on threads")


# Starts and restarts --------------------------------------------------------------------------------------------------


def initialise() -> None:
    """Initialise torch.distributed, unless it is. The keys carry a prefix of this start, because `torchrun` may keep its store.

    If another process had this rank before, this one takes its place, and comes back to the others at a checkpoint.
    """
    if dist.is_initialized():
        return
    store, number, ranks = next(rendezvous("env://"))
    own = PrefixStore(f"penstock/{_name_start()}", store)
    identity = f"{platform.node()} {os.getpid()} {_STARTED}"
    if bytes(own.compare_set(f"process/{number}", "", identity)).decode() == identity:
        dist.init_process_group(default_backend(), store=PrefixStore("torch", own), rank=number, world_size=ranks)
    else:
        initialise_alone(PrefixStore("torch", own), number, ranks)
    _initialised.append(_name_start())


def initialise_alone(store: Any, rank: int, ranks: int) -> None:
    """Initialise torch.distributed in a process that takes the place of a lost rank.

    The others have connected long ago, so it has their numbers but no connections: the pipeline makes its own. Collectives of
    torch.distributed do nothing in this process.
    """
    find_private("torch.testing._internal.distributed.fake_pg")  # registers the backend
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    _returned.append(rank)


def _name_start() -> str:
    """A name that tells this start of the processes from earlier ones, whose keys `torchrun` keeps in its store."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{os.environ.get('WORLD_SIZE', '1')}"


def _store_is_kept() -> bool:
    """Whether `torchrun` uses one store for all starts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _warn_of_restarts(rank: int) -> None:
    """Warn if a restart would read the keys of this start, because torch.distributed was initialised without our prefix."""
    if rank == 0 and _store_is_kept() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not _initialised:
        logger.warning(
            "torch.distributed was initialised without Penstock, and may hang when torchrun restarts the processes: make the mesh by "
            "penstock.runtime.device_mesh, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )
