"""Checkpoints of a training run, under the parameter names of the unpipelined model, for any number of ranks."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch

from penstock import __version__
from penstock.errors import CheckpointError, FileFormatError, LostRankError, nearest
from penstock.ir.formats.reading import check_fields, read_json
from penstock.runtime.checkpoint.training_state import (
    Model,
    ModelState,
    Optimizers,
    ParameterNames,
    Schedulers,
    Stateful,
    TrainingState,
    find_ties,
)
from penstock.runtime.transport.current_group import get_group
from penstock.runtime.transport.failures import PickledError
from penstock.runtime.transport.group import Group, do_nothing
from penstock.runtime.transport.recovery import Recovery
from penstock.text.units import check_count

if TYPE_CHECKING:
    from penstock.runtime.checkpoint.storage import CheckpointWriter


logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in a folder. Every rank makes one, and all make the same calls in the same order.

    A checkpoint holds the model and the optimizers under the parameter names of the unpipelined model, the schedulers, the step, the
    position in the data, and the random state. It can be loaded with any number of ranks and any schedule, or into the unpipelined
    model. It is a checkpoint of torch.distributed.checkpoint with a manifest, so `torch.distributed.checkpoint.load` reads it too. An
    unfinished checkpoint is never taken for a complete one.

    - `keep`: how many to keep; older ones are removed once a new one is complete. None keeps all;
    - `group`: the process group, or device mesh of one dimension, whose ranks save and load together; defaults to all ranks;
    - `verify`: whether to compare the contents of files with the manifest before loading, or only their sizes;
    - `trusted`: whether to save and load objects of any class, as states of schedulers or data may hold. Loading them runs code from
      the files, so use it only for checkpoints whose author you know. Otherwise only tensors, NumPy arrays and plain values are allowed;
    - `deadline`: seconds that a rank waits for the others at most.

    If the model is a pipeline that goes on after ranks were lost, the ranks that are left save and load together, and a save or load in
    which a rank is lost is made again. A process that takes the place of a lost rank loads the last checkpoint alone.

    `with Checkpoints(...) as checkpoints:` waits at the end for a checkpoint that is still being written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        group: Any = None,
        verify: bool = True,
        trusted: bool = False,
        deadline: float = 600.0,
    ) -> None:
        if keep is not None:
            check_count("keep (None for all)", keep, error=CheckpointError)
        self.folder, self.keep, self.verify, self.trusted = Path(folder).absolute(), keep, verify, trusted
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not existing.is_dir():
            raise CheckpointError(f"checkpoints cannot be in {self.folder}: {existing} is not a folder")
        members, self.rank = get_group(group)
        self.ranks = members.ranks
        self._collective = CollectiveSteps(members, self.rank, deadline)
        self._follows_pipeline = group is None
        self._recovery: Recovery | None = None
        self._writer: CheckpointWriter | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()

    def whole(self) -> list[Checkpoint]:
        """The complete checkpoints in the folder, the latest first."""
        return find_checkpoints(self.folder)[0]

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(
        self,
        model: Model,
        optimizer: Optimizers = None,
        *,
        step: int,
        scheduler: Schedulers = None,
        data: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> Path:
        """Write a checkpoint after `step` steps, and return its folder once it is complete.

        `model` is a pipeline or a plain module; there may be several optimizers and schedulers. `data` and the values of `extra` have
        `state_dict` and `load_state_dict`; the first rank's are saved. Gradients are not saved.
        """
        self.wait()
        training = TrainingState(ModelState.of(model), optimizer, scheduler, data, extra or {})

        def save() -> Path:
            self._start(training, step, copy=False)
            path = self._finish()
            assert path is not None
            return path

        path = self._survive(training.model, save)
        if training.model.pipeline is not None:
            training.model.pipeline.readmit_ranks()
        return path

    def save_async(
        self,
        model: Model,
        optimizer: Optimizers = None,
        *,
        step: int,
        scheduler: Schedulers = None,
        data: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> None:
        """Like `save`, but copy everything into memory and return; the checkpoint is written and completed while training continues.

        Errors are raised by `wait`, which every save starts with.
        """
        self.wait()
        training = TrainingState(ModelState.of(model), optimizer, scheduler, data, extra or {})
        self._survive(training.model, lambda: self._start(training, step, copy=True))

    def wait(self) -> Path | None:
        """Wait until the checkpoint being written is complete, and return its folder; None if none is being written.

        A checkpoint during which a rank was lost is given up with a warning, because that rank's part of it may be missing.
        """
        return None if self._writer is None else self._survive(None, self._finish)

    def _finish(self) -> Path | None:
        writer, self._writer = self._writer, None
        if writer is None:
            logger.warning("a checkpoint was not completed, because a rank was lost while it was being written: save another")
            return None
        try:
            self._collective.gather("write a checkpoint", writer.wait_written)
            self._collective.gather("complete a checkpoint", writer.wait_completed)
        except BaseException:
            writer.abort()
            raise
        return writer.draft.final

    # Losses of ranks --------------------------------------------------------------------------------------------------

    def _survive(self, model: ModelState | None, call: Callable[[], T]) -> T:
        """Make a call together with the ranks that the pipeline has now; again, if any is lost in it."""
        recovery = self._follow(model)
        if recovery is None:
            return call()

        def decide() -> T:
            self._join_pipeline(recovery)
            try:
                result: T = recovery.decide("checkpoint", call(), do_nothing, lambda values: values[0])
            except LostRankError:
                writer, self._writer = self._writer, None
                if writer is not None:
                    writer.abort()
                raise
            return result

        return recovery.run(decide)

    def _follow(self, model: ModelState | None) -> Recovery | None:
        """The recovery of the pipeline, if ranks of it may be lost; without a model, that of the last call."""
        if model is not None:
            followed = self._follows_pipeline and model.pipeline is not None
            self._recovery = model.pipeline.recovery if followed and model.pipeline is not None else None
        return self._recovery

    def _join_pipeline(self, recovery: Recovery) -> None:
        members, self.rank = recovery.find_members()
        self.ranks = members.ranks
        self._collective = CollectiveSteps(members, self.rank, self._collective.deadline)

    # Saving, on each rank ---------------------------------------------------------------------------------------------

    def _start(self, training: TrainingState, step: int, copy: bool) -> None:
        from penstock.runtime.checkpoint.storage import CheckpointWriter, RankLayout

        begun = self._collective.gather("begin a checkpoint", lambda: self._begin(training.model, step))
        draft, ties = begun[0][0], find_ties([names for _, names, _ in begun])
        assert draft is not None
        first = {name: names[0] for names in ties for name in names}
        try:
            steps = [number for *_, number in begun]
            if len(set(steps)) > 1:
                raise CheckpointError(f"the ranks save different steps, {steps}: give all the same")
            layout = self._collective.run(
                "plan a checkpoint", lambda: RankLayout(draft, *training.collect(self.rank, step, first), self.rank)
            )
            layouts = self._collective.gather("plan together", lambda: layout.local)
            self._collective.run("copy the state", lambda: layout.agree(layouts, copy, self.trusted))
        except BaseException:
            if self.rank == 0:
                draft.discard()
            raise
        about = {"schedule": training.model.schedule, "torch": str(torch.__version__), "penstock": __version__}
        deadline = self._collective.deadline
        self._writer = CheckpointWriter(draft, layout, ranks=self.ranks, ties=ties, about=about, keep=self.keep, deadline=deadline)

    def _begin(self, model: ModelState, step: int) -> tuple[Draft | None, ParameterNames, int]:
        """The values that ranks exchange first; the first rank makes the folder."""
        check_count("step, the number of steps made,", step, 0, error=CheckpointError)
        return Draft.begin(self.folder, step) if self.rank == 0 else None, model.parameter_names(), step

    # Loading ----------------------------------------------------------------------------------------------------------

    def load_latest(
        self,
        model: Model,
        optimizer: Optimizers = None,
        *,
        scheduler: Schedulers = None,
        data: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> Checkpoint | None:
        """Load the latest complete checkpoint; None if there is none yet.

        A damaged checkpoint is skipped with a warning. If no other is left, that is an error, because a run should not silently
        start from the beginning.
        """
        self.wait()
        training = TrainingState(ModelState.of(model), optimizer, scheduler, data, extra or {})
        return self._survive(training.model, lambda: self._load_latest(training))

    def _load_latest(self, training: TrainingState) -> Checkpoint | None:
        find = self._collective.gather("look for checkpoints", lambda: find_checkpoints(self.folder) if self.rank == 0 else ([], {}))
        complete, reasons = find[0]  # as the first rank sees them, so that all ranks load the same
        rejected = dict(reasons)
        for checkpoint in complete:
            try:
                self._check_files(checkpoint)
            except CheckpointError as error:
                rejected[checkpoint.name] = str(error)
                continue
            for reason in rejected.values() if self.rank == 0 else ():
                logger.warning("%s; %s is loaded instead", reason, checkpoint.name)
            return self._load(checkpoint, training)
        if rejected:
            raise CheckpointError("no checkpoint can be loaded:\n" + "\n".join(f"  {reason}" for reason in rejected.values()))
        return None

    def load(
        self,
        name: str,
        model: Model,
        optimizer: Optimizers = None,
        *,
        scheduler: Schedulers = None,
        data: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> Checkpoint:
        """Load the checkpoint of this name; raises `CheckpointError` if that is not possible."""
        self.wait()
        training = TrainingState(ModelState.of(model), optimizer, scheduler, data, extra or {})

        def load() -> Checkpoint:
            checkpoint = self._collective.gather("look for a checkpoint", lambda: self._find(name))[0]
            self._check_files(checkpoint)
            return self._load(checkpoint, training)

        return self._survive(training.model, load)

    def _find(self, name: str) -> Checkpoint:
        if type(name) is not str or name in ("", "..") or Path(name).name != name:
            raise CheckpointError(
                f"{name!r} is not the name of a checkpoint in {self.folder}: give a name such as 'step-00000100', and no path"
            )
        if not (self.folder / name).is_dir():
            known = (checkpoint.name for checkpoint in self.whole())
            raise CheckpointError(f"there is no checkpoint {name!r} in {self.folder}; {nearest(name, known)}")
        return Checkpoint.read(self.folder / name)

    def _check_files(self, checkpoint: Checkpoint) -> None:
        """Compare all files with the manifest; each rank looks at some of them."""
        names = sorted(checkpoint.files)[self.rank :: self.ranks]
        self._collective.gather("check a checkpoint", lambda: checkpoint.check(names, contents=self.verify))

    def _load(self, checkpoint: Checkpoint, training: TrainingState) -> Checkpoint:
        from penstock.runtime.checkpoint.storage import CheckpointReader

        model, stream = training.model, self._find_stream(training.model, checkpoint)
        run = self._collective.run
        reader = run("open a checkpoint", lambda: CheckpointReader(checkpoint.path, self.trusted))

        def compare() -> tuple[set[str], ParameterNames]:
            values = model.values()
            reader.check_values(values)
            return set(values), model.parameter_names()

        everyone = self._collective.gather("compare with the model", compare)
        if self._recovery is None or not self._recovery.alone:
            reader.check_whole_model([names for names, _ in everyone], find_ties([names for _, names in everyone]))
        tensors, values = run("allocate memory", lambda: training.allocate(reader, stream))
        run("read the values that are not tensors", lambda: reader.fill(values))
        with training.restore_others_on_error():  # schedulers and data may reject the saved state: before any tensor has changed
            run("load the schedulers and the data", lambda: training.load_others(values, tensors))
            run("read a checkpoint", lambda: reader.fill(tensors))
        run("load a checkpoint", lambda: training.load_tensors(tensors, values, stream))
        return checkpoint

    def _find_stream(self, model: ModelState, checkpoint: Checkpoint) -> int:
        """Which rank's random state this one continues: its own, or in a process that has come back that of a rank of its replica."""
        mesh = None if model.pipeline is None else model.pipeline.grid
        if mesh is not None and self._recovery is not None and self._recovery.alone:
            peer = mesh.find_replica_peer()
            if peer is not None and peer < checkpoint.ranks:
                return peer
        return self.rank % checkpoint.ranks


T = TypeVar("T")


@dataclass(frozen=True)
class CollectiveSteps:
    """Runs steps of a save or load together with the other ranks of the group.

    Every rank calls the same methods in the same order. Each call blocks until all ranks have run their part. If a part failed, every
    rank raises the same `CheckpointError`: that of the lowest rank that failed.
    """

    group: Group
    rank: int
    deadline: float
    """Seconds to wait for the other ranks in each step."""

    def run(self, step: str, action: Callable[[], T]) -> T:
        """Run this rank's part of a step and return its result, once it has succeeded on all ranks."""
        results: list[T] = []
        self.gather(step, lambda: results.append(action()))
        return results[0]

    def gather(self, step: str, action: Callable[[], T]) -> list[T]:
        """Run this rank's part of a step and return the results of all ranks, by rank."""
        result, error = None, None
        try:
            result = action()
        except Exception as caught:
            error = caught
        failure = None if error is None else (PickledError.of(error), isinstance(error, CheckpointError))
        everyone = self.group.gather(self.rank, step, (result, failure), self.deadline)
        for rank, (_, report) in enumerate(everyone):
            if report is not None:
                cause, is_ours = report
                text = cause.description.partition(": ")[2] if is_ours else f"rank {rank} failed to {step}: {cause.description}"
                raise CheckpointError(text) from (error if rank == self.rank else cause.rebuild())
        return [value for value, _ in everyone]


# A folder of checkpoints, each of which is complete or absent ---------------------------------------------------------


logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_NAME, _WRITING, _PRUNED = "step-", ".writing-", ".pruned-"
_FORMAT = 1
_FIELDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "number": (int,),
    "ranks": (int,),
    "about": (dict,),
    "files": (dict,),
    "sha256": (str,),
}
_FILE_FIELDS: dict[str, tuple[type, ...]] = {"bytes": (int,), "sha256": (str,)}
"""The fields of a manifest, and of each file in it."""
_LOCK = ".lock"
"""The name of the lock that the writer of a checkpoint holds, in its folder."""
_STALE = 24 * 3600.0
"""Seconds after which an unfinished save counts as abandoned on a file system without locks."""
_CHECKPOINT = re.compile(rf"{_NAME}\d{{8,}}(\.\d+)?")
"""The names of checkpoints; everything else in the folder is left alone."""


@dataclass(frozen=True)
class FileDigest:
    """The size and digest of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return cls(stream.tell(), digest)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, as its manifest describes it."""

    path: Path
    step: int
    number: int
    """How many were saved before it: the latest one has the highest number."""
    ranks: int
    """How many ranks saved it."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Further facts: the schedule, the versions of torch and Penstock."""
    files: Mapping[str, FileDigest] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read the manifest of a checkpoint; its other files are not looked at."""

        def make_error(reason: str) -> CheckpointError:
            return CheckpointError(f"checkpoint {path} is corrupt: its {MANIFEST} cannot be read ({reason})")

        try:
            manifest = read_json(path / MANIFEST)
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {path} is partial: it has no {MANIFEST}") from None
        except (OSError, FileFormatError) as error:
            raise make_error(error.reason if isinstance(error, FileFormatError) else f"{type(error).__name__}: {error}") from error
        version = check_fields(manifest, {"format": (int,)}, error=make_error)["format"]
        if version != _FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {version}, and this version reads {_FORMAT}")
        check_fields(manifest, _FIELDS, error=make_error)
        for name, entry in manifest["files"].items():
            check_fields(entry, _FILE_FIELDS, error=lambda reason, name=name: make_error(f"of {name}, {reason}"), closed=True)  # type: ignore[misc]
        if manifest.pop("sha256") != _digest(manifest):
            raise CheckpointError(f"checkpoint {path} is corrupt: its {MANIFEST} has changed since it was written")
        files = {name: FileDigest(**entry) for name, entry in manifest["files"].items()}
        return cls(path, manifest["step"], manifest["number"], manifest["ranks"], manifest["about"], files)

    def check(self, names: Iterable[str], *, contents: bool = True) -> None:
        """Compare these files with the manifest: their sizes, and their digests if `contents`."""
        for name in names:
            expected, path = self.files[name], self.path / name
            if not path.is_file():
                raise CheckpointError(f"checkpoint {self.path} is partial: {name} is missing")
            size = path.stat().st_size
            if size != expected.bytes:
                raise CheckpointError(f"checkpoint {self.path} is partial: {name} has {size} bytes of {expected.bytes}")
            if contents and FileDigest.of(path) != expected:
                raise CheckpointError(f"checkpoint {self.path} is corrupt: {name} has changed since it was written")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written."""

    path: Path
    """The folder that it is written into."""
    final: Path
    """The folder's name once it is complete."""
    step: int
    number: int
    lock: IO[str] | None = field(default=None, compare=False, repr=False)
    """Shows that the writer is alive: the system releases it when the process ends. Only the first rank has it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Draft, (self.path, self.final, self.step, self.number)

    @classmethod
    def begin(cls, folder: Path, step: int) -> Draft:
        """Make an empty folder for the next checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((checkpoint.number for checkpoint in find_checkpoints(folder)[0]), default=0)
        final = folder / f"{_NAME}{step:08d}"
        if final.exists():
            final = final.with_name(f"{final.name}.{number}")
        path = folder / f"{_WRITING}{final.name}-{uuid.uuid4().hex[:8]}"
        while True:
            path.mkdir(exist_ok=True)
            try:
                return cls(path, final, step, number, _lock(path))
            except FileNotFoundError:  # another run has just removed the folder, which had no lock yet
                continue

    def seal(self, ranks: int, about: Mapping[str, Any], files: Mapping[str, FileDigest]) -> None:
        """Turn the draft into a checkpoint once all files are written: write the manifest and rename the folder."""
        for name, written in files.items():
            size = (self.path / name).stat().st_size
            if size != written.bytes:
                raise CheckpointError(f"{self.path / name} has {size} bytes of the {written.bytes} that were written")
        manifest: dict[str, Any] = {"format": _FORMAT, "step": self.step, "number": self.number, "ranks": ranks, "about": dict(about)}
        manifest["files"] = {name: vars(files[name]) for name in sorted(files)}
        with (self.path / MANIFEST).open("w", encoding="utf-8") as stream:
            json.dump(manifest | {"sha256": _digest(manifest)}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(self.path)
        self.path.rename(self.final)
        (self.final / _LOCK).unlink(missing_ok=True)
        _sync_folder(self.final.parent)
        self._release()

    def discard(self) -> None:
        """Remove everything that was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.close()


def find_checkpoints(folder: Path) -> tuple[list[Checkpoint], dict[str, str]]:
    """The checkpoints in a folder, the latest first, and by name why others cannot be loaded."""
    complete, rejected = [], {}
    for path in folder.glob(f"{_NAME}*") if folder.is_dir() else ():
        if _CHECKPOINT.fullmatch(path.name) is None:
            continue
        try:
            complete.append(Checkpoint.read(path))
        except CheckpointError as error:
            rejected[path.name] = str(error)
    return sorted(complete, key=lambda checkpoint: -checkpoint.number), rejected


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the latest `keep` checkpoints, and the remains of abandoned saves.

    A save in progress, of another run into the same folder for example, is left alone.
    """
    for path in (*filter(_is_abandoned, folder.glob(f"{_WRITING}*")), *folder.glob(f"{_PRUNED}*")):
        shutil.rmtree(path, ignore_errors=True)
    for checkpoint in find_checkpoints(folder)[0][keep:] if keep is not None else ():
        aside = checkpoint.path.with_name(_PRUNED + checkpoint.name)
        try:
            checkpoint.path.rename(aside)  # so that it never looks like a checkpoint with missing files
            shutil.rmtree(aside)
        except OSError as error:
            logger.warning("checkpoint %s could not be removed: %s", checkpoint.path, error)


def _lock(path: Path) -> IO[str] | None:
    """Take the lock of a folder; None if the file system has no locks."""
    stream = (path / _LOCK).open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        return None
    return stream


def _is_abandoned(path: Path) -> bool:
    """Whether no process writes into this folder any more."""
    try:
        with (path / _LOCK).open("r+") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    except OSError:
        return time.time() - path.stat().st_mtime > _STALE
    return True


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
