"""Passes by name."""

from __future__ import annotations

import inspect

from penstock.errors import PassError, nearest
from penstock.passes.base import Pass
from penstock.passes.buffers import Buffers
from penstock.passes.merge_backward import MergeBackward
from penstock.passes.receive import Receive
from penstock.passes.reduce_grad import ReduceGrad
from penstock.passes.send_receive import SendReceive
from penstock.passes.shard import Shard
from penstock.passes.split_backward import SplitBackward
from penstock.passes.wait_send import WaitSend

_CLASSES: tuple[type[Pass], ...] = (SplitBackward, MergeBackward, Shard, ReduceGrad, SendReceive, Receive, WaitSend, Buffers)
_BY_NAME = {each.name: each for each in _CLASSES}


def passes() -> dict[str, str]:
    """Every pass's name and one-line summary, in the order in which lowering runs them."""
    return {name: (inspect.getdoc(cls) or "").splitlines()[0] for name, cls in _BY_NAME.items()}


def pass_class(name: str) -> type[Pass]:
    """The pass of this name."""
    if name not in _BY_NAME:
        raise PassError(f"there is no pass {name!r}: {nearest(name, _BY_NAME)}")
    return _BY_NAME[name]
