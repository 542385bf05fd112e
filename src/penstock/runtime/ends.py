"""The ends of channels that may have messages under way, for as long as something uses them."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any


class Ends:
    """Weak references to everything that must let go of its messages before a connection can close.

    A send in progress does not hold its memory: the end of the channel does. When an end goes away with sends in progress, they are
    kept here until the next end is made, by which time the step that they belong to is over.

    `drop` may be called from another thread.
    """

    def __init__(self) -> None:
        self._sends: dict[weakref.ref[Any], deque[tuple[int, Any, Any]] | None] = {}
        self._left: deque[deque[tuple[int, Any, Any]]] = deque()

    def __len__(self) -> int:
        return len(self._sends)

    def __iter__(self) -> Iterator[Any]:
        alive = (reference() for reference in tuple(self._sends))
        return (end for end in alive if end is not None)

    def add(self, end: Any, sends: deque[tuple[int, Any, Any]] | None = None) -> None:
        """Know an end; `sends` are its messages in progress: number, work, and whatever holds the memory."""
        self._settle()
        self._sends[weakref.ref(end, self._forget)] = sends

    def _forget(self, reference: weakref.ref[Any]) -> None:
        if sends := self._sends.pop(reference, None):
            self._left.append(sends)

    def _settle(self) -> None:
        """Wait for the sends of ends that are gone: their steps are over, so that the other ranks take them."""
        while self._left:
            with contextlib.suppress(RuntimeError, IndexError):  # the connection is lost, or everything was dropped meanwhile
                for _, work, _ in self._left.popleft():
                    work.wait()

    def drop(self) -> None:
        """Let go of everything under way."""
        for end in self:
            end.drop()
        self._left.clear()
