"""Run a model without a trace: everything that a forward or backward may change is restored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from penstock.runtime.model.module_state import ModuleState
from penstock.runtime.model.random_streams import preserve_random_state
from penstock.runtime.torch_internals.tensors import post_accumulate_hooks


@contextmanager
def preserve_state(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore gradients, buffers, attributes and torch's random state after the block, and parameters that gradient hooks may change."""
    parameters = list({id(parameter): parameter for module in modules for parameter in module.parameters()}.values())
    grads = [parameter.grad for parameter in parameters]
    hooked = [(parameter, parameter.detach().clone()) for parameter in parameters if post_accumulate_hooks(parameter)]
    states = [ModuleState.capture(module) for module in modules]
    try:
        with preserve_random_state():
            yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for parameter, value in hooked:
            parameter.data.copy_(value)
        for state in states:
            state.restore()
