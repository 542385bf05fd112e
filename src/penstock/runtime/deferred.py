"""Weight gradients that wait: the split backward, at the operator.

While a stage runs forward with a `Deferral`, the operators that apply its weights are seen: `torch.nn.functional`'s by a
wrapper that stands in their place, all others (`x @ w`, `torch.bmm`) by the class of the parameters. A linear map, an embedding, a
convolution or a (batched) matrix product is run with the weight cut off from autograd, and a record keeps what the weight's
gradient will need. The stage's backward is then the backward for the input, at the price of exactly that; running the records
later gives the weight gradients. Everything else a parameter takes part in is left to autograd and gets its gradient in the
backward for the input. No module is changed, and the cost is linear in the operators.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Fuse = Callable[[Tensor, Tensor, tuple[Any, ...]], bool]
"""Add the first parameter's gradient in one operation; False where that cannot be."""
Compute = Callable[[Tensor, Tensor, tuple[Any, ...], Any], tuple[Tensor | None, ...]]
"""The weight gradients from the output's gradient, the input, the parameters and what else the operator was given."""

_ANCHOR = torch.zeros((), requires_grad=True)
"""What makes a tap's output want a gradient where the operator's input does not; it never gets one itself."""


class Record:
    """One operator of one forward: what it was applied to, and the gradient of its output once the backward has been there."""

    __slots__ = ("compute", "extra", "fuse", "grad", "input", "targets")

    def __init__(
        self, compute: Compute, targets: tuple[nn.Parameter | None, ...], value: Tensor, extra: Any = None, fuse: Fuse | None = None
    ) -> None:
        self.compute = compute
        self.fuse = fuse
        self.targets = targets
        self.input: Tensor | None = value
        self.extra = extra
        self.grad: Tensor | None = None

    def take_grad(self, grads: Sequence[Tensor]) -> None:
        """The hook before the operator's own backward."""
        self.grad = grads[0]

    def run(self, fused: bool) -> None:
        """Add the weight gradients; nothing where no gradient ever reached the operator."""
        grad, value = self.grad, self.input
        self.grad = self.input = None
        if grad is None or value is None:
            return
        if value.dtype != grad.dtype and value.is_floating_point():  # autocast ran the operator in the output's type
            value = value.to(grad.dtype)
        targets = self.targets
        if fused and self.fuse is not None and self.fuse(grad, value, targets):
            targets = (None, *targets[1:])
        for target, found in zip(targets, self.compute(grad, value, targets, self.extra), strict=True):
            if target is not None and found is not None:
                _accumulate(target, found if found.dtype == target.dtype else found.to(target.dtype))


def _accumulate(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add to a parameter's gradient, as autograd does."""
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


class Deferral:
    """The records of one stage and microbatch."""

    __slots__ = ("records",)

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, out: Tensor, record: Record) -> Tensor:
        """Tie a record to its operator's output; the output to go on with."""
        packed = _packs_saved_tensors()
        if not (packed and _active.backward):  # what a checkpoint runs again has its record already
            self.records.append(record)
        if packed or out.grad_fn is None:
            tapped: Tensor = _Tap.apply(out, record.input, record, _ANCHOR)  # type: ignore[no-untyped-call]
            return tapped
        out.grad_fn.register_prehook(record.take_grad)
        return out

    @torch.no_grad()
    def run(self, fused: bool = False) -> list[nn.Parameter]:
        """The backward for the weights; the parameters that wait for a hook of theirs to be run.

        `fused` adds the products of linear maps straight to the gradients: one pass over them less, and a rounding of its own.
        """
        hooked: dict[int, nn.Parameter] = {}
        for record in self.records:
            record.run(fused)
            for target in record.targets:
                if target is not None and target._post_accumulate_grad_hooks:
                    hooked[id(target)] = target
        self.records.clear()
        return list(hooked.values())


def _packs_saved_tensors() -> bool:
    """Whether saved tensors are packed, as under activation checkpointing: a record must not hold what will be recomputed."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class _Tap(torch.autograd.Function):
    """The identity, with the record filled on the way back; saves the operator's input as autograd would, for checkpoints to recompute."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, value: Tensor, record: Record, anchor: Tensor) -> Tensor:
        ctx.record = record
        ctx.mark_dirty(out)  # rather than a view, which nothing could then change in place
        if _packs_saved_tensors():
            ctx.save_for_backward(value)
            record.input = None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        record: Record = ctx.record
        saved = ctx.saved_tensors  # may be read but once: it makes checkpointing recompute
        if saved:
            (record.input,) = saved
        record.grad = grad
        return grad, None, None, None


class _Active(threading.local):
    """What the operators of this thread are recorded into, if anything."""

    deferral: Deferral | None = None
    stand_ins: dict[int, Tensor] = {}  # noqa: RUF012 - replaced as a whole, never changed
    backward: bool = False


_active = _Active()


def active() -> tuple[Deferral | None, dict[int, Tensor]]:
    """The deferral that operators are to be recorded into now, and the stand-ins of the weights that can wait, by their id."""
    return _active.deferral if torch.is_grad_enabled() else None, _active.stand_ins


class Deferrable:
    """The parameters of a stage whose gradients can wait, and how to run its two backwards."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters: list[nn.Parameter] = []
        self.watched: list[nn.Parameter] = []
        self.stand_ins: dict[int, Tensor] = {}
        self.look(module)

    def look(self, module: nn.Module) -> None:
        """Take the module as it is now; call it when parameters may have been replaced, frozen or given hooks, as between steps."""
        # A hook on the tensor wants to see the gradient in the backward, so that such parameters are left to autograd.
        able = [p for p in module.parameters() if type(p) is nn.Parameter and p.requires_grad and not p._backward_hooks]
        self.parameters = able
        plain = {id(p) for part in module.modules() if type(part) in _PLAIN for p in part.parameters()}
        # Vectors are found beside their matrix; watching them would only make every normalisation slower.
        self.watched = [p for p in able if p.dim() > 1 and id(p) not in plain]
        self.stand_ins = {id(p): p.detach() for p in able}

    def forward(self, deferral: Deferral) -> _Recording:
        """A context in which operators on these parameters are recorded."""
        return _Recording(self, deferral, backward=False)

    def backward_input(self, deferral: Deferral, roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Gradients of the inputs and of all that was not deferred; the records get what they wait for."""
        with _Recording(self, deferral, backward=True):
            torch.autograd.backward(roots, grads)


_PLAIN = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
"""Modules that apply their weights by `torch.nn.functional` and nothing else."""


class _Recording:
    __slots__ = ("before", "now", "watched")

    def __init__(self, deferrable: Deferrable, deferral: Deferral, backward: bool) -> None:
        self.watched = deferrable.watched
        self.now = (deferral, deferrable.stand_ins, backward)

    def __enter__(self) -> None:
        self.before = (_active.deferral, _active.stand_ins, _active.backward)
        _active.deferral, _active.stand_ins, _active.backward = self.now
        _wrappers.enter()
        for parameter in self.watched:
            parameter.__class__ = _Watched

    def __exit__(self, *exc: object) -> None:
        for parameter in self.watched:
            parameter.__class__ = nn.Parameter
        _wrappers.exit()
        _active.deferral, _active.stand_ins, _active.backward = self.before


class _Watched(nn.Parameter):
    """A parameter while a stage is being recorded: it sees the operators that it is an argument of."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from penstock.runtime.operators import WATCHED

        with torch._C.DisableTorchFunctionSubclass():
            return WATCHED.get(func, func)(*args, **(kwargs or {}))


class _Wrappers:
    """The wrappers in place of `torch.nn.functional`'s operators, while any thread records."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0

    def enter(self) -> None:
        from penstock.runtime.operators import FUNCTIONAL

        with self.lock:
            self.users += 1
            if self.users == 1:
                for name, (_, wrapper) in FUNCTIONAL.items():
                    setattr(functional, name, wrapper)

    def exit(self) -> None:
        from penstock.runtime.operators import FUNCTIONAL

        with self.lock:
            self.users -= 1
            if self.users == 0:
                for name, (original, _) in FUNCTIONAL.items():
                    setattr(functional, name, original)


_wrappers = _Wrappers()
