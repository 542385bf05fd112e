"""An engine's state in our checkpoints, in folders with DeepSpeed's names.

`save_dir/tag` is a folder of `Checkpoints`, and the text file `save_dir/latest` names the tag that was saved last. Parameters and
optimizers are saved under the names of the model's state dict, so a checkpoint can be loaded with any number of stages and replicas, and
into the unpipelined model.
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
    from penstock.compat.deepspeed.parameters import StageParameters

logger = logging.getLogger(__name__)

_LATEST = "latest"


@dataclass
class EngineState:
    """The state besides the model and the optimizer. It is the same on every rank; `scheduler` is this rank's own."""

    counts: dict[str, int]
    """The engine's counters: `global_steps` and `global_samples`."""
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


def hold_stage(partition: Partition, stage: int, parameters: StageParameters, slice_: int | None) -> ModelState:
    """A stage as checkpoints take it: its modules by name, and the places of its parameters, which tied stages share.

    Slices of a layer have the same names on several ranks, so a slice adds its number to them.
    """
    part, prefix = partition.parts[stage], "" if slice_ is None else f"model_{slice_:02d}."
    assert part is not None
    part = replace(part, layers=tuple(f"{prefix}{name}" for name in part.layers))
    places = {f"{prefix}{name}": (*place, slice_ or 0) for name, place in parameters.places().items()}
    return ModelState({stage: part}, places)


def open_folder(folder: str | os.PathLike[str], tag: str, deadline: float) -> Checkpoints:
    """The checkpoints of one tag."""
    if not tag or tag in (".", "..") or Path(tag).name != tag:
        raise CheckpointError(f"{tag!r} is not the name of a checkpoint in {folder}: give a tag such as 'global_step100', and no path")
    return Checkpoints(Path(folder) / tag, keep=1, deadline=max(deadline, 600.0))


def choose_tag(folder: str | os.PathLike[str]) -> str | None:
    """The tag that was saved last; None if nothing was saved."""
    path = Path(folder) / _LATEST
    if path.is_file():
        return path.read_text(encoding="utf-8").strip()
    logger.warning("there is no %s: nothing was saved in %s, or give a tag", path, folder)
    return None


def note_latest(folder: str | os.PathLike[str], tag: str) -> None:
    """Note this tag as the last one, once its checkpoint is complete."""
    path = Path(folder) / _LATEST
    written = path.with_name(f".{_LATEST}.{os.getpid()}")
    written.write_text(tag, encoding="utf-8")
    os.replace(written, path)
