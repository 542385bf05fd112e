"""Private attributes of tensors and storages, as functions. `attrgetter` costs no Python frame, and some of these run per operator."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.torch_internals.lookup import check_private, find_private

check_private(torch.empty(0), "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks", "_values", "_nnz", "_is_view")
check_private(torch.empty(0).untyped_storage(), "_cdata")

read_version: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place. Inference tensors have none."""
find_base: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that this one is a view of."""
is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Whether a tensor is a view of another one, as far as autograd tracks it."""
gradient_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""The hooks of `register_hook`; None or empty if there are none."""
post_accumulate_hooks: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""The hooks of `register_post_accumulate_grad_hook`; None or empty if there are none."""
identify_storage: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""A number that all Python objects of one storage share."""
sparse_values: Callable[[Tensor], Tensor] = methodcaller("_values")
"""The values of a sparse tensor themselves, not a detached copy."""
count_sparse_values: Callable[[Tensor], int] = methodcaller("_nnz")
assert_on_device: Callable[[Tensor, str], None] = find_private("torch._assert_async")
"""Fails on the device if a tensor of one element is not true, as torch's own layers do; the host does not wait for it."""
unsafe_view: Any = find_private("torch.ops.aten._unsafe_view")
"""A view that autograd does not treat as one: changing it in place does not rewrite the history of its base."""


def set_only_hook(tensor: Any, hook: Callable[[Tensor], Any]) -> None:
    """Hook a tensor that has no other hooks, as `Tensor.register_hook` does, but without a handle to remove it by: at half the cost."""
    tensor._backward_hooks = {0: hook}
    tensor.grad_fn._register_hook_dict(tensor)


check_private(torch.zeros((), requires_grad=True).exp().grad_fn, "_register_hook_dict")
