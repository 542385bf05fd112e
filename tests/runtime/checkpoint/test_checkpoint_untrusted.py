"""No code in a checkpoint from an untrusted source is run."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import CheckpointError
from penstock.runtime import Checkpoints
from penstock.runtime.checkpoint.checkpoints import MANIFEST, Draft, prune
from runtime.models import blocks


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


class State:
    """Stateful data with any state, to be saved with the model."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def sealed(checkpoint: Path) -> None:
    """Make the manifest fit the files, as an attacker can."""
    said = json.loads((checkpoint / MANIFEST).read_text())
    said.pop("sha256")
    for name, each in said["files"].items():
        data = (checkpoint / name).read_bytes()
        each |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(said | {"sha256": digest}))


@pytest.mark.parametrize("make", [lambda evil: evil, lambda evil: {"a": [evil]}])
def test_metadata_runs_no_code(tmp_path: Path, make: Any) -> None:
    path = Checkpoints(tmp_path / "run").save(blocks(1), step=1)
    (path / ".metadata").write_bytes(pickle.dumps(make(Hostile(tmp_path / "evil"))))
    sealed(path)
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it names (posix|nt)\.system"):
        Checkpoints(tmp_path / "run").load(path.name, blocks(1))
    assert not (tmp_path / "evil").exists()


def test_metadata_cannot_name_files_outside(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path / "run").save(blocks(1), step=1)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sealed(path)
    with pytest.raises(CheckpointError, match=r"names '\.\./secret', which is not a file of the checkpoint"):
        Checkpoints(tmp_path / "run").load(path.name, blocks(1))


def test_values_run_no_code(tmp_path: Path) -> None:
    """Saved values other than tensors are unpickled safely too."""
    folder, data = tmp_path / "run", State({"place": 3})
    path = Checkpoints(folder).save(blocks(1), step=1, data=data)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    index, place = next((index, place) for index, place in metadata.storage_data.items() if index.fqn == "data")
    evil = io.BytesIO()
    torch.save((Hostile(tmp_path / "evil"),), evil)
    file = path / place.relative_path
    content = file.read_bytes()
    place.offset, place.length = len(content), len(evil.getvalue())
    file.write_bytes(content + evil.getvalue())
    metadata.storage_data[index] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    sealed(path)
    with pytest.raises(CheckpointError, match=r"data of checkpoint .* cannot be read without running code from it"):
        Checkpoints(folder).load(path.name, blocks(1), data=State())
    assert not (tmp_path / "evil").exists()


def test_unsafe_objects_are_rejected_on_save(tmp_path: Path) -> None:
    """State that could not be loaded is refused on saving, not days later when the run should continue."""
    odd = State({"order": State(1)})
    with pytest.raises(CheckpointError, match=r"data holds objects that could only be loaded by running code"):
        Checkpoints(tmp_path).save(blocks(1), step=1, data=odd)
    assert Checkpoints(tmp_path).whole() == []
    trusting = Checkpoints(tmp_path, trusted=True)
    path = trusting.save(blocks(1), step=1, data=odd)
    found = State()
    trusting.load(path.name, blocks(1), data=found)
    assert found.value["order"].value == 1
    with pytest.raises(CheckpointError, match=r"Checkpoints\(\.\.\., trusted=True\) loads it"):
        Checkpoints(tmp_path).load(path.name, blocks(1), data=State())


def test_arrays_and_random_states_are_plain_values(tmp_path: Path) -> None:
    value = {"state": np.random.RandomState(3).get_state(), "rate": np.float32(0.5), "rows": np.arange(4), "of": {1, 2}}
    path = Checkpoints(tmp_path).save(blocks(1), step=1, data=State(value))
    found = State()
    Checkpoints(tmp_path).load(path.name, blocks(1), data=found)
    assert np.array_equal(found.value["state"][1], value["state"][1])
    assert found.value["of"] == {1, 2}


# Saves that go on -----------------------------------------------------------------------------------------------------


def test_pruning_leaves_a_save_in_progress_alone(tmp_path: Path) -> None:
    """An unfinished save of another process is left alone while that process lives, and removed after it was killed."""
    code = f"""
        import sys
        from pathlib import Path
        from penstock.runtime.checkpoint.checkpoints import Draft
        draft = Draft.begin(Path({str(tmp_path)!r}), 7)
        print(draft.path, flush=True)
        sys.stdin.read()
    """
    other = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        mine = Draft.begin(tmp_path, 7)
        prune(tmp_path, 1)
        assert theirs.is_dir()
        assert mine.path.is_dir()
    finally:
        other.kill()
        other.communicate(timeout=30)
    prune(tmp_path, 1)
    assert not theirs.exists()
    assert mine.path.is_dir()
    mine.discard()
    assert list(tmp_path.iterdir()) == []
