"""One thread for torch, as for the engine's other tests."""

from runtime.conftest import one_thread as one_thread
