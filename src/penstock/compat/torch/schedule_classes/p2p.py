"""Messages between ranks through `torch.distributed`.

The functions `isend`, `irecv` and `batch_isend_irecv` are looked up in `torch.distributed` when a message is sent, because programs
and tests put their own in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch.distributed as dist

from penstock.compat.torch._debug import schedule_log


class Op(dist.P2POp):
    """One end of a message. Torch's own takes no function that a program has put in the place of torch's."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        return object.__new__(cls)


def _batch_p2p(p2p_ops: Sequence[Any], desc: str | None = None) -> list[dist.Work]:
    """Start the messages: one by one where all are sends or all are receives, so that none waits for another; else as one batch per
    process group."""
    if not p2p_ops:
        return []
    schedule_log.debug("batch_p2p %s%s", f"{desc}, " if desc else "", p2p_ops)
    for function, peer in ((dist.isend, "group_dst"), (dist.irecv, "group_src")):
        if all(each.op == function for each in p2p_ops):
            return [each.op(each.tensor, group=each.group, tag=each.tag, **{peer: each.group_peer}) for each in p2p_ops]
    by_group: dict[Any, list[Any]] = {}
    for each in p2p_ops:
        by_group.setdefault(each.group, []).append(each)
    return [work for ops in by_group.values() for work in dist.batch_isend_irecv(ops)]


def _sorted_batch_p2p(p2p_ops: Sequence[Any], desc: str | None = None) -> dict[int, list[dist.Work]]:
    """The messages to and from each rank as a batch of its own, the lowest rank first; the works of each."""
    from penstock.compat.torch import schedules

    by_peer: dict[int, list[Any]] = {}
    for each in p2p_ops:
        by_peer.setdefault(each.peer, []).append(each)
    return {peer: schedules._batch_p2p(by_peer[peer], desc=desc) for peer in sorted(by_peer)}


def _wait_batch_p2p(work: Sequence[Any]) -> None:
    """Wait for all of them."""
    for each in work:
        each.wait()
