"""All that differs between devices."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(tensor: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """The tensor in the host's memory, laid out like this."""
    laid = torch.empty_strided(shape, stride, dtype=tensor.dtype)
    return laid.copy_(tensor.detach())


def placed(tensor: Tensor, device: str) -> Tensor:
    """A tensor that came from another process, on this rank's device of that type."""
    return tensor.to(device)
