"""A run on a device mesh under torchrun: killed processes are started again, and it goes on from the last checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.errors import ScheduleError
from penstock.runtime import DataOrder, device_mesh, launch
from penstock.runtime.launch.workers import Workers

# Rank 1 is killed in the backward of step 2. The first start keeps copies, the second shards.
# When processes start again, the one that torch would find the old address of comes last.
SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from penstock.runtime import Checkpoints, DataOrder, Pipeline, device_mesh, rank

torch.set_num_threads(1)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt and rank() == 0:
    time.sleep(1)
mesh = device_mesh("cpu", pp=1, dp=-1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2))).double()
pipe = Pipeline(model, schedule="1f1b", microbatches=2, loss_fn=nn.functional.mse_loss, mesh=mesh, shard=attempt == 1)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
samples, data = torch.randn(20, 6).double(), DataOrder(20, batch=8)

def die(_):
    os.kill(os.getpid(), signal.SIGKILL)

with Checkpoints(sys.argv[1]) as checkpoints:
    found = checkpoints.load_latest(pipe, optimizer, data=data)
    for step in range(found.step + 1 if found else 1, 4):
        if (attempt, rank(), step) == (0, 1, 2):
            for stage in pipe.stages.values():
                stage.module.register_full_backward_hook(lambda *_: die(_))
        mine = samples[next(data)].tensor_split(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        loss = pipe.step(mine, target=mine.flip(1)).loss
        optimizer.step()
        optimizer.zero_grad()
        if rank() == 0:
            print("attempt", attempt, "step", step, "loss", float(loss), flush=True)
        checkpoints.save(pipe, optimizer, step=step, data=data)
"""


def unpipelined() -> list[float]:
    """The losses of the plain model on the whole batches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(2))).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    samples, data = torch.randn(20, 6).double(), DataOrder(20, batch=8)
    losses = []
    for _ in range(3):
        x = samples[next(data)]
        loss = functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_killed_processes_of_a_mesh(tmp_path: Path) -> None:
    """Every step runs once, also if shards load the checkpoint of replicas."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [str(script), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ, OMP_NUM_THREADS="1"), timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("exitcode: -9") == 1, done.stderr
    assert "set up without Penstock" not in done.stderr
    found = re.findall(r"^attempt (\d) step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    assert [(attempt, step) for attempt, step, _ in found] == [("0", "1"), ("1", "2"), ("1", "3")]
    assert [float(loss) for _, _, loss in found] == pytest.approx(unpipelined(), rel=1e-11)


def test_sizes_of_a_mesh(workers: Workers) -> None:
    def build() -> tuple[list[tuple[int, ...]], list[str]]:
        meshes = [device_mesh(pp=2, dp=2), device_mesh(pp=2, dp=-1), device_mesh("cpu", dp_replicate=1, dp_shard=-1, pp=2)]
        shapes, texts = [tuple(mesh.mesh.shape) for mesh in meshes], []
        for sizes in ({"pp": 2, "dp": 3}, {"pp": 3, "dp": -1}, {"pp": -1, "dp": -1}, {"pp": 0}, {"pp": 2, "ddp": 2}, {}):
            with pytest.raises(ScheduleError) as caught:
                device_mesh(**sizes)
            texts.append(str(caught.value))
        return shapes, texts

    for shapes, texts in workers.run(build):
        assert shapes == [(2, 2), (2, 2), (1, 2, 2)]
        assert [text.split(":")[0] for text in texts] == [
            "a device mesh of pp 2 x dp 3 does not fit 4 processes",
            "a device mesh of pp 3 x dp -1 does not fit 4 processes",
            "a device mesh of pp -1 x dp -1",
            "a device mesh of pp 0",
            "the device mesh has a dimension 'ddp'; did you mean 'dp'? known",
            "a device mesh without dimensions",
        ]


def test_a_mesh_needs_processes() -> None:
    with pytest.raises(ScheduleError, match="a device mesh is of processes"):
        device_mesh(pp=1)
    with pytest.raises(ScheduleError, match="a device mesh is of processes"):
        launch(lambda: device_mesh(pp=2), ranks=2)
