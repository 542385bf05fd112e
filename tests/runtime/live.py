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

SAMPLED = 1.002
"""A higher peak than the last by less than this factor is not looked for."""


class Live(TorchDispatchMode):
    """Sees every tensor that operators make on this thread, and tells which of them are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._kept: set[int] = set()
        self._most = 0
        """No less than what is alive: memory that was freed since the last count still counts."""
        self.peak = 0
        """The most bytes that were alive after an operator, up to `SAMPLED`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor):
                watched, size = watch(leaf), leaf.untyped_storage().nbytes()
                if watched.cdata not in self._kept:
                    self._most += size - self._seen.get(watched.cdata, (None, 0))[1]
                    self._seen[watched.cdata] = watched, size
        if self._most > self.peak * SAMPLED:
            self._most = self.bytes
            self.peak = max(self.peak, self._most)
        return made

    def forget(self, *kept: Tensor) -> None:
        """Start anew: what is alive now counts no more, nor do these."""
        self._held = [watch(tensor) for tensor in kept]  # so that no other memory takes over their numbers
        self._seen, self._kept = {}, {watched.cdata for watched in self._held}
        self._most = self.peak = 0

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
