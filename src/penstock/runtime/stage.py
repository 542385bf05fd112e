"""One stage on its rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.runtime.deferred import Deferral
from penstock.runtime.recording import Deferrable


class Stage:
    """A stage's module, its loss function where it is the last, and its way of splitting the backward."""

    def __init__(self, index: int, module: nn.Module, loss_fn: Callable[..., Any] | None = None, fused: bool = False) -> None:
        self.index, self.module, self.loss_fn, self.fused = index, module, loss_fn, fused
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
        return not any(hasattr(part, "_orig_mod") for part in self.module.modules())

    def seed(self, seed: int, microbatch: int) -> None:
        """Draw from the stream of this seed, stage and microbatch from here on."""
        digest = hashlib.blake2b(f"{seed}/{self.index}/{microbatch}".encode(), digest_size=8).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def backward_weights(self, deferral: Deferral) -> None:
        """Add the weight gradients, then run the hooks that wait for a parameter's gradient, once each."""
        for parameter in deferral.run(self.fused):
            hooks = parameter._post_accumulate_grad_hooks
            for hook in list(hooks.values()) if hooks else ():
                hook(parameter)
