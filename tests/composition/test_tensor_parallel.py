"""Tensor-parallel stages: each process sends its part to its counterpart in the next stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional

from composition.parallel import Outcome, check, mesh_of, schedule, split_over
from penstock.errors import PipelineError
from penstock.ir.graph import StageGraph
from penstock.ir.kind import Kind
from penstock.runtime import Pipeline
from penstock.runtime.launch.workers import Workers
from penstock.runtime.split_backward.deferral import Deferral, GradientAdder
from runtime.models import by_batch

WIDTH, LENGTH = 8, 4


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Bare(Perceptron):
    """Ends in an asynchronous collective without a wait."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Led(Perceptron):
    """Begins with a map whose input gradient is a pending sum over processes, and ends in one that every process has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.norm(self.down(torch.tanh(self.up(x)))))


def layers(count: int, kind: type[nn.Module] = Perceptron) -> nn.Sequential:
    return nn.Sequential(*(kind() for _ in range(count))).double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, LENGTH, WIDTH).double(), torch.randn(rows, LENGTH, WIDTH).double()


def in_full(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Plain tensors in full between layers."""
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def in_full_as_parts(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Tensors between layers that know that every process has all of them."""
    for layer in model:
        plan = {
            "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
        }
        parallelize_module(layer, mesh["tp"], plan)
        for part in (layer.norm, getattr(layer, "first", layer.norm)):
            for name, parameter in list(part.named_parameters()):
                if not isinstance(parameter, DTensor):
                    part.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh["tp"], [Replicate()])))
    parallelize_module(model[0], mesh["tp"], PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()))


def along_the_sequence(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Tensors in parts between layers, split along the sequence."""
    for layer in model:
        plan = {
            "norm": SequenceParallel(use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(layer, mesh["tp"], plan)
    parallelize_module(model[0], mesh["tp"], PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)))


def mean_loss(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(output.full_tensor() if isinstance(output, DTensor) else output, target)


@pytest.mark.parametrize(
    ("name", "plan", "kind"),
    [
        ("1f1b", in_full, Perceptron),
        ("zbv", in_full, Perceptron),
        ("1f1b", in_full, Bare),
        ("zbv", in_full, Bare),
        ("dualpipe-v", in_full, Bare),
        ("1f1b", in_full_as_parts, Bare),
        ("zbv", in_full_as_parts, Perceptron),
        ("dualpipe-v", in_full_as_parts, Perceptron),
        ("dualpipe-v", in_full_as_parts, Bare),
        ("dualpipe-v", in_full_as_parts, Led),
        ("zbv", in_full_as_parts, Led),
        ("gpipe", along_the_sequence, Perceptron),
        ("interleaved-zb", along_the_sequence, Perceptron),
        ("zbv", along_the_sequence, Perceptron),
        ("dualpipe-v", along_the_sequence, Bare),
    ],
)
def test_numbers_and_waiting_weights(workers: Workers, name: str, plan: Any, kind: type[nn.Module]) -> None:
    """Gradients equal those of the whole model; with a split backward, those of the sharded maps are deferred."""
    made = schedule(name, 2)
    model, (x, y) = layers(made.stages, kind), batch(13)

    def train() -> Any:
        mesh, mine = mesh_of(pp=2, tp=2), copy.deepcopy(model)
        plan(mine, mesh)
        pipe = Pipeline(mine, made, loss_fn=mean_loss, mesh=mesh)
        waited, run = [0], Deferral.run

        def counting(self: Deferral, fused: bool = False) -> Any:
            waited[0] += len(self.operators)
            return run(self, fused)

        Deferral.run = counting
        try:
            result = pipe.step(x, target=y, outputs=True)
        finally:
            Deferral.run = run
        parts = [part for action in pipe.program()[pipe.rank] for part in action.parts]
        return waited[0], sum(part.kind is Kind.I for part in parts), result.outputs, Outcome.of(pipe, result)

    found = workers.run(train)
    check([outcome for *_, outcome in found], by_batch(model, x, y))
    with torch.no_grad():
        whole = model(x)
    for waited, split, outputs, _ in found:
        assert waited == (3 if kind is Led else 2) * split  # the stage's maps
        assert (split > 0) == (name not in ("1f1b", "gpipe"))
        torch.testing.assert_close(outputs, whole, rtol=1e-12, atol=1e-12)


class Joined(Perceptron):
    """Also reads a stage that is not a neighbour."""

    def forward(self, x: Tensor, farther: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + farther)


class Skipping(nn.Sequential):
    """Four layers of which the third reads the first."""

    def forward(self, x: Tensor) -> Tensor:
        first = self[0](x)
        return self[3](self[2](self[1](first), first))  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", [in_full, in_full_as_parts, along_the_sequence])
def test_parts_that_two_stages_of_a_rank_read(workers: Workers, plan: Any) -> None:
    """On a V of two ranks stages 1 and 2 read stage 0 by one message, and send back one sum."""
    made = schedule("zbv", 2).with_graph(StageGraph.chain(4, [(0, 2)]))
    whole, (x, y) = Skipping(Perceptron(), Perceptron(), Joined(), Perceptron()).double(), batch(13)
    model = nn.Sequential(*whole)

    def train() -> Any:
        mesh, mine = mesh_of(pp=2, tp=2), copy.deepcopy(model)
        plan(mine, mesh)
        pipe = Pipeline(mine, made, loss_fn=mean_loss, mesh=mesh)
        result = pipe.step(x, target=y)
        return pipe.rank, [str(action) for action in pipe.program()[pipe.rank] if action.kind is Kind.SEND_B], Outcome.of(pipe, result)

    found = workers.run(train)
    assert {text for rank, sends, _ in found if rank == 1 for text in sends} == {f"2SEND_B{m}>0" for m in range(made.microbatches)}
    check([outcome for *_, outcome in found], by_batch(whole, x, y))


@pytest.mark.parametrize(
    ("name", "shard", "plan"), [("zbv", False, in_full), ("1f1b", True, along_the_sequence), ("zbv", True, along_the_sequence)]
)
def test_together_with_data_parallelism(workers: Workers, name: str, shard: bool, plan: Any) -> None:
    made = schedule(name, 1)
    model, (x, y) = layers(made.stages), batch(13)

    def train() -> Outcome:
        mesh, mine = mesh_of(pp=1, dp=2, tp=2), copy.deepcopy(model)
        plan(mine, mesh)
        pipe = Pipeline(mine, made, loss_fn=mean_loss, mesh=mesh, shard=shard)
        part, target = split_over(mesh, x, y, (6, 7))
        for _ in range(2):  # gradients accumulate
            result = pipe.step(part, target=target)
        for parameter in pipe.parameters():
            parameter.grad /= 2
        return Outcome.of(pipe, result)

    check(workers.run(train), by_batch(model, x, y))


@pytest.mark.parametrize("norm", [1.0, float("inf")])
def test_clipping(workers: Workers, norm: float) -> None:
    """Of all stages and of all parts, each once."""
    model, (x, y) = layers(2), batch(8)

    def train() -> Any:
        mesh, mine = mesh_of(pp=2, tp=2), copy.deepcopy(model)
        along_the_sequence(mine, mesh)
        pipe = Pipeline(mine, schedule("1f1b", 2), loss_fn=mean_loss, mesh=mesh)
        pipe.step(x, target=y)
        before = pipe.clip_grad_norm_(0.01, norm)
        return float(before), {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in pipe.local_parameters()}

    functional.mse_loss(model(x), y).backward()
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm))
    for before, grads in workers.run(train):
        assert before == pytest.approx(wanted, rel=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


class Elsewhere(nn.Module):
    """Puts its output on another mesh than the pipeline's."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.map, self.mesh = nn.Linear(WIDTH, WIDTH).double(), mesh

    def forward(self, x: Tensor) -> Tensor:
        return DTensor.from_local(self.map(x), self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)


@pytest.mark.matrix(family="1f1b", feature="tensor parallel between different meshes", refused=True)
@pytest.mark.parametrize("which", ["without names", "of other processes"])
def test_different_meshes_are_refused(workers: Workers, which: str) -> None:
    def train() -> str:
        mesh = mesh_of(pp=2, tp=2)
        pairs = [[0, 1], [2, 3]]
        other = {
            "without names": lambda: DeviceMesh("cpu", pairs),
            "of other processes": lambda: DeviceMesh("cpu", pairs, mesh_dim_names=("tp", "pp"))["tp"],
        }[which]()
        model = [Elsewhere(other), nn.Linear(WIDTH, WIDTH).double()]
        pipe = Pipeline(model, schedule("1f1b", 2), loss_fn=mean_loss, mesh=mesh)
        with pytest.raises(PipelineError) as caught:
            pipe.step(*batch(8)[:1], target=batch(8)[1])
        return str(caught.value)

    for text in workers.run(train):
        assert "a stage returns a tensor over processes" in text
        assert "which are not those along dimensions of the pipeline's mesh (pp=2, tp=2)" in text


def test_without_a_mesh_parts_are_refused(workers: Workers) -> None:
    def train() -> str:
        mesh = mesh_of(pp=2, tp=2)
        model = [Elsewhere(mesh["tp"]), nn.Linear(WIDTH, WIDTH).double()]
        pipe = Pipeline(model, schedule("1f1b", 2), loss_fn=mean_loss, group=mesh["pp"])
        with pytest.raises(PipelineError) as caught:
            pipe.step(*batch(8)[:1], target=batch(8)[1])
        return str(caught.value)

    assert all("a DTensor, which cannot be sent as it is: give the pipeline the mesh=" in text for text in workers.run(train))


def test_gradients_that_autograd_and_the_split_backward_lay_out_differently(workers: Workers) -> None:
    """Autograd leaves a sum over processes open; a weight that waited has its gradient laid out as itself."""

    def add() -> tuple[str, Tensor]:
        mesh = mesh_of(tp=2)
        weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
        weight.grad = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
        batch = GradientAdder()
        with torch.no_grad():
            batch.add(weight, distribute_tensor(torch.full((4, 2), 3.0), mesh, [Shard(0)]))
            batch.flush()
        return str(weight.grad.placements), weight.grad.full_tensor()

    for placements, total in workers.run(add, ranks=2):
        assert placements == str((Shard(0),))
        assert torch.equal(total, torch.full((4, 2), 5.0))
