"""An engine's state in our checkpoints, in folders as DeepSpeed names them.

`save_dir/tag` is a folder of `Checkpoints`, and the text file `save_dir/latest` says which tag was saved last. Parameters and optimizers
are saved under the names of the model's state dict, so that a checkpoint is loaded with any number of stages and replicas, and into
the unpipelined model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import CheckpointError
from penstock.runtime.checkpoint.checkpoints import Checkpoints
from penstock.runtime.checkpoint.model_state import ModelState
from penstock.runtime.model.partition import Partition

if TYPE_CHECKING:
    from penstock.compat.deepspeed.ties import Place, Ties

logger = logging.getLogger(__name__)

_LATEST = "latest"


@dataclass
class EngineState:
    """What is saved besides the model and the optimizer. Every rank has the same; `scheduler` is this rank's own."""

    counts: dict[str, int]
    """How far the engine has come: `global_steps` and `global_samples`."""
    rates: Any
    """The state of the learning-rate schedule, from the first rank that has one."""
    client_state: dict[str, Any]
    scheduler: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "rates": self.rates, "client_state": self.client_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts, self.rates, self.client_state = dict(state["counts"]), state["rates"], dict(state["client_state"])
        if self.scheduler is None:
            return
        if self.rates is None:
            raise CheckpointError("the checkpoint was saved without a learning-rate schedule: give load_lr_scheduler_states=False")
        self.scheduler.load_state_dict(self.rates)


def hold_stage(partition: Partition, stage: int, ties: Ties, slice_: int | None) -> ModelState:
    """A stage as checkpoints take it: its modules by name, and which of its parameters are one with another stage's.

    Slices of a layer have the same names on several ranks, so that each says which slice it is.
    """
    part = partition.parts[stage]
    assert part is not None
    if slice_ is not None:
        part = replace(part, layers=tuple(f"model_{slice_:02d}.{name}" for name in part.layers))
    first: dict[int, Place] = {}
    for number, (_, parameter) in enumerate(part.parameters):
        first.setdefault(id(parameter), (stage, number, slice_ or 0))
    first |= ties.first_places(first)
    return ModelState({stage: part}, {name: first[id(parameter)] for name, parameter in part.parameters})


def open_folder(folder: str | os.PathLike[str], tag: str, deadline: float) -> Checkpoints:
    """The checkpoints of one tag."""
    if not tag or tag in (".", "..") or Path(tag).name != tag:
        raise CheckpointError(f"{tag!r} is not the name of a checkpoint in {folder}: give a tag such as 'global_step100', and no path")
    return Checkpoints(Path(folder) / tag, keep=1, deadline=max(deadline, 600.0))


def choose_tag(folder: str | os.PathLike[str]) -> str | None:
    """The tag that was saved last; None where nothing was saved."""
    path = Path(folder) / _LATEST
    if path.is_file():
        return path.read_text(encoding="utf-8").strip()
    logger.warning("there is no %s: nothing was saved in %s, or give a tag", path, folder)
    return None


def note_latest(folder: str | os.PathLike[str], tag: str) -> None:
    """Say that this tag was saved last, once its checkpoint is whole."""
    path = Path(folder) / _LATEST
    written = path.with_name(f".{_LATEST}.{os.getpid()}")
    written.write_text(tag, encoding="utf-8")
    os.replace(written, path)
