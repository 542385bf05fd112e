"""The options of `penstock train`, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import complete_schedules, count_option, number_option, read_size, refuse_unitless, text_option
from penstock.cli.sources import ScheduleSource, read_json_object
from penstock.errors import IntegrationError, UsageError, nearest
from penstock.schedules.registry import algorithms, parse_name, schedule
from penstock.text.options import split_options

if TYPE_CHECKING:
    from penstock.integrations.metrics import MetricsWriter
    from penstock.runtime.train.trainer import TrainingOptions


AUTO = "auto"
MICROBATCHES_PER_RANK = (2, 4)
"""The microbatch counts that are measured if none is given."""
BATCH, SECONDS = 32, 5.0
"""Defaults: samples per step, and how long to search."""


@dataclass(frozen=True)
class TrainOptions:
    """The options as they were given; making one refuses options that do not go together."""

    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py|MODULE[:FUNCTION]",
            help="A training file with build() and data(), see docs/train.md; FUNCTION replaces build.",
        ),
    ]
    ranks: Annotated[int | None, count_option("Processes to start here; under torchrun, the number of its processes.", "-p", "--ranks")] = (
        None
    )
    schedule: Annotated[
        str,
        text_option(
            "A schedule's name, a .csv or .json file, a plan, or auto: profile and plan.",
            "NAME|FILE",
            "--schedule",
            complete=complete_schedules,
        ),
    ] = AUTO
    microbatches: Annotated[int | None, count_option("Microbatches per step.  [default: auto chooses]", "-m", "--microbatches")] = None
    steps: Annotated[int, count_option("Steps in total, including those of earlier runs.", "--steps")] = 100
    samples: Annotated[int | None, count_option("Samples per step.  [default: the plan's batch, else 32]", "--batch")] = None
    memory_limit: Annotated[
        str | None, text_option("The memory limit per rank, like 40GiB; with --schedule auto or a NAME.", "SIZE", "--memory-limit")
    ] = None
    recompute: Annotated[bool, typer.Option("--recompute", help="Let auto recompute forwards if memory is short.")] = False
    search: Annotated[
        float | None, number_option("Seconds that auto searches after it has timed the named schedules.  [default: 5]", "S", "--seconds")
    ] = None
    checkpoints: Annotated[Path | None, text_option("Save checkpoints there, and resume from the last one.", "FOLDER", "--checkpoints")] = (
        None
    )
    every: Annotated[int | None, count_option("Steps between two checkpoints.  [default: one at the end]", "--every")] = None
    seed: Annotated[int, count_option("The random seed of the model, the order of the data and dropout.", "--seed")] = 0
    device: Annotated[str, text_option("cpu, cuda, or auto: cuda if there is one.", "NAME", "--device")] = AUTO
    check: Annotated[
        bool, typer.Option("--check", help="Compare loss and gradients of the first and the last step with the unpipelined model.")
    ] = False
    against: Annotated[
        str | None,
        text_option(
            "Also plan this schedule within the same limit, and measure both in turns.", "NAME", "--against", complete=complete_schedules
        ),
    ] = None
    metrics: MetricsTarget = None

    def __post_init__(self) -> None:
        least = {
            "--ranks": (self.ranks, 1),
            "--microbatches": (self.microbatches, 1),
            "--steps": (self.steps, 1),
            "--batch": (self.samples, 1),
            "--every": (self.every, 0),
            "--seed": (self.seed, 0),
        }
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
        read_size("--memory-limit", self.memory_limit)
        refuse_unitless("--memory-limit", self.memory_limit)
        if self.checkpoints is not None and self.checkpoints.is_file():
            raise UsageError(f"--checkpoints {self.checkpoints} is a file: name a folder")
        if self.every and self.checkpoints is None:
            raise UsageError("--every is the interval of checkpoints: give their folder with --checkpoints FOLDER")
        check_metrics(self.metrics)

    def _check_schedule(self) -> None:
        if self.is_file:
            if self.memory_limit is not None:
                raise UsageError(f"--memory-limit is for planning: {self.schedule} is a file and is used as it is")
            self._check_file()
        elif self.schedule != AUTO:
            name = split_options(self.schedule)[0]
            if name not in algorithms():
                raise UsageError(f"--schedule: there is no schedule {name!r}: {nearest(name, [*algorithms(), AUTO])}")
            parse_name(self.schedule)
        if self.against is not None:
            parse_name(self.against)
        planning = {"--recompute": self.recompute, "--seconds": self.search is not None, "--against": self.against is not None}
        for option, is_given in planning.items():
            if is_given and not self.is_planned:
                raise UsageError(f"{option} is for planning: use --schedule auto, or a NAME with a --memory-limit")

    def _check_file(self) -> None:
        """Refuse options that contradict the file; the memory and times of a plan hold only for its own batch."""
        table = getattr(self.loaded, "schedule", self.loaded)
        fixed = {"--microbatches": (self.microbatches, table.microbatches)}
        if self.planned_batch is not None:
            fixed["--batch"] = (self.samples, self.planned_batch)
        for option, (value, expected) in fixed.items():
            if value is not None and value != expected:
                raise UsageError(f"{option} {value}: {self.schedule} is for {expected}: leave it out, or plan again")

    @cached_property
    def loaded(self) -> Any:
        """The plan, schedule or program in the file; None if --schedule is not a file."""
        from penstock.planner.plan import Plan

        if not self.is_file:
            return None
        source = ScheduleSource(self.schedule)
        data = read_json_object(source.path())
        if data is not None and data.get("type") == "job-plan":
            raise UsageError(
                f"--schedule {self.schedule} is the plan of a whole job, with data ranks and sharding of its own: give it to "
                "Pipeline(model, JobPlan.load(...), mesh=...) in a script of yours"
            )
        return Plan.load(self.schedule) if data is not None and data.get("type") == "plan" else source.table()

    @property
    def planned_batch(self) -> int | None:
        """The samples per step of the plan in the file."""
        from penstock.planner.plan import Plan

        return self.loaded.microbatches * self.loaded.microbatch if isinstance(self.loaded, Plan) else None

    @property
    def batch(self) -> int:
        return self.samples or self.planned_batch or BATCH

    @property
    def seconds(self) -> float:
        return SECONDS if self.search is None else self.search

    @property
    def is_file(self) -> bool:
        return self.schedule != AUTO and ScheduleSource(self.schedule).is_file

    @property
    def is_planned(self) -> bool:
        """Whether the model is measured and planned: for auto, and for a named schedule that must fit into a limit."""
        return self.schedule == AUTO or (self.memory_limit is not None and not self.is_file)

    def build_schedule(self, ranks: int) -> Any:
        """Build the named schedule."""
        return schedule(self.schedule, ranks, self.microbatches or min(2 * ranks, self.batch))

    def microbatch_sizes(self, ranks: int) -> list[int]:
        """Choose the microbatch sizes to measure, the largest first."""
        if self.microbatches is not None:
            return [self.batch // self.microbatches]
        sizes = [self.batch // (count * ranks) for count in MICROBATCHES_PER_RANK if self.batch % (count * ranks) == 0]
        return sizes or [next(size for size in range(max(1, self.batch // (2 * ranks)), 0, -1) if self.batch % size == 0)]

    def build_options(self) -> TrainingOptions:
        """Give the settings of every rank."""
        from penstock.runtime.train.trainer import TrainingOptions, choose_device

        folder = None if self.checkpoints is None else os.fspath(self.checkpoints)
        return TrainingOptions(
            self.steps,
            self.batch,
            self.seed,
            folder,
            self.every or 0,
            min(10, self.steps),
            self.check,
            choose_device(self.device),
            metrics_opener(self.metrics),
        )


MetricsTarget = Annotated[
    str | None,
    text_option("Write the metrics of each step to FILE.csv, FILE.jsonl, tensorboard:FOLDER or wandb:PROJECT.", "TARGET", "--metrics"),
]


def check_metrics(target: str | None) -> None:
    """Refuse a target that metrics cannot be written to, and one whose package is missing."""
    if target is not None:
        from penstock.integrations.metrics import open_metrics

        try:
            open_metrics(target)
        except IntegrationError as error:
            raise UsageError(f"--metrics: {error}") from None


def metrics_opener(target: str | None) -> Callable[[], AbstractContextManager[MetricsWriter | None]]:
    """Return what every rank calls to open its writer."""
    if target is None:
        return nullcontext
    from penstock.integrations.metrics import open_metrics

    return partial(open_metrics, target)
