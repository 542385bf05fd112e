"""Messages between ranks through `torch.distributed`.

`isend`, `irecv` and `batch_isend_irecv` are looked up in `torch.distributed` at every call, and the functions below in
`penstock.compat.torch.schedules`, because programs and tests replace them there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from penstock.compat.torch._debug import schedule_log


def _batch_p2p(p2p_ops: Sequence[Any], desc: str | None = None) -> list[dist.Work]:
    """Start messages: one by one if all are sends or all are receives, so that none waits for another; else as one batch per process
    group."""
    if not p2p_ops:
        return []
    schedule_log.debug("batch_p2p %s%s", f"{desc}, " if desc else "", p2p_ops)
    for function, peer in ((dist.isend, "group_dst"), (dist.irecv, "group_src")):
        if all(op.op == function for op in p2p_ops):
            return [op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer}) for op in p2p_ops]
    by_group: dict[str, list[Any]] = {}
    for op in p2p_ops:
        by_group.setdefault(getattr(op.group, "group_name", ""), []).append(op)
    # By name, so that all ranks start the groups in the same order.
    return [work for name in sorted(by_group) for work in dist.batch_isend_irecv(by_group[name])]


def _sorted_batch_p2p(p2p_ops: Sequence[Any], desc: str | None = None) -> dict[int, list[dist.Work]]:
    """Start the messages of each peer as a batch, the lowest rank first; return the works by peer."""
    by_peer: dict[int, list[Any]] = {}
    for op in p2p_ops:
        by_peer.setdefault(op.peer, []).append(op)
    return {peer: _schedules()._batch_p2p(by_peer[peer], desc=desc) for peer in sorted(by_peer)}


def _wait_batch_p2p(work: Sequence[Any]) -> None:
    """Wait for all works."""
    for single_work in work:
        single_work.wait()


# For the schedules ----------------------------------------------------------------------------------------------------


def _schedules() -> Any:
    from penstock.compat.torch import schedules

    return schedules


def start_batch(ops: Sequence[Any]) -> list[Any]:
    """Start messages by `_batch_p2p`."""
    return list(_schedules()._batch_p2p(ops))


def start_by_peer(ops: Sequence[Any], desc: str) -> list[Any]:
    """Start messages by `_sorted_batch_p2p`."""
    return [work for works in _schedules()._sorted_batch_p2p(ops, desc=desc).values() for work in works]


def wait_for_works(works: Sequence[Any]) -> None:
    """Wait for messages by `_wait_batch_p2p`."""
    _schedules()._wait_batch_p2p(works)
