"""Writing a checkpoint: every rank its own files, in a thread of its own, and the first rank what makes them one.

torch.distributed.checkpoint plans and writes; ranks only agree on the plan. That needs no messages once the threads have begun: a
rank that is through leaves a mark in the folder, and the first rank waits for all marks.

Several names for what is written once: tied parameters, and options that parameters have in common.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from penstock.runtime.checkpoint.files import Draft, File, prune
from penstock.runtime.checkpoint.model_state import Ties
from penstock.runtime.checkpoint.optimizer_state import Same
from penstock.runtime.checkpoint.safe_pickle import check_objects, read_metadata

_PAUSE = 0.005
_LEAVE = 30.0
"""Seconds that the other ranks have to write their files once this process is at its end."""


class Plan:
    """What one rank is to write."""

    def __init__(self, draft: Draft, state: dict[str, Any], same: Same, rank: int) -> None:
        if not draft.path.is_dir():
            raise CheckpointError(f"rank {rank} does not see {draft.path}, which rank 0 has made: checkpoints need a folder that all share")
        self.rank, self.same = rank, same
        self.planner = DefaultSavePlanner()
        self.writer = FileSystemWriter(draft.path)
        self.planner.set_up_planner(state, self.writer.storage_meta(), rank == 0)
        self.writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        self.local: SavePlan = self.writer.prepare_local_plan(self.planner.create_local_plan())

    def agree(self, everyone: list[SavePlan], copy: bool, trusted: bool) -> None:
        """What several ranks hold is written by one of them. Copied, it stays as it is now."""
        plans, metadata = self.planner.create_global_plan(everyone)
        self.metadata: Metadata = metadata
        self.local = self.planner.finish_plan(self.writer.prepare_global_plan(plans)[self.rank])
        if not trusted:
            objects = [item for item in self.local.items if item.type is WriteItemType.BYTE_IO]
            check_objects((item.index.fqn, cast(BytesIO, self.planner.resolve_data(item))) for item in objects)
        if copy:
            self.planner = _Copies({item.index: _copied(self.planner.resolve_data(item)) for item in self.local.items})

    def write(self) -> list[WriteResult]:
        done = self.writer.write_data(self.local, self.planner)
        done.wait()
        return list(done.value())


class _Copies(DefaultSavePlanner):
    """Gives out what was copied."""

    def __init__(self, copies: Mapping[MetadataIndex, Tensor | BytesIO]) -> None:
        super().__init__()
        self.copies = copies

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        return self.copies[write_item.index]


def _copied(value: Tensor | BytesIO) -> Tensor | BytesIO:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class Whole:
    """What the first rank needs to make a checkpoint of the files of all."""

    folder: Path
    ranks: int
    ties: Ties
    about: Mapping[str, Any]
    keep: int | None
    deadline: float


class Writing:
    """One rank's part of a checkpoint that is being written."""

    def __init__(self, draft: Draft, plan: Plan, whole: Whole) -> None:
        self.draft, self.whole, self.rank = draft, whole, plan.rank
        self.error: Exception | None = None
        self._plan: Plan | None = plan
        self._written, self._aborted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"penstock checkpoint {draft.final.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            assert self._plan is not None
            self._write(self._plan)
            self._written.set()
            if self.rank == 0:
                self._complete(self._plan)
        except Exception as error:
            self.error = error
        finally:
            self._plan = None  # with all that it would write
            self._written.set()

    def written(self) -> None:
        """Wait until this rank's files are written."""
        self._written.wait()
        if self.error is not None:
            raise self.error

    def completed(self) -> None:
        """Wait until all is done that this rank has to do."""
        self._thread.join()
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """Another rank has failed: leave nothing behind."""
        self._aborted.set()
        self._thread.join()
        if self.rank == 0:
            self.draft.discard()

    def _write(self, plan: Plan) -> None:
        results = plan.write()
        names = sorted({result.storage_data.relative_path for result in results})
        mark = pickle.dumps((results, {name: File.of(self.draft.path / name) for name in names}, plan.same))
        hidden = self.draft.path / f".{_mark(self.rank)}"
        hidden.write_bytes(mark)
        os.replace(hidden, self.draft.path / _mark(self.rank))

    def _complete(self, plan: Plan) -> None:
        marks = [self.draft.path / _mark(rank) for rank in range(self.whole.ranks)]
        self._await(marks)
        results: list[WriteResult] = []
        files: dict[str, File] = {}
        same: Same = {}
        for mark in marks:
            theirs, written, others = read_metadata(mark)
            results += theirs
            files |= written
            for key, more in others.items():  # ranks may name the same value first, each with other keys of its own
                same[key] = list(dict.fromkeys((*same.get(key, ()), *more)))
            mark.unlink()
        names = under_more_names(plan.metadata, results, lambda key: same.get(key, ()))
        names += under_more_names(plan.metadata, results + names, partial(tied_keys, self.whole.ties))
        plan.writer.finish(plan.metadata, [results + names])
        files[_METADATA] = File.of(self.draft.path / _METADATA)
        self.draft.seal(self.whole.ranks, self.whole.about, files)
        prune(self.whole.folder, self.whole.keep)

    def _await(self, marks: Sequence[Path]) -> None:
        until = time.monotonic() + self.whole.deadline
        leaving = False
        while missing := [rank for rank, mark in enumerate(marks) if not mark.exists()]:
            if self._aborted.is_set() or time.monotonic() > until:
                raise CheckpointError(
                    f"checkpoint {self.draft.final} is not whole: ranks {missing} did not write theirs within {self.whole.deadline:g} s"
                )
            if not leaving and not threading.main_thread().is_alive():
                leaving, until = True, min(until, time.monotonic() + _LEAVE)
            time.sleep(_PAUSE)


_METADATA = ".metadata"


def _mark(rank: int) -> str:
    return f"rank-{rank}.written"


def under_more_names(metadata: Metadata, results: Sequence[WriteResult], others: Callable[[str], Iterable[str]]) -> list[WriteResult]:
    """Make what was written be found under its other keys too."""
    known, paths = metadata.state_dict_metadata, metadata.planner_data
    more = []
    for result in results:
        key = result.index.fqn
        for other in others(key):
            if known.setdefault(other, known[key]) is known[key]:
                paths[other] = tuple(other.split(".", 1))
                more.append(replace(result, index=replace(result.index, fqn=other)))
    return more


def tied_keys(ties: Ties, key: str) -> list[str]:
    """The keys under the other names of a tied parameter, for one under its first name."""
    for first, *others in ties:
        for start, end in (("model.", ""), ("optimizer.state.", "."), ("optimizer.param_groups.", ".")):
            if f"{key}{end}".startswith(f"{start}{first}{end}") and (end or key == start + first):
                rest = key[len(start) + len(first) :]
                return [f"{start}{other}{rest}" for other in others]
    return []
