"""The loss function of a pipeline, and the weight of each microbatch's loss."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import ScheduleError
from penstock.runtime.torch_internals import pytree

REDUCTIONS = ("mean", "sum")


class Loss:
    """The loss function, called with the output and, if it takes one and there is one, the target.

    Without a function, the last stage's output is the loss.
    """

    def __init__(self, fn: Callable[..., Any] | None, reduction: str) -> None:
        self.fn = fn
        self.takes_output_only, self.takes_target = (True, False) if fn is None else _find_arities(fn)
        self._warned = False
        if reduction not in REDUCTIONS:
            raise ScheduleError(
                f"loss_reduction must be {' or '.join(map(repr, REDUCTIONS))}, got {reduction!r}; other weights go into weight="
            )
        self.reduction = reduction

    def check_own_reduction(self) -> None:
        """Refuse a loss function whose own `reduction` differs from `loss_reduction`."""
        own = _setting(self.fn, "reduction", self.reduction)
        if own != self.reduction:
            raise ScheduleError(
                f"the loss function has reduction={own!r}, but loss_reduction is {self.reduction!r}: the gradients would be scaled "
                "wrongly; give both the same"
            )

    def find_outside_parameter(self, stage: nn.Module) -> str | None:
        """Return the name of a trainable parameter of the loss function that is not in this stage, if there is one."""
        fn = _plain(self.fn)
        known = {id(parameter) for parameter in stage.parameters()}
        named = fn.named_parameters() if isinstance(fn, nn.Module) else ()
        return next((name for name, parameter in named if parameter.requires_grad and id(parameter) not in known), None)

    def can_run(self, targets: Sequence[Any] | None) -> bool:
        """Whether the loss function can be called with these targets."""
        return self.takes_output_only or targets is not None

    def can_score(self, output: Any) -> bool:
        """Whether there is a loss function, or the output can be the loss itself."""
        return self.fn is not None or (isinstance(output, Tensor) and output.numel() == 1)

    def __call__(self, output: Any, targets: Sequence[Any] | None, microbatch: int) -> Tensor:
        fn = self.fn
        if fn is None:
            loss = output
        elif targets is None or (not self.takes_target and targets[microbatch] is None):
            loss = fn(output)
        else:
            loss = fn(output, targets[microbatch])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            value = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ScheduleError(
                f"the {'last stage' if fn is None else 'loss function'} returned {value}: a loss is a tensor with one element"
                + ("; give loss_fn= to compute one from the output" if fn is None else "")
            )
        return loss

    def weights(
        self, weight: Callable[[Any], Any] | None, sizes: Sequence[int] | None, targets: Sequence[Any] | None, count: int
    ) -> list[float] | None:
        """Return the relative weight of each microbatch's loss; None if losses are added as they are."""
        if weight is not None and targets is not None:
            return [float(weight(target)) for target in targets]
        if self.reduction == "sum":
            return None
        if sizes is None or not sum(sizes):
            return [1.0] * count
        return [float(size) for size in sizes]

    def warn_about_ignore_index(self, targets: Sequence[Any]) -> None:
        """Warn once if targets are ignored: the mean over the others is not the mean of the microbatches' means."""
        ignored = _setting(self.fn, "ignore_index", -100 if _plain(self.fn) in _IGNORING else None)
        if self._warned or self.reduction != "mean" or not isinstance(ignored, int):
            return
        for leaf in pytree.tree_leaves(list(targets)):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point() and bool((leaf == ignored).any()):
                self._warned = True
                warnings.warn(
                    f"targets with ignore_index {ignored} under loss_reduction='mean': microbatches count by their size, not by "
                    f"their valid targets; give weight=lambda target: (target != {ignored}).sum()",
                    stacklevel=7,  # the caller of `step`
                )
                return


_IGNORING = (functional.cross_entropy, functional.nll_loss)


def _plain(fn: Any) -> Any:
    return fn.func if isinstance(fn, functools.partial) else fn


def _setting(fn: Any, name: str, default: Any) -> Any:
    """Return an option of the loss function: an attribute of a module, or a keyword bound by `partial`."""
    bound = fn.keywords if isinstance(fn, functools.partial) else {}
    return bound.get(name, getattr(fn, name, default))


def _find_arities(fn: Callable[..., Any]) -> tuple[bool, bool]:
    """Return whether a function can be called with one argument, and with two."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn)
    except (TypeError, ValueError):  # a builtin without a signature
        return True, True

    def binds(count: int) -> bool:
        try:
            signature.bind(*[None] * count)
        except TypeError:
            return False
        return True

    return binds(1), binds(2)
