"""A folder of checkpoints, each of which is complete or absent.

A checkpoint is written into a folder of another name. The manifest, with the size and the digest of every file, is written last,
and then the folder is renamed. So a process may be killed at any moment: a folder with the name of a checkpoint is complete.
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
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            digest = manifest.pop("sha256")
            files = {name: FileDigest(**entry) for name, entry in manifest["files"].items()}
            checkpoint = cls(path, manifest["step"], manifest["number"], manifest["ranks"], manifest["about"], files)
            version = manifest["format"]
        except FileNotFoundError:
            raise CheckpointError(f"checkpoint {path} is partial: it has no {MANIFEST}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"checkpoint {path} is corrupt: its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
            ) from error
        if version != _FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {version}, and this version reads {_FORMAT}")
        if digest != _digest(manifest):
            raise CheckpointError(f"checkpoint {path} is corrupt: its {MANIFEST} has changed since it was written")
        return checkpoint

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
