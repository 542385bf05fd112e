"""Weights in safetensors files: a header that says where each tensor is, and the tensors."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import FileFormatError, WeightsError
from penstock.runtime.weights.source import Owned, put

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_LENGTH = 8
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class File:
    """One file. Its tensors are read when they are asked for."""

    path: Path

    @cached_property
    def _data(self) -> mmap.mmap:
        with self.path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that it could write to

    @cached_property
    def header(self) -> dict[str, dict[str, Any]]:
        """What is said of each tensor."""
        if self.path.stat().st_size < _LENGTH:
            raise FileFormatError(str(self.path), "too short to be a safetensors file")
        length = int.from_bytes(self._data[:_LENGTH], "little")
        if _LENGTH + length > len(self._data):
            raise FileFormatError(str(self.path), f"a header of {length} bytes in a file of {len(self._data)}")
        try:
            said: dict[str, dict[str, Any]] = json.loads(self._data[_LENGTH : _LENGTH + length])
            said.pop("__metadata__", None)
            for name, each in said.items():
                self._check(name, each, len(self._data) - _LENGTH - length)
        except FileFormatError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(str(self.path), f"the header cannot be read ({type(error).__name__}: {error})") from error
        return said

    def _check(self, name: str, said: dict[str, Any], room: int) -> None:
        begin, end = said["data_offsets"]
        if said["dtype"] not in _TYPES:
            raise FileFormatError(str(self.path), f"{name} has the unknown type {said['dtype']!r}")
        if not 0 <= begin <= end <= room or end - begin != math.prod(said["shape"]) * _TYPES[said["dtype"]].itemsize:
            raise FileFormatError(
                str(self.path), f"{name} of shape {said['shape']} and type {said['dtype']} has bytes {begin} to {end} of {room}"
            )

    def read(self, name: str) -> Tensor:
        """A tensor, whose memory is the file's."""
        said = self.header[name]
        begin, end = said["data_offsets"]
        dtype = _TYPES[said["dtype"]]
        if begin == end:
            return torch.empty(said["shape"], dtype=dtype)
        start = _LENGTH + int.from_bytes(self._data[:_LENGTH], "little")
        return torch.frombuffer(self._data, dtype=dtype, offset=start + begin, count=math.prod(said["shape"])).reshape(said["shape"])


@dataclass(frozen=True)
class Safetensors:
    """Weights from a safetensors file, or from a folder of them with an index.

    Only what this rank has is read, straight into place, as the parameter's own type, on `device`. `rename` gives the name in
    the file of a parameter of the model; a tied parameter may be there under any of its names. With `strict=False` what is not
    in the files is left to the weights that come next: `weights=(Safetensors(path, strict=False), Initial(seed=0))`. So are buffers that
    are not part of the model's state.
    """

    path: str | Path
    rename: Callable[[str], str] = str
    strict: bool = True
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | Owned) -> None:
        owned = Owned.of(model)
        files = self.files()
        tensors = {id(tensor): tensor for _, tensor in owned.named()}
        optional = _not_saved(owned)
        for ident, names in owned.names().items():
            there = next((self.rename(name) for name in names if self.rename(name) in files), None)
            if there is not None:
                self._take(tensors[ident], there, files[there])
            elif self.strict and ident not in optional:
                raise WeightsError(f"{self.path} has no {' or '.join(dict.fromkeys(map(self.rename, names)))}")

    def _take(self, tensor: Tensor, name: str, file: File) -> None:
        value = file.read(name)
        if value.shape != tensor.shape:
            raise WeightsError(f"{file.path} has {name} with shape {list(value.shape)}, but the model's has {list(tensor.shape)}")
        put(tensor, value, self.device)

    def files(self) -> dict[str, File]:
        """The file of each tensor."""
        path = Path(self.path)
        if path.is_dir() and (path / INDEX).is_file():
            return dict(_indexed(path))
        found = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise WeightsError(f"{path} is no safetensors file, nor a folder with some")
        return {name: file for file in map(File, found) for name in file.header}


def _indexed(folder: Path) -> Iterator[tuple[str, File]]:
    try:
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(str(folder / INDEX), f"no map of weights ({type(error).__name__}: {error})") from error
    files: dict[str, File] = {}
    for name, file in listed:
        yield name, files.setdefault(file, File(folder / file))


def _not_saved(owned: Owned) -> set[int]:
    """Buffers that are not part of the model's state."""
    inner = (module for part in owned.modules.values() for module in part.modules())
    return {id(module._buffers[name]) for module in inner for name in module._non_persistent_buffers_set}
