"""Look up private names of torch, with a clear error if the installed torch does not have them."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from penstock.errors import TorchVersionError
from penstock.runtime.torch_internals.version import describe_range


def find_private(name: str) -> Any:
    """Return what a private dotted name stands for, for example `torch._C._set_grad_enabled`."""
    parts = name.split(".")
    value: Any = torch
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[:number]))
            except ImportError as error:
                raise _make_absence_error(name) from error
        value = getattr(value, part)
    return value


def check_names(*names: str) -> None:
    """Check that torch has these private dotted names, before a module imports them."""
    for name in names:
        find_private(name)


def check_private(value: Any, *attributes: str) -> None:
    """Check that an object or a class of torch has these private attributes."""
    kind = value if isinstance(value, type) else type(value)
    for attribute in attributes:
        if not hasattr(value, attribute):
            raise _make_absence_error(f"{kind.__module__}.{kind.__qualname__}.{attribute}")


def _make_absence_error(name: str) -> TorchVersionError:
    return TorchVersionError(
        f"penstock needs {name}, which torch {torch.__version__} does not have: install another version of torch {describe_range()}, and "
        "report this version"
    )
