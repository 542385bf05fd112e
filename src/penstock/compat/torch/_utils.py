"""The names of `torch.distributed.pipelining._utils`: torch's own, and stand-ins for those that an older torch lacks."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import _utils as _torch_utils

from penstock.compat.torch import older_metadata


def __getattr__(name: str) -> Any:
    """Look up a name in torch's module."""
    return getattr(_torch_utils if hasattr(_torch_utils, name) else older_metadata, name)
