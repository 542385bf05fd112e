"""The random streams of this process, as they stand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from penstock.runtime import device


def random_state() -> dict[str, Any]:
    """The states of torch's, NumPy's and Python's streams."""
    host, on_device = device.random_state()
    return {"torch": host, "cuda": on_device, "numpy": np.random.get_state(), "python": random.getstate()}


def set_random_state(state: dict[str, Any]) -> None:
    device.set_random_state((state["torch"], state["cuda"]))
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
