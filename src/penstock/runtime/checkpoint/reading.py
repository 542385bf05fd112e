"""Reading a checkpoint: each rank reads what it needs, whichever rank wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError
from penstock.runtime.checkpoint.model_state import TiedNames
from penstock.runtime.checkpoint.optimizer_state import OPTIONS, STATE, keys_by_parameter
from penstock.runtime.checkpoint.safe_pickle import load_object, read_metadata

_SHOWN = 5
"""How many names an error lists."""


class CheckpointReader:
    """Compares a checkpoint with a model, and reads parts of it.

    `trusted` loads objects of any class, which may run code from the checkpoint.
    """

    def __init__(self, path: Path, trusted: bool = False) -> None:
        self.path, self.trusted = path, trusted
        self._storage = _SafeStorageReader(path)
        self._metadata: Metadata = self._storage.read_metadata()
        self._saved = self._metadata.state_dict_metadata
        self._aliases: dict[str, str] = {}
        """Keys of optimizer options that have the value of another key."""

    def _model_names(self) -> set[str]:
        return {key.removeprefix("model.") for key in self._saved if key.startswith("model.")}

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Reject a model whose parameters and buffers on this rank are not in the checkpoint, or have another shape or type."""
        for name, value in values.items():
            saved = self._saved.get(f"model.{name}")
            if isinstance(saved, TensorStorageMetadata) and isinstance(value, Tensor):
                for what, theirs, mine in (("shape", list(saved.size), list(value.shape)), ("type", saved.properties.dtype, value.dtype)):
                    if theirs != mine:
                        raise CheckpointError(f"checkpoint {self.path} has {name} with {what} {theirs}, but the model's has {mine}")
                if value.is_meta:
                    raise CheckpointError(f"{name} is on the meta device: give the pipeline weights= before loading a checkpoint")
        self._reject_names("has no", values.keys() - self._model_names())

    def check_whole_model(self, names: Sequence[set[str]], ties: TiedNames) -> None:
        """Reject a model that is only a part of the saved one, or that ties parameters saved apart. `names` are those of each rank."""
        self._reject_names("has names that the model has on no rank:", self._model_names().difference(*names))
        for tied in ties:
            if len({str(self._storage_places(name)) for name in tied}) > 1:
                raise CheckpointError(f"checkpoint {self.path} has {' and '.join(tied)} as separate parameters, but the model ties them")

    def _reject_names(self, what: str, names: Iterable[str]) -> None:
        ordered = sorted(names)
        if ordered:
            more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
            raise CheckpointError(f"checkpoint {self.path} {what} {', '.join(ordered[:_SHOWN])}{more}")

    def _storage_places(self, name: str) -> list[Any]:
        saved = self._saved.get(f"model.{name}")
        chunks = saved.chunks if isinstance(saved, TensorStorageMetadata) else []
        return [self._metadata.storage_data[MetadataIndex(f"model.{name}", chunk.offsets)] for chunk in chunks]

    def allocate_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """Destinations for the saved optimizer state of these parameters, by key; a value with several keys has one destination."""
        destinations: dict[str, Any] = {}
        first_keys: dict[str, str] = {}
        for prefix in (STATE, OPTIONS):
            for name, keys in keys_by_parameter(self._saved, parameters, f"optimizer.{prefix}").items():
                if prefix == OPTIONS and not keys:
                    raise CheckpointError(f"checkpoint {self.path} has no optimizer state for {name}")
                for key in keys.values():
                    place = str(self._metadata.storage_data.get(MetadataIndex(key), key))
                    if first_keys.setdefault(place, key) == key:
                        destinations[key] = _allocate(self._saved[key], parameters[name])
                    else:
                        self._aliases[key] = first_keys[place]
        return destinations

    def fill(self, destinations: dict[str, Any]) -> None:
        """Read into the tensors of `destinations`, and set its other entries to the saved values."""
        missing = sorted(key for key in destinations if key not in self._saved)
        if missing:
            raise CheckpointError(f"checkpoint {self.path} has no {missing[0]}")
        planner = DefaultLoadPlanner(flatten_state_dict=False) if self.trusted else _SafeLoadPlanner(self.path)
        planner.set_up_planner(destinations, self._metadata, False)
        self._storage.set_up_storage_reader(self._metadata, False)
        self._storage.read_data(planner.create_local_plan(), planner).wait()
        destinations.update(planner.state_dict)
        destinations.update({key: destinations[first] for key, first in self._aliases.items() if first in destinations})


def _allocate(saved: Any, parameter: nn.Parameter) -> Any:
    """A tensor to read optimizer state into, sharded and placed like its parameter; None for a value that is not a tensor."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    if isinstance(parameter, DTensor) and saved.size == parameter.size():
        return torch.empty_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
    device = parameter.device if saved.size else "cpu"
    return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)


class _SafeStorageReader(FileSystemReader):
    """Reads the metadata without running code from it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        metadata = read_metadata(path)
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{path} cannot be read: it is not the metadata of a checkpoint")
        files = (str(place.relative_path) for place in metadata.storage_data.values())
        outside = next((file for file in files if Path(file).name != file), None)
        if outside is not None:
            raise CheckpointError(f"{path} names {outside!r}, which is not a file of the checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _SafeLoadPlanner(DefaultLoadPlanner):
    """Loads values that are not tensors without running code from them."""

    def __init__(self, path: Path) -> None:
        super().__init__(flatten_state_dict=False)
        self.path = path

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = load_object(value, f"{key} of checkpoint {self.path}")
        except CheckpointError as error:
            raise CheckpointError(f"{error}. If you know who wrote it, Checkpoints(..., trusted=True) loads it") from error
