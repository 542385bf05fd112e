"""Reading a checkpoint: every rank what it needs, from whichever ranks' files it is in."""

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
from penstock.runtime.checkpoint.model_state import Known, Ties
from penstock.runtime.checkpoint.optimizer_state import OPTIONS, STATE, by_parameter
from penstock.runtime.checkpoint.safe_pickle import load_object, read_metadata

_SHOWN = 5


class Reading:
    """A checkpoint that is being read."""

    def __init__(self, path: Path, trusted: bool = False) -> None:
        """`trusted` loads objects of any class, for which code from the checkpoint may have to be run."""
        self.path, self.trusted = path, trusted
        self.reader = _Reader(path)
        self.metadata: Metadata = self.reader.read_metadata()
        self.saved = self.metadata.state_dict_metadata
        self.same: dict[str, str] = {}
        """Keys of the optimizer's that have the value of another."""

    def names(self) -> set[str]:
        """The names of all that was saved of the model."""
        return {key.removeprefix("model.") for key in self.saved if key.startswith("model.")}

    def compared(self, state: Mapping[str, Any], known: Known) -> tuple[set[str], Known]:
        """Refuse a model that is not the one that was saved; what others need to know of this rank's."""
        for name, value in state.items():
            saved = self.saved.get(f"model.{name}")
            if isinstance(saved, TensorStorageMetadata) and isinstance(value, Tensor):
                for what, theirs, mine in (("shape", list(saved.size), list(value.shape)), ("type", saved.properties.dtype, value.dtype)):
                    if theirs != mine:
                        raise CheckpointError(f"checkpoint {self.path} has {name} with {what} {theirs}, but the model's has {mine}")
                if value.is_meta:
                    raise CheckpointError(f"{name} is on the meta device: give the pipeline weights= before loading a checkpoint")
        self._refuse("has no", state.keys() - self.names())
        return set(state), known

    def check_all(self, taken: Sequence[set[str]], ties: Ties) -> None:
        """Refuse a model that is a part of the one that was saved, or that makes one parameter of several."""
        self._refuse("has, and no rank's model has,", self.names().difference(*taken))
        for names in ties:
            if len({str(self._where(name)) for name in names}) > 1:
                raise CheckpointError(
                    f"checkpoint {self.path} has {' and '.join(names)} as parameters of their own, but the model ties them"
                )

    def _refuse(self, what: str, names: Iterable[str]) -> None:
        listed = sorted(names)
        if listed:
            more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
            raise CheckpointError(f"checkpoint {self.path} {what} {', '.join(listed[:_SHOWN])}{more}")

    def _where(self, name: str) -> list[Any]:
        saved = self.saved.get(f"model.{name}")
        chunks = saved.chunks if isinstance(saved, TensorStorageMetadata) else []
        return [self.metadata.storage_data[MetadataIndex(f"model.{name}", chunk.offsets)] for chunk in chunks]

    def optimizer(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        """Room for what was saved of the optimizers for these parameters, by key; what was written once is read once."""
        room: dict[str, Any] = {}
        first: dict[str, str] = {}
        for prefix in (STATE, OPTIONS):
            for name, keys in by_parameter(self.saved, parameters, f"optimizer.{prefix}").items():
                if prefix == OPTIONS and not keys:
                    raise CheckpointError(f"checkpoint {self.path} has nothing of the optimizer for {name}")
                for key in keys.values():
                    place = str(self.metadata.storage_data.get(MetadataIndex(key), key))
                    if first.setdefault(place, key) == key:
                        room[key] = self._room(self.saved[key], parameters[name])
                    else:
                        self.same[key] = first[place]
        return room

    def _room(self, saved: Any, parameter: nn.Parameter) -> Any:
        if not isinstance(saved, TensorStorageMetadata):
            return None
        if isinstance(parameter, DTensor) and saved.size == parameter.size():
            return torch.empty_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
        device = parameter.device if saved.size else "cpu"
        return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)

    def fill(self, room: dict[str, Any]) -> None:
        """Read into the tensors, and put other values in their places."""
        lost = sorted(key for key in room if key not in self.saved)
        if lost:
            raise CheckpointError(f"checkpoint {self.path} has no {lost[0]}")
        planner = DefaultLoadPlanner(flatten_state_dict=False) if self.trusted else _Planner(self.path)
        planner.set_up_planner(room, self.metadata, False)
        self.reader.set_up_storage_reader(self.metadata, False)
        self.reader.read_data(planner.create_local_plan(), planner).wait()
        room.update(planner.state_dict)
        room.update({key: room[first] for key, first in self.same.items() if first in room})


class _Reader(FileSystemReader):
    """Reads the metadata without running code from it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        metadata = read_metadata(path)
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointError(f"{path} cannot be read: it is no checkpoint's metadata")
        places = metadata.storage_data
        outside = next((str(each.relative_path) for each in places.values() if Path(each.relative_path).name != each.relative_path), None)
        if outside is not None:
            raise CheckpointError(f"{path} names {outside!r}, which is not a file of the checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """Loads values that are no tensors without running code from them."""

    def __init__(self, path: Path) -> None:
        super().__init__(flatten_state_dict=False)
        self.path = path

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = load_object(value, f"{key} of checkpoint {self.path}")
        except CheckpointError as error:
            raise CheckpointError(f"{error}. If you know who wrote it, Checkpoints(..., trusted=True) loads it") from error
