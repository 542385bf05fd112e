"""Writers for `Pipeline(on_step=...)`: CSV, JSON lines, TensorBoard, Weights & Biases.

Every rank may be given the same writer: only the first one writes. Packages are imported when a writer is made, and files are opened with
the first step.
"""

from __future__ import annotations

import csv
import io
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Self

from penstock.errors import IntegrationError, MissingExtraError, nearest
from penstock.runtime import StepMetrics, rank

FORMS = "FILE.csv, FILE.jsonl, tensorboard:FOLDER or wandb:PROJECT"


class MetricsWriter(ABC):
    """Writes the metrics of each step on the first rank; the other ranks ignore them. As a context manager, it closes itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, metrics: StepMetrics) -> None:
        if rank() == 0:
            self.write(metrics)

    @abstractmethod
    def write(self, metrics: StepMetrics) -> None:
        """Write the metrics of one step; called on the first rank only, with ascending steps."""

    def close(self) -> None:  # noqa: B027 - files are complete after each step
        """Finish what was written."""


# Files ------------------------------------------------------------------------------------------------------------------


class FileWriter(MetricsWriter):
    """Adds one line per step to a file.

    If the file exists, the lines of earlier steps stay: a run that resumes at step 101 continues after the line of step 100, and a run
    that begins at step 1 replaces the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir() or not self.path.absolute().parent.is_dir():
            raise IntegrationError(f"metrics cannot be written to {self.path}: name a file in a folder that exists")
        self._begun = False

    def write(self, metrics: StepMetrics) -> None:
        if not self._begun:
            earlier = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
            self.path.write_text("".join(self.begin(earlier, metrics)), encoding="utf-8")
            self._begun = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self.line(metrics))

    @abstractmethod
    def begin(self, earlier: Sequence[str], metrics: StepMetrics) -> Sequence[str]:
        """Return the lines that stay before those of this run, given the lines of the file and the run's first metrics."""

    @abstractmethod
    def line(self, metrics: StepMetrics) -> str:
        """Return the line of a step."""

    def read_step(self, line: str | Mapping[str, Any]) -> int:
        """Return the step of a line, or of its cells; refuse a file that something else has written."""
        try:
            cells = json.loads(line) if isinstance(line, str) else line
            return int(cells["step"])
        except (ValueError, KeyError, TypeError):
            self.refuse()

    def refuse(self) -> NoReturn:
        raise IntegrationError(f"{self.path} holds something other than metrics: name another file, or move it away")


class CsvWriter(FileWriter):
    """A table with one row per step and one column per number; numbers that a step does not have are empty.

    A run that resumes on another number of ranks has columns for both numbers.
    """

    def begin(self, earlier: Sequence[str], metrics: StepMetrics) -> Sequence[str]:
        own = ["step", *metrics.scalars(), "drift"]
        rows = csv.DictReader(earlier)
        columns = list(rows.fieldnames or own)
        if not {"step", "loss", "drift"} <= set(columns):
            self.refuse()
        table = [row for row in rows if self.read_step(row) < metrics.step]
        self._columns = list(dict.fromkeys([*own, *columns])) if table else own
        return [self._format({name: name for name in self._columns}), *map(self._format, table)]

    def line(self, metrics: StepMetrics) -> str:
        cells = {name: repr(value) for name, value in metrics.scalars().items() if value is not None}
        return self._format(cells | {"step": str(metrics.step), "drift": ". ".join(map(str, metrics.drifts))})

    def _format(self, cells: Mapping[str, str]) -> str:
        line = io.StringIO()
        csv.DictWriter(line, self._columns, restval="", lineterminator="\n").writerow(cells)
        return line.getvalue()


class JsonLinesWriter(FileWriter):
    """One JSON object per step with all of its metrics, each rank's waits by sender included. NaN and infinity become `null`."""

    def begin(self, earlier: Sequence[str], metrics: StepMetrics) -> Sequence[str]:
        return [line for line in earlier if self.read_step(line) < metrics.step]

    def line(self, metrics: StepMetrics) -> str:
        data = asdict(metrics)
        data |= {"samples_per_second": metrics.samples_per_second, "tokens_per_second": metrics.tokens_per_second}
        data["drifts"] = [asdict(drift) | {"text": str(drift)} for drift in metrics.drifts]
        return json.dumps(_drop_nonfinite(data), allow_nan=False) + "\n"


def _drop_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_drop_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Services ---------------------------------------------------------------------------------------------------------------


class TensorBoardWriter(MetricsWriter):
    """Charts for TensorBoard, in a folder; drifts are texts."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("writing metrics for TensorBoard", "tensorboard", "tensorboard") from error
        self.folder, self._open = Path(folder), SummaryWriter
        if self.folder.is_file():
            raise IntegrationError(f"tensorboard:{self.folder} is a file: name a folder")
        self._writer: Any = None

    def write(self, metrics: StepMetrics) -> None:
        if self._writer is None:  # charts of a run that resumes hide the steps that it repeats
            self._writer = self._open(str(self.folder), purge_step=metrics.step)
        for name, value in metrics.scalars().items():
            if value is not None:
                self._writer.add_scalar(name, value, metrics.step)
        for drift in metrics.drifts:
            self._writer.add_text("drift", str(drift), metrics.step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbWriter(MetricsWriter):
    """A run of Weights & Biases: the one that is active, or a new one with these options of `wandb.init`. Drifts are alerts."""

    def __init__(self, project: str | None = None, **options: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("writing metrics for Weights & Biases", "wandb", "wandb") from error
        self._wandb, self._options = wandb, {"project": project} | options
        self._run: Any = None
        self._opened = False

    def write(self, metrics: StepMetrics) -> None:
        if self._run is None:
            self._run = self._wandb.run
            if self._run is None:
                self._run, self._opened = self._wandb.init(**self._options), True
        numbers = {name: value for name, value in metrics.scalars().items() if value is not None}
        self._run.log(numbers, step=metrics.step)
        for drift in metrics.drifts:
            self._run.alert(title=f"rank {drift.rank} drifts", text=str(drift))

    def close(self) -> None:
        """Finish the run, if this writer has begun it."""
        if self._opened:
            self._run.finish()


# By name ----------------------------------------------------------------------------------------------------------------


def open_metrics(target: str) -> MetricsWriter:
    """Make the writer that a text names: `FILE.csv`, `FILE.jsonl`, `tensorboard:FOLDER` or `wandb:PROJECT`."""
    files: dict[str, Callable[[str], MetricsWriter]] = {".csv": CsvWriter, ".jsonl": JsonLinesWriter}
    services: dict[str, Callable[[str], MetricsWriter]] = {"tensorboard": TensorBoardWriter, "wandb": WandbWriter}
    service, colon, place = target.partition(":")
    if Path(target).suffix in files:
        return files[Path(target).suffix](target)
    if not colon:
        raise IntegrationError(f"metrics to {target!r}: give {FORMS}")
    if service not in services:
        raise IntegrationError(f"metrics to {target!r}: {nearest(service, services)}; give {FORMS}")
    if not place:
        missing = "a folder" if service == "tensorboard" else "a project"
        raise IntegrationError(f"metrics to {target!r}: {missing} is missing after the colon; give {FORMS}")
    return services[service](place)
