"""How much memory the GPU's allocator has handed out."""

from __future__ import annotations

from penstock.runtime.device.gpu import cuda, is_initialized


def allocated_bytes() -> int:
    """Bytes that are allocated now; 0 without a GPU."""
    return int(cuda.memory_allocated()) if is_initialized() else 0


class PeakMemory:
    """The most that was allocated since this object was made, beyond what was allocated then; 0 without a GPU."""

    def __init__(self) -> None:
        self._before = allocated_bytes()
        if is_initialized():
            cuda.reset_peak_memory_stats()

    def bytes(self) -> int:
        return int(cuda.max_memory_allocated()) - self._before if is_initialized() else 0
