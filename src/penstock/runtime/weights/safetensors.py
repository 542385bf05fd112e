"""Weights from safetensors files: a header with the place of each tensor, followed by the tensors."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import FileFormatError, WeightsError
from penstock.ir.formats.reading import check_fields, parse_json, read_json
from penstock.runtime.tensors.tensor_rows import TensorRows
from penstock.runtime.torch_internals.modules import non_persistent_buffers, own_buffers
from penstock.runtime.weights.source import OwnedTensors, put

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
_ENTRY: dict[str, tuple[type, ...]] = {"dtype": (str,), "shape": (list,), "data_offsets": (list,)}
_LENGTH = 8
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class SafetensorsFile:
    """One file. Its tensors are read when they are asked for."""

    path: Path

    @cached_property
    def _data(self) -> mmap.mmap:
        with self.path.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants writable memory

    @cached_property
    def header(self) -> dict[str, dict[str, Any]]:
        """The type, shape and place of each tensor."""
        if self.path.stat().st_size < _LENGTH:
            raise FileFormatError(str(self.path), "too short to be a safetensors file")
        length = int.from_bytes(self._data[:_LENGTH], "little")
        if _LENGTH + length > len(self._data):
            raise FileFormatError(str(self.path), f"a header of {length} bytes in a file of {len(self._data)}")
        header = parse_json(self._data[_LENGTH : _LENGTH + length], str(self.path), "JSON header")
        check_fields(header, {}, error=partial(FileFormatError, str(self.path)))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            self._check(name, entry, len(self._data) - _LENGTH - length)
        return header  # type: ignore[no-any-return]

    def _check(self, name: str, entry: Any, size: int) -> None:
        check_fields(entry, _ENTRY, error=lambda reason: FileFormatError(str(self.path), f"of {name}, {reason}"))
        dtype, shape, place = (entry[key] for key in _ENTRY)
        if dtype not in _TYPES:
            raise FileFormatError(str(self.path), f"{name} has the unknown type {dtype!r}")
        if len(place) != 2 or any(type(number) is not int or number < 0 for number in (*shape, *place)):
            raise FileFormatError(str(self.path), f"{name} has the shape {shape} and the place {place}, which are not whole numbers")
        begin, end = place
        if not begin <= end <= size or end - begin != math.prod(shape) * _TYPES[dtype].itemsize:
            raise FileFormatError(str(self.path), f"{name} of shape {shape} and type {dtype} has bytes {begin} to {end} of {size}")

    def read(self, name: str) -> Tensor:
        """A tensor that shares the memory of the mapped file."""
        entry = self.header[name]
        (begin, end), dtype, shape = entry["data_offsets"], _TYPES[entry["dtype"]], entry["shape"]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        start = _LENGTH + int.from_bytes(self._data[:_LENGTH], "little")
        return torch.frombuffer(self._data, dtype=dtype, offset=start + begin, count=math.prod(shape)).reshape(shape)


@dataclass(frozen=True)
class Safetensors:
    """Weights from a safetensors file, or from a folder of them with an index.

    Only this rank's tensors are read, straight into place, converted to the parameter's type, on `device`. `rename` maps the name of a
    parameter in the model to its name in the file; a tied parameter may be there under any of its names. With `strict=False`, tensors
    that are not in the files are left to the next source: `weights=(Safetensors(path, strict=False), Initial(seed=0))`. So are buffers
    that are not persistent.
    """

    path: str | Path
    rename: Callable[[str], str] = str
    strict: bool = True
    device: torch.device | str = "cpu"

    def __call__(self, model: nn.Module | OwnedTensors) -> None:
        owned = OwnedTensors.of(model)
        files = self.files()
        tensors = {id(tensor): tensor for _, tensor in owned.list_tensors()}
        optional = _list_non_persistent(owned)
        for ident, names in owned.names().items():
            saved = [name for name in map(self.rename, names) if name in files]
            if saved:
                self._read_into(tensors[ident], saved[0], files[saved[0]], owned.rows.get(ident))
            elif self.strict and ident not in optional:
                raise WeightsError(f"{self.path} has no {' or '.join(dict.fromkeys(map(self.rename, names)))}")

    def _read_into(self, tensor: Tensor, name: str, file: SafetensorsFile, shard: TensorRows | None) -> None:
        """Read a tensor, or only these rows of it."""
        value = file.read(name)
        if value.shape != tensor.shape:
            raise WeightsError(f"{file.path} has {name} with shape {list(value.shape)}, but the model's has {list(tensor.shape)}")
        if shard is None:
            put(tensor, value, self.device)
        else:
            put(shard.rows, shard.take_from(value), self.device)

    def files(self) -> dict[str, SafetensorsFile]:
        """The file of each tensor, by the tensor's name."""
        path = Path(self.path)
        if path.is_dir() and (path / INDEX).is_file():
            return _read_index(path)
        paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not paths or not paths[0].is_file():
            raise WeightsError(f"{path} is neither a safetensors file nor a folder of them")
        return {name: file for file in map(SafetensorsFile, paths) for name in file.header}


def _read_index(folder: Path) -> dict[str, SafetensorsFile]:
    error = partial(FileFormatError, str(folder / INDEX))
    weights = check_fields(read_json(folder / INDEX), {"weight_map": (dict,)}, error=error)["weight_map"]
    check_fields(weights, dict.fromkeys(weights, (str,)), error=error)
    files = {file: SafetensorsFile(folder / file) for file in weights.values()}
    return {name: files[file] for name, file in weights.items()}


def _list_non_persistent(owned: OwnedTensors) -> set[int]:
    """The identities of buffers that are not part of the state dict."""
    modules = (module for part in owned.modules.values() for module in part.modules())
    return {id(own_buffers(module)[name]) for module in modules for name in non_persistent_buffers(module)}
