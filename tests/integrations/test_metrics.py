"""The writers of metrics, each read back by the package or parser that a user would read it with."""

from __future__ import annotations

import csv
import json
import math
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.errors import IntegrationError, MissingExtraError
from penstock.integrations.metrics import CsvWriter, JsonLinesWriter, TensorBoardWriter, WandbWriter, open_metrics
from penstock.runtime import Drift, Pipeline, RankMetrics, StepMetrics, launch

DRIFT = Drift(1, "forward", None, 90, 118, 0.010, 0.015, {0: 0.004})


def metrics_of(step: int, **changes: Any) -> StepMetrics:
    """Made-up metrics of a step on two ranks."""
    ranks = (RankMetrics(0.1, 0.2, 0.0, 0.05, {1: 0.04}), RankMetrics(0.11, 0.19, 0.0, 0.05, {0: 0.03}))
    return replace(StepMetrics(step, 1.0 / step, 0.5, 0.4, 32, 4096.0, 0.35, 1 / 7, ranks), **changes)


RUN = [metrics_of(1), metrics_of(2, grad_norm=None, tokens=None), metrics_of(3, drifts=(DRIFT,))]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").splitlines()]


def test_csv_has_every_number_of_every_step(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    writer = open_metrics(str(path))
    for metrics in RUN:
        writer(metrics)
    rows = read_csv(path)
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    for row, metrics in zip(rows, RUN, strict=True):
        for name, value in metrics.scalars().items():
            assert (row[name] == "") if value is None else float(row[name]) == value
    assert [row["drift"] for row in rows] == ["", "", str(DRIFT)]
    assert float(rows[0]["rank1/waiting"]) == 0.03


def test_json_lines_hold_all_metrics_with_waits_by_sender(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    writer = open_metrics(str(path))
    for metrics in [*RUN, metrics_of(4, loss=math.nan, grad_norm=math.inf)]:
        writer(metrics)
    first, second, third, fourth = read_json_lines(path)
    assert (first["step"], first["loss"], first["tokens_per_second"]) == (1, 1.0, 4096 / 0.4)
    assert first["ranks"][0] == {"forward": 0.1, "backward": 0.2, "overlapped": 0.0, "idle": 0.05, "waits": {"1": 0.04}}
    assert second["tokens_per_second"] is None
    assert third["drifts"][0]["since"] == 90
    assert third["drifts"][0]["text"] == str(DRIFT)
    assert (fourth["loss"], fourth["grad_norm"]) == (None, None)


@pytest.mark.parametrize("name", ["run.csv", "run.jsonl"])
def test_a_run_that_resumes_continues_its_file_and_a_new_run_replaces_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    read: Any = read_csv if name.endswith("csv") else read_json_lines
    first = open_metrics(str(path))
    for step in range(1, 8):
        first(metrics_of(step))
    resumed = open_metrics(str(path))  # from the checkpoint of step 5
    for step in range(6, 10):
        resumed(metrics_of(step, loss=7.0))
    rows = read(path)
    assert [int(row["step"]) for row in rows] == list(range(1, 10))
    assert [float(row["loss"]) for row in rows[4:6]] == [1 / 5, 7.0]
    open_metrics(str(path))(metrics_of(1))
    assert [int(row["step"]) for row in read(path)] == [1]


def test_a_run_that_resumes_on_more_ranks_adds_columns(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    open_metrics(str(path))(metrics_of(1, ranks=metrics_of(1).ranks[:1]))
    open_metrics(str(path))(metrics_of(2))
    first, second = read_csv(path)
    assert (first["step"], first["rank0/forward"], first["rank1/forward"]) == ("1", "0.1", "")
    assert (second["step"], second["rank0/forward"], second["rank1/forward"]) == ("2", "0.1", "0.11")
    open_metrics(str(path))(metrics_of(3, ranks=metrics_of(1).ranks[:1]))
    assert [row["rank1/forward"] for row in read_csv(path)] == ["", "0.11", ""]


@pytest.mark.parametrize(("name", "text"), [("a.csv", "epoch,score\n1,2\n"), ("a.jsonl", '{"epoch": 1}\n'), ("b.jsonl", "notes\n")])
def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(IntegrationError, match="name another file, or move it away"):
        open_metrics(str(path))(metrics_of(1))
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_tensorboard_reads_the_charts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_metrics(f"tensorboard:{tmp_path / 'board'}") as writer:
        for metrics in RUN:
            writer(metrics)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(RUN[0].scalars())
    for name in RUN[0].scalars():
        expected = {metrics.step: value for metrics in RUN if (value := metrics.scalars()[name]) is not None}
        assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(expected)
    (text,) = events.Tensors("drift/text_summary")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (3, str(DRIFT))


def read_wandb_records(log: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: after 7 bytes a log in the format of LevelDB, whose blocks of 32 KiB hold records in parts."""
    block, at, record = 1 << 15, 7, b""
    while at + 7 <= len(log):
        if block - at % block < 7:  # too little for the head of a part
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<4xHB", log, at)
        at += 7 + size
        record += log[at - size : at]
        if kind in (1, 4):  # the only part of a record, or the last
            yield record
            record = b""


@pytest.mark.slow
def test_wandb_gets_the_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    with open_metrics("wandb:penstock-test") as writer:
        for metrics in RUN:
            writer(metrics)
    assert wandb.run is None  # it has finished the run that it began
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 30
    while sum(1 for _ in read_wandb_records(path.read_bytes())) < 5 and time.monotonic() < deadline:
        time.sleep(0.1)  # another process writes the file: the run, an alert, and at least one record per step
    alerts, project = [], None
    for data in read_wandb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history[int(items["_step"])] = items
        elif record.HasField("alert"):
            alerts.append(record.alert.text)
        elif record.HasField("run"):
            project = record.run.project
    assert project == "penstock-test"
    assert alerts == [str(DRIFT)]
    assert list(history) == [1, 2, 3]
    for metrics in RUN:
        expected = {name: value for name, value in metrics.scalars().items() if value is not None}
        assert {name: history[metrics.step].get(name) for name in metrics.scalars() if name in history[metrics.step]} == expected


# On a pipeline -----------------------------------------------------------------------------------------------------------


def train(folder: Path) -> list[float]:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    writers = [CsvWriter(folder / "run.csv"), JsonLinesWriter(folder / "run.jsonl")]
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = Pipeline(layers, schedule="1f1b", microbatches=4, loss_fn=functional.mse_loss, on_step=writers)
    losses = []
    for _ in range(3):
        losses.append(float(pipe.step(batch, target=batch).loss))
        pipe.clip_grad_norm_(1.0)
    return losses


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    losses, _ = launch(train, 2, args=(tmp_path,))
    for rows in (read_csv(tmp_path / "run.csv"), read_json_lines(tmp_path / "run.jsonl")):
        assert [float(row["loss"]) for row in rows] == losses
        assert all(float(row["grad_norm"]) > 0 for row in rows)


# Refused -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("run.txt", "metrics to 'run.txt': give FILE.csv, FILE.jsonl, tensorboard:FOLDER or wandb:PROJECT"),
        ("", "give FILE.csv"),
        ("tensorbord:runs", r"did you mean 'tensorboard'\?"),
        ("tensorboard:", "a folder is missing after the colon"),
        ("wandb:", "a project is missing after the colon"),
        ("missing/folder/run.csv", "name a file in a folder that exists"),
    ],
)
def test_bad_targets_are_refused(target: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IntegrationError, match=message):
        open_metrics(target)


def test_a_folder_in_place_of_a_file_is_refused_and_the_other_way_round(tmp_path: Path) -> None:
    (tmp_path / "run.csv").mkdir()
    with pytest.raises(IntegrationError, match="name a file"):
        open_metrics(str(tmp_path / "run.csv"))
    (tmp_path / "board").touch()
    with pytest.raises(IntegrationError, match="is a file: name a folder"):
        open_metrics(f"tensorboard:{tmp_path / 'board'}")


@pytest.mark.parametrize(("writer", "package"), [(TensorBoardWriter, "tensorboard"), (WandbWriter, "wandb")])
def test_a_missing_package_is_named_with_what_to_install(writer: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if package == "tensorboard" else package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}, which is not installed: install the extra '{package}'"):
        writer("anything")
