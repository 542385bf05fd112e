"""Columns of numbers in JSON: base64 of their bytes, which a page reads without parsing a digit."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

_TYPES: dict[str, np.dtype[Any]] = {"i8": np.dtype("<i1"), "i32": np.dtype("<i4"), "f64": np.dtype("<f8")}

Column = dict[str, str]


def small(values: Any) -> Column:
    """Whole numbers from -128 to 127."""
    return _packed("i8", values)


def whole(values: Any) -> Column:
    """Whole numbers of 32 bits."""
    return _packed("i32", values)


def real(values: Any) -> Column:
    """Floating-point numbers, to the last bit."""
    return _packed("f64", values)


def _packed(name: str, values: Any) -> Column:
    return {name: base64.b64encode(np.asarray(values).astype(_TYPES[name]).tobytes()).decode("ascii")}
