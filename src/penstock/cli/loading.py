"""A function from a file of the user's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import UsageError, nearest


def load_function(source: str) -> Callable[[], Any]:
    """The function that `FILE.py:FUNCTION` names."""
    file, colon, name = source.rpartition(":")
    path = Path(file)
    if not colon or path.suffix != ".py" or not name.isidentifier():
        raise UsageError(f"{source!r} is not FILE.py:FUNCTION, like examples/gpt.py:build")
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    module = _run(path)
    known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"{path} has no function {name!r}: {nearest(name, known)}")
    return found  # type: ignore[no-any-return]


def _run(path: Path) -> ModuleType:
    """The file as a module; what stands beside it can be imported."""
    spec = importlib.util.spec_from_file_location(f"__penstock_{path.stem}__", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} could not be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module
