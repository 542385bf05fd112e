"""Stages that keep their inputs alone, and run their forward again when their backward comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import ScheduleError
from penstock.runtime.extras import collect, unwrap
from penstock.runtime.partition import Partition
from penstock.runtime.values import detached

Recompute = bool | Sequence[bool] | None
"""Which stages: all, none, one word each, or as the plan says."""


def recomputing(partition: Partition, plan: Any, given: Recompute = None) -> Partition:
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
class Ended:
    """The output of a last stage that is recomputed, without its history, and the loss that it came to."""

    output: Any
    loss: Tensor


class Recomputed(nn.Module):
    """A module that keeps its inputs alone, and runs its forward again when its backward comes.

    It draws the same random numbers then, and what it gives on the side, losses and metrics, counts once. With a loss it gives that:
    otherwise the loss would hold the output, which of a language model is most of what its last stage holds.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.loss: Callable[[Any], Tensor] | None = None
        """That of the next forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss, self.loss = self.loss, None
        run = self.module if loss is None else partial(_ended, self.module, loss)
        return checkpoint(run, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _ended(module: nn.Module, loss: Callable[[Any], Tensor], *args: Any, **kwargs: Any) -> Ended:
    made = unwrap(module(*args, **kwargs))
    return Ended(detached(made), loss(made))


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For the forward, and for that which is run again."""
    return nullcontext(), collect()
