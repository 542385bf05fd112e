"""Random numbers that do not depend on who draws them when."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def draw_from(*key: object) -> None:
    """Draw from the stream of this key from here on: a seed, a stage and a microbatch, say."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(number)
    if _has_device():
        torch.cuda.manual_seed(number)


def _has_device() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave torch's random state as it was."""
    state = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if _has_device() else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)
