"""Stages that keep their inputs alone, and run their forward again when their backward comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from penstock.errors import ScheduleError
from penstock.runtime.batch.side_outputs import collect, unwrap_stage_output
from penstock.runtime.model.module_state import ModuleState, ModuleVersions, running_statistics_names
from penstock.runtime.model.partition import Partition
from penstock.runtime.tensors.boundary import copy_tensor, detach_tree, memory_overlaps

Recompute = bool | Sequence[bool] | None
"""Which stages: all, none, one word each, or as the plan says."""


def recompute_stages(partition: Partition, plan: Any, given: Recompute = None) -> Partition:
    """The partition with the stages that are recomputed: those that were given, else the plan's."""
    flags = getattr(plan, "recompute", None) if given is None else given
    each = [flags] * len(partition) if isinstance(flags, bool) else list(flags or [False] * len(partition))
    if len(each) != len(partition):
        raise ScheduleError(f"recompute={given!r} for {len(partition)} stages: give True, False, or one of these each")
    parts = [
        replace(part, module=Recomputed(part.module)) if part is not None and again else part
        for part, again in zip(partition.parts, each, strict=True)
    ]
    return Partition(tuple(parts))


@dataclass(frozen=True)
class OutputAndLoss:
    """The output of a last stage that is recomputed, without its history, and the loss that it came to."""

    output: Any
    loss: Tensor


class Recomputed(nn.Module):
    """A module that keeps its inputs alone, and runs its forward again when its backward comes.

    It draws the same random numbers then, starts from the same buffers and attributes, and what it gives on the side, losses and
    metrics, counts once. What the second forward makes of the state is dropped. With a loss it gives that: otherwise the loss would
    hold the output, which of a language model is most of what its last stage holds.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.loss: Callable[[Any], Tensor] | None = None
        """That of the next forward."""
        self._state, self._inputs = _State(module), _Inputs()

    @property
    def changed_inputs(self) -> set[int]:
        """The inputs of the last forward whose copies the module has changed in place, by id."""
        return self._inputs.originals

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss, self.loss = self.loss, None
        call = self.module if loss is None else partial(_ended, self.module, loss)
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        before = self._state.capture()
        run = partial(self._inputs.run, call)
        made = checkpoint(run, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _Again(before)), **kwargs)
        self._state.look(before)
        return made


class _Inputs:
    """Copies of the inputs that a module changes in place, so that it can be run again from what they were."""

    def __init__(self) -> None:
        self.changed: set[int] | None = None
        """Which leaves were seen to change; None until the module has run once."""
        self.originals: set[int] = set()
        """The inputs of the last forward that would have been changed, by id."""

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = {number: leaf for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        copied = tensors.keys() if self.changed is None else tensors.keys() & self.changed
        if copied:
            copies = {id(tensors[number]): copy_tensor(tensors[number]) for number in copied}  # one that is there twice stays one
            leaves = [copies.get(id(leaf), leaf) for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        before = {number: leaves[number]._version for number in tensors}
        made = call(*args, **kwargs)
        changed = {number for number, version in before.items() if leaves[number]._version != version}
        self.changed = changed | (self.changed or set())
        self.originals = {id(tensors[number]) for number in changed}
        for number in changed:
            if any(other is not tensors[number] and memory_overlaps(tensors[number], other) for other in tensors.values()):
                raise ScheduleError(
                    "a recomputed stage changes in place a tensor that shares memory with another of its inputs, and would be run again "
                    "from copies that do not: clone it before changing it"
                )
        if changed - copied:
            raise ScheduleError(
                "a recomputed stage has changed an input in place for the first time, and cannot be run again from it: run the step again, "
                "which gives the stage a copy, or clone the input in the stage"
            )
        return made


class _State:
    """Which buffers and attributes a module's forward changes, and what they are before each forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.watched: set[str] | None = None
        """The names of those that were seen to change; None until the module has run once."""
        self.others: ModuleVersions | None = None
        self.pending: WeakSet[ModuleState] = WeakSet()
        """The states before forwards that are still to be run again."""

    def capture(self) -> ModuleState:
        """The state before a forward, as far as forwards are known to change it."""
        if self.watched is None:
            self.others = ModuleVersions.capture(self.module)
            return ModuleState.capture(self.module)
        names = self.watched | set(running_statistics_names(self.module))
        self.others = ModuleVersions.capture(self.module, skip=names)
        return ModuleState.capture_only(self.module, names)

    def look(self, before: ModuleState) -> None:
        """After a forward: see what it has changed, and let go of everything else.

        What was never changed before has been the same for all forwards that are still to be run again.
        """
        self.pending.add(before)
        assert self.others is not None
        replaced, in_place = self.others.changes()
        if self.watched is None:
            self.watched = set(before.keep_changed(in_place))  # something may have been written with the value that it had
            return
        for state in self.pending:
            state.extend(replaced)
        self.watched = {*self.watched, *in_place, *replaced.names()}
        if in_place:
            raise ScheduleError(
                f"a recomputed stage has changed {in_place[0]!r} for the first time in a later forward than its first, and cannot be run "
                "again from what it was: run the step again, which keeps a copy, or do not recompute the stage"
            )


def _ended(module: nn.Module, loss: Callable[[Any], Tensor], *args: Any, **kwargs: Any) -> OutputAndLoss:
    made = unwrap_stage_output(module(*args, **kwargs))
    return OutputAndLoss(detach_tree(made), loss(made))


class _Again:
    """The context of a forward that is run again: from the state before the first, with nothing left of it."""

    def __init__(self, before: ModuleState) -> None:
        self.before = before
        self.stack = ExitStack()

    def __enter__(self) -> None:
        self.stack.enter_context(collect())
        self.stack.enter_context(self.before.stand_in())

    def __exit__(self, *exc: object) -> None:
        self.stack.close()
