"""What `penstock train` was asked for, checked before anything is started."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.runtime.train.trainer import TrainingOptions

AUTO = "auto"
FINER = (2, 4)
"""Microbatches a rank that a batch is cut into, where they are chosen."""
BATCH, SECONDS = 32, 5.0
"""Samples of a step and how long to search, where nothing is said."""


@dataclass(frozen=True)
class Wish:
    """The options."""

    source: str
    ranks: int | None = None
    schedule: str = AUTO
    microbatches: int | None = None
    steps: int = 100
    samples: int | None = None
    memory_limit: str | None = None
    recompute: bool = False
    search: float | None = None
    checkpoints: Path | None = None
    every: int = 0
    seed: int = 0
    device: str = AUTO
    check: bool = False

    def __post_init__(self) -> None:
        from penstock.cli.plan import size

        least = {
            "--ranks": (self.ranks, 1),
            "--microbatches": (self.microbatches, 1),
            "--steps": (self.steps, 1),
            "--batch": (self.samples, 1),
        }
        least |= {"--every": (self.every, 0), "--seed": (self.seed, 0)}
        for option, (value, low) in least.items():
            if value is not None and value < low:
                raise UsageError(f"{option} {value}: give a whole number of at least {low}")
        if not 0 <= self.seconds < float("inf"):
            raise UsageError(f"--seconds {self.seconds:g}: give a number of at least 0")
        self._check_schedule()
        if self.microbatches is not None and self.microbatches > self.batch:
            raise UsageError(f"--microbatches {self.microbatches} of a --batch of {self.batch}: a microbatch has at least one sample")
        if self.is_planned and self.microbatches is not None and self.batch % self.microbatches:
            raise UsageError(f"--batch {self.batch} cannot be cut into {self.microbatches} equal microbatches: take a multiple")
        size("--memory-limit", self.memory_limit)
        if self.checkpoints is not None and self.checkpoints.is_file():
            raise UsageError(f"--checkpoints {self.checkpoints} is a file: name a folder")
        if self.every and self.checkpoints is None:
            raise UsageError("--every says how often to save: say where with --checkpoints FOLDER")

    def _check_schedule(self) -> None:
        from penstock.errors import nearest
        from penstock.schedules.registry import algorithms

        if self.is_file:
            if self.memory_limit is not None:
                raise UsageError(f"--memory-limit is for what is planned: {self.schedule} is a file and stays as it is")
            self._check_given()
        elif self.schedule != AUTO and self.schedule not in algorithms():
            raise UsageError(f"--schedule: there is no schedule {self.schedule!r}: {nearest(self.schedule, [*algorithms(), AUTO])}")
        for option, is_given in {"--recompute": self.recompute, "--seconds": self.search is not None}.items():
            if is_given and not self.is_planned:
                raise UsageError(f"{option} is for what is planned: --schedule auto, or a NAME with a --memory-limit")

    def _check_given(self) -> None:
        """Refuse what a file says otherwise; a plan's memory and times hold for its own batch alone."""
        table = getattr(self.given, "schedule", self.given)
        said = {"--microbatches": (self.microbatches, table.microbatches)}
        if self.planned_batch is not None:
            said["--batch"] = (self.samples, self.planned_batch)
        for option, (asked, there) in said.items():
            if asked is not None and asked != there:
                raise UsageError(f"{option} {asked}: {self.schedule} is for {there}: leave it out, or plan anew")

    @cached_property
    def given(self) -> Any:
        """The plan, schedule or program in the file, if one is named."""
        return self._loaded() if self.is_file else None

    @property
    def planned_batch(self) -> int | None:
        """The samples of a step that a plan in the file is for."""
        from penstock.planner.plan import Plan

        return self.given.microbatches * self.given.microbatch if isinstance(self.given, Plan) else None

    @property
    def batch(self) -> int:
        return self.samples or self.planned_batch or BATCH

    @property
    def seconds(self) -> float:
        return SECONDS if self.search is None else self.search

    @property
    def is_file(self) -> bool:
        from penstock.cli.source import Wanted

        return self.schedule != AUTO and Wanted(self.schedule).is_file

    @property
    def is_planned(self) -> bool:
        """Whether the model is measured and planned for: also where a schedule must fit into a limit."""
        return self.schedule == AUTO or (self.memory_limit is not None and not self.is_file)

    def _loaded(self) -> Any:
        from penstock.cli.source import Wanted
        from penstock.planner.plan import Plan

        wanted = Wanted(self.schedule)
        if _is_plan(wanted.path()):
            return Plan.load(self.schedule)
        return wanted.table()

    def named(self, ranks: int) -> Any:
        """The schedule of that name."""
        from penstock.schedules.registry import schedule

        return schedule(self.schedule, ranks, self.microbatches or min(2 * ranks, self.batch))

    def sizes(self, ranks: int) -> list[int]:
        """The microbatch sizes to measure, the largest first."""
        if self.microbatches is not None:
            return [self.batch // self.microbatches]
        cut = [self.batch // (finer * ranks) for finer in FINER if self.batch % (finer * ranks) == 0]
        return cut or [next(size for size in range(max(1, self.batch // (2 * ranks)), 0, -1) if self.batch % size == 0)]

    def how(self) -> TrainingOptions:
        """What each rank is told."""
        from penstock.runtime.train.trainer import TrainingOptions, choose_device

        folder = None if self.checkpoints is None else os.fspath(self.checkpoints)
        return TrainingOptions(
            self.steps, self.batch, self.seed, folder, self.every, min(10, self.steps), self.check, choose_device(self.device)
        )


def _is_plan(path: Path) -> bool:
    """Whether a file is a plan; what is wrong with one that cannot be read is said when it is read as a schedule."""
    if path.suffix.lower() != ".json":
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("type") == "plan"
