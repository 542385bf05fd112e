"""The tensors that are alive, by their memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.execution.executor import Executor
from penstock.runtime.transport.group import EMPTY, Operation


class Live(TorchDispatchMode):
    """Sees every tensor that operators make on this thread, and tells which of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor):
                watched = watch(leaf)
                self._seen.setdefault(watched.cdata, (watched, leaf.untyped_storage().nbytes()))
        return made

    def forget(self, *kept: Tensor) -> None:
        """Start anew: what is alive now counts no more, nor do these."""
        self._seen = {watch(tensor).cdata: (watch(tensor), 0) for tensor in kept}

    @property
    def sizes(self) -> list[int]:
        """The bytes of every tensor that is alive."""
        self._seen = {key: (storage, size) for key, (storage, size) in self._seen.items() if not storage.expired()}
        return sorted(size for _, size in self._seen.values() if size)

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


def watch(tensor: Tensor) -> StorageWeakRef:
    """A reference to a tensor's memory that does not keep it; `expired()` says whether it is gone."""
    return StorageWeakRef(tensor.untyped_storage())


def observe_actions(executor: Executor, look: Callable[[int], None]) -> None:
    """Call `look` with the number of each action after it has run, in all later steps."""

    def observe(at: int, operation: Operation) -> Operation:
        def run() -> None:
            operation()
            look(at)

        return run

    executor.replace_operations(executor.actions, [observe(at, operation) for at, operation in enumerate(executor.operations)])


def count_held(executor: Executor) -> dict[str, int]:
    """How many forward contexts, weight stashes and received messages an executor holds."""
    registers = executor.links.registers
    full = Counter(name[0] for name, number in registers.numbers.items() if registers.values[number] is not EMPTY)
    posted = sum(len(inbox.posted) for inbox in executor.links.inboxes.values())
    return {"contexts": full["context"], "stashes": full["stash"], "received": full["received"] + posted}
