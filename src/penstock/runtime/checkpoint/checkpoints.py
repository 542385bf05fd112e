"""Checkpoints of a training run, under the parameter names of the unpipelined model, for any number of ranks."""

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
from penstock.runtime.checkpoint.collective_steps import CollectiveSteps
from penstock.runtime.checkpoint.files import Checkpoint, Draft, find_checkpoints
from penstock.runtime.checkpoint.model_state import Model, ModelState, ParameterNames, find_ties
from penstock.runtime.checkpoint.optimizer_state import Optimizers
from penstock.runtime.checkpoint.training_state import Schedulers, Stateful, TrainingState
from penstock.runtime.transport.current_group import get_group

if TYPE_CHECKING:
    from penstock.runtime.checkpoint.writing import CheckpointWriter

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
        if keep is not None and (not _is_count(keep) or keep < 1):
            raise CheckpointError(f"keep={keep!r}: keep at least one checkpoint, or None for all")
        self.folder, self.keep, self.verify, self.trusted = Path(folder).absolute(), keep, verify, trusted
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not existing.is_dir():
            raise CheckpointError(f"checkpoints cannot be in {self.folder}: {existing} is not a folder")
        members, self.rank = get_group(group)
        self.ranks = members.ranks
        self._collective = CollectiveSteps(members, self.rank, deadline)
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
        self._start(TrainingState(ModelState.of(model), optimizer, scheduler, data, extra or {}), step, copy=False)
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
        """Like `save`, but copy everything into memory and return; the checkpoint is written and completed while training continues.

        Errors are raised by `wait`, which every save starts with.
        """
        self._start(TrainingState(ModelState.of(model), optimizer, scheduler, data, extra or {}), step, copy=True)

    def wait(self) -> Path | None:
        """Wait until the checkpoint being written is complete, and return its folder; None if none is being written."""
        writer, self._writer = self._writer, None
        if writer is None:
            return None
        try:
            self._collective.gather("write a checkpoint", writer.wait_written)
            self._collective.gather("complete a checkpoint", writer.wait_completed)
        except BaseException:
            writer.abort()
            raise
        return writer.draft.final

    def _start(self, training: TrainingState, step: int, copy: bool) -> None:
        from penstock.runtime.checkpoint.writing import CheckpointWriter, RankLayout

        self.wait()
        begun = self._collective.gather("begin a checkpoint", lambda: self._begin(training.model, step))
        draft, ties = begun[0][0], find_ties([names for _, names, _ in begun])
        assert draft is not None
        first = {name: names[0] for names in ties for name in names}
        try:
            _check_same_step([theirs for _, _, theirs in begun])
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
        """What the ranks exchange first; the first rank makes the folder."""
        if not _is_count(step) or step < 0:
            raise CheckpointError(f"step {step!r}: give the number of steps that were made")
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
        find = self._collective.gather("look for checkpoints", lambda: find_checkpoints(self.folder) if self.rank == 0 else ([], {}))
        complete, reasons = find[0]  # as the first rank sees them, so that all ranks load the same
        rejected = dict(reasons)
        training = TrainingState(ModelState.of(model), optimizer, scheduler, data, extra or {})
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
        checkpoint = self._collective.gather("look for a checkpoint", lambda: self._find(name))[0]
        self._check_files(checkpoint)
        return self._load(checkpoint, TrainingState(ModelState.of(model), optimizer, scheduler, data, extra or {}))

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
        mine = sorted(checkpoint.files)[self.rank :: self.ranks]
        self._collective.gather("check a checkpoint", lambda: checkpoint.check(mine, contents=self.verify))

    def _load(self, checkpoint: Checkpoint, training: TrainingState) -> Checkpoint:
        from penstock.runtime.checkpoint.reading import CheckpointReader

        model, stream = training.model, self.rank % checkpoint.ranks
        run = self._collective.run
        reader = run("open a checkpoint", lambda: CheckpointReader(checkpoint.path, self.trusted))

        def compare() -> tuple[set[str], ParameterNames]:
            values = model.values()
            reader.check_values(values)
            return set(values), model.parameter_names()

        everyone = self._collective.gather("compare with the model", compare)
        reader.check_whole_model([names for names, _ in everyone], find_ties([names for _, names in everyone]))
        tensors, values = run("allocate memory", lambda: training.allocate(reader, stream))
        run("read the values that are not tensors", lambda: reader.fill(values))
        with training.restore_others_on_error():  # schedulers and data may reject the saved state: before any tensor has changed
            run("load the schedulers and the data", lambda: training.load_others(values, tensors))
            run("read a checkpoint", lambda: reader.fill(tensors))
        run("load a checkpoint", lambda: training.load_tensors(tensors, values, stream))
        return checkpoint


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_same_step(steps: list[int]) -> None:
    if len(set(steps)) > 1:
        raise CheckpointError(f"the ranks save different steps, {steps}: give all the same")
