"""Private attributes and base classes of modules. The dictionaries are the module's own and may be changed."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor, nn

from penstock.runtime.torch_internals.lookup import check_names, check_private

check_names("torch.nn.modules.batchnorm._NormBase", "torch.nn.modules.batchnorm._BatchNorm", "torch.nn.modules.instancenorm._InstanceNorm")

# Imported after the clear error above, and by name, so that types are known.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # noqa: E402
from torch.nn.modules.batchnorm import _NormBase as NormBase  # noqa: E402
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm  # noqa: E402

__all__ = [
    "BUFFERS",
    "CHILDREN",
    "PARAMETERS",
    "BatchNorm",
    "InstanceNorm",
    "NormBase",
    "has_forward_hooks",
    "is_compiled",
    "non_persistent_buffers",
    "own_buffers",
    "own_children",
    "own_parameters",
]

CHILDREN = "_modules"
"""The attribute with a module's children, which stand-ins set without registering them."""
check_private(
    nn.Module(),
    *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_non_persistent_buffers_set", "_compiled_call_impl"),
)

PARAMETERS, BUFFERS = "_parameters", "_buffers"
"""The attributes with a module's own parameters and buffers, which copies of a module replace."""

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
own_children: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of buffers that state dicts leave out."""


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether anything is called before or after the module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether the module is the result of `torch.compile`, or was compiled in place."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
