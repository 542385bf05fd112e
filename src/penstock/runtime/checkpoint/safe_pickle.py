"""Read pickled data from files without running code that somebody may have put into them.

Unpickling calls whatever the data names. Here only the few classes that a checkpoint is made of may be named; everything else is
rejected before it is looked up.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.errors import CheckpointError

_ALLOWED: dict[str, set[str]] = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
"""The classes that the metadata of a checkpoint is made of, by module. None is ours, so that our modules can move."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint is made of")


def read_metadata(path: Path) -> Any:
    """Read the pickled metadata of a checkpoint; a file that names any other class is rejected."""
    try:
        with path.open("rb") as stream:
            return _Unpickler(stream).load()
    except Exception as error:  # damaged data can raise anything
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _safe_classes() -> list[Any]:
    """What state dicts hold besides what torch itself allows: NumPy's arrays and numbers, which its random state is made of."""
    kinds = [type(np.dtype(kind)) for kind in ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")]
    rebuild = [value.__reduce__()[0] for value in (np.empty(0), np.float64(0))]  # an array, and a single number
    return [np.ndarray, np.dtype, *rebuild, *kinds]


def load_object(data: io.BytesIO, what: str) -> Any:
    """Load a value written by `torch.save`: tensors, arrays and plain values in dicts, lists and tuples, and nothing else."""
    with torch.serialization.safe_globals(_safe_classes()):
        try:
            return torch.load(data, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError) as error:
            raise CheckpointError(f"{what} cannot be read without running code from it: {_reason(error)}") from error


def check_objects(values: Iterable[tuple[str, io.BytesIO]]) -> None:
    """Refuse to save values that could not be loaded again."""
    for name, data in values:
        try:
            load_object(io.BytesIO(data.getvalue()), name)
        except CheckpointError as error:
            raise CheckpointError(
                f"{name} holds objects that could only be loaded by running code from the checkpoint: give a state of tensors, arrays and "
                f"plain values, or Checkpoints(..., trusted=True), which loads any object ({error.__cause__})"
            ) from error


def _reason(error: Exception) -> str:
    """torch's message without its advice to switch the check off."""
    text = str(error)
    for line in text.splitlines():
        if "Unsupported" in line or "GLOBAL" in line:
            return line.strip()
    return text.splitlines()[0] if text else type(error).__name__
