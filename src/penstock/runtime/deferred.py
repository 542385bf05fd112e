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
    """One operator of one forward: what it was applied to, and the gradient of its output once the backward has been there.

    It is itself the hook that the backward calls.
    """

    __slots__ = ("compute", "deferral", "extra", "fuse", "grad", "targets", "value", "version")

    def __init__(
        self, deferral: Deferral, compute: Compute, targets: Targets, value: Tensor, extra: Any = None, fuse: Fuse | None = None
    ) -> None:
        self.deferral: Deferral | None = deferral
        self.compute = compute
        self.targets = targets
        self.value: Tensor | None = value
        self.version = value._version
        self.extra = extra
        self.fuse = fuse
        self.grad: Tensor | None = None

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        """The hook before the operator's own backward."""
        self.arrive(grads[0])

    def arrive(self, grad: Tensor | None) -> None:
        """Take the gradient of the operator's output."""
        if _is_grad_enabled():
            raise SplitError(
                "a stage differentiates a gradient of its own (create_graph=True), which a weight that waits has no part in: "
                "run its backward whole, with lower(schedule, merge_backward=True)"
            )
        deferral = self.deferral
        if grad is None or (deferral is not None and not deferral.backward):  # a gradient that the forward asked for itself
            return
        self.grad = grad
        if deferral is not None:
            deferral.records.append(self)
            self.deferral = None  # no cycle, so that all of it goes as soon as it has been used

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

    @torch.no_grad()
    def run(self, fused: bool = False) -> list[nn.Parameter]:
        """The backward for the weights; the parameters that wait for a hook of theirs to be run.

        `fused` adds the products of linear maps straight to the gradients: one pass over them less, and a rounding of its own.
        """
        sums = _Sums(self.records)
        for record in self.records:
            grad, value = record.take()
            targets = record.targets
            if fused and record.fuse is not None and sums.can_fuse(targets[0], grad):
                record.fuse(grad, value, targets[0].grad)  # type: ignore[union-attr, arg-type]
                targets = (None, *targets[1:])
            for target, found in zip(targets, record.compute(grad, value, targets, record.extra), strict=True):
                if found is not None:
                    sums.add(target, found)  # type: ignore[arg-type]
            for target in record.targets:
                if target is not None and target._post_accumulate_grad_hooks:
                    self.hooked[target] = None
        self.records.clear()
        return list(self.hooked)


class _Sums:
    """Adds to parameters' gradients as autograd does: what several operators gave is summed first."""

    def __init__(self, records: Sequence[Record]) -> None:
        targets = [id(target) for record in records for target in record.targets if target is not None]
        self.left = Counter(targets) if len(set(targets)) < len(targets) else None
        """How many operators have yet to give theirs; None where each parameter has but one."""
        self.sums: dict[int, Tensor] = {}

    def can_fuse(self, target: nn.Parameter | None, grad: Tensor) -> bool:
        """Where there is a sum of the same kind to add to, and nothing else to be added first."""
        if target is None or target.grad is None or (self.left is not None and (self.left[id(target)] > 1 or id(target) in self.sums)):
            return False
        return target.grad.dtype == grad.dtype and target.grad.layout == torch.strided

    def add(self, target: nn.Parameter, found: Tensor) -> None:
        if found.dtype != target.dtype:
            found = found.to(target.dtype)
        if self.left is not None:
            if id(target) in self.sums:
                found = self.sums.pop(id(target)).add_(found)
            self.left[id(target)] -= 1
            if self.left[id(target)]:
                self.sums[id(target)] = found
                return
        total = target.grad
        if total is None:
            target.grad = found
        elif total.layout == torch.strided:
            total.add_(found)
        else:  # sparse, from an operator that was left to autograd
            target.grad = found + total


def tie(out: Tensor, record: Record) -> Tensor:
    """Tie a record to its operator's output, which must not be a view; the output to go on with."""
    node = out.grad_fn
    if node is None or _saved_tensor_hooks(False) is not None:
        tapped: Tensor = _Tap.apply(out, record.value, record, _ANCHOR)  # type: ignore[no-untyped-call]
        return tapped
    node.register_prehook(record)
    return out


def tie_inner(out: Tensor, record: Record) -> Tensor:
    """The same for an output that only views of are handed on, so that no one else has hooks on it: at a third of the price."""
    if out.grad_fn is None or _saved_tensor_hooks(False) is not None:
        tapped: Tensor = _Tap.apply(out, record.value, record, _ANCHOR)  # type: ignore[no-untyped-call]
        return tapped
    out._backward_hooks = {0: record.arrive}  # type: ignore[assignment]
    return out


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
    def forward(ctx: Any, out: Tensor, value: Tensor, record: Record, anchor: Tensor) -> Tensor:
        ctx.record = record
        ctx.mark_dirty(out)  # rather than a view, which nothing could then change in place
        if packs_saved_tensors():
            ctx.save_for_backward(value)
            record.value = None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        record: Record = ctx.record
        saved = ctx.saved_tensors  # may be read but once: it makes checkpointing recompute
        if saved:
            record.value, record.version = saved[0], saved[0]._version
        record.arrive(grad)
        return grad, None, None, None
