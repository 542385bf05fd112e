"""Weight gradients that wait: the split backward, at the operator.

While a stage runs forward with a `Deferral`, a linear map, an embedding, a convolution, a normalisation or a (batched) matrix product
is run with its weight cut off from autograd, and a record of it is tied to its place in the graph. The stage's backward is then the
backward for the input, at the price of exactly that, and on its way hands each record the gradient of its operator's output. Running
the records later gives the weight gradients. Everything else that a parameter takes part in is left to autograd and gets its
gradient in the backward for the input. No module is changed, and the cost is linear in the operators.

`operators` has the operators that can wait, `recording` puts them in place.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError, SplitError, WholeBackwardNeeded
from penstock.runtime.tensors.dtensor import has_same_placements, redistribute_like
from penstock.runtime.tensors.layout import match_layout

T = TypeVar("T")
Grads = tuple[Tensor | None, Tensor | None]
ComputeGrads = Callable[[Tensor, Tensor, Any, Any, Any], Grads]
"""The gradients of weight and bias, from the output's gradient, the input, the weight and the bias (None for one that is not wanted),
and what else the operator was given."""
Fuse = Callable[[Tensor, Tensor, Tensor], None]
"""Add the weight's gradient to what is there already in one operation: the output's gradient, the input, the sum."""

_ANCHOR = torch.zeros((), requires_grad=True)
"""What makes a tap's output want a gradient where the operator's input does not; it never gets one itself."""


class _ThreadState(threading.local):
    """What this thread does for a split backward, if anything."""

    deferral: Deferral | None = None
    """What its operators are recorded into."""
    observation: Observation | None = None
    """What its calls of autograd are noted in."""
    tied: Collection[int] = ()
    """The weights, by id, that stages use which are not run here."""


_here = _ThreadState()
running_backwards: list[Deferral] = []
"""Those whose backward for the input runs now: torch runs a device's on a thread of its own."""

# Asked at every operator, so that looking them up counts.
_is_compiling, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_are_transforms_active = torch._C._are_functorch_transforms_active
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class DeferredOperator:
    """One operator of one forward: what it was applied to, and the gradient of its output once the backward has been there.

    It is itself the hook that the backward calls.
    """

    __slots__ = ("bias", "compute", "deferral", "extra", "fuse", "grad", "packed", "value", "version", "weight")

    def __init__(
        self,
        deferral: Deferral,
        value: Tensor,
        weight: Any,
        bias: Any,
        compute: ComputeGrads,
        *,
        extra: Any = None,
        fuse: Fuse | None = None,
    ) -> None:
        self.deferral: Deferral | None = deferral
        self.value: Tensor | None = value
        self.version = value._version
        self.weight: nn.Parameter | None = weight
        self.bias: nn.Parameter | None = bias
        self.compute = compute
        self.extra = extra
        self.fuse = fuse
        self.grad: Tensor | None = None
        self.packed: Any = None
        if _saved_tensor_hooks(False) is not None:
            self.pack()

    def pack(self) -> None:
        """Save the input as autograd saves tensors, where hooks are set on that: a checkpoint, say, is to compute it again."""
        self.packed = _Saved.apply(self.value, _ANCHOR)  # type: ignore[no-untyped-call]
        self.value = None

    def __call__(self, grad: Any) -> None:
        """The hook that is called with the gradient of the operator's output, before the operator's own backward."""
        if _is_grad_enabled():
            raise SplitError(
                "a stage differentiates a gradient of its own (create_graph=True), which a weight that waits has no part in: "
                "run its backward whole, with PassList.parse('merge-backward{stages=...,apart=true}').apply(schedule)"
            )
        if type(grad) is tuple:  # from a node rather than a tensor
            grad = grad[0]
        deferral = self.deferral
        if grad is None or (deferral is not None and not deferral.backward):  # a gradient that the forward asked for itself
            return
        self.grad = grad
        if self.packed is not None:
            (self.value,), self.packed = self.packed.grad_fn.saved_tensors, None
            self.version = self.value._version
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
            raise changed_in_place(value)
        return grad, value


def changed_in_place(value: Tensor) -> SplitError:
    """The error for a value that was changed after a weight was applied to it."""
    return SplitError(
        f"a tensor of shape {list(value.shape)} that a weight was applied to was changed in place before the weight's gradient "
        "was computed: change a copy"
    )


def has_saved_tensor_hooks() -> bool:
    """Whether tensors that autograd saves now are packed by someone, as a checkpoint does."""
    return _saved_tensor_hooks(False) is not None


def _without_grad(work: Callable[[Deferral, bool], T]) -> Callable[..., T]:
    """As `torch.no_grad()` does, which takes as long as a small product by itself."""

    def run(deferral: Deferral, fused: bool = False) -> T:
        before = _is_grad_enabled()
        _set_grad_enabled(False)
        try:
            return work(deferral, fused)
        finally:
            _set_grad_enabled(before)

    return update_wrapper(run, work)


class Deferral:
    """The records of one stage and microbatch, and the weights that can wait, by their id, each with what stands in for it."""

    __slots__ = ("backward", "beside", "due", "hooked", "records", "stand_ins")

    def __init__(self) -> None:
        self.beside = False
        """Whether the forward runs another stage's backward by the way."""
        self.records: list[DeferredOperator] = []
        """Those that a gradient has reached, in the order of the backward."""
        self.stand_ins: dict[int, Tensor] = {}
        self.hooked: dict[int, nn.Parameter] = {}
        """Parameters with hooks that run when their gradient is there, by their id."""
        self.due: dict[int, nn.Parameter] = {}
        """Those of them that have got a gradient."""
        self.backward = False

    @_without_grad
    def run(self, fused: bool = False) -> list[nn.Parameter]:
        """The backward for the weights; the parameters whose hooks are now due.

        `fused` adds the products of linear maps straight to the gradients: one pass over them less, and a rounding of its own,
        for sums of some tens of terms in float32 within 1e-6 of the largest gradient.
        """
        batch = GradientAdder()
        sums = _RepeatedUses(self.records, batch.add)
        add = sums.add if sums.left else batch.add
        for record in self.records:
            grad, value = record.take()
            weight, bias = record.weight, record.bias
            if fused and record.fuse is not None and weight is not None and sums.can_fuse(weight, grad):
                record.fuse(grad, value, weight.grad)  # type: ignore[arg-type]
                weight = None
            of_weight, of_bias = record.compute(grad, value, weight, bias, record.extra)
            if weight is not None:
                add(weight, of_weight)  # type: ignore[arg-type]
            if bias is not None:
                add(bias, of_bias)  # type: ignore[arg-type]
        batch.flush()
        self.records.clear()
        if self.hooked:
            self.due.update((ident, self.hooked[ident]) for ident in sums.targets if ident in self.hooked)
        return list(self.due.values())


@dataclass
class Observation:
    """What is seen of a forward that is not split: whether it could be."""

    stand_ins: Mapping[int, Tensor]
    """The weights that would have one, by their id."""
    beside: bool = False
    """Whether the forward runs another stage's backward by the way."""
    reason: str | None = None
    """What it does that a split forward could not."""


class GradientAdder:
    """Adds to parameters' gradients, as autograd does, but those of small ones many at a time: for a device that is one launch."""

    __slots__ = ("found", "totals")
    LARGEST, MOST = 1 << 16, 64
    """Numbers of a gradient that waits for others, and how many do."""

    def __init__(self) -> None:
        self.totals: list[Tensor] = []
        self.found: list[Tensor] = []

    def add(self, target: nn.Parameter, found: Tensor) -> None:
        total = target.grad
        if total is None:
            found = found if found.dtype == target.dtype else found.to(target.dtype)
            target.grad = found if found.is_contiguous() and target.is_contiguous() else match_layout(found, target)
        elif total.is_sparse:  # from an operator that was left to autograd
            target.grad = found + total
        elif type(total) is not Tensor and not has_same_placements(total, target):  # a sum over processes that autograd has left open
            target.grad = redistribute_like(total, target) + redistribute_like(found, target)
        elif found.is_cpu or found.numel() > self.LARGEST or found.dtype != total.dtype:  # on a CPU one by one is quicker
            total.add_(found)
        else:
            self.totals.append(total)
            self.found.append(found)
            if len(self.found) == self.MOST:
                self.flush()

    def flush(self) -> None:
        if self.found:
            torch._foreach_add_(self.totals, self.found)
            self.totals.clear()
            self.found.clear()


_NONE_LEFT: Counter[int] = Counter()


class _RepeatedUses:
    """Where several operators have used a parameter, their gradients are summed before they are added to it, as autograd does."""

    __slots__ = ("add_to", "left", "sums", "targets")

    def __init__(self, records: Sequence[DeferredOperator], add: Callable[[nn.Parameter, Tensor], None]) -> None:
        self.add_to = add
        self.targets = [id(target) for record in records for target in (record.weight, record.bias) if target is not None]
        self.left = Counter(self.targets) if len(set(self.targets)) < len(self.targets) else _NONE_LEFT
        """How many operators have yet to give theirs; nothing where each parameter has but one."""
        self.sums: dict[int, Tensor] = {}

    def can_fuse(self, target: nn.Parameter, grad: Tensor) -> bool:
        """Where there is a sum of the same kind to add to, and nothing else to be added first."""
        total = target.grad
        alone = self.left[id(target)] <= 1 and id(target) not in self.sums
        return alone and total is not None and total.dtype == grad.dtype and not total.is_sparse

    def add(self, target: nn.Parameter, found: Tensor) -> None:
        found = found if found.dtype == target.dtype else found.to(target.dtype)
        if id(target) in self.sums:
            found = self.sums.pop(id(target)).add_(found)
        self.left[id(target)] -= 1
        if self.left[id(target)]:
            self.sums[id(target)] = found
        else:
            self.add_to(target, found)


def attach(out: Tensor, record: DeferredOperator) -> Tensor:
    """Tie a record to its operator's output, which must not be a view; the output to go on with."""
    if not out.requires_grad:
        return _tapped(out, record)
    out.grad_fn.register_prehook(record)  # type: ignore[union-attr]
    return out


def attach_inner(out: Any, record: DeferredOperator) -> Tensor:
    """The same for an output that only views of are handed on, so that no one else has hooks on it: at half the price."""
    if not out.requires_grad:
        return _tapped(out, record)
    out._backward_hooks = {0: record}  # as Tensor.register_hook does, without a handle to remove it by
    out.grad_fn._register_hook_dict(out)
    return out  # type: ignore[no-any-return]


def _tapped(out: Tensor, record: DeferredOperator) -> Tensor:
    tapped: Tensor = _Tap.apply(out, record, _ANCHOR)  # type: ignore[no-untyped-call]
    return tapped


class _Tap(torch.autograd.Function):
    """The identity, where an operator's output has no history yet, with the record filled on the way back."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, record: DeferredOperator, anchor: Tensor) -> Tensor:
        ctx.record = record
        if record.packed is not None:  # who packs what is saved may keep the output too, and wants it unchanged
            return out.clone()
        ctx.mark_dirty(out)  # rather than a view, which nothing could then change in place
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.record(grad)
        return grad, None, None


class _Saved(torch.autograd.Function):
    """Saves a tensor, to be read from the function's place in the graph; nothing ever goes backward through it.

    What a checkpoint computes again is saved again in the same order, which tells it what the first one was.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return anchor.new_empty(0)


def active_deferral(weight: Any) -> Deferral | None:
    """The deferral that an operator on this weight is to be recorded into; none inside a compiled function or a function transform."""
    if _is_compiling() or not _is_grad_enabled() or _are_transforms_active():
        return None
    if _here.deferral is None and running_backwards and torch._C._current_graph_task_id() != -1:
        return next((deferral for deferral in running_backwards if id(weight) in deferral.stand_ins), None)
    return _here.deferral


def activate(deferral: Deferral | None) -> Deferral | None:
    """Record what this thread does into this from now on; what was recorded into before."""
    before, _here.deferral = _here.deferral, deferral
    return before


def observe(observation: Observation | None) -> Observation | None:
    """Note this thread's calls of autograd in this from now on; what they were noted in before."""
    before, _here.observation = _here.observation, observation
    return before


def set_tied_weights(tied: Collection[int]) -> Collection[int]:
    """Have this thread's calls of autograd not ask for these weights, by their ids, from now on; those before."""
    before, _here.tied = _here.tied, tied
    return before


def check_request(inputs: Sequence[Any], create_graph: bool) -> None:
    """Check a call of autograd: inside a split forward, stand-ins are in the graph in place of the weights."""
    if _here.tied and any(id(_tensor_of(each)) in _here.tied for each in inputs):
        raise ScheduleError(
            "a stage or the loss asks autograd for the gradient of a weight that another stage uses too, and would get the part of its own "
            "stage alone: ask for that of a weight that is not tied"
        )
    deferral = _here.deferral
    guarded = _here.observation if deferral is None or deferral.backward else deferral
    if guarded is None or _is_compiling() or _are_transforms_active():
        return
    if create_graph:
        reason = "differentiates a gradient (create_graph=True)"
    elif not inputs and not guarded.beside:
        reason = "runs a backward of its own"
    elif any(id(_tensor_of(each)) in guarded.stand_ins for each in inputs):
        reason = "asks autograd for a weight's gradient"
    else:
        return
    if isinstance(guarded, Deferral):
        raise WholeBackwardNeeded(reason)
    guarded.reason = reason


@contextmanager
def autograd_request(inputs: Sequence[Any]) -> Iterator[None]:
    """A context for a call of autograd for the gradients of these inputs, or of everything if there are none.

    A forward that is run again inside a backward asks again for the gradients of its inputs. That is no part of the backward, so records
    take nothing from it. A call for everything is a part of it, as torch's reentrant checkpoint makes one, and so is one for weights,
    by a function that runs its own forward again.
    """
    deferral = _here.deferral
    if deferral is None or not inputs or not deferral.backward or torch._C._current_graph_task_id() == -1:
        yield
        return
    if any(id(_tensor_of(each)) in deferral.stand_ins for each in inputs):
        yield
        return
    deferral.backward = False
    try:
        yield
    finally:
        deferral.backward = True


def _tensor_of(asked: Any) -> Any:
    """The tensor that a gradient is asked of, which may be named by its place in the graph."""
    return asked if isinstance(asked, Tensor) else getattr(getattr(asked, "node", None), "variable", None)
