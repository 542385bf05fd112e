"""One stage on its rank."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from penstock.errors import ScheduleError, SplitError, WholeBackwardNeeded
from penstock.runtime.model.random_streams import draws_by_layer
from penstock.runtime.model.recompute import Recomputed
from penstock.runtime.split_backward.deferrable import Deferrable
from penstock.runtime.split_backward.deferral import Deferral
from penstock.runtime.tensors.boundary import WatchedInputs
from penstock.runtime.tensors.dtensor import is_dtensor


class Stage:
    """A stage's module, and its way of splitting the backward."""

    def __init__(self, index: int, module: nn.Module, *, unpack: bool = True, fused: bool = False) -> None:
        self.index, self.module, self.unpack, self.fused = index, module, unpack, fused
        self.stream: int | str = "layers" if draws_by_layer(module) else index
        """What tells the stage's random stream from others'."""
        known = None if self.splits else False
        self.changes_input: dict[bool, bool | None] = {True: known, False: known}
        """Whether the module changes its input in place, in training and in evaluation; None until it has run once. Compilers do not take
        inputs that can be looked at for that, so that a compiled one is found out by the error that it raises."""
        self.tried = False
        """Whether a forward has been run with its backward split, so that nothing speaks against it."""
        self.whole: str | None = None
        """What the stage does that needs its backward whole, once a forward has done so."""
        self._deferrable: Deferrable | None = None
        self._memory: dict[int, str] | None = None
        self.tied: frozenset[int] = frozenset()
        """Its parameters that other stages use too, by id."""
        self.passing: dict[int, str] = {}
        """Memory of the present forward's inputs that no stage may change, with the reason: an output may lie in it."""

    def deferrable(self) -> Deferrable:
        """Made when the first split backward asks for it."""
        if self._deferrable is None:
            self._deferrable = Deferrable(self.module)
        return self._deferrable

    def refresh(self) -> None:
        """Before a step: parameters may have been replaced, frozen or given hooks since the last one."""
        self._memory = None
        if self._deferrable is not None:
            self._deferrable.look(self.module)

    @property
    def splits(self) -> bool:
        """Whether the backward can be split: a compiled module cannot be looked into."""
        return not any(hasattr(part, "_orig_mod") or part._compiled_call_impl is not None for part in self.module.modules())

    def run(self, inputs: list[Any], kwargs: dict[str, Any], call: Callable[..., Any] | None = None) -> Any:
        """Run the module on what came in from other stages. A tuple is several arguments, if stages were written one by one."""
        first, *more = inputs
        call = self.module if call is None else call
        if self.unpack and type(first) is tuple:
            return call(*first, *more, **kwargs)
        return call(first, *more, **kwargs)

    def look_at_error(self, error: RuntimeError) -> None:
        """After the first in-place change of an input, in-place changes are allowed from the next step on."""
        if "leaf Variable that requires grad" in str(error):
            self.changes_input[True] = True
            error.add_note(f"stage {self.index} has changed its input in place for the first time, which the next step will allow")

    def look_for_changes(self, watch: WatchedInputs, others: list[int], training: bool) -> None:
        """See whether the module has changed its input in place; refuse what something else in the model would have seen."""
        changed, reason = watch.changed(self.changed_copies)
        self.changes_input[training] = changed or bool(self.changes_input[training])
        if changed and others:
            raise ScheduleError(
                f"stage {self.index} changes its input in place, but stage {others[0]} reads the same value: clone it in stage {self.index}"
            )
        if reason is not None:
            raise ScheduleError(
                f"stage {self.index} changes {reason} in place; stages hand on copies, so the change would be lost elsewhere: clone it in "
                f"stage {self.index} before changing it"
            )

    @property
    def changed_copies(self) -> Collection[int]:
        """The inputs of the last forward, by id, that the module has copied by itself and whose copies it has changed."""
        return self.module.changed_inputs if isinstance(self.module, Recomputed) else ()

    def memory(self) -> dict[int, str]:
        """The names of the module's parameters and buffers, by the address of their memory."""
        if self._memory is None:
            module = self.module.module if isinstance(self.module, Recomputed) else self.module
            named = [("parameter", *each) for each in module.named_parameters()] + [("buffer", *each) for each in module.named_buffers()]
            self._memory = {t.untyped_storage().data_ptr(): f"{sort} {name!r}" for sort, name, t in named if not is_dtensor(t)}
        return self._memory

    def refuse_split(self, need: WholeBackwardNeeded, why: str) -> SplitError:
        """The error for a forward that can be neither split nor run again; the next step runs the backward whole."""
        self.whole = need.reason
        return SplitError(
            f"stage {self.index} {need.reason} in its forward or loss, so its backward cannot be split, and {why}. From the next step "
            "on the stage runs its backward whole: run this step again"
        )

    def backward_weights(self, deferral: Deferral) -> None:
        """Add the weight gradients, then run the hooks that wait for a parameter's gradient, once each."""
        for parameter in deferral.run(self.fused):
            hooks = parameter._post_accumulate_grad_hooks
            for hook in list(hooks.values()) if hooks else ():
                hook(parameter)
