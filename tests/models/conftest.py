"""One thread for torch, as for the engine's other tests; the script that torchtitan's tests start is no test module."""

from runtime.conftest import one_thread

__all__ = ["one_thread"]
collect_ignore = ["titan_worker.py"]
