"""The user's own code: functions and training files from a file or a module."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError, nearest

if TYPE_CHECKING:
    from penstock.runtime.train.training_file import TrainingFile


def load_function(source: str) -> Callable[[], Any]:
    """Load the function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names."""
    place, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier() or not _is_place(place):
        raise UsageError(f"{source!r} is not FILE.py:FUNCTION, like examples/gpt.py:build, nor MODULE:FUNCTION")
    module = load_module(place)
    known = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{place} has no function {name!r}: {nearest(name, known)}")
    return function  # type: ignore[no-any-return]


def load_script(source: str, folder: str = ".") -> TrainingFile:
    """Load the training file that `FILE.py` or `MODULE` names; after a colon comes the function that builds its model.

    Names are relative to `folder`, the one that the command ran in: ranks may run in another.
    """
    from penstock.runtime.train.training_file import TrainingFile

    place, colon, name = source.rpartition(":")
    if not colon:
        place, name = source, "build"
    if not name.isidentifier() or not _is_place(place):
        raise UsageError(f"{source!r} is not a training file: name FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION")
    return TrainingFile.of(place, vars(load_module(place, folder)), name)


def load_module(place: str, folder: str = ".") -> ModuleType:
    """Run a file, or import a module."""
    path = Path(folder, place)
    if path.is_dir():
        raise UsageError(f"{place} is a folder, not a file")
    if path.suffix == ".py" and not path.is_file():
        raise UsageError(f"there is no file {place}")
    try:
        return _run(path) if path.suffix == ".py" else _import(place, folder)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{place} could not be run: {type(error).__name__}: {error}") from error


def _is_place(place: str) -> bool:
    return Path(place).suffix == ".py" or Path(place).is_dir() or all(part.isidentifier() for part in place.split("."))


def _import(name: str, folder: str) -> ModuleType:
    """Import a module by name, looking into the folder of the command first."""
    with _on_path(os.path.abspath(folder)):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module exists, and one of its own imports is missing
            raise UsageError(f"there is no module {name}: name a file with its suffix, {name}.py") from None


def _run(path: Path) -> ModuleType:
    """Run a file as a module; it can import the files beside it."""
    spec = importlib.util.spec_from_file_location(f"__penstock_{path.stem}__", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    with _on_path(str(path.parent.resolve())):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _on_path(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
