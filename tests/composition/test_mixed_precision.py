"""Autocast, parameters in bfloat16, sums in float32, and scaled losses: the numbers of the unpipelined run with the same."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import penstock as ps
from composition.parallel import WIDTH, Sided, batch, full, mesh_of, perceptrons, schedule, split_over
from penstock.errors import ScheduleError
from penstock.runtime import GradScaler, Pipeline, launch
from penstock.runtime.launch.workers import Workers
from runtime.models import assert_equal

NAMES = ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "zbv"]
"""All of them sum each stage's gradients in the order of microbatches."""
HALF = torch.bfloat16


class Exact(nn.Module):
    """A product that autocast must leave alone, in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x + torch.tanh(x.float() @ self.weight)


def layers(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(layer, Exact()) for layer in perceptrons(count, torch.float32)))


def loop(model: nn.Module, x: Tensor, y: Tensor, *, cast: bool, scale: float = 1.0) -> dict[str, Tensor]:
    """The microbatch loop, each backward outside of autocast."""
    model = copy.deepcopy(model)
    for one, other in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
        with torch.autocast("cpu", HALF, enabled=cast):
            loss = functional.mse_loss(model(one), other)
        torch.autograd.backward(loss, torch.full_like(loss, len(one) / len(x) * scale))
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_autocast_to_the_last_bit(name: str) -> None:
    """Every gradient is that of the loop, though the whole step is inside of autocast: backwards run outside."""
    model, (x, y) = layers(schedule(name, 2).stages), batch(13, torch.float32)
    wanted = loop(model, x, y, cast=True)
    plain = loop(model, x, y, cast=False)
    mine = copy.deepcopy(model)

    def train() -> None:
        with torch.autocast("cpu", HALF):
            Pipeline(mine, schedule(name, 2), loss_fn=functional.mse_loss).step(x, target=y)

    launch(train, ranks=2)
    for key, grad in wanted.items():
        assert_equal(mine.get_parameter(key).grad, grad, key)
    assert any(not torch.equal(wanted[key], plain[key]) for key in wanted)


def test_autocast_inside_of_an_overlap() -> None:
    """A forward and a backward that run as one action: the forward inside, the backward outside."""
    model, (x, y) = layers(4), batch(16, torch.float32)
    wanted, mine = loop(model, x, y, cast=True), copy.deepcopy(model)
    seen = []

    def overlap(action: Any, parts: Any) -> None:
        seen.append(torch.is_autocast_enabled("cpu"))
        for part in parts:
            part()

    def train() -> None:
        with torch.autocast("cpu", HALF):
            Pipeline(mine, schedule("dualpipe-v", 2), loss_fn=functional.mse_loss, overlap=overlap).step(x, target=y)

    launch(train, ranks=2)
    assert seen
    assert all(seen)
    for key, grad in wanted.items():
        assert_equal(mine.get_parameter(key).grad, grad, key)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_in_bfloat16(name: str) -> None:
    """Gradients equal those of the loop in bfloat16, to the last bit."""
    model, (x, y) = perceptrons(schedule(name, 2).stages, HALF), batch(13, HALF)
    wanted, mine = loop(model, x, y, cast=False), copy.deepcopy(model)
    launch(lambda: Pipeline(mine, schedule(name, 2), loss_fn=functional.mse_loss).step(x, target=y), ranks=2)
    for key, grad in wanted.items():
        assert_equal(mine.get_parameter(key).grad, grad, key)


def summed(model: nn.Module, x: Tensor, y: Tensor, pieces: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Each microbatch's gradients in bfloat16, added up in higher precision."""
    totals: dict[str, Tensor] = {}
    for one, other in zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True):
        again = copy.deepcopy(model)
        loss = functional.mse_loss(again(one), other)
        torch.autograd.backward(loss, torch.full_like(loss, len(one) / len(x)))
        for key, parameter in again.named_parameters():
            grad = parameter.grad.to(dtype)
            totals[key] = totals[key] + grad if key in totals else grad
    return totals


@pytest.mark.parametrize("name", NAMES)
def test_sums_in_float32(name: str) -> None:
    """Gradients of many microbatches are summed in float32 and rounded once; over steps they are summed in the parameters' dtype."""
    made = ps.schedule(name, ranks=2, microbatches=16)
    model, (x, y) = perceptrons(made.stages, HALF), batch(32, HALF)
    mine, plain = copy.deepcopy(model), copy.deepcopy(model)

    def train(stages: nn.Module, steps: int, dtype: torch.dtype | None) -> None:
        pipe = Pipeline(stages, made, loss_fn=functional.mse_loss, accumulate_dtype=dtype)
        for _ in range(steps):
            pipe.step(x, target=y)

    launch(train, ranks=2, args=(mine, 1, torch.float32))
    launch(train, ranks=2, args=(plain, 1, None))
    totals = summed(model, x, y, 16)
    for key, total in totals.items():
        assert_equal(mine.get_parameter(key).grad, total.to(HALF), key)

    def error(found: nn.Module) -> float:
        return sum(float((found.get_parameter(key).grad.float() - total).abs().sum()) for key, total in totals.items())

    assert error(mine) < error(plain)
    launch(train, ranks=2, args=(mine, 1, torch.float32))
    for key, total in totals.items():
        assert_equal(mine.get_parameter(key).grad, total.to(HALF) + total.to(HALF), key)


@pytest.mark.parametrize(("name", "shard"), [("1f1b", False), ("zbv", True)], ids=["replicate", "FSDP2"])
def test_sums_in_float32_over_data_ranks(workers: Workers, name: str, shard: bool) -> None:
    """Microbatches and data ranks in float32, then rounded once: by ours for copies, by the policy's reduce_dtype for shards."""
    made = schedule(name, 2)
    model, (x, y) = perceptrons(made.stages, HALF), batch(16, HALF)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    def train() -> dict[str, Tensor]:
        mesh = mesh_of(pp=2, dp=2)
        options = {"shard": partial(fully_shard, mp_policy=policy)} if shard else {}
        pipe = Pipeline(copy.deepcopy(model), made, loss_fn=functional.mse_loss, mesh=mesh, accumulate_dtype=torch.float32, **options)
        mine, target = split_over(mesh, x, y, (8, 8))
        pipe.step(mine, target=target)
        return {key: full(parameter.grad) for key, parameter in pipe.local_parameters()}

    totals = summed(model, x, y, 8)
    for theirs in workers.run(train):
        for key, grad in theirs.items():
            assert grad.dtype is HALF
            # Sums of the two data ranks in another order, so that a value between two of bfloat16 may be rounded to the other.
            torch.testing.assert_close(grad.float(), totals[key], rtol=2**-8, atol=1e-6, msg=key)
            assert float((grad == totals[key].to(HALF)).float().mean()) > 0.9, key


@pytest.mark.parametrize("name", ["1f1b", "zbv", "chimera"])
def test_gradients_in_the_dtype_that_their_parameters_name(workers: Workers, name: str) -> None:
    """`grad_dtype` of torch: parameters in bfloat16 whose gradients autograd keeps in float32, over data ranks and copies of a stage."""
    made = schedule(name, 2)
    model, (x, y) = perceptrons(made.stages, HALF), batch(16, HALF)

    def train() -> dict[str, Tensor]:
        mesh, mine = mesh_of(pp=2, dp=2), copy.deepcopy(model)
        for parameter in mine.parameters():
            parameter.grad_dtype = torch.float32
        pipe = Pipeline(mine, made, loss_fn=functional.mse_loss, mesh=mesh)
        part, target = split_over(mesh, x, y, (8, 8))
        pipe.step(part, target=target)
        return {key: parameter.grad for key, parameter in pipe.local_parameters()}

    totals = summed(model, x, y, 8)
    for theirs in workers.run(train):
        for key, grad in theirs.items():
            torch.testing.assert_close(grad, totals[key], rtol=1e-5, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", ["chimera", "dualpipe"])
def test_sums_in_float64_over_data_ranks_and_copies(workers: Workers, name: str) -> None:
    """Microbatches, data ranks and both copies of a stage, then rounded once; in double no sum depends on its order."""
    made = schedule(name, 2)
    model, (x, y) = perceptrons(made.stages, HALF), batch(16, HALF)

    def train() -> dict[str, Tensor]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), made, loss_fn=functional.mse_loss, mesh=mesh, accumulate_dtype=torch.float64)
        mine, target = split_over(mesh, x, y, (8, 8))
        pipe.step(mine, target=target)
        return {key: parameter.grad for key, parameter in pipe.local_parameters()}

    totals = summed(model, x, y, 8, torch.float64)
    for theirs in workers.run(train):
        for key, grad in theirs.items():
            assert_equal(grad, totals[key].to(HALF), key)


def test_sharding_with_a_mixed_precision_policy(workers: Workers) -> None:
    """Parameters in float32, computed with in bfloat16, gradients summed in float32: those of the loop under the same rule."""
    made = schedule("zbv", 2)
    model, (x, y) = perceptrons(made.stages, torch.float32), batch(16, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32, output_dtype=torch.float32)

    def train() -> dict[str, Tensor]:
        mesh = mesh_of(pp=2, dp=2)
        pipe = Pipeline(copy.deepcopy(model), made, loss_fn=functional.mse_loss, mesh=mesh, shard=partial(fully_shard, mp_policy=policy))
        mine, target = split_over(mesh, x, y, (8, 8))
        pipe.step(mine, target=target)
        return {key: full(parameter.grad) for key, parameter in pipe.local_parameters()}

    class Rounded(nn.Module):
        """A layer computed in bfloat16, with float32 outside."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner.to(HALF)

        def forward(self, value: Tensor) -> Tensor:
            return self.inner(value.to(HALF)).float()

    totals = summed(nn.Sequential(*map(Rounded, copy.deepcopy(model))), x, y, 8)
    for theirs in workers.run(train):
        for key, grad in theirs.items():
            number, rest = key.split(".", 1)
            assert grad.dtype is torch.float32
            torch.testing.assert_close(grad, totals[f"{number}.inner.{rest}"], rtol=1e-5, atol=1e-7, msg=key)


def test_sums_that_the_policy_does_not_give_are_refused(workers: Workers) -> None:
    def build() -> None:
        mesh = mesh_of(pp=2, dp=2)
        with pytest.raises(ScheduleError, match=r"sharded with reduce_dtype=None.*MixedPrecisionPolicy\(reduce_dtype=torch.float32\)"):
            Pipeline(perceptrons(2, HALF), schedule("1f1b", 2), mesh=mesh, shard=True, accumulate_dtype=torch.float32)

    workers.run(build)


# Scaled losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_scaled_steps(name: str) -> None:
    """Gradients, of side losses too, are scaled until they are unscaled; losses never are. A power of two leaves every bit."""
    made = schedule(name, 2)
    model, (x, y) = nn.Sequential(*(Sided() for _ in range(made.stages))), batch(13, torch.float32)
    plain, mine = copy.deepcopy(model), copy.deepcopy(model)

    def train(stages: nn.Module, scale: float) -> tuple[Tensor, float, float]:
        pipe = Pipeline(stages, made, loss_fn=functional.mse_loss)
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        scaler = GradScaler(pipe, init_scale=scale, enabled=scale != 1.0)
        loss = pipe.step(x, target=y).loss
        before = float(next(iter(pipe.parameters())).grad.norm())
        scaler.unscale_(optimizer)
        after = float(next(iter(pipe.parameters())).grad.norm())
        pipe.clip_grad_norm_(0.05)
        scaler.step(optimizer)
        scaler.update()
        return loss, before, after

    for (loss, before, after), (other, big, small) in zip(
        launch(train, ranks=2, args=(plain, 1.0)), launch(train, ranks=2, args=(mine, 4096.0)), strict=True
    ):
        assert_equal(loss, other)
        assert before == after == small
        assert big == pytest.approx(4096 * before, rel=1e-6)
    for key, parameter in plain.named_parameters():
        assert_equal(mine.get_parameter(key).detach(), parameter.detach(), key)


@pytest.mark.parametrize(("victim", "fused", "shard"), [(0, False, False), (3, True, False), (3, False, True), (0, True, True)])
def test_found_by_one_process_skipped_by_all(workers: Workers, victim: int, fused: bool, shard: bool) -> None:
    """A gradient that is not finite on one stage of one data rank, also with an optimizer that unscales by itself."""
    model, (x, y) = perceptrons(2, torch.float32), batch(13, torch.float32)

    def train() -> Any:
        mesh, mine = mesh_of(pp=2, dp=2), copy.deepcopy(model)
        pipe = Pipeline(mine, schedule("1f1b", 2), loss_fn=functional.mse_loss, mesh=mesh, shard=shard)
        optimizer = torch.optim.Adam(pipe.parameters(), 0.1, fused=fused)
        scaler = GradScaler(pipe, init_scale=256.0, growth_interval=2)
        part, target = split_over(mesh, x, y, (6, 7))
        before, moved, scales = [full(p.detach()) for p in pipe.parameters()], [], []
        for number in range(4):
            pipe.step(part, target=target)
            if number == 1 and mesh.get_rank() == victim:
                grad = next(iter(pipe.parameters())).grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            now = [full(p.detach()) for p in pipe.parameters()]
            moved.append(any(not torch.equal(one, other) for one, other in zip(before, now, strict=True)))
            before = now
            scales.append(scaler.get_scale())
        assert all(bool(p.isfinite().all()) for p in before)
        return moved, scales

    for moved, scales in workers.run(train):
        assert moved == [True, False, True, True]
        assert scales == [256.0, 128.0, 128.0, 256.0]


def test_sparse_gradients_are_unscaled() -> None:
    """An embedding whose gradient holds one row twice: coalesced before the sum of the rows is checked for infinities."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.Linear(5, 5))
    x, y = torch.tensor([1, 3, 3, 6]), torch.randn(4, 5)
    functional.mse_loss(model(x), y).backward()
    expected = {key: parameter.grad.to_dense() for key, parameter in model.named_parameters()}

    def train() -> dict[str, Tensor]:
        pipe = Pipeline(copy.deepcopy(model), schedule("1f1b", 2), microbatches=2, loss_fn=functional.mse_loss)
        scaler = GradScaler(pipe, init_scale=1024.0)
        pipe.step(x, target=y)
        scaler.unscale_(torch.optim.SGD(pipe.parameters(), 0.1))
        return {key: parameter.grad.to_dense() for key, parameter in pipe.local_parameters()}

    for grads in launch(train, ranks=2):
        for key, grad in grads.items():
            torch.testing.assert_close(grad, expected[key], msg=key)


def test_scaler_state_travels() -> None:
    def train() -> dict[str, Any]:
        pipe = Pipeline(perceptrons(2, torch.float32), schedule("1f1b", 2), loss_fn=functional.mse_loss)
        scaler = GradScaler(pipe, init_scale=512.0)
        again = GradScaler(pipe, init_scale=2.0)
        again.load_state_dict(scaler.state_dict())
        assert again.get_scale() == 512.0
        assert pipe.scaler is again
        return again.state_dict()

    one, other = launch(train, ranks=2)
    assert one == other


def test_scalers_that_disagree() -> None:
    def train() -> None:
        from penstock.runtime import rank

        pipe = Pipeline(perceptrons(2, torch.float32), schedule("1f1b", 2), loss_fn=functional.mse_loss)
        with pytest.raises(ScheduleError, match="the ranks give their gradient scalers different options"):
            GradScaler(pipe, init_scale=2.0 ** rank())

    launch(train, ranks=2)


def test_parameters_in_float16_cannot_be_unscaled() -> None:
    def train() -> None:
        pipe = Pipeline(perceptrons(2, torch.float16), schedule("1f1b", 2), loss_fn=functional.mse_loss)
        scaler = GradScaler(pipe, init_scale=2.0)
        pipe.step(batch(8, torch.float16)[0], target=batch(8, torch.float16)[1])
        with pytest.raises(ScheduleError, match="gradients of float16 parameters cannot be unscaled"):
            scaler.unscale_(torch.optim.SGD(pipe.parameters(), 0.1))

    launch(train, ranks=2)
