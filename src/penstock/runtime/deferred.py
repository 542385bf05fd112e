"""Weight gradients that wait: the split backward, at the operator.

While a stage runs forward with a `Deferral`, a linear map, an embedding, a convolution or a (batched) matrix product is run with
its weight cut off from autograd, and a record of it is tied to its place in the graph. The stage's backward is then the backward
for the input, at the price of exactly that, and on its way hands each record the gradient of its operator's output. Running
the records later gives the weight gradients. Everything else that a parameter takes part in is left to autograd and gets its
gradient in the backward for the input. No module is changed, and the cost is linear in the operators.

`operators` has the operators that can wait, `recording` puts them in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import SplitError

Targets = tuple[nn.Parameter | None, ...]
Fuse = Callable[[Tensor, Tensor, Tensor], None]
"""Add the first parameter's gradient to what is there already in one operation: the output's gradient, the input, the sum."""
Compute = Callable[[Tensor, Tensor, Targets, Any], tuple[Tensor | None, ...]]
"""The weight gradients from the output's gradient, the input, the parameters and what else the operator was given."""

_ANCHOR = torch.zeros((), requires_grad=True)
"""What makes a tap's output want a gradient where the operator's input does not; it never gets one itself."""
_KEY = "penstock.deferral"
"""Where torch keeps the active deferral for this thread, and for the threads that run this thread's backward."""

# Asked at every operator, so that looking them up counts.
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_are_transforms_active = torch._C._are_functorch_transforms_active
_is_stashed, _stashed = torch._C._is_key_in_tls, torch._C._get_obj_in_tls
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Record:
    """One operator of one forward: what it was applied to, and the gradient of its output once the backward has been there."""

    __slots__ = ("compute", "extra", "fuse", "grad", "targets", "value", "version")

    def __init__(self, compute: Compute, targets: Targets, value: Tensor, extra: Any = None, fuse: Fuse | None = None) -> None:
        self.compute = compute
        self.targets = targets
        self.value: Tensor | None = value
        self.version = value._version
        self.extra = extra
        self.fuse = fuse
        self.grad: Tensor | None = None

    def take(self) -> tuple[Tensor, Tensor]:
        """The output's gradient and the input, which the record then no longer holds."""
        grad, value = self.grad, self.value
        self.grad = self.value = None
        assert grad is not None
        assert value is not None
        if value._version != self.version:
            raise SplitError(
                f"a tensor of shape {list(value.shape)} that a weight was applied to was changed in place before the weight's gradient "
                "was computed: change a copy"
            )
        return grad, value


class Deferral:
    """The records of one stage and microbatch, and the weights that can wait, by their id, each with what stands in for it."""

    __slots__ = ("backward", "hooked", "records", "stand_ins")

    def __init__(self) -> None:
        self.records: list[Record] = []
        """Those that a gradient has reached, in the order of the backward."""
        self.stand_ins: dict[int, Tensor] = {}
        self.backward = False
        self.hooked: dict[nn.Parameter, None] = {}
        """Parameters that have got a gradient and wait for a hook of theirs to be run."""

    def add(self, out: Tensor, record: Record) -> Tensor:
        """Tie a record to its operator's output, which must not be a view; the output to go on with."""
        node = out.grad_fn
        if node is None or _saved_tensor_hooks(False) is not None:
            tapped: Tensor = _Tap.apply(out, record.value, record, self, _ANCHOR)  # type: ignore[no-untyped-call]
            return tapped
        node.register_prehook(partial(self.arrive, record))
        return out

    def arrive(self, record: Record, grads: Sequence[Tensor | None]) -> None:
        """The hook before an operator's own backward."""
        if _is_grad_enabled():
            raise SplitError(
                "a stage differentiates a gradient of its own (create_graph=True), which a weight that waits has no part in: "
                "run its backward whole, with lower(schedule, merge_backward=True)"
            )
        grad = grads[0]
        if grad is None or not self.backward:  # nothing comes here, or a forward asks for a gradient itself
            return
        if record.grad is None:
            self.records.append(record)
        record.grad = grad

    @torch.no_grad()
    def run(self, fused: bool = False) -> list[nn.Parameter]:
        """The backward for the weights; the parameters that wait for a hook of theirs to be run.

        `fused` adds the products of linear maps straight to the gradients: one pass over them less, and a rounding of its own.
        """
        uses = Counter(target for record in self.records for target in record.targets)
        sums: dict[nn.Parameter, Tensor] = {}
        for record in self.records:
            grad, value = record.take()
            targets = record.targets
            if fused and record.fuse is not None and _can_fuse(targets[0], uses, grad):
                record.fuse(grad, value, targets[0].grad)  # type: ignore[union-attr, arg-type]
                self._note(targets[0])
                targets = (None, *targets[1:])
            for target, found in zip(targets, record.compute(grad, value, targets, record.extra), strict=True):
                if target is not None and found is not None:
                    self._add(target, found, uses, sums)
        self.records.clear()
        return list(self.hooked)

    def _add(self, target: nn.Parameter, found: Tensor, uses: Counter[nn.Parameter | None], sums: dict[nn.Parameter, Tensor]) -> None:
        """Add to a parameter's gradient as autograd does: what several operators gave is summed first."""
        if found.dtype != target.dtype:
            found = found.to(target.dtype)
        uses[target] -= 1
        if target in sums:
            found = sums.pop(target).add_(found)
        if uses[target]:
            sums[target] = found
            return
        total = target.grad
        if total is None:
            target.grad = found
        elif total.is_sparse:
            target.grad = found + total
        else:
            total.add_(found)
        self._note(target)

    def _note(self, target: nn.Parameter | None) -> None:
        if target is not None and target._post_accumulate_grad_hooks:
            self.hooked[target] = None


def _can_fuse(target: nn.Parameter | None, uses: Counter[nn.Parameter | None], grad: Tensor) -> bool:
    """Where there is a sum of the same kind to add to, and nothing else to be added first."""
    if target is None or uses[target] != 1 or target.grad is None:
        return False
    total = target.grad
    return total.dtype == grad.dtype and total.layout == torch.strided


def active() -> Deferral | None:
    """The deferral that operators are to be recorded into now; none inside a compiled function or a function transform."""
    if _is_compiling() or not _is_grad_enabled() or _are_transforms_active() or not _is_stashed(_KEY):
        return None
    return _stashed(_KEY)  # type: ignore[no-any-return]


def activate(deferral: Deferral | None) -> Deferral | None:
    """Record into this from now on; what was recorded into before."""
    before: Deferral | None = _stashed(_KEY) if _is_stashed(_KEY) else None
    if deferral is not None:
        torch._C._stash_obj_in_tls(_KEY, deferral)
    elif before is not None:
        torch._C._remove_obj_from_tls(_KEY)
    return before


def packs_saved_tensors() -> bool:
    """Whether saved tensors are packed, as under activation checkpointing: a record must not hold what will be recomputed."""
    return _saved_tensor_hooks(False) is not None


class _Tap(torch.autograd.Function):
    """The identity, with the record filled on the way back; saves the operator's input as autograd would, for checkpoints to recompute.

    What a checkpoint computes again gets taps too, so that it saves the same tensors; no gradient ever comes to those.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, value: Tensor, record: Record, deferral: Deferral, anchor: Tensor) -> Tensor:
        ctx.record, ctx.deferral = record, deferral
        ctx.mark_dirty(out)  # rather than a view, which nothing could then change in place
        if packs_saved_tensors():
            ctx.save_for_backward(value)
            record.value = None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        record: Record = ctx.record
        saved = ctx.saved_tensors  # may be read but once: it makes checkpointing recompute
        if saved:
            record.value, record.version = saved[0], saved[0]._version
        ctx.deferral.arrive(record, (grad,))
        return grad, None, None, None, None
