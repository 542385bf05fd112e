"""The loss function of a pipeline, and the weight of each microbatch's loss."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import ScheduleError
from penstock.runtime.torch_internals import pytree
from penstock.text.checks import check_function

REDUCTIONS = ("mean", "sum")


class TokenCrossEntropy:
    """The mean cross-entropy of tokens: `loss_fn=TokenCrossEntropy()`.

    Logits have the vocabulary in their last dimension, and targets the shape of the dimensions before it. Targets equal to `ignore_index`
    do not count. Unlike a function of your own, a pipeline can compute it from shares of a vocabulary that is spread over its ranks.
    """

    reduction = "mean"

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        targets = self.align(targets)
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=self.ignore_index)

    def align(self, targets: Tensor) -> Tensor:
        """Return the target of each position's logits, which `targets` already are."""
        return targets


class NextTokenCrossEntropy(TokenCrossEntropy):
    """The same for targets that are the tokens themselves: each position predicts the token after it, and the last one nothing."""

    def align(self, targets: Tensor) -> Tensor:
        return functional.pad(targets, (0, 1), value=self.ignore_index)[..., 1:]


@dataclass(frozen=True)
class LogitMap:
    """How a model turns the output of its head into logits: times `scale`, and with a `cap` then `cap * tanh(logits / cap)`."""

    scale: float = 1.0
    cap: float | None = None

    def apply(self, output: Tensor) -> Tensor:
        logits = output if self.scale == 1.0 else output * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


NO_MAP = LogitMap()
"""The output is the logits."""


class Loss:
    """The loss function, called with the output and, if it takes one and there is one, the target.

    Without a function, the last stage's output is the loss.
    """

    def __init__(self, fn: Callable[..., Any] | None, reduction: str, counts: Callable[[Any], Any] | None = None) -> None:
        """`counts` returns how many targets the function averages over, if that is known."""
        if fn is not None:
            check_function("loss_fn", fn, "loss_fn(output, target)")
        self.fn, self.counts = fn, counts
        self.takes_output_only, self.takes_target = (True, False) if fn is None else _find_arities(fn)
        self._warned = False
        self._batches_on_device = 0
        """How many batches with targets on a device there were, while ignored targets were looked for."""
        if reduction not in REDUCTIONS:
            raise ScheduleError(
                f"loss_reduction must be {' or '.join(map(repr, REDUCTIONS))}, got {reduction!r}; other weights go into weight="
            )
        self.reduction = reduction

    def check_own_reduction(self) -> None:
        """Refuse a loss function whose own `reduction` differs from `loss_reduction`."""
        own = _get_setting(self.fn, "reduction", self.reduction)
        if own != self.reduction:
            raise ScheduleError(
                f"the loss function has reduction={own!r}, but loss_reduction is {self.reduction!r}: the gradients would be scaled "
                "wrongly; give both the same"
            )

    def find_outside_parameter(self, stage: nn.Module) -> str | None:
        """Return the name of a trainable parameter of the loss function that is not in this stage, if there is one."""
        fn = _unwrap(self.fn)
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
    ) -> list[Any] | None:
        """Return the relative weight of each microbatch's loss, as a number or a tensor; None if losses are added as they are."""
        if weight is not None and targets is not None:
            return [weight(target) for target in targets]
        if self.reduction == "sum":
            return None
        if sizes is None or not sum(sizes):
            return [1.0] * count
        return [float(size) for size in sizes]

    def count_targets(self, target: Any) -> Any:
        """Return how many targets the function averages over, weighted by its class weights; None if that is not known."""
        if self.counts is not None:
            return self.counts(target)
        fn = _unwrap(self.fn)
        if not (fn in _IGNORING or isinstance(fn, (nn.CrossEntropyLoss, nn.NLLLoss, TokenCrossEntropy))):
            return None
        if not isinstance(target, Tensor) or target.is_floating_point():  # probabilities of classes: all count the same
            return None
        counts = target != _get_setting(self.fn, "ignore_index", -100)
        classes = _get_setting(self.fn, "weight", None)
        return counts.sum() if classes is None else torch.where(counts, classes[target.where(counts, 0)], 0).sum()

    def find_token_entropy(self) -> TokenCrossEntropy | None:
        """Return the mean cross-entropy of tokens that the function computes; None if it is another function, or has other options."""
        fn = self.fn
        if isinstance(fn, TokenCrossEntropy):
            return fn
        own = getattr(fn, "token_entropy", None)  # of the loss of a model
        if isinstance(own, TokenCrossEntropy):
            return own
        if fn is functional.cross_entropy:
            return TokenCrossEntropy()
        if isinstance(fn, functools.partial) and fn.func is functional.cross_entropy and not fn.args:
            return TokenCrossEntropy(fn.keywords["ignore_index"]) if fn.keywords.keys() == {"ignore_index"} else None
        if type(fn) is nn.CrossEntropyLoss and fn.weight is None and fn.reduction == "mean" and not fn.label_smoothing:
            return TokenCrossEntropy(fn.ignore_index)
        return None

    @property
    def takes_flat_targets(self) -> bool:
        """Whether the function is torch's cross-entropy, for which targets of tokens have one dimension."""
        return _unwrap(self.fn) is functional.cross_entropy or isinstance(self.fn, nn.CrossEntropyLoss)

    def warn_about_ignore_index(self, targets: Sequence[Any]) -> None:
        """Warn once if targets are ignored: the mean over the others is not the mean of the microbatches' means.

        Looking at targets on a device makes the host wait for all the work that the device was given, so it is done for batches 1, 2, 4, 8
        and so on: if targets are ignored at all, they mostly are in many batches.
        """
        ignored = _get_setting(self.fn, "ignore_index", -100 if _unwrap(self.fn) in _IGNORING else None)
        if self._warned or self.reduction != "mean" or not isinstance(ignored, int):
            return
        leaves = [leaf for leaf in pytree.tree_leaves(list(targets)) if isinstance(leaf, Tensor) and not leaf.is_floating_point()]
        if not all(map(is_on_host, leaves)):
            self._batches_on_device += 1
            if self._batches_on_device.bit_count() > 1:
                return
        if any(read_numbers([(leaf == ignored).any() for leaf in leaves])):
            self._warned = True
            warnings.warn(
                f"targets with ignore_index {ignored} under loss_reduction='mean': microbatches count by their size, not by "
                f"their valid targets; give weight=lambda target: (target != {ignored}).sum()",
                stacklevel=7,  # the caller of `step`
            )


def is_on_host(tensor: Tensor) -> bool:
    """Whether the host can read a tensor without waiting for a device."""
    return tensor.is_cpu


def read_numbers(values: Sequence[Any]) -> list[float]:
    """Read numbers and tensors with one element. The tensors of one device are read together, because the host waits for each read."""
    numbers: list[float | None] = [None] * len(values)
    by_device: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        if type(value) is Tensor and value.numel() == 1 and not value.is_complex():
            by_device.setdefault(value.device, []).append(place)
        else:
            numbers[place] = float(value)
    for places in by_device.values():
        together = torch.stack([values[place].detach().reshape(()).double() for place in places])
        for place, number in zip(places, together.tolist(), strict=True):
            numbers[place] = number
    return [number for number in numbers if number is not None]


_IGNORING = (functional.cross_entropy, functional.nll_loss)


def _unwrap(fn: Any) -> Any:
    return fn.func if isinstance(fn, functools.partial) else fn


def _get_setting(fn: Any, name: str, default: Any) -> Any:
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
