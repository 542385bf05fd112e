"""Private functions of autograd, and the class that intercepts operators."""

from __future__ import annotations

from collections.abc import Callable

from penstock.runtime.torch_internals.lookup import check_names, find_private

check_names("torch.utils._python_dispatch.TorchDispatchMode")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - after the clear error

__all__ = ["TorchDispatchMode", "is_profiling"]

is_profiling: Callable[[], bool] = find_private("torch.autograd._profiler_enabled")
"""Whether `torch.profiler` is recording."""
