"""Ranks as processes: the same script on both packages, compared with a plain loop over microbatches."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from compat.torch.both import BOTH, LOOPED, ON_A_V, OURS, SINGLE, TORCH, VERSION, Package, later, parse
from compat.torch.models import Outcome, assert_same, blocks, data, grads, held_by, loop, schedule, stages
from penstock.runtime.launch.workers import Workers

pytestmark = pytest.mark.slow


def feed(made: Any, here: Sequence[int], total: int, x: Any, y: Any, **more: Any) -> tuple[Any, list[Tensor]]:
    """Run one step: pass the batch on the rank of the first stage, the target on the rank of the last."""
    losses: list[Tensor] = []
    args = (x,) if 0 in here else ()
    target = {"target": y, "losses": losses} if total - 1 in here else {}
    return made.step(*args, **target, **more), losses


def train(package: Package, name: str, modules: list[nn.Module], batches: Any, count: int, options: dict[str, Any]) -> Outcome:
    """Run steps over batches on one rank; return the last output and losses, and the accumulated gradients."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = held_by(name, rank, ranks)
    mine = [modules[k] for k in here]
    made = schedule(package, name, stages(package, mine, here, len(modules)), count, **{"loss_fn": functional.mse_loss, **options})
    found = Outcome()
    for x, y in batches:
        found.output, found.losses = feed(made, here, len(modules), x, y)
    found.grads = grads(mine)
    return found


def together(found: Sequence[Outcome], name: str, ranks: int, total: int) -> Outcome:
    """Combine the results of all ranks."""
    whole = Outcome()
    by_stage: dict[int, list[Any]] = {}
    for rank, each in enumerate(found):
        here = held_by(name, rank, ranks)
        size = len(each.grads) // len(here)
        by_stage |= {stage: each.grads[k * size : (k + 1) * size] for k, stage in enumerate(here)}
        if each.losses:
            whole.output, whole.losses = each.output, each.losses
    whole.grads = [grad for stage in range(total) for grad in by_stage[stage]]
    return whole


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*SINGLE, *LOOPED, *ON_A_V])
def test_the_same_script_on_both_packages(workers: Workers, name: str, ranks: int) -> None:
    total = ranks if name in SINGLE else 2 * ranks
    modules, batch = blocks(total), data(16)
    for scale in (True, False) if ranks == 2 else (True,):
        outcomes = [
            together(workers.run(train, (package, name, modules, [batch], 8, {"scale_grads": scale}), ranks=ranks), name, ranks, total)
            for package in BOTH
        ]
        assert_same(outcomes[1], outcomes[0])
        assert_same(outcomes[1], loop(modules, *batch, 8, scale))


OPTIONS = {"defer_reduce_grad_wait": True, "unshard_lookahead": "auto", "max_active_stages": 2}


@pytest.mark.parametrize("defer_pp_recv", [False, True])
@pytest.mark.parametrize("name", [*LOOPED, *ON_A_V])
def test_waits_between_ranks(workers: Workers, name: str, defer_pp_recv: bool) -> None:
    """With the options of torch 2.15 a rank waits for its sends, and releases their outputs, in the midst of a step."""
    modules, batch = blocks(4), data(16)
    limit = 8 if defer_pp_recv else 3  # late receives need more sends under way
    options = {**OPTIONS, "defer_pp_recv": defer_pp_recv, "max_outstanding_sends": limit}
    found = together(workers.run(train, (OURS, name, modules, [batch], 8, options), ranks=2), name, 2, 4)
    assert_same(found, loop(modules, *batch, 8))


def train_per_edge(package: Package, name: str, modules: list[nn.Module], batch: Any) -> tuple[Outcome, list[bool]]:
    """Run a step with one communicator per pair of ranks and direction, which torch 2.15 has as a setting."""
    settings = importlib.import_module("torch.distributed.config").patch if VERSION >= (2, 15) else nullcontext
    seen: list[bool] = []

    class Asked(package.top.PipelineStage):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            seen.append(self.p2p_per_edge)

    with settings({"pipeline_per_edge_p2p": True}), mock.patch.object(package.top, "PipelineStage", Asked):
        return train(package, name, modules, [batch], 8, {}), seen


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_a_communicator_per_edge(workers: Workers, name: str) -> None:
    """A stage says what torch has set; the numbers are the same. Before torch 2.15 there is no such setting, and a stage says no."""
    total = 2 if name in SINGLE else 4
    modules, batch = blocks(total), data(16)
    for package in BOTH if VERSION >= (2, 15) else [OURS]:
        outcomes = workers.run(train_per_edge, (package, name, modules, batch), ranks=2)
        assert_same(together([outcome for outcome, _ in outcomes], name, 2, total), loop(modules, *batch, 8))
        assert {flag for _, seen in outcomes for flag in seen} == {VERSION >= (2, 15)}


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_uneven_microbatches_and_changing_batches(workers: Workers, name: str) -> None:
    total = 2 if name in SINGLE else 4
    modules = blocks(total)
    batches = [data(size) for size in (8, 10, 7, 8, 21)]
    found = together(workers.run(train, (OURS, name, modules, batches, 4, {}), ranks=2), name, 2, total)
    each = [loop(modules, *batch, 4) for batch in batches]
    assert_same(Outcome(found.output, found.losses), Outcome(each[-1].output, each[-1].losses))
    summed = [torch.stack([outcome.grads[k] for outcome in each]).sum(0) for k in range(len(found.grads))]  # type: ignore[arg-type]
    assert_same(found.grads, summed)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def train_without_target(name: str, modules: list[nn.Module], batches: list[Tensor]) -> list[Outcome]:
    """Steps whose loss takes the output alone, so that only the first rank gets a batch; gradients start from zero each time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = held_by(name, rank, ranks)
    mine = [modules[k] for k in here]
    made = schedule(OURS, name, stages(OURS, mine, here, len(modules)), 4, loss_fn=mean_square)
    outcomes = []
    for x in batches:
        for module in mine:
            module.zero_grad()
        made.step(*([x] if rank == 0 else []))
        outcomes.append(Outcome(grads=copy.deepcopy(grads(mine))))
    return outcomes


@pytest.mark.parametrize(("name", "ranks"), [("Schedule1F1B", 3), ("ScheduleInterleavedZeroBubble", 2), ("ScheduleZBVZeroBubble", 2)])
def test_uneven_microbatches_without_a_target(workers: Workers, name: str, ranks: int) -> None:
    """The last rank learns from the first how many rows each microbatch has; the reference is the model on the whole batch."""
    total = ranks if name in SINGLE else 2 * ranks
    modules = blocks(total)
    batches = [data(size)[0] for size in (10, 8, 7)]
    by_rank = workers.run(train_without_target, (name, modules, batches), ranks=ranks)
    for k, x in enumerate(batches):
        whole = copy.deepcopy(modules)
        mean_square(nn.Sequential(*whole)(x)).backward()
        assert_same(together([outcomes[k] for outcomes in by_rank], name, ranks, total).grads, grads(whole))


def evaluate(package: Package, name: str, modules: list[nn.Module], x: Tensor, y: Tensor) -> tuple[Any, list[Tensor], list[Any]]:
    """Evaluate before and after a step; the gradients in between are those of the step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = held_by(name, rank, ranks)
    mine = [modules[k] for k in here]
    made = schedule(package, name, stages(package, mine, here, len(modules)), 4, loss_fn=functional.mse_loss)
    args = (x,) if 0 in here else ()
    losses: list[Tensor] = []
    target = {"target": y, "losses": losses} if len(modules) - 1 in here else {}
    made.eval(*args, **target)
    assert grads(mine) == [None] * len(grads(mine))
    feed(made, here, len(modules), x, y)
    before = copy.deepcopy(grads(mine))
    out = made.eval(*args, **target)
    assert_same(grads(mine), before, exact=True)
    return out, losses, before


@pytest.mark.parametrize("name", ["ScheduleGPipe", "ScheduleInterleaved1F1B", *ON_A_V])
def test_alternating_evaluation_and_training(workers: Workers, name: str) -> None:
    total = 2 if name in SINGLE else 4
    modules, (x, y) = blocks(total), data(8)
    outs = workers.run(evaluate, (OURS, name, modules, x, y), ranks=2)
    wanted = loop(modules, x, y, 4)
    out, losses, _ = next(each for each in outs if each[1])
    assert_same(Outcome(out, losses), Outcome(wanted.output, wanted.losses))


def forward_only(package: Package, modules: list[nn.Module], x: Tensor, rounds: int) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made = schedule(package, "_ScheduleForwardOnly", stages(package, [modules[rank]], [rank], ranks), 8, scale_grads=False)
    out = None
    for _ in range(rounds):
        out = made.step(*([x] if rank == 0 else []))
        if rank == 0:
            dist.recv(x, src=ranks - 1)
        elif rank == ranks - 1:
            dist.send(out, dst=0)
    return out


def test_forward_only(workers: Workers) -> None:
    modules, (x, _) = blocks(4), data(16)
    out = workers.run(forward_only, (OURS, modules, x.clone(), 3))[-1]
    for _ in range(3):
        for module in modules:
            x = module(x).detach()
    assert_same(out, x)


# Handwritten orders ---------------------------------------------------------------------------------------------------

ORDERS = {
    "v-shaped": (1, {0: [0, 3], 1: [1, 2]}, ("0F0 . . 3F0 3B0 . . 0B0", ". 1F0 2F0 . . 2B0 1B0 .")),
    "unbalanced": (1, {0: [0, 1, 4], 1: [2, 3]}, ("0F0 1F0 . . 4F0 4B0 . . 1B0 0B0", ". . 2F0 3F0 . . 3B0 2B0 . .")),
    "split": (
        2,
        {0: [0, 2], 1: [1, 3]},
        (
            "0F0 0F1 2F0 2F1 . 2I0 2W0 0I0 2I1 0W0 0I1 2W1 0W1",
            ". 1F0 1F1 3F0 3I0 3F1 1I0 3I1 3W0 1I1 1W0 3W1 1W1",
        ),
    ),
}
WITH_MESSAGES = (
    "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
    "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
)
REORDERED = (
    "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0RECV_B1 0B0 0B1",
    "1RECV_F1 1RECV_F0 1F0 1B0 1F1 1B1 1SEND_B0 1SEND_B1",
)


def by_hand(
    package: Package, count: int, where: dict[int, list[int]], rows: tuple[str, ...], modules: list[nn.Module], x: Any, y: Any
) -> Outcome:
    """Run four steps of a subclass that sets its own order."""

    class Compute(package.schedules.PipelineScheduleMulti):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.pipeline_order = parse(package, *rows)
            self._validate_and_set_stage_mapping(self.pipeline_order)

    class Lowered(package.schedules._PipelineScheduleRuntime):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.pipeline_order_with_comms = parse(package, *rows)

    here = where[dist.get_rank()]
    made = Lowered if "SEND" in rows[0] else Compute
    held = made(stages(package, [modules[k] for k in here], here, len(modules)), count, loss_fn=functional.mse_loss, scale_grads=False)
    found = Outcome()
    for _ in range(4):
        found.output, found.losses = feed(held, here, len(modules), x, y)
    found.grads = grads([modules[k] for k in here])
    return found


def check_by_hand(workers: Workers, package: Package, count: int, where: dict[int, list[int]], rows: tuple[str, ...]) -> None:
    total = sum(map(len, where.values()))
    modules, (x, y) = blocks(total), data(8)
    found = workers.run(by_hand, (package, count, where, rows, modules, x, y), ranks=2)
    wanted = loop(modules, x, y, count, scale=False)
    last = next(each for each in found if each.losses)
    assert_same(Outcome(last.output, last.losses), Outcome(wanted.output, wanted.losses))
    for rank, here in where.items():
        assert_same(found[rank].grads, [4 * wanted.grads[4 * stage + k] for stage in here for k in range(4)])  # type: ignore[operator]


@pytest.mark.parametrize("order", ORDERS)
def test_handwritten_compute_orders(workers: Workers, order: str) -> None:
    check_by_hand(workers, OURS, *ORDERS[order])
    if order == "split":
        check_by_hand(workers, TORCH, *ORDERS[order])


@pytest.mark.parametrize("rows", [WITH_MESSAGES, REORDERED])
def test_handwritten_orders_with_messages(workers: Workers, rows: tuple[str, ...]) -> None:
    check_by_hand(workers, OURS, 2, {0: [0], 1: [1]}, rows)


def of_ours(table: ps.Schedule, modules: list[nn.Module], x: Tensor, y: Tensor) -> Outcome:
    here = table.placement.stages_of(dist.get_rank())
    made = OURS.top.as_torch(table, stages(OURS, [modules[k] for k in here], here, table.stages), loss_fn=functional.mse_loss)
    out, losses = feed(made, here, table.stages, x, y)
    return Outcome(out, losses, grads([modules[k] for k in here]))


@pytest.mark.parametrize("name", ["v-half", "zb-h2", "hanayo"])
def test_any_schedule_of_ours(workers: Workers, name: str) -> None:
    table = ps.schedule(name, 2, 5)
    modules, (x, y) = blocks(table.stages), data(10)
    found, wanted = workers.run(of_ours, (table, modules, x, y), ranks=2), loop(modules, x, y, 5)
    for rank, each in enumerate(found):
        here = table.placement.stages_of(rank)
        assert_same(each.grads, [wanted.grads[4 * stage + k] for stage in here for k in range(4)])


# Stages of other kinds ------------------------------------------------------------------------------------------------


def stage_by_stage(package: Package, modules: list[nn.Module], x: Tensor, y: Tensor) -> Outcome:
    """A schedule that drives its stage by hand, as torch's do."""
    schedules = package.schedules

    class Mine(schedules.PipelineScheduleSingle):  # type: ignore[misc,name-defined]
        def _step_microbatches(
            self, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, losses: Any = None, *more: Any, **named: Any
        ) -> None:
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            self._initialize_stage(arg_mbs[0], kwarg_mbs[0], *later((2, 12), target_mbs[0] if target_mbs else None))
            sending = []
            for k in range(self._n_microbatches):
                for works in schedules._sorted_batch_p2p(self._stage.get_fwd_recv_ops(k)).values():
                    schedules._wait_batch_p2p(works)
                output = self._stage.forward_one_chunk(k, arg_mbs[k], kwarg_mbs[k])
                sending += schedules._batch_p2p(self._stage.get_fwd_send_ops(k))
                self._maybe_compute_loss(self._stage, output, target_mbs, k)
            for k in range(self._n_microbatches):
                schedules._wait_batch_p2p(schedules._batch_p2p(self._stage.get_bwd_recv_ops(k)))
                self._stage.backward_one_chunk(k, loss=self._maybe_get_loss(self._stage, k), last_backward=k == self._n_microbatches - 1)
                sending += schedules._batch_p2p(self._stage.get_bwd_send_ops(k))
            schedules._wait_batch_p2p(sending)
            self._update_losses(self._stage, losses)
            self._stage.perform_reduce_grad(self._n_microbatches if self.scale_grads else 1)

    rank = dist.get_rank()
    made = Mine(stages(package, [modules[rank]], [rank], 2)[0], 4, loss_fn=functional.mse_loss)
    out, losses = None, list[Tensor]()
    for _ in range(2):
        modules[rank].zero_grad()
        out, losses = feed(made, [rank], 2, x, y)
    return Outcome(out, losses, grads([modules[rank]]))


def test_a_schedule_that_drives_its_stage_by_hand(workers: Workers) -> None:
    modules, (x, y) = blocks(2), data(8)
    for package in BOTH:
        found = workers.run(stage_by_stage, (package, modules, x, y), ranks=2)
        assert_same(Outcome(found[1].output, found[1].losses, found[0].grads + found[1].grads), loop(modules, x, y, 4))


def test_shape_inference(workers: Workers) -> None:
    for name in ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
        total = 2 if name in SINGLE else 4
        modules, (x, y) = blocks(total), data(8)
        wanted = loop(modules, x, y, 4)
        found = together(workers.run(_train_without_messages, (name, modules, x, y), ranks=2), name, 2, total)
        assert_same(found.grads, [2 * grad for grad in wanted.grads if grad is not None])
        assert_same(Outcome(found.output, found.losses), Outcome(wanted.output, wanted.losses))


def _train_without_messages(name: str, modules: list[nn.Module], x: Tensor, y: Tensor) -> Outcome:
    kept = OURS.stage.PipelineStage.use_messages
    OURS.stage.PipelineStage.use_messages = lambda self, count, training: False
    try:
        return train(OURS, name, modules, [(x, y), (x, y)], 4, {})
    finally:
        OURS.stage.PipelineStage.use_messages = kept


def counted(modules: list[nn.Module], x: Tensor, y: Tensor) -> dict[str, int]:
    """A program replaces torch's functions by its own."""
    calls = {"isend": 0, "irecv": 0}
    kept = {name: getattr(OURS.schedules.dist, name) for name in calls}

    def noting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return kept[name](*args, **kwargs)

        return call

    for name in calls:
        setattr(OURS.schedules.dist, name, noting(name))
    try:
        train(OURS, "Schedule1F1B", modules, [(x, y)], 4, {})
        first = dict(calls)
        calls.update(isend=0, irecv=0)
        train(OURS, "Schedule1F1B", modules, [(x, y), (x, y)], 4, {})
    finally:
        for name, function in kept.items():
            setattr(OURS.schedules.dist, name, function)
    assert calls == {name: first[name] + 4 for name in calls}  # once shapes are known, a message is one send
    return first


def test_messages_use_replaced_functions(workers: Workers) -> None:
    modules, (x, y) = blocks(2), data(8)
    for found in workers.run(counted, (modules, x, y), ranks=2):
        assert found == {"isend": 8, "irecv": 8}  # four microbatches, and the form of each is sent once


def traced(package: Package, name: str, model: nn.Module, x: Tensor, y: Tensor) -> Outcome:
    """Train a traced model."""
    rank = dist.get_rank()
    warnings.simplefilter("ignore")
    pipe = package.top.pipeline(model, mb_args=(x.chunk(4)[0],), split_spec={"1": package.top.SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    made = schedule(package, name, [stage], 4, loss_fn=functional.mse_loss)
    out, losses = feed(made, [rank], 2, x, y)
    return Outcome(out, losses, grads([stage.submod]))


@pytest.mark.parametrize("name", SINGLE)
def test_traced_models(workers: Workers, name: str) -> None:
    model, (x, y) = nn.Sequential(*blocks(2)), data(8)
    wanted = loop(list(model), x, y, 4)
    for package in BOTH:
        found = workers.run(traced, (package, name, model, x, y), ranks=2)
        assert_same(Outcome(found[1].output, found[1].losses, found[0].grads + found[1].grads), wanted)


# Data parallelism -----------------------------------------------------------------------------------------------------


def replicated(kind: str, name: str, modules: list[nn.Module], batches: list[tuple[Tensor, Tensor]]) -> list[Any]:
    """Train two replicas of a pipeline of two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    replica, at = divmod(rank, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    here = held_by(name, at, 2)
    for k in here:
        if kind == "ddp":
            modules[k] = nn.parallel.DistributedDataParallel(modules[k], process_group=mesh["dp"].get_group())
        else:
            fully_shard(modules[k], mesh=mesh["dp"])
    held = stages(OURS, [modules[k] for k in here], here, len(modules), group=mesh["pp"].get_group())
    made = schedule(OURS, name, held, 4, loss_fn=functional.mse_loss)
    for _ in range(2):
        feed(made, here, len(modules), *batches[replica])
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads([modules[k] for k in here])]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
def test_replicas_average_their_gradients(workers: Workers, kind: str, name: str) -> None:
    total = 2 if name in SINGLE else 4
    modules, batches = blocks(total), [data(8), data(8)]
    found = workers.run(replicated, (kind, name, modules, batches))
    each = [loop(modules, *batch, 4) for batch in batches]
    for rank, theirs in enumerate(found):
        here = held_by(name, rank % 2, 2)
        wanted = [each[0].grads[4 * k + j] + each[1].grads[4 * k + j] for k in here for j in range(4)]  # type: ignore[operator]
        assert_same(theirs, wanted)  # the mean over two replicas, summed over two steps


# Tensor parallelism ---------------------------------------------------------------------------------------------------


def ending_in_a_collective(name: str, modules: list[nn.Module], x: Tensor, y: Tensor, messages: bool) -> tuple[Outcome, bool]:
    """Stages whose second linear layer is split by rows, so that each ends in an all-reduce that nothing has waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    at = mesh["pp"].get_local_rank()
    here = held_by(name, at, 2)
    mine, unwaited = [modules[k] for k in here], []
    for module in mine:
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        module.register_forward_hook(lambda module, args, output: unwaited.append(isinstance(output, AsyncCollectiveTensor)))
    held = stages(OURS, mine, here, len(modules), group=mesh["pp"].get_group())
    kept = OURS.stage.PipelineStage.use_messages
    if not messages:
        OURS.stage.PipelineStage.use_messages = lambda self, count, training: False
    try:
        made = schedule(OURS, name, held, 4, loss_fn=functional.mse_loss)
        out, losses = feed(made, here, len(modules), x, y)
    finally:
        OURS.stage.PipelineStage.use_messages = kept
    return Outcome(out, losses, [grad.full_tensor() for grad in grads(mine)]), all(unwaited)  # type: ignore[union-attr]


@pytest.mark.parametrize("messages", [True, False])
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_stages_that_end_in_a_collective(workers: Workers, name: str, messages: bool) -> None:
    total = 2 if name in SINGLE else 4
    modules, (x, y) = blocks(total), data(8)
    found = workers.run(ending_in_a_collective, (name, modules, x, y, messages))
    assert all(unwaited for _, unwaited in found)
    assert_same(together([found[0][0], found[2][0]], name, 2, total), loop(modules, x, y, 4))
