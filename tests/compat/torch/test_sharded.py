"""Stages sharded by FSDP2: evaluation unshards them only when needed and leaves nothing unsharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from compat.torch.both import BOTH, LOOPED, ON_A_V, OURS, SINGLE, TORCH, VERSION, Package
from compat.torch.models import assert_same, blocks, data, grads, loop, schedule, stages

pytestmark = pytest.mark.usefixtures("alone")


def shard(modules: list[nn.Module], **options: Any) -> list[nn.Module]:
    """Copies of the modules, sharded over this process only; an unsharded parameter is not a `DTensor`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    held = copy.deepcopy(modules)
    for module in held:
        fully_shard(module[0], mesh=mesh, **options)  # type: ignore[index]
        fully_shard(module, mesh=mesh, **options)
    return held


def count_gathered(modules: list[nn.Module]) -> int:
    return sum(not isinstance(parameter, DTensor) for module in modules for parameter in module.parameters())


def chunks(name: str) -> int:
    return 1 if name in SINGLE or name == "_ScheduleForwardOnly" else 2 if name in ON_A_V else 5


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
@pytest.mark.parametrize("name", [*SINGLE, "_ScheduleForwardOnly", *LOOPED, *ON_A_V])
def test_evaluation_leaves_nothing_unsharded(name: str, options: dict[str, Any]) -> None:
    """Before and after training, with all stages on this rank."""
    modules, (x, y) = blocks(chunks(name)), data()
    wanted = loop(modules, x, y, 4)
    held = shard(modules, **options)
    forwards = name == "_ScheduleForwardOnly"
    made = schedule(OURS, name, stages(OURS, held), 4, **({} if forwards else {"loss_fn": functional.mse_loss}))
    assert_same(made.step(x) if forwards else made.eval(x), wanted.output)
    assert count_gathered(held) == 0
    if forwards:
        return
    made.step(x, target=y)
    assert_same([grad.full_tensor() for grad in grads(held)], wanted.grads)  # type: ignore[union-attr]
    assert_same(made.eval(x, target=y), wanted.output)
    assert count_gathered(held) == 0


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("package", BOTH, ids=repr)
def test_training_and_evaluation_on_both_packages(package: Package, name: str) -> None:
    modules, (x, y) = blocks(1), data()
    held = shard(modules)
    made = schedule(package, name, stages(package, held), 4, loss_fn=functional.mse_loss)
    assert_same(made.eval(x, target=y), loop(modules, x, y, 4).output)
    left = 2 if package is TORCH and VERSION >= (2, 15) else 0  # torch 2.15 leaves the root's own parameters in full
    assert count_gathered(held) == left


def test_evaluation_after_a_failed_one() -> None:
    modules, (x, y) = blocks(4), data()
    held = shard(modules)
    made = schedule(OURS, "ScheduleInterleaved1F1B", stages(OURS, held), 4, loss_fn=functional.mse_loss)
    with pytest.raises(RuntimeError, match="failed to run forward"):
        made.eval(x[:, :5], target=y)
    assert_same(made.eval(x, target=y), loop(modules, x, y, 4).output)
    assert count_gathered(held) == 0


def test_evaluation_unshards_for_forwards_only() -> None:
    """Unsharding for backwards is left out, unless a custom function may need it."""
    modules, (x, y) = blocks(6), data()
    counts = []
    for own in (False, True):
        held = shard(modules)
        made = schedule(OURS, "ScheduleInterleaved1F1B", stages(OURS, held), 4, loss_fn=functional.mse_loss)
        calls = [0]
        for module in held:
            assert isinstance(module, FSDPModule)
            unshard = module.unshard

            def counted(async_op: bool = False, unshard: Any = unshard, calls: list[int] = calls) -> Any:
                calls[0] += 1
                return unshard(async_op)

            module.unshard = counted  # type: ignore[method-assign]
        if own:
            made.register_custom_function(OURS.schedules.FULL_BACKWARD, lambda action, ctx: None)
        out = made.eval(x, target=y)
        assert_same(out, loop(modules, x, y, 4).output)
        counts.append(calls[0])
    assert counts[0] < counts[1]
