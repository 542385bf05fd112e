"""Deferred operators of one forward, and the weight gradients that they are run for later.

While a stage runs its forward with a `Deferral`, each linear map, embedding, convolution, normalisation and (batched) matrix product
runs with its weight detached, and a `DeferredOperator` is attached to its place in the graph. The stage's backward is then the
backward for the input, at exactly that cost, and hands each deferred operator the gradient of its output. Everything else that a
parameter takes part in is left to autograd and gets its gradient in the backward for the input. No module is changed, and the cost
is linear in the number of operators.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ScheduleError, SplitError, WholeBackwardNeeded
from penstock.runtime.tensors.dtensor import has_same_placements, redistribute_like
from penstock.runtime.tensors.layout import match_layout
from penstock.runtime.torch_internals.lookup import find_private
from penstock.runtime.torch_internals.tensors import find_base, read_version, set_only_hook

Grads = tuple[Tensor | None, Tensor | None]
ComputeGrads = Callable[[Tensor, Tensor, Any, Any, Any], Grads]
"""Computes the gradients of weight and bias from the output's gradient, the input, the weight and the bias (None for one whose gradient
is not needed), and the operator's other arguments."""
Fuse = Callable[[Tensor, Tensor, Tensor], None]
"""Adds the weight's gradient to a sum in one operation: called with the output's gradient, the input and the sum."""

_ANCHOR = torch.zeros((), requires_grad=True)
"""Makes an operator's output require a gradient when its input does not; never gets a gradient itself."""


class _ThreadState(threading.local):
    """The split backward of this thread, if there is one."""

    deferral: Deferral | None = None
    """Where its operators are recorded."""
    observation: Observation | None = None
    """Where its calls of autograd are noted."""
    tied: Collection[int] = ()
    """The ids of weights that other stages use too, whose gradients autograd must not be asked for."""


here = _ThreadState()
running_backwards: list[Deferral] = []
"""The deferrals whose backward for the input is running: torch runs a device's backward on another thread."""

# Bound here because they are called for every operator.
_is_compiling, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_set_grad_enabled = find_private("torch._C._set_grad_enabled")
_are_transforms_active = find_private("torch._C._are_functorch_transforms_active")
_saved_tensor_hooks = find_private("torch._C._autograd._top_saved_tensors_default_hooks")
_current_graph_task = find_private("torch._C._current_graph_task_id")
_add_all_in_place = find_private("torch._foreach_add_")


class DeferredOperator:
    """One operator of one forward: its input, and the gradient of its output once the backward has reached it.

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
        self.version = read_version(value)
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
        """Save the input as autograd saves tensors, so that saved-tensor hooks see it: a checkpoint recomputes it, for example."""
        self.packed = _Saved.apply(self.value, _ANCHOR)  # type: ignore[no-untyped-call]
        self.value = None

    def __call__(self, grad: Any) -> None:
        """Take the gradient of the operator's output; called as a hook before the operator's own backward."""
        if _is_grad_enabled():
            raise SplitError(
                "a stage differentiates a gradient of its own (create_graph=True), which deferred weights take no part in: "
                "run its backward whole, with PassList.parse('merge-backward{stages=...,apart=true}').apply(schedule)"
            )
        if type(grad) is tuple:  # a hook on a node rather than on a tensor
            grad = grad[0]
        deferral = self.deferral
        if grad is None or (deferral is not None and not deferral.backward):  # a gradient that the forward itself asked for
            return
        self.grad = grad
        if self.packed is not None:
            (self.value,), self.packed = self.packed.grad_fn.saved_tensors, None
            self.version = read_version(self.value)
        if deferral is not None:
            deferral.operators.append(self)
            self.deferral = None  # no reference cycle, so that memory is freed as soon as it has been used

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the output's gradient and the input, and let go of both."""
        grad, value = self.grad, self.value
        self.grad = self.value = None
        assert grad is not None
        assert value is not None
        if read_version(value) != self.version:
            raise make_in_place_error(value)
        return grad, value


def make_in_place_error(value: Tensor) -> SplitError:
    """Return the error for an input that was changed after a weight was applied to it."""
    return SplitError(
        f"a tensor of shape {list(value.shape)} that a weight was applied to was changed in place before the weight's gradient "
        "was computed: change a copy"
    )


def has_saved_tensor_hooks() -> bool:
    """Whether saved-tensor hooks are set, as a checkpoint does."""
    return _saved_tensor_hooks(False) is not None


class Deferral:
    """The deferred operators of one stage and microbatch."""

    __slots__ = ("backward", "beside", "due", "hooked", "operators", "stand_ins")

    def __init__(self) -> None:
        self.beside = False
        """Whether the forward runs another stage's backward as well."""
        self.operators: list[DeferredOperator] = []
        """The operators that a gradient has reached, in the order of the backward."""
        self.stand_ins: dict[int, Tensor] = {}
        """The detached weights that operators run with, by the id of the weight."""
        self.hooked: dict[int, nn.Parameter] = {}
        """Parameters with post-accumulate hooks, by id."""
        self.due: dict[int, nn.Parameter] = {}
        """The hooked parameters that have got a gradient."""
        self.backward = False
        """Whether the backward for the input is running or has run."""

    def run(self, fused: bool = False) -> list[nn.Parameter]:
        """Run the backward for the weights; return the parameters whose hooks are now due.

        `fused` adds the products of linear maps straight to the gradients. That saves one pass over them, and rounds differently: sums
        of some tens of terms in float32 are within 1e-6 of the largest gradient.
        """
        before = _is_grad_enabled()
        _set_grad_enabled(False)  # `torch.no_grad()` takes as long as a small matrix product
        try:
            return self._run(fused)
        finally:
            _set_grad_enabled(before)

    def _run(self, fused: bool) -> list[nn.Parameter]:
        adder = GradientAdder()
        uses = _RepeatedUses(self.operators, adder.add)
        add = uses.add if uses.left else adder.add
        for operator in self.operators:
            grad, value = operator.take()
            weight, bias = operator.weight, operator.bias
            if fused and operator.fuse is not None and weight is not None and uses.can_fuse(weight, grad):
                operator.fuse(grad, value, weight.grad)  # type: ignore[arg-type]
                weight = None
            of_weight, of_bias = operator.compute(grad, value, weight, bias, operator.extra)
            if weight is not None:
                add(weight, of_weight)  # type: ignore[arg-type]
            if bias is not None:
                add(bias, of_bias)  # type: ignore[arg-type]
        adder.flush()
        self.operators.clear()
        if self.hooked:
            self.due.update((ident, self.hooked[ident]) for ident in uses.targets if ident in self.hooked)
        return list(self.due.values())


@dataclass
class Observation:
    """Whether a forward that is not split could be."""

    stand_ins: Mapping[int, Tensor]
    """The detached weights that a split forward would run with, by the id of the weight."""
    beside: bool = False
    """Whether the forward runs another stage's backward as well."""
    reason: str | None = None
    """The reason why it cannot be split; None if there is none."""


class GradientAdder:
    """Adds to the parameters' gradients, as autograd does; on a device, many small ones with one kernel launch."""

    __slots__ = ("grads", "totals")
    LARGEST, MOST = 1 << 16, 64
    """The most elements of a gradient that is added together with others, and how many are added at once."""

    def __init__(self) -> None:
        self.totals: list[Tensor] = []
        self.grads: list[Tensor] = []

    def add(self, target: nn.Parameter, grad: Tensor) -> None:
        total = target.grad
        if total is None:
            grad = _cast(grad, target)
            target.grad = grad if grad.is_contiguous() and target.is_contiguous() else match_layout(grad, target)
        elif total.is_sparse:  # from an operator that was left to autograd
            target.grad = grad + total
        elif type(total) is not Tensor and not has_same_placements(total, target):  # autograd has left a sum over processes undone
            target.grad = redistribute_like(total, target) + redistribute_like(grad, target)
        elif grad.is_cpu or grad.numel() > self.LARGEST or grad.dtype != total.dtype:  # on a CPU one by one is quicker
            total.add_(grad)
        else:
            self.totals.append(total)
            self.grads.append(grad)
            if len(self.grads) == self.MOST:
                self.flush()

    def flush(self) -> None:
        if self.grads:
            _add_all_in_place(self.totals, self.grads)
            self.totals.clear()
            self.grads.clear()


_NONE_LEFT: Counter[int] = Counter()


class _RepeatedUses:
    """Sums the gradients of a parameter that several operators use before adding them to it, as autograd does."""

    __slots__ = ("add_to", "left", "sums", "targets")

    def __init__(self, operators: Sequence[DeferredOperator], add: Callable[[nn.Parameter, Tensor], None]) -> None:
        self.add_to = add
        self.targets = [id(target) for operator in operators for target in (operator.weight, operator.bias) if target is not None]
        self.left = Counter(self.targets) if len(set(self.targets)) < len(self.targets) else _NONE_LEFT
        """How many gradients of each parameter are missing; empty if no parameter is used twice."""
        self.sums: dict[int, Tensor] = {}

    def can_fuse(self, target: nn.Parameter, grad: Tensor) -> bool:
        """Whether there is a dense sum of the same dtype to add to, and nothing to be added first."""
        total = target.grad
        alone = self.left[id(target)] <= 1 and id(target) not in self.sums
        return alone and total is not None and total.dtype == grad.dtype and not total.is_sparse

    def add(self, target: nn.Parameter, grad: Tensor) -> None:
        grad = _cast(grad, target)
        if id(target) in self.sums:
            grad = self.sums.pop(id(target)).add_(grad)
        self.left[id(target)] -= 1
        if self.left[id(target)]:
            self.sums[id(target)] = grad
        else:
            self.add_to(target, grad)


def attach(out: Tensor, operator: DeferredOperator) -> Tensor:
    """Attach an operator to its output, which must not be a view; return the output to use."""
    if not out.requires_grad:
        return _tap(out, operator)
    out.grad_fn.register_prehook(operator)  # type: ignore[union-attr]
    return out


def attach_inner(out: Any, operator: DeferredOperator) -> Tensor:
    """Attach an operator to an output of which only views leave the operator, so that it has no other hooks: at half the cost."""
    if not out.requires_grad:
        return _tap(out, operator)
    set_only_hook(out, operator)
    return out  # type: ignore[no-any-return]


def attach_product(out: Tensor, operator: DeferredOperator) -> None:
    """Attach an operator to the matrix product of a linear map over more than two dimensions, whose output has another shape.

    Up to torch 2.13 the output is a view of the product. Later it is an unsafe view, which has no base, but whose node follows the
    product's.
    """
    base = find_base(out)
    if base is not None:
        attach_inner(base, operator)
        return
    node: Any = out.grad_fn
    if node.name() == "UnsafeViewBackward0":
        node = node.next_functions[0][0]
    node.register_prehook(operator)


def _tap(out: Tensor, operator: DeferredOperator) -> Tensor:
    tapped: Tensor = _Tap.apply(out, operator, _ANCHOR)  # type: ignore[no-untyped-call]
    return tapped


class _Tap(torch.autograd.Function):
    """The identity for an output without a graph; its backward hands the gradient to the operator."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, operator: DeferredOperator, anchor: Tensor) -> Tensor:
        ctx.operator = operator
        if operator.packed is not None:  # the saved-tensor hook may keep the output too, and needs it unchanged
            return out.clone()
        ctx.mark_dirty(out)  # rather than a view, which could not be changed in place
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.operator(grad)
        return grad, None, None


class _Saved(torch.autograd.Function):
    """Saves a tensor, to be read from the node in the graph; no gradient ever flows through it.

    A checkpoint matches recomputed tensors with the original ones by the order in which they are saved.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return anchor.new_empty(0)


def _cast(grad: Tensor, parameter: Tensor) -> Tensor:
    """Cast a gradient as autograd does before it adds the gradient to a parameter's: not at all if any dtype is allowed."""
    dtype = parameter.grad_dtype
    return grad if dtype is None or dtype == grad.dtype else grad.to(dtype)


def get_deferral(weight: Any) -> Deferral | None:
    """Return the deferral to record an operator on this weight in; None inside a compiled function or a function transform."""
    if _is_compiling() or not _is_grad_enabled() or _are_transforms_active():
        return None
    if here.deferral is None and running_backwards and _current_graph_task() != -1:
        return next((deferral for deferral in running_backwards if id(weight) in deferral.stand_ins), None)
    return here.deferral


def activate(deferral: Deferral | None) -> Deferral | None:
    """Set where this thread's operators are recorded from now on; return the previous deferral."""
    before, here.deferral = here.deferral, deferral
    return before


def _check_request(inputs: Sequence[Any], create_graph: bool) -> None:
    """Check a call of autograd: inside a split forward, the graph has stand-ins in place of the weights."""
    if here.tied and any(id(_find_tensor(value)) in here.tied for value in inputs):
        raise ScheduleError(
            "a stage or the loss asks autograd for the gradient of a weight that another stage uses too, and would get only its "
            "own stage's part: ask for that of a weight that is not tied"
        )
    deferral = here.deferral
    guarded = here.observation if deferral is None or deferral.backward else deferral
    if guarded is None or _is_compiling() or _are_transforms_active():
        return
    if create_graph:
        reason = "differentiates a gradient (create_graph=True)"
    elif not inputs and not guarded.beside:
        reason = "runs a backward of its own"
    elif any(id(_find_tensor(value)) in guarded.stand_ins for value in inputs):
        reason = "asks autograd for a weight's gradient"
    else:
        return
    if isinstance(guarded, Deferral):
        raise WholeBackwardNeeded(reason)
    guarded.reason = reason


@contextmanager
def autograd_request(inputs: Sequence[Any], create_graph: bool) -> Iterator[None]:
    """A context for a call of autograd for the gradients of these inputs, or of all leaves if there are none, which is checked first.

    A forward that is recomputed inside a backward asks again for the gradients of its inputs. That is not part of the backward, so
    deferred operators take nothing from it. A call for all leaves is part of it, as from torch's reentrant checkpoint, and so is a call
    for weights, from a function that recomputes its own forward.
    """
    _check_request(inputs, create_graph)
    deferral = here.deferral
    if (
        deferral is None
        or not (inputs and deferral.backward)
        or _current_graph_task() == -1
        or any(id(_find_tensor(value)) in deferral.stand_ins for value in inputs)
    ):
        yield
        return
    deferral.backward = False
    try:
        yield
    finally:
        deferral.backward = True


def _find_tensor(asked: Any) -> Any:
    """Return the tensor whose gradient is asked for; it may be given as an edge of the graph."""
    return asked if isinstance(asked, Tensor) else getattr(getattr(asked, "node", None), "variable", None)
