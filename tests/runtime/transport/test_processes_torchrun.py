"""In processes that are there already: those of `torchrun`, and groups of some of them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.errors import PenstockError
from penstock.runtime import Pipeline
from penstock.runtime.launch.workers import Workers

pytestmark = pytest.mark.slow

START = """
import os, sys
import torch
from torch import nn
from torch.nn import functional
from penstock.errors import PenstockError
from penstock.runtime import Pipeline, launch, rank

def model(stages, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(stages))).double()

def batch(seed=1, rows=10):
    torch.manual_seed(seed)
    return torch.randn(rows, 6).double()

def grads(pipe):
    return {name: parameter.grad for name, parameter in pipe.local_parameters()}

def tell(**values):
    torch.save(values, f"{sys.argv[1]}/{os.environ['RANK']}.pt")
"""


def run(body: str, processes: int, folder: Path) -> list[dict[str, Any]]:
    """Run a script on so many processes; what each tells. It must end well, and print nothing."""
    script = folder / "script.py"
    script.write_text(START + textwrap.dedent(body))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return [torch.load(folder / f"{each}.pt") for each in range(processes)]


def whole(stages: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(stages))).double()


def wanted(model: nn.Module, *seeds: int, rows: int = 10) -> dict[str, torch.Tensor]:
    """Gradients of the whole batch, for each seed one, added up."""
    for seed in seeds:
        torch.manual_seed(seed)
        x = torch.randn(rows, 6).double()
        functional.mse_loss(model(x), x).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_grads(found: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    assert {name for theirs in found for name in theirs} == set(expected)
    for theirs in found:
        for name, grad in theirs.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14)


def test_pipeline_and_launch(tmp_path: Path) -> None:
    """A pipeline joins the existing processes; `launch` calls the function in each and returns all results to all of them."""
    found = run(
        """
        before = rank()
        pipe = Pipeline(model(4), schedule="zbv", microbatches=4, loss_fn=functional.mse_loss)
        x = batch()
        loss = pipe.step(x, target=x).loss

        def train(seed):
            pipe = Pipeline(model(2), schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss)
            y = batch(seed)
            return rank(), os.getpid(), float(pipe.step(y, target=y).loss), grads(pipe)

        launched = launch(train, 2, backend="gloo", args=(5,))
        try:
            launch(train, 3, backend="gloo", args=(5,))
        except PenstockError as error:
            refused = str(error)
        virtual = launch(lambda: rank(), 3)  # threads of this process, in any case
        losses = [loss, pipe.step(x, target=x).loss]
        tell(ranks=[before, rank()], pid=os.getpid(), losses=losses, grads=grads(pipe), launched=launched, refused=refused, virtual=virtual)
        """,
        2,
        tmp_path,
    )
    torch.manual_seed(1)
    x = torch.randn(10, 6).double()
    loss = functional.mse_loss(whole(4)(x), x).detach()
    for mine, told in enumerate(found):
        assert told["ranks"] == [mine, mine]
        for found_loss in told["losses"]:
            torch.testing.assert_close(found_loss, loss, rtol=1e-12, atol=0)
        assert [(each, pid) for each, pid, _, _ in told["launched"]] == [(each, found[each]["pid"]) for each in range(2)]
        assert told["refused"] == "launch for 3 ranks, but there are 2 processes: start as many"
        assert told["virtual"] == [0, 1, 2]
    assert_grads([told["grads"] for told in found], wanted(whole(4), 1, 1))
    assert_grads([grads for _, _, _, grads in found[0]["launched"]], wanted(whole(2), 5))


def test_groups_of_a_device_mesh(workers: Workers) -> None:
    """Two pipelines side by side, each on a row of the mesh and with data of its own; their gradients are averaged across.

    A group of processes will do as well; one that a process is not in, or a mesh of several dimensions, is refused.
    """

    def train() -> dict[str, Any]:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        def batch(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            return torch.randn(10, 6).double()

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        row = mesh["dp"].get_local_rank()
        pipe = Pipeline(whole(4), schedule="interleaved-zb", microbatches=4, loss_fn=functional.mse_loss, group=mesh["pp"])
        x = batch(10 + row)
        for _ in range(2):
            loss = pipe.step(x, target=x).loss
        for parameter in pipe.parameters():
            dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
        refused: list[Any] = []
        for group in (mesh, dist.new_group([1, 3])):
            try:
                pair = Pipeline(whole(2), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, group=group)
                refused.append(float(pair.step(batch(2), target=batch(2)).loss))
            except PenstockError as error:
                refused.append(str(error))
        grads = {name: parameter.grad for name, parameter in pipe.local_parameters()}
        return {"rank": pipe.rank, "row": row, "loss": loss, "grads": grads, "refused": refused}

    found = workers.run(train)
    assert [(told["row"], told["rank"]) for told in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert_grads([told["grads"] for told in found], wanted(whole(4), 10, 10, 11, 11))
    assert torch.equal(found[0]["loss"], found[1]["loss"])
    assert not torch.equal(found[0]["loss"], found[2]["loss"])
    torch.manual_seed(2)
    x = torch.randn(10, 6).double()
    loss = functional.mse_loss(whole(2)(x), x)
    for mine, told in enumerate(found):
        assert told["refused"][0] == "a device mesh of 2 dimensions: give the pipeline's own, mesh['pp'] say"
        if mine % 2:
            assert told["refused"][1] == pytest.approx(float(loss.detach()), rel=1e-12)
        else:
            assert told["refused"][1] == f"process {mine} is not in the group that it was given for the pipeline"
