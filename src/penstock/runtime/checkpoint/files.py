"""A folder of checkpoints, each of which is whole or is not there.

A checkpoint is written into a folder of another name. The manifest, with the size and the digest of every file, is written last,
and then the folder gets its own name. So a process may be killed at any moment: what has the name of a checkpoint is whole.
"""

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from penstock.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_NAME, _WRITING, _PRUNED = "step-", ".writing-", ".pruned-"
_FORMAT = 1
_LOCK = ".lock"
"""The name of the lock that the writer of a checkpoint holds, in its folder."""
_STALE = 24 * 3600.0
"""Seconds after which an unfinished save is given up on a file system that has no locks."""
_CHECKPOINT = re.compile(rf"{_NAME}\d{{8,}}(\.\d+)?")
"""The names of checkpoints; whatever else is in the folder is not ours."""


@dataclass(frozen=True)
class File:
    """What a file must be."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> File:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            return cls(stream.tell(), digest)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, as its manifest tells."""

    path: Path
    step: int
    number: int
    """How many were saved before it: the last one has the highest."""
    ranks: int
    """How many ranks saved it."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else was noted: the schedule, the version of torch, and the like."""
    files: Mapping[str, File] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """The checkpoint in a folder, or a refusal; the contents of its files are not looked at."""
        try:
            said = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            digest = said.pop("sha256")
            files = {name: File(**each) for name, each in said["files"].items()}
            found, written = cls(path, said["step"], said["number"], said["ranks"], said["about"], files), said["format"]
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {path} is partial: it has no {MANIFEST}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"checkpoint {path} is corrupt: its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
            ) from error
        if written != _FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {written}, and this version reads {_FORMAT}")
        if digest != _digest(said):
            raise CheckpointError(f"checkpoint {path} is corrupt: its {MANIFEST} is not as it was written")
        return found

    def check(self, names: Iterable[str], *, contents: bool = True) -> None:
        """See that these files are as they were written, or at least as long."""
        for name in names:
            wanted, path = self.files[name], self.path / name
            if not path.is_file():
                raise CheckpointError(f"checkpoint {self.path} is partial: {name} is missing")
            size = path.stat().st_size
            if size != wanted.bytes:
                raise CheckpointError(f"checkpoint {self.path} is partial: {name} has {size} bytes of {wanted.bytes}")
            if contents and File.of(path) != wanted:
                raise CheckpointError(f"checkpoint {self.path} is corrupt: {name} is not as it was written")


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written: where, and what it will be."""

    path: Path
    """Where it is written."""
    final: Path
    step: int
    number: int
    lock: IO[str] | None = field(default=None, compare=False, repr=False)
    """What shows that its writer is alive: the system lets go of it with the process. Other ranks have none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Draft, (self.path, self.final, self.step, self.number)

    @classmethod
    def begin(cls, folder: Path, step: int) -> Draft:
        """An empty place for the next checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max((each.number for each in found(folder)[0]), default=0)
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

    def seal(self, ranks: int, about: Mapping[str, Any], files: Mapping[str, File]) -> None:
        """All files are written: make it a checkpoint."""
        for name, each in files.items():
            size = (self.path / name).stat().st_size
            if size != each.bytes:
                raise CheckpointError(f"{self.path / name} has {size} bytes of the {each.bytes} that were written")
        said: dict[str, Any] = {"format": _FORMAT, "step": self.step, "number": self.number, "ranks": ranks, "about": dict(about)}
        said["files"] = {name: vars(files[name]) for name in sorted(files)}
        with (self.path / MANIFEST).open("w", encoding="utf-8") as stream:
            json.dump(said | {"sha256": _digest(said)}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(self.path)
        self.path.rename(self.final)
        (self.final / _LOCK).unlink(missing_ok=True)
        _sync_folder(self.final.parent)
        self._let_go()

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._let_go()

    def _let_go(self) -> None:
        if self.lock is not None:
            self.lock.close()


def found(folder: Path) -> tuple[list[Checkpoint], dict[str, str]]:
    """The checkpoints of a folder, the last one first, and why others are refused, by name."""
    whole, refused = [], {}
    for path in folder.glob(f"{_NAME}*") if folder.is_dir() else ():
        if _CHECKPOINT.fullmatch(path.name) is None:
            continue
        try:
            whole.append(Checkpoint.read(path))
        except CheckpointError as error:
            refused[path.name] = str(error)
    return sorted(whole, key=lambda each: -each.number), refused


def prune(folder: Path, keep: int | None) -> None:
    """Remove all but the last checkpoints, and what was left by saves that did not come to an end.

    A save that is still going on, of another run into the same folder, say, is left alone.
    """
    for path in (*filter(_is_abandoned, folder.glob(f"{_WRITING}*")), *folder.glob(f"{_PRUNED}*")):
        shutil.rmtree(path, ignore_errors=True)
    for each in found(folder)[0][keep:] if keep is not None else ():
        aside = each.path.with_name(_PRUNED + each.name)
        try:
            each.path.rename(aside)  # so that it is never a checkpoint of which files are missing
            shutil.rmtree(aside)
        except OSError as error:
            logger.warning("checkpoint %s could not be removed: %s", each.path, error)


def _lock(path: Path) -> IO[str] | None:
    """Hold the lock of a folder; None if the file system has none."""
    stream = (path / _LOCK).open("w")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        return None
    return stream


def _is_abandoned(path: Path) -> bool:
    """Whether nobody writes into this folder any more."""
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


def _digest(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _sync_folder(path: Path) -> None:
    """See that the names in a folder are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
