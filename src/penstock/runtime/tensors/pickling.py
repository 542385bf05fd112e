"""Which pickle module turns Python objects into bytes."""

from __future__ import annotations

import pickle
from typing import Any


def load_pickler() -> Any:
    """cloudpickle, which takes along functions and classes of a script or notebook; plain pickle if it is not installed."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle
    return cloudpickle
