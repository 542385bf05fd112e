"""Which rank of which group this code runs on."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.errors import PipelineError, ScheduleError, UnknownNameError, nearest
from penstock.runtime.device.device import backend
from penstock.runtime.transport.group import Group
from penstock.runtime.transport.processes import CONNECT, TRANSPORTS, Processes
from penstock.runtime.transport.store import PrefixStore
from penstock.runtime.transport.threads import VirtualGroup

logger = logging.getLogger(__name__)


class _Here(threading.local):
    group: Group | None = None
    rank: int = 0


_here = _Here()
_joined: dict[str, Processes] = {}
_set_up: list[str] = []
"""The starts that torch.distributed was set up for from here."""


def part(error: BaseException | None = None) -> None:
    """Leave all groups of torch.distributed that were joined; an error is told to their other ranks, who need not wait then."""
    for joined in _joined.values():
        if error is not None:
            joined.fail(joined.rank, error, fatal=True)
        joined.close()
    _joined.clear()


atexit.register(lambda: part(getattr(sys, "last_value", None)))


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
    initialise()
    group = _process_group(within)
    return _kept(f"{group.group_name}/{transport}", group.rank(), group.size(), transport)


def _kept(name: str, rank: int, ranks: int, transport: str) -> Processes:
    """The group of this name, connected when it is first asked for."""
    if name not in _joined or _joined[name].closed:
        _warn_of_restarts(rank)
        store: Any = PrefixStore(f"penstock/{_attempt()}/{name}", dist.distributed_c10d._get_default_store())
        _joined[name] = Processes(store.clone(), rank, ranks, CONNECT, transport)
    return _joined[name]


def join_ranks(ranks: Sequence[int], transport: str = "auto") -> Processes:
    """Some of the processes of torch.distributed by their numbers, in this order: those of a device mesh."""
    refuse_threads()
    everyone = list(ranks) == list(range(dist.get_world_size()))
    if everyone and isinstance(_here.group, Processes) and transport in ("auto", _here.group.transport):
        return _here.group
    if everyone:
        return join(None, transport)
    name = f"{'-'.join(map(str, ranks))}/{transport}"
    return _kept(name, ranks.index(dist.get_rank()), len(ranks), transport)


def refuse_threads() -> None:
    """A device mesh cannot be had here, where ranks are threads or there are none."""
    if isinstance(_here.group, VirtualGroup) or not under_torchrun():
        raise ScheduleError("a device mesh is of processes: launch with backend='gloo' or torchrun rather than on threads")


def _attempt() -> str:
    """What tells this start of the processes from those before: `torchrun` keeps its store, with all that they left in it."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{os.environ.get('WORLD_SIZE', '1')}"


def initialise() -> None:
    """Set up torch.distributed where nobody has, under names of this start alone where `torchrun` keeps the store."""
    if dist.is_initialized():
        return
    if not _store_is_kept():
        dist.init_process_group(backend())
        return
    store, number, ranks = next(rendezvous("env://"))
    dist.init_process_group(backend(), store=PrefixStore(f"penstock/{_attempt()}/torch", store), rank=number, world_size=ranks)
    _set_up.append(_attempt())


def _store_is_kept() -> bool:
    """Whether `torchrun` has one store for all starts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _warn_of_restarts(rank: int) -> None:
    """Say so where another start would find what this one has left: torch.distributed was set up by others, in a store that is kept."""
    if rank == 0 and _store_is_kept() and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not _set_up:
        logger.warning(
            "torch.distributed was set up without Penstock, and may hang when torchrun starts the processes again: make the mesh by "
            "penstock.runtime.device_mesh, or set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )


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
