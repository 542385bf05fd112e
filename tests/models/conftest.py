"""One thread for torch, as for the engine's other tests."""

from runtime.conftest import one_thread

__all__ = ["one_thread"]
