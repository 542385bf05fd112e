"""Checkpoints on disk are complete or absent, whatever happens to the process that writes them or to the files."""

from __future__ import annotations

import json
import logging
import os
import pickletools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional

from penstock.errors import CheckpointError
from penstock.runtime import Checkpoint, Checkpoints, DataOrder, Pipeline, launch
from penstock.runtime.checkpoint.checkpoints import MANIFEST
from runtime.models import blocks


def holding(value: float) -> nn.Linear:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, value)
    return made


def loaded(folder: Path) -> tuple[int, float]:
    """The step and the value of the last checkpoint."""
    made = holding(-1.0)
    found = Checkpoints(folder).load_latest(made)
    assert found is not None
    return found.step, float(made.weight[0, 0].detach())


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2, which hold these numbers."""
    for step in (1, 2):
        Checkpoints(tmp_path).save(holding(step), step=step)
    return tmp_path


def test_empty_folder_loads_nothing(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "run").load_latest(holding(0)) is None
    assert Checkpoints(tmp_path / "run").whole() == []


def test_keeps_the_latest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 5):
        checkpoints.save(holding(step), step=step)
    assert [each.step for each in checkpoints.whole()] == [4, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert loaded(tmp_path) == (4, 4.0)


def test_keep_none_keeps_all(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=None)
    for step in range(1, 6):
        checkpoints.save(holding(step), step=step)
    assert [each.step for each in checkpoints.whole()] == [5, 4, 3, 2, 1]


def test_latest_is_by_time_of_save_not_by_step(two: Path) -> None:
    """A run that went back to an earlier checkpoint continues from there."""
    checkpoints, made = Checkpoints(two), holding(0)
    assert checkpoints.load("step-00000001", made).step == 1
    assert float(made.weight[0, 0].detach()) == 1.0
    checkpoints.save(holding(1.5), step=1)
    assert loaded(two) == (1, 1.5)
    assert [each.name for each in checkpoints.whole()] == ["step-00000001.3", "step-00000002", "step-00000001"]


def test_manifest_lists_every_file(two: Path) -> None:
    found = Checkpoints(two).whole()[0]
    assert (found.step, found.number, found.ranks, found.about["torch"]) == (2, 2, 1, torch.__version__)
    assert set(found.files) | {MANIFEST} == {path.name for path in found.path.iterdir()}
    assert {name: each.bytes for name, each in found.files.items()} == {name: (found.path / name).stat().st_size for name in found.files}


def shorten(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path, name: str) -> None:
    """Change one bit in the middle."""
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)


def restate(folder: Path, old: str, new: str) -> None:
    """Replace a text in the manifest."""
    text = (folder / MANIFEST).read_text()
    assert old in text
    (folder / MANIFEST).write_text(text.replace(old, new))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), f"is partial: it has no {MANIFEST}"),
    "no data": (lambda folder: (folder / "__0_0.distcp").unlink(), "is partial: __0_0.distcp is missing"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), "is partial: .metadata is missing"),
    "short data": (shorten, r"is partial: __0_0.distcp has \d+ bytes of \d+"),
    "flipped data": (lambda folder: flip(folder, "__0_0.distcp"), "is corrupt: __0_0.distcp has changed since it was written"),
    "flipped metadata": (lambda folder: flip(folder, ".metadata"), "is corrupt: .metadata has changed since it was written"),
    "empty manifest": (
        lambda folder: (folder / MANIFEST).write_text(""),
        rf"is corrupt: its {MANIFEST} cannot be read \(not a JSON file: it is empty\)",
    ),
    "other manifest": (
        lambda folder: (folder / MANIFEST).write_text("[1]"),
        rf"is corrupt: its {MANIFEST} cannot be read \(the data must be an object, got a list\)",
    ),
    "missing field": (
        lambda folder: restate(folder, "sha256", "digest"),
        rf"is corrupt: its {MANIFEST} cannot be read \('sha256' is missing\)",
    ),
    "text for a number": (
        lambda folder: restate(folder, '"ranks": 1', '"ranks": "1"'),
        rf"is corrupt: its {MANIFEST} cannot be read \('ranks' must be a whole number, got text\)",
    ),
    "unknown field of a file": (
        lambda folder: restate(folder, '"bytes"', '"bites"'),
        rf"is corrupt: its {MANIFEST} cannot be read \(of .metadata, there is no field 'bites': did you mean 'bytes'\?",
    ),
    "changed manifest": (
        lambda folder: restate(folder, '"step": 2', '"step": 7'),
        f"is corrupt: its {MANIFEST} has changed since it was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_rejected_by_name(damage: str, two: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged checkpoint that is requested by name is refused; if the latest is damaged, the one before it is loaded with a warning."""
    act, said = DAMAGE[damage]
    act(two / "step-00000002")
    made = holding(-1.0)
    with pytest.raises(CheckpointError, match=rf"^checkpoint {two}/step-00000002 {said}"):
        Checkpoints(two).load("step-00000002", made)
    assert float(made.weight[0, 0].detach()) == -1.0
    with caplog.at_level(logging.WARNING, "penstock"):
        assert loaded(two) == (1, 1.0)
    assert len(caplog.messages) == 1
    assert f"{two}/step-00000002 is " in caplog.messages[0]
    assert caplog.messages[0].endswith("; step-00000001 is loaded instead")


def test_verify_false_compares_sizes_only(two: Path) -> None:
    """For checkpoints that take too long to read twice: missing files are still detected."""
    flip(two / "step-00000002", "manifest.json")
    flip(two / "step-00000001", "__0_0.distcp")
    checkpoints = Checkpoints(two, verify=False)
    checkpoints._check_files(checkpoints.whole()[0])
    shorten(two / "step-00000001")
    with pytest.raises(CheckpointError, match="step-00000001 is partial"):
        checkpoints.load_latest(holding(0))


def test_raises_when_every_checkpoint_is_damaged(two: Path) -> None:
    for step in (1, 2):
        flip(two / f"step-0000000{step}", "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"no checkpoint can be loaded:\n.*step-00000002 is corrupt.*\n.*step-00000001 is corrupt"):
        loaded(two)


def test_later_format_is_rejected(two: Path) -> None:
    said = json.loads((two / "step-00000002" / MANIFEST).read_text())
    (two / "step-00000002" / MANIFEST).write_text(json.dumps(said | {"format": 9}))
    with pytest.raises(CheckpointError, match="has format 9, and this version reads 1"):
        Checkpoint.read(two / "step-00000002")


def test_unknown_name(two: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'step-3' in .*; did you mean 'step-0000000"):
        Checkpoints(two).load("step-3", holding(0))


def test_unwritable_folder(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run")
    (tmp_path / "run").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0 failed to begin a checkpoint: FileExistsError"):
        checkpoints.save(holding(0), step=1)


KILLED = """
    import os, pathlib, signal, sys
    import torch
    from torch import nn
    from penstock.runtime import Checkpoints
    import penstock.runtime.checkpoint.storage, penstock.runtime.checkpoint.storage

    folder = sys.argv[1]
    torch.set_num_threads(1)

    def holding(value):
        made = nn.Linear(2, 2)
        nn.init.constant_(made.weight, value)
        return made

    def die_before(count):
        # Killed in front of the operation of this number that changes the disk.
        for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open"):
            def act(*args, _real=getattr(os, name), **kwargs):
                nonlocal count
                if count == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                count -= 1
                return _real(*args, **kwargs)
            setattr(os, name, act)

    def save(step, keep):
        Checkpoints(folder, keep=keep).save(holding(step), step=step)

    step, kills = 1, 0
    save(step, 1)
    for keep in (1, 2):
        for count in range(1000):
            child = os.fork()
            if not child:
                die_before(count)
                save(step + 1, keep)
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            made = holding(-1)
            found = Checkpoints(folder).load_latest(made)
            value = float(made.weight[0, 0].detach())
            assert found.step == value, (count, found, value)
            assert found.step in (step, step + 1), (count, found)
            step = found.step
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            kills += 1
        assert len(Checkpoints(folder).whole()) == keep
        assert len(os.listdir(folder)) == keep, os.listdir(folder)
    print(kills)
"""


@pytest.mark.slow
def test_killed_at_any_moment_of_a_save(tmp_path: Path) -> None:
    """After a crash at any write, either the previous checkpoint or the new one is complete, and nothing else remains."""
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_other_files_in_the_folder_are_left_alone(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The user's own files are left alone; a checkpoint whose manifest cannot be opened counts as damaged and is skipped."""
    (two / "step-notes.txt").write_text("mine")
    (two / "step-by-step").mkdir()
    assert loaded(two) == (2, 2.0)
    assert not caplog.records
    manifest = two / "step-00000002" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    (two / "step-00000009").write_text("not a folder")
    assert loaded(two) == (1, 1.0)
    said = [record.getMessage() for record in caplog.records]
    assert any("step-00000002 is corrupt: its manifest.json cannot be read (IsADirectoryError" in text for text in said)
    assert any("step-00000009 is corrupt: its manifest.json cannot be read (NotADirectoryError" in text for text in said)


def test_bad_arguments(two: Path, tmp_path: Path) -> None:
    """Each wrong argument is refused with a clear message, and leaves nothing behind."""
    before, checkpoints = sorted(two.iterdir()), Checkpoints(two)
    for step in (1.5, "3", True, -1):
        with pytest.raises(CheckpointError, match=r"^step, the number of steps made, must be a whole number of at least 0"):
            checkpoints.save(holding(0), step=step)
    for keep in ("3", 0, True):
        with pytest.raises(CheckpointError, match=r"^keep \(None for all\) must be a whole number of at least 1"):
            Checkpoints(two, keep=keep)
    for name in ("", ".", "..", "../two", "step-00000001/", str(two / "step-00000001"), None):
        with pytest.raises(CheckpointError, match=r"is not the name of a checkpoint in .*, and no path"):
            checkpoints.load(name, holding(0))
    assert sorted(two.iterdir()) == before
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"checkpoints cannot be in .*: .*/file is not a folder"):
            Checkpoints(folder)


# Checkpoints of earlier versions ------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_of_version_0_1() -> None:
    """A checkpoint written by version 0.1 on two ranks loads into a pipeline, into the plain model, and with torch alone."""
    folder = Path(__file__).parents[2] / "data" / "checkpoint_0_1"
    wanted, velocity = trained_by_0_1()

    def load() -> dict[str, torch.Tensor]:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
        pipe = Pipeline(model, schedule="gpipe", microbatches=4, loss_fn=functional.mse_loss, seed=7)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0, momentum=0.9)
        scheduler, data = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), DataOrder(8, 4, shuffle=False)
        found = Checkpoints(folder).load_latest(pipe, optimizer, scheduler=scheduler, data=data)
        assert found is not None
        assert (found.step, found.ranks, pipe.steps) == (3, 2, 3)
        assert (data.epoch, data.position, scheduler.last_epoch) == (1, 4, 3)
        assert optimizer.param_groups[0]["lr"] == 0.5**4
        return {name: parameter.detach() for name, parameter in pipe.named_parameters()}

    first, second = launch(load, 2)
    plain = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9)
    Checkpoints(folder).load_latest(plain, optimizer)
    by_torch = {"model": {name: torch.zeros(2, 2) for name in wanted}}
    dcp.load(by_torch, checkpoint_id=folder / "step-00000003")
    for loaded in (first | second, dict(plain.named_parameters()), by_torch["model"]):
        torch.testing.assert_close({name: value.detach() for name, value in loaded.items()}, wanted)
    torch.testing.assert_close([optimizer.state[parameter]["momentum_buffer"] for parameter in plain.parameters()], velocity)


def trained_by_0_1() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Compute the weights and velocities of gradient descent with momentum by its formula."""
    samples = torch.arange(16.0).reshape(8, 2) / 16
    weights, velocity, rate = [torch.eye(2), torch.eye(2)], [torch.zeros(2, 2), torch.zeros(2, 2)], 0.5
    for step in range(3):
        batch = samples[4 * (step % 2) :][:4]
        hidden = batch @ weights[0].T
        slope = 2 * (hidden @ weights[1].T - (1 - batch)) / batch.numel()
        gradients = [(slope @ weights[1]).T @ batch, slope.T @ hidden]
        velocity = [0.9 * before + gradient for before, gradient in zip(velocity, gradients, strict=True)]
        weights = [weight - rate * change for weight, change in zip(weights, velocity, strict=True)]
        rate /= 2
    return {"0.weight": weights[0], "1.weight": weights[1]}, velocity


def test_pickled_metadata_names_no_class_of_ours(tmp_path: Path) -> None:
    """Our modules can move without breaking checkpoints, and torch alone can read them."""
    path = Checkpoints(tmp_path).save(blocks(2), step=1)
    words = {argument for _, argument, _ in pickletools.genops((path / ".metadata").read_bytes()) if isinstance(argument, str)}
    assert "torch.distributed.checkpoint.metadata" in words
    assert not [word for word in words if word.partition(".")[0] == "penstock"]
