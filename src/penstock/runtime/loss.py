"""How much each microbatch counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from penstock.errors import ScheduleError

REDUCTIONS = ("mean", "sum")


def scales(
    reduction: str, weight: Callable[[Any], Any] | None, sizes: Sequence[int] | None, targets: Sequence[Any] | None, count: int
) -> list[float]:
    """What each microbatch's loss is multiplied by, so that the sum is the loss of the whole batch."""
    if weight is not None:
        if targets is None:
            raise ScheduleError("weight= is a function of the target, but the step was given none")
        each = [float(weight(target)) for target in targets]
        total = sum(each)
        if total <= 0:
            raise ScheduleError(f"the weights of the microbatches sum to {total}: there is nothing to average over")
        return [one / total for one in each]
    if reduction == "sum":
        return [1.0] * count
    if sizes is None:
        return [1.0 / count] * count
    return [size / sum(sizes) for size in sizes]


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ScheduleError(
            f"loss_reduction must be {' or '.join(map(repr, REDUCTIONS))}, got {reduction!r}; other weights go into weight="
        )


def warn_of_ignored(loss_fn: Any, targets: Sequence[Any]) -> None:
    """A mean over the targets that are not ignored is not the mean of the microbatches' means."""
    ignored = getattr(loss_fn, "ignore_index", -100 if loss_fn in (functional.cross_entropy, functional.nll_loss) else None)
    if not isinstance(ignored, int) or getattr(loss_fn, "reduction", "mean") != "mean":
        return
    for leaf in pytree.tree_leaves(list(targets)):
        if isinstance(leaf, Tensor) and not leaf.is_floating_point() and bool((leaf == ignored).any()):
            warnings.warn(
                f"targets with ignore_index {ignored} under loss_reduction='mean': microbatches count by their size, "
                "not by their valid targets; "
                f"give weight=lambda target: (target != {ignored}).sum()",
                stacklevel=4,
            )
            return
