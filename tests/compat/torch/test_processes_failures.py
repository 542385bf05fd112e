"""Ranks as processes, one of which fails: what the others see, and how they recover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from compat.torch.both import BOTH, OURS, SINGLE, Package
from compat.torch.models import assert_same, blocks, data, grads, held_by, loop, schedule, stages
from penstock.runtime.launch.workers import Workers

pytestmark = pytest.mark.slow


def validated(modules: list[nn.Module], x: Tensor) -> list[str]:
    """With torch's runtime validation, a stage refuses shapes that differ from its first microbatch."""
    rank = dist.get_rank()
    stage = stages(OURS, [modules[rank]], [rank], 2)[0]
    stage._runtime_validate = True
    made = schedule(OURS, "ScheduleGPipe", [stage], 4)
    made.step(*([x] if rank == 0 else []))
    said = []
    if rank == 0:
        for wrong in (torch.randn(9, 6), x.to(torch.int32)):
            with pytest.raises(OURS._utils.PipeliningMetadataError) as error:
                made.step(wrong)
            said.append(str(error.value))
        handle = modules[0].register_forward_hook(lambda module, args, output: output.flatten())
        with pytest.raises(OURS._utils.PipeliningMetadataError) as error:
            made.step(x)
        said.append(str(error.value))
        handle.remove()
    dist.barrier()
    return said


def test_runtime_validation(workers: Workers) -> None:
    said, _ = workers.run(validated, (blocks(2), data(8)[0]), ranks=2)
    assert ["shape mismatch" in said[0], "dtype mismatch" in said[1], "shape mismatch" in said[2]] == [True] * 3


class Picky(nn.Module):
    """Fails in these calls."""

    def __init__(self, inner: nn.Module, *calls: int) -> None:
        super().__init__()
        self.inner, self.calls, self.bad = inner, 0, calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls - 1 in self.bad:
            raise ArithmeticError(f"call {self.calls - 1}")
        return self.inner(x)  # type: ignore[no-any-return]


def skipping(package: Package, name: str, modules: list[nn.Module], batches: Any, tries: Sequence[int], evaluate: bool) -> list[Any]:
    """Run a number of steps on each rank, continuing with the next batch after a failure; return losses and messages, then gradients."""
    rank = dist.get_rank()
    here = held_by(name, rank, 2)
    made = schedule(package, name, stages(package, [modules[k] for k in here], here, len(modules)), 2, loss_fn=functional.mse_loss)
    seen: list[Any] = []
    for x, y in batches[: tries[rank]]:
        losses: list[Tensor] = []
        target = {"target": y, "losses": losses} if len(modules) - 1 in here else {}
        try:
            (made.eval if evaluate else made.step)(*([x] if 0 in here else []), **target)
            seen.append(losses)
        except RuntimeError as error:
            seen.append(str(error))
    dist.barrier()
    return [seen, grads([modules[k] for k in here])]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_one_rank_skips_a_batch(workers: Workers, name: str, bad: int) -> None:
    """The first rank gives up a batch before it sends anything; the other does not notice."""
    total = 2 if name in SINGLE else 4
    modules, good = blocks(total), [data(8) for _ in range(3)]
    batches: list[Any] = list(good)
    first = [*batches[:bad], (torch.randn(8, 5), None), *batches[bad:]]
    both = workers.run(lambda: skipping(OURS, name, modules, first if dist.get_rank() == 0 else batches, (4, 3), False), ranks=2)
    assert "failed to run forward" in both[0][0].pop(bad)
    each = [loop(modules, *batch, 2) for batch in good]
    last = next(found for found, _ in both if any(found))
    assert_same(last, [outcome.losses for outcome in each])
    summed = [torch.stack(list(grads)).sum(0) for grads in zip(*(outcome.grads for outcome in each), strict=True)]  # type: ignore[arg-type]
    for rank, (_, mine) in enumerate(both):
        assert_same(mine, [grad for stage in held_by(name, rank, 2) for grad in summed[4 * stage : 4 * stage + 4]])


def test_skipping_a_batch_in_torch(workers: Workers) -> None:
    modules, good = blocks(2), [data(8) for _ in range(2)]
    first = [good[0], (torch.randn(8, 5), None), good[1]]
    for name in SINGLE:
        both = [
            workers.run(
                lambda package, name: skipping(package, name, modules, first if dist.get_rank() == 0 else good, (3, 2), False),
                (package, name),
                ranks=2,
            )
            for package in BOTH
        ]
        assert_same(both[1][1][0], both[0][1][0])


@pytest.mark.parametrize(("rank", "call"), [(0, 3), (1, 3)])
def test_a_step_given_up_half_way(workers: Workers, rank: int, call: int) -> None:
    """The other rank receives a message of another step; once both are in the same step again, training continues."""
    modules, batches = blocks(2), [data(size) for size in (8, 8, 12, 8)]
    held = [Picky(module, *([call] if k == rank else [])) for k, module in enumerate(modules)]
    both = workers.run(skipping, (OURS, "ScheduleGPipe", held, batches, (4, 4), True), ranks=2)
    seen = both[1][0]
    assert "failed to run forward" in both[rank][0][1]
    assert isinstance(seen[1], str)
    assert rank or "expected microbatch 1 of stage 0 in step 2, but received a message of stage 0 in step 3" in seen[1]
    for k in (0, 2, 3):
        assert_same(seen[k], loop(modules, *batches[k], 2).losses)


def out_of_step(modules: list[nn.Module], x: Tensor) -> str:
    rank = dist.get_rank()
    stage = stages(OURS, [modules[rank]], [rank], 2)[0]
    made = schedule(OURS, "ScheduleGPipe", [stage], 1)
    made.step(*([x] if rank == 0 else []))
    stage._messages.step -= rank  # as if the other rank had given up a step half-way
    try:
        made.step(*([x] if rank == 0 else []))
    except RuntimeError as error:
        return str(error)
    return ""


def test_messages_of_another_step_are_refused(workers: Workers) -> None:
    _, said = workers.run(out_of_step, (blocks(2), data(8)[0]), ranks=2)
    assert "in step 1, but received a message of stage 0 in step 2" in said
