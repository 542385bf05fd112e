"""Everything that a stage's forward may change, so that it can be run again as if it had not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.runtime.extras import Extras
from penstock.runtime.module_state import ModuleState, TensorState
from penstock.runtime.random_state import random_state, set_random_state


@dataclass(frozen=True)
class ForwardState:
    """The state before one forward: of modules, its inputs, random streams, and the losses and metrics collected on the side."""

    modules: list[ModuleState]
    inputs: TensorState
    random: dict[str, Any]
    extras: Extras
    before: Extras
    versions: list[tuple[nn.Parameter, int]]
    """How often each parameter had been changed in place: there is no copy to put those back from."""

    @classmethod
    def capture(cls, modules: Sequence[nn.Module], inputs: Any, extras: Extras) -> ForwardState:
        states = [ModuleState.capture(module) for module in modules]
        versions = [(parameter, parameter._version) for module in modules for parameter in module.parameters()]
        before = Extras(list(extras.losses), dict(extras.metrics))
        return cls(states, TensorState.capture(inputs), random_state(), extras, before, versions)

    @property
    def restorable(self) -> bool:
        """Whether no parameter has been changed in place."""
        return all(parameter._version == version for parameter, version in self.versions)

    def restore(self) -> None:
        for state in self.modules:
            state.restore()
        self.inputs.restore()
        set_random_state(self.random)
        self.extras.losses, self.extras.metrics = list(self.before.losses), dict(self.before.metrics)
