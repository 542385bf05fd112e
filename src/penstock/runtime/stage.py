"""One stage on its rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from penstock.errors import ScheduleError
from penstock.runtime.deferred import Deferral
from penstock.runtime.recomputed import Recomputed
from penstock.runtime.recording import Deferrable
from penstock.runtime.streamed import draws_by_layer
from penstock.runtime.values import was_changed


class Stage:
    """A stage's module, and its way of splitting the backward."""

    def __init__(self, index: int, module: nn.Module, *, unpack: bool = True, fused: bool = False) -> None:
        self.index, self.module, self.unpack, self.fused = index, module, unpack, fused
        self.stream: int | str = "layers" if draws_by_layer(module) else index
        """What tells the stage's random stream from others'."""
        self.changes_input: bool | None = None if self.splits else False
        """Whether the module changes its input in place; None until it has run once. Compilers do not take inputs that can be looked at
        for that, so that a compiled one is found out by the error that it raises."""
        self._deferrable: Deferrable | None = None

    def deferrable(self) -> Deferrable:
        """Made when the first split backward asks for it."""
        if self._deferrable is None:
            self._deferrable = Deferrable(self.module)
        return self._deferrable

    def refresh(self) -> None:
        """Before a step: parameters may have been replaced, frozen or given hooks since the last one."""
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
        """Where the module has changed its input in place for the first time, it may from the next step on."""
        if "leaf Variable that requires grad" in str(error):
            self.changes_input = True
            error.add_note(f"stage {self.index} has changed its input in place for the first time, which the next step will allow")

    def look_for_changes(self, leaves: Any, given: Any, others: list[int]) -> None:
        """See whether the module has changed its input in place, which no other stage may be reading."""
        self.changes_input = was_changed(leaves, given) or bool(self.changes_input)
        copied = isinstance(self.module, Recomputed) and self.module.changes_input
        if (self.changes_input or copied) and others:
            raise ScheduleError(
                f"stage {self.index} changes its input in place, but stage {others[0]} reads the same value: clone it in stage {self.index}"
            )

    def backward_weights(self, deferral: Deferral) -> None:
        """Add the weight gradients, then run the hooks that wait for a parameter's gradient, once each."""
        for parameter in deferral.run(self.fused):
            hooks = parameter._post_accumulate_grad_hooks
            for hook in list(hooks.values()) if hooks else ():
                hook(parameter)
