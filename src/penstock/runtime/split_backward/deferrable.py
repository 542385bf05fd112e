"""The parameters of a stage that can be deferred, and the contexts in which their operators are recorded.

The operators of `torch.nn.functional` are replaced by wrappers while any thread records; all others (`x @ w`, `torch.bmm`) are
intercepted by the class of the parameters. Calls of autograd go through a wrapper, too.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.runtime.split_backward.deferral import (
    Deferral,
    Observation,
    activate,
    autograd_request,
    check_request,
    observe,
    running_backwards,
    set_tied_weights,
)
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
        deferral.backward = True
        running_backwards.append(deferral)
        try:
            with _Recording(deferral, self.watched):  # for the forwards that checkpoints recompute
                if self.hooked:
                    with _HooksHeldBack(deferral):
                        run_backward(roots, grads)
                else:
                    run_backward(roots, grads)
        finally:
            running_backwards.remove(deferral)

    @contextmanager
    def observe(self, *, beside: bool = False) -> Iterator[Observation]:
        """A context for a forward that is not split, which notes whether it could be."""
        observation = Observation(self.stand_ins, beside)
        before = observe(observation)
        _wrappers.enter()
        try:
            yield observation
        finally:
            _wrappers.exit()
            observe(before)

    @contextmanager
    def backward(self, deferral: Deferral) -> Iterator[None]:
        """A context in which other code runs a backward for the input."""
        deferral.backward = True
        running_backwards.append(deferral)
        try:
            with _Recording(deferral, self.watched), _HooksHeldBack(deferral):
                yield
        finally:
            running_backwards.remove(deferral)


@contextmanager
def without_gradients_of(tied: Collection[int]) -> Iterator[None]:
    """A context that refuses to ask autograd for the gradients of these weights, given by their ids."""
    before = set_tied_weights(tied)
    _wrappers.enter()
    try:
        yield
    finally:
        _wrappers.exit()
        set_tied_weights(before)


_engine = find_private("torch.autograd.Variable._execution_engine")
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
        _wrappers.enter()
        for parameter in self.watched:
            parameter.__class__ = _Watched

    def __exit__(self, *exc: object) -> None:
        for parameter in self.watched:
            parameter.__class__ = nn.Parameter
        _wrappers.exit()
        activate(self.before)


class _Watched(nn.Parameter):
    """The class of a parameter while a stage is recorded: it intercepts the operators that take it as an argument."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _DisabledTorchFunction():
            return WATCHED.get(func, func)(*args, **(kwargs or {}))


class _HooksHeldBack:
    """A context without post-accumulate hooks: a gradient is complete only after the backward for the weights."""

    _one_at_a_time = threading.RLock()

    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral

    def __enter__(self) -> None:
        self._one_at_a_time.acquire()
        held = [post_accumulate_hooks(p) for p in self.deferral.hooked.values()]
        self.kept = [(hooks, dict(hooks)) for hooks in held]
        for hooks, _ in self.kept:
            hooks.clear()
            hooks[0] = self._note

    def _note(self, parameter: nn.Parameter) -> None:
        self.deferral.due[id(parameter)] = parameter

    def __exit__(self, *exc: object) -> None:
        for hooks, kept in self.kept:
            hooks.clear()
            hooks.update(kept)
        self._one_at_a_time.release()


def _checked_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function through which torch calls its autograd engine with a check."""

    def run(outputs: Any, grads: Any, retain_graph: Any, create_graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        check_request(inputs, create_graph)
        with autograd_request(inputs):
            return original(outputs, grads, retain_graph, create_graph, inputs, *args, **kwargs)

    return run


def _checked_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.autograd.grad` or `backward` with a check, for versions of torch without that function."""
    signature = inspect.signature(original)

    def run(*args: Any, **kwargs: Any) -> Any:
        named = signature.bind(*args, **kwargs).arguments
        inputs = named.get("inputs")
        several = isinstance(inputs, (list, tuple)) and not hasattr(inputs, "node")  # a GradientEdge is a tuple, too
        asked = () if inputs is None else inputs if several else (inputs,)
        check_request(asked, bool(named.get("create_graph", False)))
        with autograd_request(asked):
            return original(*args, **kwargs)

    return run


def wrap_autograd_calls(autograd: Any = torch.autograd) -> dict[str, tuple[Any, Any]]:
    """Return the functions of `torch.autograd` that ask for gradients, each with its wrapper."""
    engine = getattr(autograd, "_engine_run_backward", None)
    if engine is not None:
        return {"_engine_run_backward": (engine, _checked_engine(engine))}
    return {name: (original, _checked_call(original)) for name in ("grad", "backward") for original in (getattr(autograd, name),)}


class _Wrappers:
    """Replaces torch's functions by wrappers while any thread records."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        places = [(vars(functional), FUNCTIONAL), (vars(torch.autograd), wrap_autograd_calls())]
        self.wrappers = [(place, {name: wrapper for name, (_, wrapper) in pairs.items()}) for place, pairs in places]
        self.originals = [(place, {name: original for name, (original, _) in pairs.items()}) for place, pairs in places]

    def enter(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                for place, wrappers in self.wrappers:
                    place.update(wrappers)

    def exit(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                for place, originals in self.originals:
                    place.update(originals)


_wrappers = _Wrappers()


@contextmanager
def keep_wrappers(wanted: bool) -> Iterator[None]:
    """A context that keeps the wrappers installed, if `wanted`, so that recording in it need not install them each time."""
    if not wanted:
        yield
        return
    _wrappers.enter()
    try:
        yield
    finally:
        _wrappers.exit()
