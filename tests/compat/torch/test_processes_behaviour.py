"""The behaviour that torch's own tests of schedules on several processes require, on both packages with gloo."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from compat.torch.both import BOTH, LOOPED, ON_A_V, SINGLE, Package, parse, with_waits
from compat.torch.models import Outcome, assert_same, block, blocks, data, grads, held_by, loop, schedule, stages
from penstock.runtime.launch.workers import Workers

both = pytest.mark.parametrize("package", BOTH, ids=repr)
pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def step_here(made: Any, here: list[int], total: int, x: Any, y: Any, **more: Any) -> tuple[Any, list[Tensor]]:
    losses: list[Tensor] = []
    target = {"target": y, "losses": losses} if total - 1 in here else {}
    return made.step(*([x] if 0 in here else []), **target, **more), losses


def forward_only(package: Package, modules: list[nn.Module], x: Tensor) -> Any:
    rank = dist.get_rank()
    made = schedule(package, "_ScheduleForwardOnly", stages(package, [modules[rank]], [rank], 2), 4)
    out = [made.step(*([x] if rank == 0 else [])) for _ in range(3)][-1]
    if rank == 1:
        with pytest.raises(RuntimeError, match="does not support loss computation"):
            made.step(target=x)
    return None if out is None else out.detach()


@both
def test_forward_only(workers: Workers, package: Package) -> None:
    modules, (x, _) = blocks(2), data(8)
    outs = workers.run(forward_only, (package, modules, x), ranks=2)
    assert outs[0] is None
    assert_same(outs[1], nn.Sequential(*modules)(x).detach())


def evaluate(package: Package, name: str, modules: list[nn.Module], x: Tensor, y: Tensor, mode: str) -> tuple[Any, list[Any]]:
    here = held_by(name, dist.get_rank(), 2)
    mine = [modules[k] for k in here]
    made = schedule(package, name, stages(package, mine, here, len(modules)), 4, loss_fn=functional.mse_loss)
    losses: list[Tensor] = []
    target = {"target": y, "losses": losses} if len(modules) - 1 in here else {}
    with {"plain": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]():
        out = made.eval(*([x] if 0 in here else []), **target)
    return (None if out is None else out.clone().detach()), [loss.clone().detach() for loss in losses] + grads(mine)


@both
@pytest.mark.parametrize("mode", ["plain", "no_grad", "inference"])
@pytest.mark.parametrize("name", [*SINGLE, "ScheduleInterleaved1F1B"])
def test_evaluation(workers: Workers, package: Package, name: str, mode: str) -> None:
    modules, (x, y) = blocks(2 if name in SINGLE else 4), data(8)
    found = workers.run(evaluate, (package, name, modules, x, y, mode), ranks=2)
    wanted = loop(modules, x, y, 4)
    out, rest = found[-1]
    assert_same([out, rest[:4]], [wanted.output, wanted.losses])
    assert rest[4:] == [None] * len(rest[4:])


def train(package: Package, name: str, modules: list[nn.Module], x: Any, y: Any, steps: int, returned: bool, scale: bool) -> Outcome:
    here = held_by(name, dist.get_rank(), dist.get_world_size())
    mine = [modules[k] for k in here]
    made = schedule(package, name, stages(package, mine, here, len(modules)), 4, loss_fn=functional.mse_loss, scale_grads=scale)
    out, losses = None, list[Tensor]()
    for _ in range(steps):
        for module in mine:
            module.zero_grad()
        out, losses = step_here(made, here, len(modules), x, y, return_outputs=returned)
    return Outcome(out, losses, grads(mine))


def check_training(found: list[Outcome], name: str, modules: list[nn.Module], x: Tensor, y: Tensor, scale: bool = True) -> None:
    ranks, wanted = len(found), loop(modules, x, y, 4, scale)
    for rank, outcome in enumerate(found):
        here = held_by(name, rank, ranks)
        assert_same(outcome.grads, [wanted.grads[4 * stage + k] for stage in here for k in range(4)])
        if len(modules) - 1 in here:
            assert_same(outcome.losses, wanted.losses)


@both
@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("name", [*SINGLE, "ScheduleInterleaved1F1B"])
def test_outputs_on_request(workers: Workers, package: Package, name: str, returned: bool) -> None:
    modules, (x, y) = blocks(2 if name in SINGLE else 4), data(8)
    found = workers.run(train, (package, name, modules, x, y, 1, returned, True), ranks=2)
    assert found[0].output is None
    assert_same(found[1].output, loop(modules, x, y, 4).output if returned else None)


@both
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("name", [*SINGLE, *LOOPED, *ON_A_V])
def test_gradients_of_manual_stages(workers: Workers, package: Package, name: str, steps: int) -> None:
    modules, (x, y) = blocks(2 if name in SINGLE else 4), data(8)
    scale = steps == 1
    found = workers.run(train, (package, name, modules, x, y, steps, True, scale), ranks=2)
    check_training(found, name, modules, x, y, scale)


@both
@pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_four_ranks(workers: Workers, package: Package, name: str) -> None:
    modules, (x, y) = blocks(4 if name in SINGLE else 8), data(8)
    check_training(workers.run(train, (package, name, modules, x, y, 2, True, True)), name, modules, x, y)


class Keyed(nn.Module):
    """Stages that take a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        out: Tensor = self.inner(x)
        return out if shift is None else out + shift


def with_keywords(package: Package, name: str, modules: list[nn.Module], x: Tensor, y: Tensor, shift: Tensor) -> Outcome:
    here = held_by(name, dist.get_rank(), 2)
    mine = [modules[k] for k in here]
    made = schedule(package, name, stages(package, mine, here, len(modules)), 4, loss_fn=functional.mse_loss)
    out, losses = step_here(made, here, len(modules), x, y, shift=shift)
    return Outcome(out, losses, grads(mine))


@both
@pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_keyword_arguments_of_every_stage(workers: Workers, package: Package, name: str) -> None:
    modules: list[nn.Module] = [Keyed() for _ in range(2 if name in SINGLE else 4)]
    (x, y), shift = data(8), torch.randn(8, 6)
    found = workers.run(with_keywords, (package, name, modules, x, y, shift), ranks=2)
    alone = copy.deepcopy(modules)
    for part in range(4):
        rows = slice(2 * part, 2 * part + 2)
        value = x[rows]
        for module in alone:
            value = module(value, shift[rows])
        (functional.mse_loss(value, y[rows]) / 4).backward()
    for rank, outcome in enumerate(found):
        assert_same(outcome.grads, grads([alone[k] for k in held_by(name, rank, 2)]))


class Three(nn.Module):
    """Three parts; with `skips`, a value goes from the first directly to the last."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.three, self.skips = block(), block(), block(), skips

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        first = self.one(x if shift is None else x + shift)
        out: Tensor = self.three(self.two(first))
        return out + first if self.skips else out


def traced(package: Package, name: str, model: nn.Module, x: Tensor, y: Tensor, cuts: list[str], keyword: bool) -> Any:
    warnings.simplefilter("ignore")
    rank, total = dist.get_rank(), len(cuts) + 1
    example = {"shift": y[:2]} if keyword else None
    where = dict.fromkeys(cuts, package.top.SplitPoint.BEGINNING)
    pipe = package.top.pipeline(model, mb_args=(x[:2],), mb_kwargs=example, split_spec=where)
    stage = pipe.build_stage(rank, CPU)
    made = schedule(package, name, [stage], 4, loss_fn=None if getattr(model, "skips", False) else functional.mse_loss)
    more = {"shift": y} if keyword else {}
    losses: list[Tensor] = []
    target = {"target": y, "losses": losses} if rank == total - 1 and made._loss_fn is not None else {}
    out = made.step(*([x] if rank == 0 else []), **target, **(more if rank == 0 else {}))
    return out, losses, {each: parameter.grad for each, parameter in stage.submod.named_parameters()}


@both
@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("name", SINGLE)
def test_gradients_of_traced_stages(workers: Workers, package: Package, name: str, keyword: bool) -> None:
    model, (x, y) = Three(), data(8)
    cuts = ["two", "three"]
    found = workers.run(traced, (package, name, model, x, y, cuts, keyword), ranks=3)
    alone = copy.deepcopy(model)
    for part in range(4):
        rows = slice(2 * part, 2 * part + 2)
        (functional.mse_loss(alone(x[rows], y[rows] if keyword else None), y[rows]) / 4).backward()
    together = {each: grad for _, _, own in found for each, grad in own.items()}
    assert_same([together[each] for each, _ in alone.named_parameters()], grads([alone]))
    assert_same(found[-1][0], alone(x, y if keyword else None))


@both
@pytest.mark.parametrize("name", SINGLE)
def test_skip_connections_of_traced_stages(workers: Workers, package: Package, name: str) -> None:
    """Forward only: torch's tracing has no backward for them."""
    model, (x, y) = Three(skips=True), data(8)
    found = workers.run(traced, (package, name, model, x, y, ["two", "three"], False), ranks=3)
    assert_same(found[-1][0].detach(), model(x).detach())


ORDERS = {
    "v": ((1, {0: [0, 3], 1: [1, 2]}), ("0F0 . . 3F0 3B0 . . 0B0", ". 1F0 2F0 . . 2B0 1B0 .")),
    "loop": ((1, {0: [0, 2], 1: [1, 3]}), ("0F0 . 2F0 . . 2B0 . 0B0", ". 1F0 . 3F0 3B0 . 1B0 .")),
    "messages": (
        (2, {0: [0], 1: [1]}),
        ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"),
    ),
    "late": (
        (2, {0: [0], 1: [1]}),
        ("0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1", "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1"),
    ),
}


def by_hand(package: Package, order: str, modules: list[nn.Module], x: Tensor, y: Tensor) -> Outcome:
    (count, where), rows = ORDERS[order]
    here = where[dist.get_rank()]
    mine = [modules[k] for k in here]
    schedules = package.schedules
    made = schedules._PipelineScheduleRuntime(
        stages(package, mine, here, len(modules)), count, loss_fn=functional.mse_loss, scale_grads=False
    )
    compute = "SEND" not in rows[0]
    made._prepare_schedule_with_comms(parse(package, *map(with_waits, rows)), format="compute_only" if compute else "compute_comms")
    out, losses = step_here(made, here, len(modules), x, y)
    return Outcome(out, losses, grads(mine))


@both
@pytest.mark.parametrize("order", ORDERS)
def test_handwritten_orders(workers: Workers, package: Package, order: str) -> None:
    (count, where), _ = ORDERS[order]
    modules, (x, y) = blocks(sum(map(len, where.values()))), data(8)
    found = workers.run(by_hand, (package, order, modules, x, y), ranks=2)
    wanted = loop(modules, x, y, count, scale=False)
    for rank, here in where.items():
        assert_same(found[rank].grads, [wanted.grads[4 * stage + k] for stage in here for k in range(4)])
    assert_same(next(each.losses for each in found if each.losses), wanted.losses)


def overlapped(package: Package, modules: list[nn.Module], x: Tensor, y: Tensor) -> tuple[Outcome, int]:
    """A custom function for overlapped actions, which waits for messages and keeps losses as torch's documentation shows."""
    schedules = package.schedules
    here = held_by("ScheduleDualPipeV", dist.get_rank(), 2)
    mine = [modules[k] for k in here]
    made = schedules.ScheduleDualPipeV(stages(package, mine, here, 4), 8, loss_fn=functional.mse_loss, scale_grads=False)
    held, calls = {stage.stage_index: stage for stage in made._stages}, [0]

    def run(action: Any, ctx: Any) -> None:
        calls[0] += 1
        for part in action.sub_actions:
            stage, k, at = held[part.stage_index], part.microbatch_index, part.stage_index
            if part.computation_type == schedules.FORWARD:
                if not stage.is_first and at - 1 not in held:
                    schedules._wait_batch_p2p(made.fwd_recv_ops.pop((at, k)))
                output = stage.forward_one_chunk(k, ctx.arg_mbs[k], ctx.kwarg_mbs[k])
                if stage.is_last:
                    made._internal_losses.append(functional.mse_loss(output, ctx.target_mbs[k]))
                if at + 1 in held:
                    held[at + 1].set_local_fwd_input(output, k)
            else:
                if not stage.is_last and at + 1 not in held:
                    schedules._wait_batch_p2p(made.bwd_recv_ops.pop((at, k)))
                whole = part.computation_type == schedules.FULL_BACKWARD
                made.backward_counter[at] += whole
                stage.backward_one_chunk(k, loss=made._maybe_get_loss(stage, k), full_backward=whole)
                if at - 1 in held:
                    held[at - 1].set_local_bwd_input(stage.get_local_bwd_output(k), k)

    made.register_custom_function(schedules.OVERLAP_F_B, run)
    out, losses = step_here(made, here, 4, x, y)
    return Outcome(out, losses, grads(mine)), calls[0]


@both
def test_custom_overlaps(workers: Workers, package: Package) -> None:
    modules, (x, y) = blocks(4), data(16)
    found = workers.run(overlapped, (package, modules, x, y), ranks=2)
    wanted = loop(modules, x, y, 8, scale=False)
    for rank, (outcome, calls) in enumerate(found):
        assert calls > 0
        here = held_by("ScheduleDualPipeV", rank, 2)
        assert_same(outcome.grads, [wanted.grads[4 * stage + k] for stage in here for k in range(4)])
    assert_same(found[0][0].losses, wanted.losses)


def learn(package: Package, name: str, modules: list[nn.Module], batches: list[Any]) -> list[Tensor]:
    here = held_by(name, dist.get_rank(), 2)
    mine = [modules[k] for k in here]
    made = schedule(package, name, stages(package, mine, here, len(modules)), 4, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD([p for module in mine for p in module.parameters()], 0.1)
    for x, y in batches:
        optimizer.zero_grad()
        step_here(made, here, len(modules), x, y)
        optimizer.step()
    return [parameter.detach() for module in mine for parameter in module.parameters()]


@both
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_models_learn(workers: Workers, package: Package, name: str) -> None:
    modules, batches = blocks(2 if name in SINGLE else 4), [data(8) for _ in range(5)]
    found = workers.run(learn, (package, name, modules, batches), ranks=2)
    alone = copy.deepcopy(modules)
    optimizer = torch.optim.SGD([p for module in alone for p in module.parameters()], 0.1)
    for x, y in batches:
        optimizer.zero_grad()
        functional.mse_loss(nn.Sequential(*alone)(x), y).backward()
        optimizer.step()
    for rank, mine in enumerate(found):
        assert_same(mine, [parameter.detach() for k in held_by(name, rank, 2) for parameter in alone[k].parameters()])


def mixed(of_stages: Package, of_schedules: Package, name: str, modules: list[nn.Module], x: Tensor, y: Tensor) -> Outcome:
    here = held_by(name, dist.get_rank(), 2)
    mine = [modules[k] for k in here]
    made = schedule(of_schedules, name, stages(of_stages, mine, here, len(modules)), 4, loss_fn=functional.mse_loss)
    out, losses = None, list[Tensor]()
    for _ in range(2):
        for module in mine:
            module.zero_grad()
        out, losses = step_here(made, here, len(modules), x, y)
    return Outcome(out, losses, grads(mine))


@pytest.mark.parametrize("theirs", ["stages", "schedule"])
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_stages_of_one_package_under_a_schedule_of_the_other(workers: Workers, name: str, theirs: str) -> None:
    modules, (x, y) = blocks(2 if name in SINGLE else 4), data(8)
    packages = BOTH if theirs == "stages" else BOTH[::-1]
    check_training(workers.run(mixed, (*packages, name, modules, x, y), ranks=2), name, modules, x, y)
