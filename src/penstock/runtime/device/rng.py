"""torch's random state: the host's, and the GPU's once a GPU is used."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.runtime.device.gpu import cuda, is_initialized

RngState = tuple[Tensor, Tensor | None]
"""The host's state and the GPU's."""


def seed_rng(number: int) -> None:
    """Seed torch's random numbers."""
    torch.default_generator.manual_seed(number)
    if is_initialized():
        cuda.manual_seed(number)


def get_rng_state() -> RngState:
    return torch.get_rng_state(), cuda.get_rng_state() if is_initialized() else None


def set_rng_state(state: RngState) -> None:
    host, gpu = state
    torch.set_rng_state(host)
    if gpu is not None and cuda.is_available():
        cuda.set_rng_state(gpu)
