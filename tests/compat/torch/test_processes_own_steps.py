"""Ranks as processes that run a user's own `_step_microbatches`, which waits for sends and receives together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from compat.torch.both import BOTH, OURS, Package, later, parse
from compat.torch.models import Outcome, assert_same, blocks, data, grads, loop, stages
from penstock.runtime.launch.workers import Workers

pytestmark = pytest.mark.slow

DEADLINE = timedelta(seconds=30)
"""A receive or send without its counterpart fails after this time."""


def fused(schedules: Any) -> Any:
    """1F1B whose steady state waits for a send and a receive in one batch."""

    class Fused(schedules.PipelineScheduleSingle):  # type: ignore[misc,name-defined]
        def exchange(self, ops: list[Any]) -> None:
            schedules._wait_batch_p2p(schedules._batch_p2p(ops))

        def _step_microbatches(
            self,
            arg_mbs: Any = None,
            kwarg_mbs: Any = None,
            target_mbs: Any = None,
            losses: Any = None,
            return_outputs: bool = True,
            loss_kwargs: Any = None,
        ) -> None:
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            target = target_mbs[0] if target_mbs else None
            self._initialize_stage(arg_mbs[0], kwarg_mbs[0], *later((2, 12), target), *later((2, 13), loss_kwargs))
            stage, count = self._stage, self._n_microbatches
            ahead = min(count, self._num_stages - stage.stage_index)
            pending: list[Any] = []
            for k in range(count + ahead):
                if k < count:
                    self.exchange(pending + stage.get_fwd_recv_ops(k))
                    output = stage.forward_one_chunk(k, arg_mbs[k], kwarg_mbs[k], save_forward_output=return_outputs)
                    self._maybe_compute_loss(stage, output, target_mbs, k, *later((2, 13), loss_kwargs))
                    pending = stage.get_fwd_send_ops(k)
                if k >= ahead - 1 and k - ahead + 1 < count:
                    back = k - ahead + 1
                    self.exchange(pending + stage.get_bwd_recv_ops(back))
                    stage.backward_one_chunk(back, loss=self._maybe_get_loss(stage, back), last_backward=back == count - 1)
                    pending = stage.get_bwd_send_ops(back)
            self.exchange(pending)
            self._update_losses(stage, losses)
            stage.perform_reduce_grad(count if self.scale_grads else 1)

    return Fused


ROWS = {
    2: (
        "0F0 0F1 2F0 2F1 . 2B0 . 0B0 2B1 . 0B1",
        ". 1F0 1F1 3F0 3B0 3F1 1B0 3B1 . 1B1 .",
    ),
}


def lockstep(package: Package) -> Any:
    """Several stages per rank: in each slot a rank computes, then sends its result and receives those of its neighbours."""
    schedules = package.schedules

    class Lockstep(schedules.PipelineScheduleMulti):  # type: ignore[misc,name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.pipeline_order = parse(package, *ROWS[self._n_microbatches])

        def _step_microbatches(
            self,
            arg_mbs: Any = None,
            kwarg_mbs: Any = None,
            target_mbs: Any = None,
            losses: Any = None,
            return_outputs: bool = True,
            loss_kwargs: Any = None,
        ) -> None:
            arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
            target = target_mbs[0] if target_mbs else None
            self._initialize_stages(arg_mbs[0], kwarg_mbs[0], *later((2, 12), target), *later((2, 13), loss_kwargs))
            mine = {stage.stage_index: stage for stage in self._stages}
            done = dict.fromkeys(mine, 0)
            others = [row for rank, row in self.pipeline_order.items() if rank != self.rank]
            for slot, action in enumerate(self.pipeline_order[self.rank]):
                ops = []
                if action is not None:
                    stage, k = mine[action.stage_index], action.microbatch_index
                    if action.computation_type == schedules.FORWARD:
                        output = stage.forward_one_chunk(k, arg_mbs[k], kwarg_mbs[k], save_forward_output=return_outputs)
                        self._maybe_compute_loss(stage, output, target_mbs, k, *later((2, 13), loss_kwargs))
                        ops += stage.get_fwd_send_ops(k)
                    else:
                        done[stage.stage_index] += 1
                        last = done[stage.stage_index] == self._n_microbatches
                        stage.backward_one_chunk(k, loss=self._maybe_get_loss(stage, k), last_backward=last)
                        if last:
                            stage.scale_grads(self._n_microbatches if self.scale_grads else 1)
                        ops += stage.get_bwd_send_ops(k)
                for other in (row[slot] for row in others):
                    if other is None:
                        continue
                    forward = other.computation_type == schedules.FORWARD
                    reader = mine.get(other.stage_index + (1 if forward else -1))
                    if reader is not None:
                        ops += (reader.get_fwd_recv_ops if forward else reader.get_bwd_recv_ops)(other.microbatch_index)
                schedules._wait_batch_p2p(schedules._batch_p2p(ops))
            self._update_losses(self._stages, losses)

    return Lockstep


def own_steps(package: Package, body: str, modules: list[nn.Module], batches: Sequence[Any], count: int) -> list[Outcome]:
    """Run one own step per batch; gradients start from zero each time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=DEADLINE)
    here = [rank] if body == "fused" else [rank, rank + ranks]
    mine = [modules[k] for k in here]
    held = stages(package, mine, here, len(modules), group=group)
    if body == "fused":
        made = fused(package.schedules)(held[0], count, loss_fn=functional.mse_loss)
    else:
        made = lockstep(package)(held, count, loss_fn=functional.mse_loss)
    found = []
    for x, y in batches:
        losses: list[Tensor] = []
        for module in mine:
            module.zero_grad()
        target = {"target": y, "losses": losses} if len(modules) - 1 in here else {}
        out = made.step(*([x] if rank == 0 else []), **target)
        found.append(Outcome(out, losses, copy.deepcopy(grads(mine))))
    return found


@pytest.mark.parametrize(("body", "ranks", "count"), [("fused", 2, 4), ("fused", 4, 6), ("lockstep", 2, 2)])
def test_own_steps_that_wait_for_sends_and_receives_together(workers: Workers, body: str, ranks: int, count: int) -> None:
    """In the first step and after changes of shape; on torch with one shape, because it accepts no other."""
    total = ranks if body == "fused" else 2 * ranks
    modules = blocks(total)
    for package in BOTH:
        batches = [data(size) for size in ((3 * count, 3 * count, 5 * count, 2 * count) if package is OURS else (3 * count,))]
        ranks_found = workers.run(own_steps, (package, body, modules, batches, count), ranks=ranks)
        for k, batch in enumerate(batches):
            wanted = loop(modules, *batch, count)
            last = ranks_found[-1][k]
            assert_same(Outcome(last.output, last.losses), Outcome(wanted.output, wanted.losses))
            for rank, found in enumerate(ranks_found):
                here = [rank] if body == "fused" else [rank, rank + ranks]
                assert_same(found[k].grads, [wanted.grads[4 * stage + j] for stage in here for j in range(4)])


def on_microbatches(package: Package, modules: list[nn.Module], x: Tensor, y: Tensor) -> list[Any]:
    """`_step_microbatches` called by the program itself, and evaluation and a bad batch in between."""
    rank = dist.get_rank()
    mine = [modules[rank]]
    held = stages(package, mine, [rank], 2, group=dist.new_group(timeout=DEADLINE))
    made = fused(package.schedules)(held[0], 4, loss_fn=functional.mse_loss)
    held[0].has_backward = True
    parts: Any = [(part,) for part in x.chunk(4)] if rank == 0 else None
    made._step_microbatches(parts, None, list(y.chunk(4)) if rank == 1 else None)
    direct = copy.deepcopy(grads(mine))
    if rank == 0:
        with pytest.raises(RuntimeError, match="failed to run forward"):
            made.step(x[:, :5])
    target = {"target": y} if rank == 1 else {}
    for size in (len(x), 8):
        held[0].submod.zero_grad()
        made.step(*([x[:size]] if rank == 0 else []), **{name: value[:size] for name, value in target.items()})
    return [direct, grads(mine)]


def test_calling_step_microbatches_directly_and_a_bad_batch(workers: Workers) -> None:
    modules, (x, y) = blocks(2), data(12)
    found = workers.run(on_microbatches, (OURS, modules, x, y), ranks=2)
    first, last = loop(modules, x, y, 4).grads, loop(modules, x[:8], y[:8], 4).grads
    for rank, both in enumerate(found):
        assert_same(both, [first[4 * rank : 4 * rank + 4], last[4 * rank : 4 * rank + 4]])


def in_evaluation(modules: list[nn.Module], x: Tensor, y: Tensor) -> list[Any]:
    rank = dist.get_rank()
    held = stages(OURS, [modules[rank]], [rank], 2, group=dist.new_group(timeout=DEADLINE))
    made = fused(OURS.schedules)(held[0], 4, loss_fn=functional.mse_loss)
    outs = []
    for size in (8, 12, 8):
        args, target = ([x[:size]] if rank == 0 else []), ({"target": y[:size]} if rank == 1 else {})
        outs.append(made.eval(*args, **target))
        made.step(*args, **target)
    return outs


def test_own_steps_evaluate(workers: Workers) -> None:
    modules, (x, y) = blocks(2), data(12)
    _, outs = workers.run(in_evaluation, (modules, x, y), ranks=2)
    assert_same(outs, [loop(modules, x[:size], y[:size], 4).output for size in (8, 12, 8)])
