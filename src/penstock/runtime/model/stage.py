"""One stage on its rank: its module, how its backward is split, and what was learnt about it from its forwards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from penstock.errors import ScheduleError, SplitError, WholeBackwardNeeded
from penstock.runtime.model.random_streams import draws_by_layer
from penstock.runtime.model.transforms import Recomputed
from penstock.runtime.split_backward.deferrable import Deferrable
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.tensors.boundary import WatchedInputs, make_message
from penstock.runtime.tensors.dtensor import is_dtensor
from penstock.runtime.torch_internals.modules import is_compiled
from penstock.runtime.torch_internals.tensors import post_accumulate_hooks


class Stage:
    """A stage's module, as the executor runs it.

    `unpack` says that a tuple from the stage before is several arguments; `fused` adds weight gradients by one fused operation.
    """

    def __init__(self, index: int, module: nn.Module, *, unpack: bool = True, fused: bool = False) -> None:
        self.index, self.module, self.unpack, self.fused = index, module, unpack, fused
        self.stream: int | str = "layers" if draws_by_layer(module) else index
        """The stage's part of the key of its random stream."""
        known = None if self.splits else False
        self.changes_input: dict[bool, bool | None] = {True: known, False: known}
        """Whether the module changes its input in place, in training and in evaluation; None until it has run once. Inputs of a compiled
        module cannot be watched, so it is assumed not to until torch raises an error about it."""
        self.tried = False
        """Whether a forward has shown that the backward can be split."""
        self.whole: str | None = None
        """The reason why its backward cannot be split, once a forward has shown one."""
        self._deferrable: Deferrable | None = None
        self._memory: dict[int, str] | None = None
        self.tied: frozenset[int] = frozenset()
        """The ids of its parameters that other stages use too."""
        self.guarded_memory: dict[int, str] = {}
        """Why inputs of the current forward must not be changed in place, by the address of their memory, in which outputs may lie."""

    def find_deferrable(self) -> Deferrable:
        """Return the parameters whose gradients can be deferred, found on the first call."""
        if self._deferrable is None:
            self._deferrable = Deferrable(self.module)
        return self._deferrable

    def refresh(self) -> None:
        """Look at the parameters again before a step: they may have been replaced, frozen or given hooks since the last one."""
        self._memory = None
        if self._deferrable is not None:
            self._deferrable.refresh(self.module)

    @property
    def splits(self) -> bool:
        """Whether the backward can be split; that of a compiled module cannot."""
        return not any(map(is_compiled, self.module.modules()))

    def run(self, inputs: list[Any], kwargs: dict[str, Any], call: Callable[..., Any] | None = None) -> Any:
        """Run the module, or `call` in its place, on inputs from other stages."""
        first, *more = inputs
        call = self.module if call is None else call
        if self.unpack and type(first) is tuple:
            return call(*first, *more, **kwargs)
        return call(first, *more, **kwargs)

    def make_message(self, output: Any, mesh: bool) -> Any:
        """Turn an output into the next stage's input."""
        return make_message(output, self.index, self.memory, self.guarded_memory, mesh)

    def note_error(self, error: RuntimeError) -> None:
        """After the first in-place change of an input, allow in-place changes from the next step on."""
        if "leaf Variable that requires grad" in str(error):
            self.changes_input[True] = True
            error.add_note(f"stage {self.index} has changed its input in place for the first time, which the next step will allow")

    def check_changes(self, watch: WatchedInputs, others: list[int], training: bool) -> None:
        """Note whether the module has changed its input in place; refuse a change that would have been seen elsewhere in the model."""
        changed, reason = watch.find_changed(self.changed_copies)
        self.changes_input[training] = changed or bool(self.changes_input[training])
        if changed and others:
            raise ScheduleError(
                f"stage {self.index} changes its input in place, but stage {others[0]} reads the same value: clone it in stage {self.index}"
            )
        if reason is not None:
            raise ScheduleError(
                f"stage {self.index} changes {reason} in place, but works on a copy, so the change would be lost elsewhere: clone it in "
                f"stage {self.index} before changing it"
            )

    @property
    def changed_copies(self) -> Collection[int]:
        """The ids of inputs of the last forward that the module has copied itself and whose copies it has changed."""
        return self.module.changed_inputs if isinstance(self.module, Recomputed) else ()

    def memory(self) -> dict[int, str]:
        """Return the names of the module's parameters and buffers, by the address of their memory."""
        if self._memory is None:
            module = self.module.module if isinstance(self.module, Recomputed) else self.module
            parameters = [(f"parameter {name!r}", parameter) for name, parameter in module.named_parameters()]
            named = [*parameters, *((f"buffer {name!r}", buffer) for name, buffer in module.named_buffers())]
            self._memory = {tensor.untyped_storage().data_ptr(): name for name, tensor in named if not is_dtensor(tensor)}
        return self._memory

    def refuse_split(self, need: WholeBackwardNeeded, why: str) -> SplitError:
        """Return the error for a forward that can be neither split nor run again; from the next step on the backward runs whole."""
        self.whole = need.reason
        return SplitError(
            f"stage {self.index} {need.reason} in its forward or loss, so its backward cannot be split, and {why}. From the next step "
            "on the stage runs its backward whole: run this step again"
        )

    def backward_weights(self, deferral: Deferral) -> None:
        """Add the weight gradients, then run each post-accumulate hook once."""
        for parameter in deferral.run(self.fused):
            hooks = post_accumulate_hooks(parameter)
            for hook in list(hooks.values()) if hooks else ():
                hook(parameter)
