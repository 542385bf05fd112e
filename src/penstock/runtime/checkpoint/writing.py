"""Writing a checkpoint: each rank writes its own files in a thread, and the first rank completes the checkpoint.

torch.distributed.checkpoint decides who writes what and writes it; the ranks only exchange their layouts. No messages are needed once the
threads have started: a rank that is done leaves a marker file in the folder, and the first rank waits for all markers.

Tied parameters, and options that many parameters have in common, are written once and listed in the metadata under all their names.
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

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from penstock.errors import CheckpointError
from penstock.runtime.checkpoint.files import Draft, FileDigest, prune
from penstock.runtime.checkpoint.model_state import TiedNames
from penstock.runtime.checkpoint.optimizer_state import Aliases
from penstock.runtime.checkpoint.safe_pickle import check_objects, read_metadata

_POLL = 0.005
"""Seconds between two looks for the markers of the other ranks."""
_EXIT_GRACE = 30.0
"""Seconds that the other ranks have left to write their files once the main thread of this process has ended."""
_METADATA = ".metadata"


class RankLayout:
    """What one rank writes of a checkpoint."""

    def __init__(self, draft: Draft, state: dict[str, Any], aliases: Aliases, rank: int) -> None:
        if not draft.path.is_dir():
            raise CheckpointError(
                f"rank {rank} does not see {draft.path}, which rank 0 made: put checkpoints on a file system shared by all"
            )
        self.rank, self.aliases = rank, aliases
        self.planner = DefaultSavePlanner()
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
            self.planner = _CopiedValues({item.index: _copy(self.planner.resolve_data(item)) for item in self.local.items})

    def write(self) -> list[WriteResult]:
        written = self.writer.write_data(self.local, self.planner)
        written.wait()
        return list(written.value())


class _CopiedValues(DefaultSavePlanner):
    """Gives the writer copies in place of the values themselves."""

    def __init__(self, copies: Mapping[MetadataIndex, Tensor | BytesIO]) -> None:
        super().__init__()
        self.copies = copies

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        return self.copies[write_item.index]


def _copy(value: Tensor | BytesIO) -> Tensor | BytesIO:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


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
        if self.error is not None:
            raise self.error

    def wait_completed(self) -> None:
        """Wait until this rank has nothing left to do."""
        self._thread.join()
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
        hidden = self.draft.path / f".{_marker(self.rank)}"
        hidden.write_bytes(pickle.dumps((results, digests, layout.aliases)))
        os.replace(hidden, self.draft.path / _marker(self.rank))

    def _complete(self, layout: RankLayout) -> None:
        markers = [self.draft.path / _marker(rank) for rank in range(self._ranks)]
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
        added += add_keys(layout.metadata, results + added, partial(tied_keys, self._ties))
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


def _marker(rank: int) -> str:
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


def tied_keys(ties: TiedNames, key: str) -> list[str]:
    """The keys under the other names of a tied parameter, given one under its first name."""
    for first, *others in ties:
        for start, end in (("model.", ""), ("optimizer.state.", "."), ("optimizer.param_groups.", ".")):
            if f"{key}{end}".startswith(f"{start}{first}{end}") and (end or key == start + first):
                rest = key[len(start) + len(first) :]
                return [f"{start}{other}{rest}" for other in others]
    return []
