"""Functions from a file or a module of the user's."""

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
    """The function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names."""
    place, colon, name = source.rpartition(":")
    if not colon or not name.isidentifier() or not _is_place(place):
        raise UsageError(f"{source!r} is not FILE.py:FUNCTION, like examples/gpt.py:build, nor MODULE:FUNCTION")
    module = load_module(place)
    known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"{place} has no function {name!r}: {nearest(name, known)}")
    return found  # type: ignore[no-any-return]


def load_script(source: str, folder: str = ".") -> TrainingFile:
    """The training file that `FILE.py` or `MODULE` names, and after a colon the function that builds its model.

    Ranks may run elsewhere than the command did: names are meant in its `folder`.
    """
    from penstock.runtime.train.training_file import TrainingFile

    place, colon, name = source.rpartition(":")
    if not colon:
        place, name = source, "build"
    if not name.isidentifier() or not _is_place(place):
        raise UsageError(f"{source!r} is not a training file: name FILE.py, FILE.py:FUNCTION or MODULE:FUNCTION")
    return TrainingFile.of(place, vars(load_module(place, folder)), name)


def load_module(place: str, folder: str = ".") -> ModuleType:
    """The file or module, run."""
    path = Path(folder, place)
    if path.is_dir():
        raise UsageError(f"{place} is a folder, not a file")
    if path.suffix == ".py" and not path.is_file():
        raise UsageError(f"there is no file {place}")
    try:
        return _run(path) if path.suffix == ".py" else _imported(place, folder)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{place} could not be run: {type(error).__name__}: {error}") from error


def _is_place(place: str) -> bool:
    return Path(place).suffix == ".py" or Path(place).is_dir() or all(part.isidentifier() for part in place.split("."))


def _imported(name: str, folder: str) -> ModuleType:
    """The module of this name; the folder that the command runs in is looked into first."""
    with _reachable(os.path.abspath(folder)):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, and lacks something itself
            raise UsageError(f"there is no module {name}: a file is named with its suffix, {name}.py") from None


def _run(path: Path) -> ModuleType:
    """The file as a module; what stands beside it can be imported."""
    spec = importlib.util.spec_from_file_location(f"__penstock_{path.stem}__", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    with _reachable(str(path.parent.resolve())):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _reachable(folder: str) -> Iterator[None]:
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
