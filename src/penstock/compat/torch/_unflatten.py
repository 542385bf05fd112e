"""Torch's own functions that put the modules of a traced graph back into their tree."""

from typing import Any

from torch.distributed.pipelining import _unflatten as _torch_unflatten


def __getattr__(name: str) -> Any:
    """Look up torch's names that are not defined here."""
    return getattr(_torch_unflatten, name)
