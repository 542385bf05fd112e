"""Checkpoints of a training run, under the model's own names, for any number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from penstock import __version__
from penstock.errors import CheckpointError, nearest
from penstock.runtime.checkpoint.files import Checkpoint, Draft, found
from penstock.runtime.checkpoint.meeting import Meeting
from penstock.runtime.checkpoint.model_state import Held, Known, Model, known_names, ties_of
from penstock.runtime.checkpoint.optimizer_state import Optimizers
from penstock.runtime.checkpoint.training_state import Schedulers, Stateful, Training
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.current_group import get_group

if TYPE_CHECKING:
    from penstock.runtime.checkpoint.writing import Writing

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints in a folder. Every rank makes one, and all make the same calls in the same order.

    A checkpoint holds the model and the optimizers under the model's own names, the schedulers, the step, how far the data was
    read, and the random state. It can be loaded with any number of ranks and any schedule, or into the unpipelined model. It is
    a checkpoint of torch.distributed.checkpoint with a manifest, so that `torch.distributed.checkpoint.load` reads it too. What
    was not written to its end is never taken for a checkpoint.

    - `keep`: how many are kept; older ones are removed once a new one is whole. None keeps all;
    - `group`: the process group, or device mesh of one dimension, whose ranks save and load together; all ranks unless given;
    - `verify`: whether the contents of files are compared with the manifest before they are loaded, or their sizes alone;
    - `trusted`: whether objects of any class are saved and loaded, as states of schedulers or data may hold. Loading them runs code from
      the files, so it is for checkpoints whose author you know. Otherwise tensors, NumPy's arrays and plain values are taken;
    - `deadline`: seconds that a rank waits for the others at most.

    `with Checkpoints(...) as checkpoints:` waits at the end for one that is still being written.
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
        if keep is not None and (not _is_count(keep) or keep < 1):
            raise CheckpointError(f"keep={keep!r}: keep at least one checkpoint, or None for all")
        self.folder, self.keep, self.verify, self.trusted = Path(folder).absolute(), keep, verify, trusted
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not there.is_dir():
            raise CheckpointError(f"checkpoints cannot be in {self.folder}: {there} is no folder")
        members, self.rank = get_group(group)
        self.ranks = members.ranks
        self.meeting = Meeting(members, self.rank, deadline)
        self._writing: Writing | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()

    def whole(self) -> list[Checkpoint]:
        """The checkpoints that are there, the last one first."""
        return found(self.folder)[0]

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
        """Write a checkpoint after so many steps; its folder, once it is whole.

        `model` is a pipeline or a plain module; there may be several optimizers and schedulers. `data`, and what is `extra`, has
        `state_dict` and `load_state_dict`; the first rank's is saved. Gradients are not saved.
        """
        self._start(Training(model, optimizer, scheduler, data, extra or {}), step, copy=False)
        path = self.wait()
        assert path is not None
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
        """Like `save`, but copy everything into memory and return; it is written, and made whole, while training goes on.

        What goes wrong is raised by `wait`, which every save begins with.
        """
        self._start(Training(model, optimizer, scheduler, data, extra or {}), step, copy=True)

    def wait(self) -> Path | None:
        """Wait until the checkpoint that is being written is whole; its folder, or None where there is none."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        try:
            self.meeting.each("write a checkpoint", writing.written)
            self.meeting.each("complete a checkpoint", writing.completed)
        except BaseException:
            writing.abort()
            raise
        return writing.draft.final

    def _start(self, training: Training, step: int, copy: bool) -> None:
        from penstock.runtime.checkpoint.writing import Plan, Whole, Writing

        self.wait()
        begun = self.meeting.each("begin a checkpoint", lambda: self._begin(training.model, step))
        draft, ties = begun[0][0], ties_of([names for _, names, _ in begun])
        assert draft is not None
        first = {name: group[0] for group in ties for name in group}
        try:
            _refuse_different([theirs for _, _, theirs in begun])
            plan = self.meeting.own("plan a checkpoint", lambda: Plan(draft, *training.state(self.rank, step, first), self.rank))
            plans = self.meeting.each("plan together", lambda: plan.local)
            self.meeting.own("copy the state", lambda: plan.agree(plans, copy, self.trusted))
        except BaseException:
            if self.rank == 0:
                draft.discard()
            raise
        whole = Whole(self.folder, self.ranks, ties, _about(training.model), self.keep, self.meeting.deadline)
        self._writing = Writing(draft, plan, whole)

    def _begin(self, model: Model, step: int) -> tuple[Draft | None, Known, int]:
        """What ranks tell each other first; the first of them makes the place."""
        if not _is_count(step) or step < 0:
            raise CheckpointError(f"step {step!r}: give the number of steps that were made")
        return Draft.begin(self.folder, step) if self.rank == 0 else None, known_names(model), step

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
        """Load the last checkpoint that is whole; None where there is none yet.

        One whose files are not as they were written is passed over with a warning. Where nothing else is left that is an error,
        for a run should not start again by itself.
        """
        self.wait()
        whole, reasons = self._found()
        refused = dict(reasons)
        training = Training(model, optimizer, scheduler, data, extra or {})
        for checkpoint in whole:
            try:
                self._check(checkpoint)
            except CheckpointError as error:
                refused[checkpoint.name] = str(error)
                continue
            for reason in refused.values() if self.rank == 0 else ():
                logger.warning("%s; %s is loaded instead", reason, checkpoint.name)
            return self._load(checkpoint, training)
        if refused:
            raise CheckpointError("no checkpoint can be loaded:\n" + "\n".join(f"  {reason}" for reason in refused.values()))
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
        """Load the checkpoint of this name, or refuse it."""
        self.wait()
        checkpoint = self.meeting.each("look for a checkpoint", lambda: self._named(name))[0]
        self._check(checkpoint)
        return self._load(checkpoint, Training(model, optimizer, scheduler, data, extra or {}))

    def _named(self, name: str) -> Checkpoint:
        if type(name) is not str or name in ("", "..") or Path(name).name != name:
            raise CheckpointError(
                f"{name!r} is not the name of a checkpoint in {self.folder}: give a name such as 'step-00000100', and no path"
            )
        if not (self.folder / name).is_dir():
            raise CheckpointError(
                f"there is no checkpoint {name!r} in {self.folder}; {nearest(name, (each.name for each in self.whole()))}"
            )
        return Checkpoint.read(self.folder / name)

    def _found(self) -> tuple[list[Checkpoint], dict[str, str]]:
        """What the first rank sees, so that all load the same."""
        return self.meeting.each("look for checkpoints", lambda: found(self.folder) if self.rank == 0 else ([], {}))[0]

    def _check(self, checkpoint: Checkpoint) -> None:
        """See that no file has changed; every rank looks at some."""
        mine = sorted(checkpoint.files)[self.rank :: self.ranks]
        self.meeting.each("check a checkpoint", lambda: checkpoint.check(mine, contents=self.verify))

    def _load(self, checkpoint: Checkpoint, training: Training) -> Checkpoint:
        from penstock.runtime.checkpoint.reading import Reading

        held, stream = Held.of(training.model), self.rank % checkpoint.ranks
        reading = self.meeting.own("open a checkpoint", lambda: Reading(checkpoint.path, self.trusted))
        known = self.meeting.each("compare with the model", lambda: reading.compared(held.state(), known_names(training.model)))
        reading.check_all([names for names, _ in known], ties_of([names for _, names in known]))
        room, rest = self.meeting.own("make room", lambda: training.room(reading, stream))
        self.meeting.own("read what is not the model's", lambda: reading.fill(rest))
        with training.put_back():  # schedulers and data may refuse what was saved: before any tensor has changed
            self.meeting.own("take what is not the model's", lambda: training.load_others(rest, room))
            self.meeting.own("read a checkpoint", lambda: reading.fill(room))
        self.meeting.own("take a checkpoint", lambda: training.load(room, rest, stream))
        return checkpoint


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse_different(steps: list[int]) -> None:
    if len(set(steps)) > 1:
        raise CheckpointError(f"the ranks save different steps, {steps}: give all the same")


def _about(model: Model) -> dict[str, Any]:
    """What may help whoever looks at a checkpoint later."""
    schedule = model.table.name if isinstance(model, Pipeline) else ""
    return {"schedule": schedule, "torch": str(torch.__version__), "penstock": __version__}
