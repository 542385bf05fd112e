"""torch's key-value stores, and numbered notices in them: one request tells a rank whether anything has happened.

A rank that has something to tell writes it under a key of its own kind, then posts a notice. The others look only for the next
notice, and read the other keys when there is one. So a look takes the same number of requests for any number of ranks.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

__all__ = ["Notices", "PrefixStore", "TCPStore"]


class Notices:
    """The notices of one store, and how many of them this reader has seen. Each reader has an object of its own."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen = 0

    def post(self, text: str) -> None:
        """Post a notice after the last one. The write is atomic: a process that dies here leaves no gap that would stop readers."""
        number = self._seen + 1
        with contextlib.suppress(Exception):  # the store may be gone
            while bytes(self._store.compare_set(f"notice/{number}", "", text)) != text.encode():
                number += 1

    def have_come(self) -> bool:
        """Whether there are new notices since the last call; one request if not."""
        before = self._seen
        with contextlib.suppress(Exception):
            while self._store.check([f"notice/{self._seen + 1}"]):
                self._seen += 1
        return self._seen > before
