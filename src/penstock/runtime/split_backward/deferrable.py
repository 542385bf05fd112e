"""The parameters of a stage that can be deferred, and the contexts in which their operators are recorded.

The operators of `torch.nn.functional` are replaced by wrappers while any thread records; all others (`x @ w`, `torch.bmm`) are
intercepted by the class of the parameters. Calls of autograd go through a wrapper, too.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.runtime.split_backward.deferral import Deferral, Observation, activate, autograd_request, here, running_backwards
from penstock.runtime.split_backward.operators import FUNCTIONAL, WATCHED
from penstock.runtime.tensors.dtensor import is_dtensor
from penstock.runtime.torch_internals.lookup import find_private
from penstock.runtime.torch_internals.tensors import gradient_hooks, post_accumulate_hooks

_PLAIN = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
"""Modules that apply their weights only through `torch.nn.functional`."""


class Deferrable:
    """The parameters of a stage whose gradients can be deferred, and its two backwards.

    Run a forward in `forward(deferral)`, then `backward_input(deferral, ...)`, then `deferral.run()` for the weights; call `refresh`
    before a step.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: list[nn.Parameter] = []
        self.watched: list[nn.Parameter] = []
        self.hooked: dict[int, nn.Parameter] = {}
        self.stand_ins: dict[int, Tensor] = {}
        self.refresh(module)

    def refresh(self, module: nn.Module) -> None:
        """Look at the module again, when parameters may have been replaced, frozen or given hooks."""
        every = [p for p in module.parameters() if p.requires_grad]
        self.parameters = [p for p in every if _can_defer(p)]
        plain = {id(p) for part in module.modules() if type(part) in _PLAIN for p in part.parameters()}
        # Biases are seen together with their weight; watching vectors would only slow down every normalisation.
        self.watched = [p for p in self.parameters if p.dim() > 1 and id(p) not in plain and not is_dtensor(p)]
        self.hooked = {id(p): p for p in every if post_accumulate_hooks(p)}
        self.stand_ins = {id(p): p.detach() for p in self.parameters}

    def forward(self, deferral: Deferral) -> _Recording:
        """A context in which operators on these parameters are recorded, and calls of autograd checked."""
        deferral.stand_ins, deferral.hooked = self.stand_ins, self.hooked
        return _Recording(deferral, self.watched)

    def backward_input(self, deferral: Deferral, roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Compute the gradients of the inputs and of all that was not deferred; deferred operators get their outputs' gradients."""
        with _InputBackward(deferral, self.watched):
            run_backward(roots, grads)

    @contextmanager
    def observe(self, *, beside: bool = False) -> Iterator[Observation]:
        """A context for a forward that is not split, which notes whether it could be."""
        before, here.observation = here.observation, Observation(self.stand_ins, beside)
        try:
            with _wrappers:
                yield here.observation
        finally:
            here.observation = before

    def backward(self, deferral: Deferral) -> _InputBackward:
        """A context for a backward for the input; forwards that checkpoints recompute in it are recorded too."""
        return _InputBackward(deferral, self.watched)


@contextmanager
def refuse_gradients_of(tied: Collection[int]) -> Iterator[None]:
    """A context that refuses to ask autograd for the gradients of these weights, given by their ids."""
    before, here.tied = here.tied, tied
    try:
        with _wrappers:
            yield
    finally:
        here.tied = before


_engine = find_private("torch.autograd.Variable._execution_engine")
_run_engine = find_private("torch.autograd._engine_run_backward")
_DisabledTorchFunction = find_private("torch._C.DisableTorchFunctionSubclass")


def run_backward(roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Run `torch.autograd.backward` without its argument checks, which take longer than the backward of a small layer."""
    _engine.run_backward(tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _can_defer(parameter: nn.Parameter) -> bool:
    """Whether a gradient can wait. A tensor hook must see it in the backward, so hooked parameters are left to autograd."""
    known = type(parameter) in (nn.Parameter, _Watched) or is_dtensor(parameter)
    return known and parameter.is_floating_point() and not gradient_hooks(parameter)


class _Recording:
    """A context in which operators on the watched parameters are recorded."""

    __slots__ = ("before", "deferral", "watched")

    def __init__(self, deferral: Deferral, watched: list[nn.Parameter]) -> None:
        self.deferral, self.watched = deferral, watched

    def __enter__(self) -> None:
        self.before = activate(self.deferral)
        _wrappers.__enter__()
        for parameter in self.watched:
            parameter.__class__ = _Watched

    def __exit__(self, *exc: object) -> None:
        for parameter in self.watched:
            parameter.__class__ = nn.Parameter
        _wrappers.__exit__()
        activate(self.before)


class _InputBackward(_Recording):
    """A context for a backward for the input. A class, because a generator would cost as much as a small operator."""

    __slots__ = ("hooks",)

    def __enter__(self) -> None:
        deferral = self.deferral
        deferral.backward = True
        running_backwards.append(deferral)
        _Recording.__enter__(self)  # super() takes as long as the rest of this
        self.hooks = _hold_hooks_back(deferral) if deferral.hooked else None
        if self.hooks is not None:
            self.hooks.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self.hooks is not None:
            self.hooks.__exit__(None, None, None)
        _Recording.__exit__(self)
        running_backwards.remove(self.deferral)


class _Watched(nn.Parameter):
    """The class of a parameter while a stage is recorded: it intercepts the operators that take it as an argument."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _DisabledTorchFunction():
            return WATCHED.get(func, func)(*args, **(kwargs or {}))


_one_at_a_time = threading.RLock()


@contextmanager
def _hold_hooks_back(deferral: Deferral) -> Iterator[None]:
    """A context without post-accumulate hooks: a gradient is complete only after the backward for the weights."""

    def note(parameter: nn.Parameter) -> None:
        deferral.due[id(parameter)] = parameter

    with _one_at_a_time:
        saved = [(hooks, dict(hooks)) for hooks in map(post_accumulate_hooks, deferral.hooked.values())]
        for hooks, _ in saved:
            hooks.clear()
            hooks[0] = note
        try:
            yield
        finally:
            for hooks, before in saved:
                hooks.clear()
                hooks.update(before)


def _run_checked(outputs: Any, grads: Any, retain_graph: Any, create_graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the autograd engine as `torch.autograd.grad` and `backward` do, with a check."""
    with autograd_request(inputs, create_graph):
        return _run_engine(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)


class _Wrappers:
    """Replaces torch's functions by wrappers while any thread is in this context."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0
        places = [(vars(functional), FUNCTIONAL), (vars(torch.autograd), {"_engine_run_backward": (_run_engine, _run_checked)})]
        self.wrappers = [(place, {name: wrapper for name, (_, wrapper) in pairs.items()}) for place, pairs in places]
        self.originals = [(place, {name: original for name, (original, _) in pairs.items()}) for place, pairs in places]

    def __enter__(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                for place, wrappers in self.wrappers:
                    place.update(wrappers)

    def __exit__(self, *exc: object) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                for place, originals in self.originals:
                    place.update(originals)


_wrappers = _Wrappers()


def keep_wrappers(wanted: bool) -> AbstractContextManager[None]:
    """A context that keeps the wrappers installed, if `wanted`, so that recording in it need not install them each time."""
    return _wrappers if wanted else nullcontext()
