"""The files of a checkpoint, written and read with torch.distributed.checkpoint, which takes seconds to import.

On a save each rank writes its own files in a thread, and the first rank completes the checkpoint. torch.distributed.checkpoint decides
who writes what; the ranks only exchange their layouts. No messages are needed once the threads have started: a rank that is done leaves
a marker file in the folder, and the first rank waits for all markers. Tied parameters, and options that many parameters have in common,
are written once and listed in the metadata under all their names. On a load each rank reads what it needs, whichever rank wrote it.

Unpickling calls whatever the data names. Here only the few classes that a checkpoint is made of may be named; everything else is
rejected before it is looked up.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError
from penstock.runtime.checkpoint.checkpoints import Draft, FileDigest, prune
from penstock.runtime.checkpoint.training_state import OPTIONS, STATE, Aliases, TiedNames, keys_by_parameter
from penstock.runtime.tensors.tensor_rows import TensorRows

_POLL = 0.005
"""Seconds between two looks for the markers of the other ranks."""
_EXIT_GRACE = 30.0
"""Seconds that the other ranks have left to write their files once the main thread of this process has ended."""
_METADATA = ".metadata"
_SHOWN = 5
"""How many names an error lists."""
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


# Writing ----------------------------------------------------------------------------------------------------------------


class RankLayout:
    """One rank's part of a checkpoint."""

    def __init__(self, draft: Draft, state: dict[str, Any], aliases: Aliases, rank: int) -> None:
        if not draft.path.is_dir():
            raise CheckpointError(
                f"rank {rank} does not see {draft.path}, which rank 0 made: put checkpoints on a file system shared by all"
            )
        self.rank, self.aliases = rank, aliases
        self.planner: DefaultSavePlanner = _SavePlanner()
        self.writer = FileSystemWriter(draft.path)
        self.planner.set_up_planner(state, self.writer.storage_meta(), rank == 0)
        self.writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        self.local: SavePlan = self.writer.prepare_local_plan(self.planner.create_local_plan())

    def agree(self, everyone: list[SavePlan], copy: bool, trusted: bool) -> None:
        """Drop what another rank writes, given the local plans of all ranks. With `copy`, keep copies of the values as they are now."""
        plans, metadata = self.planner.create_global_plan(everyone)
        self.metadata: Metadata = metadata
        self.local = self.planner.finish_plan(self.writer.prepare_global_plan(plans)[self.rank])
        if not trusted:
            objects = [item for item in self.local.items if item.type is WriteItemType.BYTE_IO]
            check_objects((item.index.fqn, cast(BytesIO, self.planner.resolve_data(item))) for item in objects)
        if copy:
            self.planner = _CopiedValues(self.planner, self.local.items)

    def write(self) -> list[WriteResult]:
        written = self.writer.write_data(self.local, self.planner)
        written.wait()
        return list(written.value())


class _SavePlanner(DefaultSavePlanner):
    """Writes a `TensorRows` as a part of the whole tensor."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [_plan_rows(item, self.state_dict[item.index.fqn]) for item in plan.items]
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.rows if isinstance(value, TensorRows) else super().lookup_object(index)


def _plan_rows(item: WriteItem, value: Any) -> WriteItem:
    """The item that writes a value: for rows of a tensor another one than torch's, which takes them for an object to pickle."""
    if not isinstance(value, TensorRows):
        return item
    chunk = _locate_rows(value)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(value.rows), value.shape)
    return WriteItem(MetadataIndex(item.index.fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _locate_rows(shard: TensorRows) -> ChunkStorageMetadata:
    """The place of rows in the whole tensor."""
    return ChunkStorageMetadata(torch.Size((shard.first, *(0 for _ in shard.rows.shape[1:]))), shard.rows.shape)


class _CopiedValues(DefaultSavePlanner):
    """Gives the writer copies in place of the values themselves."""

    def __init__(self, planner: DefaultSavePlanner, items: Iterable[WriteItem]) -> None:
        super().__init__()
        values = ((item.index, planner.resolve_data(item)) for item in items)
        self.copies = {index: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value for index, value in values}

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        return self.copies[write_item.index]


class CheckpointWriter:
    """Writes one rank's part of a checkpoint in a thread of its own, from construction on.

    The first rank then completes the checkpoint: it waits at most `deadline` seconds for all `ranks`, adds `ties` to the metadata and
    `about` to the manifest, and keeps only the latest `keep` checkpoints. `wait_written` and `wait_completed` raise what went wrong on
    this rank; `abort` is called after them if any rank failed.
    """

    def __init__(
        self, draft: Draft, layout: RankLayout, *, ranks: int, ties: TiedNames, about: Mapping[str, Any], keep: int | None, deadline: float
    ) -> None:
        self.draft, self.rank = draft, layout.rank
        self._ranks, self._ties, self._about, self._keep, self._deadline = ranks, ties, about, keep, deadline
        self.error: Exception | None = None
        self._layout: RankLayout | None = layout
        self._written, self._aborted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"penstock checkpoint {draft.final.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            assert self._layout is not None
            self._write(self._layout)
            self._written.set()
            if self.rank == 0:
                self._complete(self._layout)
        except Exception as error:
            self.error = error
        finally:
            self._layout = None  # frees the copies
            self._written.set()

    def wait_written(self) -> None:
        """Wait until this rank's files are written."""
        self._written.wait()
        self._raise_error()

    def wait_completed(self) -> None:
        """Wait until this rank has nothing left to do."""
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """Stop and remove what was written."""
        self._aborted.set()
        self._thread.join()
        if self.rank == 0:
            self.draft.discard()

    def _write(self, layout: RankLayout) -> None:
        """Write this rank's files, and then a marker with their digests in plain values, so that no class of ours is pickled."""
        results = layout.write()
        names = sorted({result.storage_data.relative_path for result in results})
        digests = {name: vars(FileDigest.of(self.draft.path / name)) for name in names}
        hidden = self.draft.path / f".{_find_marker(self.rank)}"
        hidden.write_bytes(pickle.dumps((results, digests, layout.aliases)))
        os.replace(hidden, self.draft.path / _find_marker(self.rank))

    def _complete(self, layout: RankLayout) -> None:
        markers = [self.draft.path / _find_marker(rank) for rank in range(self._ranks)]
        self._wait_for(markers)
        results: list[WriteResult] = []
        files: dict[str, FileDigest] = {}
        aliases: Aliases = {}
        for marker in markers:
            their_results, digests, their_aliases = read_metadata(marker)
            results += their_results
            files |= {name: FileDigest(**digest) for name, digest in digests.items()}
            for key, others in their_aliases.items():  # several ranks may have written a value first, each with aliases of its own
                aliases[key] = list(dict.fromkeys((*aliases.get(key, ()), *others)))
            marker.unlink()
        added = add_keys(layout.metadata, results, lambda key: aliases.get(key, ()))
        added += add_keys(layout.metadata, results + added, partial(list_tied_keys, self._ties))
        layout.writer.finish(layout.metadata, [results + added])
        files[_METADATA] = FileDigest.of(self.draft.path / _METADATA)
        self.draft.seal(self._ranks, self._about, files)
        prune(self.draft.final.parent, self._keep)

    def _wait_for(self, markers: Sequence[Path]) -> None:
        until, is_exiting = time.monotonic() + self._deadline, False
        while missing := [rank for rank, marker in enumerate(markers) if not marker.exists()]:
            if self._aborted.is_set() or time.monotonic() > until:
                raise CheckpointError(
                    f"checkpoint {self.draft.final} is incomplete: ranks {missing} did not write their files within {self._deadline:g} s"
                )
            if not is_exiting and not threading.main_thread().is_alive():
                is_exiting, until = True, min(until, time.monotonic() + _EXIT_GRACE)
            time.sleep(_POLL)


def _find_marker(rank: int) -> str:
    return f"rank-{rank}.written"


def add_keys(metadata: Metadata, results: Sequence[WriteResult], others: Callable[[str], Iterable[str]]) -> list[WriteResult]:
    """List written values in the metadata under their other keys too; the results to add for them."""
    known, paths = metadata.state_dict_metadata, metadata.planner_data
    added = []
    for result in results:
        key = result.index.fqn
        for other in others(key):
            if known.setdefault(other, known[key]) is known[key]:
                paths[other] = tuple(other.split(".", 1))
                added.append(replace(result, index=replace(result.index, fqn=other)))
    return added


def list_tied_keys(ties: TiedNames, key: str) -> list[str]:
    """The keys under the other names of a tied parameter, given one under its first name."""
    for first, *others in ties:
        for start, end in (("model.", ""), ("optimizer.state.", "."), ("optimizer.param_groups.", ".")):
            if f"{key}{end}".startswith(f"{start}{first}{end}") and (end or key == start + first):
                rest = key[len(start) + len(first) :]
                return [f"{start}{other}{rest}" for other in others]
    return []


# Reading ----------------------------------------------------------------------------------------------------------------


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

    def _list_model_names(self) -> set[str]:
        return {key.removeprefix("model.") for key in self._saved if key.startswith("model.")}

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Reject a model whose parameters and buffers on this rank are not in the checkpoint, or have another shape or type."""
        for name, value in values.items():
            saved = self._saved.get(f"model.{name}")
            if isinstance(saved, TensorStorageMetadata) and isinstance(value, (Tensor, TensorRows)):
                for what, stored, expected in (
                    ("shape", list(saved.size), list(value.shape)),
                    ("type", saved.properties.dtype, value.dtype),
                ):
                    if stored != expected:
                        raise CheckpointError(f"checkpoint {self.path} has {name} with {what} {stored}, but the model's has {expected}")
                if value.is_meta:
                    raise CheckpointError(f"{name} is on the meta device: give the pipeline weights= before loading a checkpoint")
        self._reject_names("has no", values.keys() - self._list_model_names())

    def check_whole_model(self, names: Sequence[set[str]], ties: TiedNames) -> None:
        """Reject a model that is only a part of the saved one, or that ties parameters saved apart. `names` are those of each rank."""
        self._reject_names("has names that the model has on no rank:", self._list_model_names().difference(*names))
        for tied in ties:
            if len({str(self._find_storage_places(name)) for name in tied}) > 1:
                raise CheckpointError(f"checkpoint {self.path} has {' and '.join(tied)} as separate parameters, but the model ties them")

    def _reject_names(self, what: str, names: Iterable[str]) -> None:
        ordered = sorted(names)
        if ordered:
            more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
            raise CheckpointError(f"checkpoint {self.path} {what} {', '.join(ordered[:_SHOWN])}{more}")

    def _find_storage_places(self, name: str) -> list[Any]:
        saved = self._saved.get(f"model.{name}")
        chunks = saved.chunks if isinstance(saved, TensorStorageMetadata) else []
        return [self._metadata.storage_data[MetadataIndex(f"model.{name}", chunk.offsets)] for chunk in chunks]

    def allocate_optimizer(self, parameters: Mapping[str, nn.Parameter | TensorRows]) -> dict[str, Any]:
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
                        destinations[key] = _allocate(key, self._saved[key], parameters[name])
                    else:
                        self._aliases[key] = first_keys[place]
        return destinations

    def fill(self, destinations: dict[str, Any]) -> None:
        """Read into the tensors of `destinations`, and set its other entries to the saved values."""
        missing = sorted(key for key in destinations if key not in self._saved)
        if missing:
            raise CheckpointError(f"checkpoint {self.path} has no {missing[0]}")
        shards = {key: value for key, value in destinations.items() if isinstance(value, TensorRows)}
        planner = _LoadPlanner(shards) if self.trusted else _SafeLoadPlanner(shards, self.path)
        planner.set_up_planner({key: value for key, value in destinations.items() if key not in shards}, self._metadata, False)
        self._storage.set_up_storage_reader(self._metadata, False)
        self._storage.read_data(planner.create_local_plan(), planner).wait()
        destinations.update(planner.state_dict)
        destinations.update({key: destinations[first] for key, first in self._aliases.items() if first in destinations})


def _allocate(key: str, saved: Any, parameter: nn.Parameter | TensorRows) -> Any:
    """A tensor to read optimizer state into, sharded and placed like its parameter; None for a value that is not a tensor."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    if isinstance(parameter, TensorRows) and saved.size:
        if saved.size != parameter.shape:
            raise CheckpointError(
                f"{key} was saved with shape {list(saved.size)} for a parameter of shape {list(parameter.shape)}, and not with one value "
                "per element, so a rank has no rows of it: load it into a pipeline whose vocabulary is not spread over the ranks, or "
                "without the optimizer"
            )
        return parameter.with_rows(torch.empty_like(parameter.rows, dtype=saved.properties.dtype, requires_grad=False))
    if isinstance(parameter, DTensor) and saved.size == parameter.size():
        return torch.empty_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
    device = parameter.device if saved.size and not isinstance(parameter, TensorRows) else "cpu"
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


class _LoadPlanner(DefaultLoadPlanner):
    """Also reads rows into `shards`, by key, from the whole tensors, however these were split when they were saved."""

    def __init__(self, shards: Mapping[str, TensorRows]) -> None:
        super().__init__(flatten_state_dict=False)
        self.shards = shards

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items = list(plan.items)
        assert self.metadata is not None
        for key, shard in self.shards.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(key, saved, [_locate_rows(shard)])
        return replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.shards[index.fqn].rows if index.fqn in self.shards else super().lookup_tensor(index)


class _SafeLoadPlanner(_LoadPlanner):
    """Loads values that are not tensors without running code from them."""

    def __init__(self, shards: Mapping[str, TensorRows], path: Path) -> None:
        super().__init__(shards)
        self.path = path

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.state_dict[key] = load_object(value, f"{key} of checkpoint {self.path}")
        except CheckpointError as error:
            raise CheckpointError(f"{error}. If you know who wrote it, Checkpoints(..., trusted=True) loads it") from error


# Reading without running code -------------------------------------------------------------------------------------------


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


def _list_safe_classes() -> list[Any]:
    """Classes in state dicts that torch itself does not allow: NumPy's arrays and numbers, which its random state is made of."""
    kinds = [type(np.dtype(kind)) for kind in ("bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")]
    rebuild = [value.__reduce__()[0] for value in (np.empty(0), np.float64(0))]  # an array, and a single number
    return [np.ndarray, np.dtype, *rebuild, *kinds]


def load_object(data: BytesIO, what: str) -> Any:
    """Load a value written by `torch.save`: tensors, arrays and plain values in dicts, lists and tuples, and nothing else."""
    with torch.serialization.safe_globals(_list_safe_classes()):
        try:
            return torch.load(data, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, EOFError) as error:
            raise CheckpointError(f"{what} cannot be read without running code from it: {_describe_reason(error)}") from error


def check_objects(values: Iterable[tuple[str, BytesIO]]) -> None:
    """Refuse to save values that could not be loaded again."""
    for name, data in values:
        try:
            load_object(BytesIO(data.getvalue()), name)
        except CheckpointError as error:
            raise CheckpointError(
                f"{name} holds objects that could only be loaded by running code from the checkpoint: give a state of tensors, arrays and "
                f"plain values, or Checkpoints(..., trusted=True), which loads any object ({error.__cause__})"
            ) from error


def _describe_reason(error: Exception) -> str:
    """torch's message without its advice to switch the check off."""
    text = str(error)
    for line in text.splitlines():
        if "Unsupported" in line or "GLOBAL" in line:
            return line.strip()
    return text.splitlines()[0] if text else type(error).__name__
