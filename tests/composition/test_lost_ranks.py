"""Ranks that are killed while a mesh trains: the others go on with the numbers of the unpipelined model, and each step is done once."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PipelineError, ScheduleError
from penstock.runtime import Checkpoints, Pipeline, device_mesh, launch, rank
from penstock.runtime.launch.workers import Workers
from penstock.runtime.transport.all_gather import AllGather

WIDTH, STEPS, LONG, MICROBATCHES = 5, 6, 16, 4
SIZES = (8, 12)
"""Rows of the two replicas."""
SOON = 60.0
"""Seconds in which a step with a loss must be through, on a machine that is busy with other things; it takes well under one otherwise."""
DEADLINE = 120.0
LIMIT = 400.0
"""Seconds after which a test ends its processes."""
FORWARDS_LEFT: list[int] = []
"""In a process that is to die in a forward: how many it has left."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Block(nn.Module):
    """A layer with norm statistics, in one of whose forwards the process may die."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.map, self.norm, self.drop = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if FORWARDS_LEFT:
            FORWARDS_LEFT[0] -= 1
            if not FORWARDS_LEFT[0]:
                die()
        return x + self.drop(torch.tanh(self.norm(self.map(x))))


class Model(nn.Module):
    """Blocks, the last of which shares its map with the first."""

    def __init__(self, blocks: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.blocks[-1].map.weight = self.blocks[0].map.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_batch(step: int) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs and targets of both replicas in a step."""
    source = torch.Generator().manual_seed(step)
    x, y = (torch.randn(sum(SIZES), WIDTH, dtype=torch.float64, generator=source) for _ in range(2))
    return list(x.split(SIZES)), list(y.split(SIZES))


def train_alone(blocks: int, steps: int, accumulate: int) -> dict[str, Any]:
    """The unpipelined model on the same microbatches; running statistics are those of the first replica, as on a mesh."""
    model = Model(blocks)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses, norms = [], []
    for step in range(steps):
        inputs, targets = make_batch(step)
        total = 0.0
        for replica, (x, y) in enumerate(zip(inputs, targets, strict=True)):
            buffers = copy.deepcopy(dict(model.named_buffers()))
            for part, wanted in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                loss = functional.mse_loss(model(part), wanted) * len(part) / sum(SIZES)
                loss.backward()
                total += float(loss.detach())
            if replica:
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
        losses.append(total)
        if (step + 1) % accumulate:
            continue
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "state": model.state_dict()}


def make_pipeline(name: str, dropout: float = 0.0, **options: Any) -> tuple[Pipeline, int]:
    """The pipeline of this process, and its replica."""
    torch.set_num_threads(1)
    mesh = device_mesh(pp=2, dp=2)
    schedule = ps.schedule(name, 2, MICROBATCHES)
    model = Model(schedule.stages, dropout)
    made = {
        "loss_fn": functional.mse_loss,
        "mesh": mesh,
        "deadline": DEADLINE,
        "ties": [("0.map.weight", f"{schedule.stages - 1}.map.weight")],
    }
    return Pipeline(list(model.blocks), schedule, **(made | options)), mesh.get_local_rank("dp")


def read_state(pipe: Pipeline) -> dict[str, Tensor]:
    """The parameters and buffers of this rank, under the names of the unpipelined model."""
    return {
        f"blocks.{index}.{name}": value.detach().clone()
        for index, stage in pipe.stages.items()
        for name, value in stage.module.state_dict().items()
    }


def check(found: list[Any], wanted: dict[str, Any], lost: set[int]) -> None:
    """Every rank that is left has the losses, norms, parameters, statistics and outputs of the run without losses."""
    losses, norms, state = wanted["losses"], wanted["norms"], wanted["state"]
    assert {number for number, result in enumerate(found) if result is None} == lost
    seen: set[str] = set()
    for result in found:
        if result is None:
            continue
        assert result["losses"] == pytest.approx(losses[-len(result["losses"]) :], rel=1e-12, abs=1e-12)
        assert result["norms"] == pytest.approx(norms[-len(result["norms"]) :], rel=1e-11, abs=1e-12)
        assert result["steps"] == len(losses)
        assert max(result["seconds"]) < SOON
        if "outputs" in result:
            replica, outputs = result["outputs"]
            assert torch.allclose(outputs, wanted["outputs"][replica], rtol=1e-10, atol=1e-12)
        for name, value in result["state"].items():
            seen.add(name)
            assert torch.allclose(value, state[name], rtol=1e-10, atol=1e-12), name
    assert seen == set(state)


def train(name: str, plan: dict[int, tuple[int, str]], accumulate: int, **options: Any) -> dict[str, Any]:
    """Train, and die as planned: by step, the rank and the place."""
    metrics: list[Any] = []
    pipe, replica = make_pipeline(name, record=True, on_step=metrics.append, **options)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.05)
    out: dict[str, Any] = {"losses": [], "norms": [], "seconds": [], "lost": []}
    for step in range(STEPS):
        victim, place = plan.get(step, (None, ""))
        if victim == rank():
            arm(pipe, place)
        inputs, targets = make_batch(step)
        began, finalize = time.monotonic(), (step + 1) % accumulate == 0
        before = len(pipe.grid.whole.members)
        result = pipe.step(inputs[replica], target=targets[replica], finalize_gradients=finalize)
        # A step that was complete when a rank was lost has the timeline of all ranks that ran it.
        assert result.timeline.ranks in ([2] if result.lost is None else [before, len(pipe.grid.whole.members)])
        out["losses"].append(float(result.loss))
        if finalize:
            out["norms"].append(float(pipe.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
        out["seconds"].append(time.monotonic() - began)
        out["lost"].append(result.lost)
        assert len(result.losses) == MICROBATCHES
    pipe.flush_metrics()
    assert [(one.step, one.samples) for one in metrics] == [(step + 1, SIZES[replica]) for step in range(STEPS)]
    inputs, _ = make_batch(0)
    return {**out, "steps": pipe.steps, "state": read_state(pipe), "outputs": (replica, pipe.infer(inputs[replica]))}


def arm(pipe: Pipeline, place: str) -> None:
    """Have this process stop, die in its third forward, or die in an exchange: after its first message, before the answer."""
    if place == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif place == "forward":
        FORWARDS_LEFT.append(3)
    else:
        receive = AllGather._receive

        def receive_or_die(self: AllGather, source: int, name: str, timeout: Any) -> bytes:
            if name == place:
                die()
            return receive(self, source, name, timeout)

        AllGather._receive = receive_or_die  # type: ignore[method-assign]


def run(function: Callable[..., Any], args: tuple[Any, ...], ranks: int = 4, **options: Any) -> list[Any]:
    """Call the function on new processes, which are ended after `LIMIT` seconds."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with Workers(ranks) as workers:
        timer = threading.Timer(LIMIT, workers.stop)
        timer.start()
        try:
            return workers.run(function, args, **options)
        finally:
            timer.cancel()


@pytest.mark.slow
def test_the_others_go_on(workers: Workers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rank stops answering, and another is killed in the last exchange of a step: both columns have one rank left, and inputs and targets
    are sent on.

    The lost ranks had summed their own part of the gradients of steps that were not finalized: the others run these steps again, also one
    that has completed the last of them and is in the next already.
    Everything is as in a run without losses, random streams too.
    """

    def train_with(plan: dict[int, tuple[int, str]], folder: str) -> dict[str, Any]:
        (Path(folder) / f"{rank()}.pid").write_text(str(os.getpid()))
        out = train("zbv", plan, 3, dropout=0.3, seed=5, deadline=6.0 if plan else DEADLINE)
        if plan and rank() == 1:
            os.kill(int((Path(folder) / "3.pid").read_text()), signal.SIGCONT)
        return out

    without = workers.run(train_with, ({}, str(tmp_path)))
    found = run(train_with, ({1: (3, "stop"), 4: (0, "commit")}, str(tmp_path)), losses=2)
    state = {name: value for result in reversed(without) for name, value in result["state"].items()}  # statistics are the first replica's
    outputs = [next(result["outputs"][1] for result in without if result["outputs"][0] == replica) for replica in range(2)]
    check(found, {**without[0], "state": state, "outputs": outputs}, {0, 3})
    said = found[1]["lost"]
    assert said[0] is None
    for victim, peer in ((3, 2), (0, 1)):
        named = [f"rank {number} (pp {number // 2}, dp {number % 2})" for number in (victim, peer)]
        assert f"{named[0]} was lost; its 4 microbatches run on {named[1]}" in said[-1]
    assert "predicted step 1." in said[-1]
    assert "rank 3 (pp 1, dp 1) did not answer the others, which go on without it" in caplog.text
    assert "the process of rank 0 was killed by SIGKILL; the others go on" in caplog.text


def come_back(folder: str) -> dict[str, Any]:
    """Train with a checkpoint every other step, in which a rank comes back that has died since the last one.

    Some ranks complete the step in which rank 3 dies, which finalizes the gradients of two, and others are told its result: none of them
    runs the first of the two again. Rank 0 had to send the norms of its column, which its peer does instead. Some complete the save in
    which rank 2 dies, and others are told that it is complete; the one in which rank 1 dies is made again. Rank 3 dies again in a forward.
    """
    deaths = {(1, 3): "commit", (3, 0): "norm", (5, 2): "checkpoint", (9, 1): "plan together", (12, 3): "forward"}
    pipe, replica = make_pipeline("1f1b")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.05)
    checkpoints = Checkpoints(folder)
    start = checkpoints.load_latest(pipe, optimizer)
    out: dict[str, Any] = {"losses": [], "norms": [], "seconds": [0.0], "lost": []}
    for step in range(0 if start is None else start.step, LONG):
        place = deaths.get((step, rank()))
        if place not in (None, "norm"):
            arm(pipe, place)
        inputs, targets = make_batch(step)
        finalize = step % 2 == 1
        result = pipe.step(inputs[replica], target=targets[replica], finalize_gradients=finalize)
        out["losses"].append(float(result.loss))
        if place == "norm":
            die()
        out["lost"].append(result.lost)
        if finalize:
            out["norms"].append(float(pipe.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
            if len(pipe.grid.whole.members) < 4:  # give the new process time to start
                until = time.monotonic() + SOON
                while len(pipe.grid.whole.list_returning()) + len(pipe.grid.whole.members) < 4 and time.monotonic() < until:
                    time.sleep(0.05)
            checkpoints.save(pipe, optimizer, step=step + 1)
    return {**out, "steps": pipe.steps, "state": read_state(pipe), "started": 0 if start is None else start.step}


@pytest.mark.slow
def test_ranks_come_back_at_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Workers._start

    def start_late(workers: Workers, number: int) -> Any:
        if workers._count:  # the others save and go on meanwhile
            time.sleep(1)
        return start(workers, number)

    monkeypatch.setattr(Workers, "_start", start_late)
    found = run(come_back, (str(tmp_path),), losses=5, restart=True)
    check(found, train_alone(2, LONG, 2), set())
    started = [result["started"] for result in found]
    assert started in (
        [4, again, earlier, 14] for again in (10, 12) for earlier in (6, 8)
    )  # ranks that are lost in a save may be back for it
    gone = {2: range(6, started[2]), 1: range(10, started[1]), 3: range(12, started[3])}
    for step, said in enumerate(found[0]["lost"], started[0]):
        names = [f"rank {number}" for number, steps in gone.items() if step in steps]
        assert [said and said[:6]] == (names or [None])


def lose_a_shard() -> str:
    """A mesh without pipeline, on which each rank has shards of its own."""
    torch.set_num_threads(1)
    mesh = device_mesh(pp=1, dp=2)
    torch.manual_seed(0)
    pipe = Pipeline([nn.Linear(WIDTH, WIDTH)], schedule="data-parallel", microbatches=2, loss_fn=functional.mse_loss, mesh=mesh, shard=True)
    x = torch.randn(4, WIDTH)
    pipe.step(x, target=x)
    if rank() == 1:
        die()
    try:
        pipe.step(x, target=x)
    except PipelineError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.slow
def test_a_lost_shard_says_what_would_serve() -> None:
    first, second = run(lose_a_shard, (), ranks=2, losses=1)
    assert second is None
    assert (
        "lost: rank 1 (pp 0, dp 1) with its shards of stage 0. Along dp no other rank holds the same shards. Start "
        "again from the last checkpoint"
    ) in first


def test_pipelines_that_cannot_go_on_say_so_when_they_are_built(workers: Workers) -> None:
    def build() -> list[str]:
        said = []
        for dims, options in (
            ({"pp": 4}, {}),
            ({"pp": 2, "tp": 2}, {}),
            ({"pp": 2, "dp": 2}, {"schedule": "seq1f1b"}),
            ({"pp": 2, "dp": 2}, {"shard": True}),
            ({"pp": 1, "dp": 4}, {}),
        ):
            mesh = device_mesh(**dims)
            stages = [nn.Linear(WIDTH, WIDTH) for _ in range(dims["pp"])]
            chosen = {"schedule": "1f1b", "microbatches": 4} | options
            try:
                Pipeline(stages, mesh=mesh, loss_fn=functional.mse_loss, on_loss="take-over", **chosen)
            except ScheduleError as error:
                said.append(str(error))
        try:
            Pipeline([nn.Linear(1, 1)], schedule="1f1b", microbatches=1, on_loss="go on")
        except ScheduleError as error:
            said.append(str(error))
        return said

    for said in workers.run(build):
        assert "only ranks along dp or dp_replicate of a mesh hold the same stages" in said[0]
        assert "only ranks along dp" in said[1]
        assert "slices of a sequence must stay on one rank" in said[2]
        assert "stages are sharded, and the shards of a lost rank are lost with it. Along dp no other rank holds the same shards" in said[3]
        assert "it is the whole replica, whose part of the batch is lost with it: give a mesh with pp of 2 or more" in said[4]
        assert said[5] == "on_loss must be 'raise' or 'take-over', got 'go on'"
    with pytest.raises(ScheduleError, match="losses=1 is for processes that launch starts itself"):
        launch(build, 4, losses=1)
    with pytest.raises(ScheduleError, match="losses, the number of processes that may end early, "):
        launch(build, 4, "gloo", losses=-1)
    with pytest.raises(ScheduleError, match="at least 1 to restart them"):
        launch(build, 4, "gloo", restart=True)
