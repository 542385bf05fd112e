"""Autocast: on which kinds of device operators choose their types by themselves."""

from __future__ import annotations

import torch

AUTOCAST_KINDS = ("cpu", "cuda")
"""The kinds of device that have an autocast of their own."""


def find_autocast() -> dict[str, torch.dtype]:
    """The kinds of device on which autocast is on in this thread, each with the type that it computes in."""
    return {kind: torch.get_autocast_dtype(kind) for kind in AUTOCAST_KINDS if torch.is_autocast_enabled(kind)}
