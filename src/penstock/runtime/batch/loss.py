"""The loss of a microbatch, and how much each counts."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError

REDUCTIONS = ("mean", "sum")


class Loss:
    """The loss function, called with the output and, where there is one and it takes one, the target."""

    def __init__(self, fn: Callable[..., Any] | None, reduction: str) -> None:
        self.fn = fn
        self.alone, self.paired = (True, False) if fn is None else _takes(fn)
        self._warned = False
        if reduction not in REDUCTIONS:
            raise ScheduleError(
                f"loss_reduction must be {' or '.join(map(repr, REDUCTIONS))}, got {reduction!r}; other weights go into weight="
            )
        self.reduction = reduction

    def check_own_reduction(self) -> None:
        """A loss function that says how it reduces must reduce as the pipeline was told."""
        own = _setting(self.fn, "reduction", self.reduction)
        if own != self.reduction:
            raise ScheduleError(
                f"the loss function has reduction={own!r}, but loss_reduction is {self.reduction!r}: the gradients would be scaled "
                "wrongly, so give both the same"
            )

    def trained_outside(self, stage: nn.Module) -> str | None:
        """The name of a parameter that the loss function would train, and that is none of this stage's."""
        fn = _plain(self.fn)
        known = {id(parameter) for parameter in stage.parameters()}
        named = fn.named_parameters() if isinstance(fn, nn.Module) else ()
        return next((name for name, parameter in named if parameter.requires_grad and id(parameter) not in known), None)

    def can_run(self, targets: Sequence[Any] | None) -> bool:
        """Whether what was given is enough to call it."""
        return self.alone or targets is not None

    def fits(self, output: Any) -> bool:
        """Whether there is a loss function, or the output can be the loss itself."""
        return self.fn is not None or (isinstance(output, Tensor) and output.numel() == 1)

    def __call__(self, output: Any, targets: Sequence[Any] | None, microbatch: int) -> Tensor:
        fn = self.fn
        if fn is None:
            loss = output
        elif targets is None or (not self.paired and targets[microbatch] is None):
            loss = fn(output)
        else:
            loss = fn(output, targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ScheduleError(
                f"the {'last stage' if fn is None else 'loss function'} gave {what}: a loss is a tensor of one number"
                + ("; give loss_fn= to compute one from the output" if fn is None else "")
            )
        return loss

    def weights(
        self, weight: Callable[[Any], Any] | None, sizes: Sequence[int] | None, targets: Sequence[Any] | None, count: int
    ) -> list[float] | None:
        """How much each microbatch's loss counts against the others; None where losses are added as they are."""
        if weight is not None and targets is not None:
            return [float(weight(target)) for target in targets]
        if self.reduction == "sum":
            return None
        if sizes is None or not sum(sizes):
            return [1.0] * count
        return [float(size) for size in sizes]

    def warn_of_ignored(self, targets: Sequence[Any]) -> None:
        """A mean over the targets that are not ignored is not the mean of the microbatches' means. Said once."""
        ignored = _setting(self.fn, "ignore_index", -100 if _plain(self.fn) in _IGNORING else None)
        if self._warned or self.reduction != "mean" or not isinstance(ignored, int):
            return
        for leaf in pytree.tree_leaves(list(targets)):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point() and bool((leaf == ignored).any()):
                self._warned = True
                warnings.warn(
                    f"targets with ignore_index {ignored} under loss_reduction='mean': microbatches count by their size, not by "
                    f"their valid targets; give weight=lambda target: (target != {ignored}).sum()",
                    stacklevel=7,  # whoever called step, above what tells the other data ranks of a refusal
                )
                return


_IGNORING = (functional.cross_entropy, functional.nll_loss)


def _plain(fn: Any) -> Any:
    return fn.func if isinstance(fn, functools.partial) else fn


def _setting(fn: Any, name: str, default: Any) -> Any:
    """An option that the loss function was made with: a module's attribute, or a keyword bound beforehand."""
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    return bound.get(name, getattr(fn, name, default))


def _takes(fn: Callable[..., Any]) -> tuple[bool, bool]:
    """Whether a function can be called with one argument, and with two."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):  # some builtins do not say
        return True, True

    def binds(count: int) -> bool:
        try:
            signature.bind(*[None] * count)
        except TypeError:
            return False
        return True

    return binds(1), binds(2)
