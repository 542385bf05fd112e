"""Random numbers that do not depend on who draws them when."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.runtime import device


def draw_from(*key: object) -> None:
    """Draw from the stream of this key from here on: a seed, a stage and a microbatch, say."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    device.seed(number)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave torch's random state as it was."""
    state = device.random_state()
    try:
        yield
    finally:
        device.set_random_state(state)
