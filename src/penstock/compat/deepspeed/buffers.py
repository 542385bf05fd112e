"""What a stage holds while a batch runs."""

from __future__ import annotations

from typing import Any

from penstock.errors import ScheduleError
from penstock.runtime.transport.group import EMPTY

_PARTS = ("inputs", "labels", "outputs", "loss", "gradients", "input gradients")


class PipeBuffers:
    """Numbered buffers, each with room for one of everything. Nothing is used before it is there or overwritten while it is needed."""

    def __init__(self, count: int) -> None:
        self._held: dict[str, list[Any]] = {part: [EMPTY] * count for part in _PARTS}
        self._count = count

    def put(self, part: str, buffer_id: int, value: Any) -> None:
        if self._at(part, buffer_id) is not EMPTY:
            raise ScheduleError(f"buffer {buffer_id} is filled while its {part} are still needed: use another one")
        self._held[part][buffer_id] = value

    def get(self, part: str, buffer_id: int) -> Any:
        value = self._at(part, buffer_id)
        if value is EMPTY:
            raise ScheduleError(f"buffer {buffer_id} has no {part}: it is used before it is filled")
        return value

    def take(self, part: str, buffer_id: int) -> Any:
        """Get it and make room."""
        value = self.get(part, buffer_id)
        self._held[part][buffer_id] = EMPTY
        return value

    def drop(self, part: str, buffer_id: int) -> None:
        """Make room, whether anything is there or not."""
        self._at(part, buffer_id)
        self._held[part][buffer_id] = EMPTY

    def _at(self, part: str, buffer_id: int) -> Any:
        if not 0 <= buffer_id < self._count:
            raise ScheduleError(f"there is no buffer {buffer_id}: num_pipe_buffers() says {self._count}")
        return self._held[part][buffer_id]
