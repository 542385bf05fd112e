"""What autograd saves, moved to other memory and back: the same gradients to the last bit, every storage once, nothing left behind."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.errors import ScheduleError
from penstock.runtime.device.host_memory import HostMemory, SavedTensors
from runtime.live import watch


class Views(nn.Module):
    """Saves views of one storage, an expanded tensor, integers, a scalar and its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        whole = x @ self.weight
        left, right = whole.chunk(2, dim=-1)
        mixed = left * right.exp()
        mixed = mixed * mixed[:, :1].expand_as(mixed)
        order = torch.argsort(mixed.detach(), dim=-1)
        return mixed.gather(-1, order).sigmoid() * whole.mean()


def run(module: nn.Module, between: Callable[[SavedTensors], None] | None) -> list[Tensor]:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.grad = None
        parameter.data = torch.randn_like(parameter)
    x = torch.randn(5, 6, requires_grad=True)
    kept = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    if between is None:
        output = module(x)
    else:
        saved = SavedTensors(HostMemory())
        with saved.save_tensors(kept):
            output = module(x)
        between(saved)
    output.sum().backward()
    assert x.grad is not None
    return [x.grad, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)]


def there_and_back(saved: SavedTensors) -> None:
    saved.offload()
    saved.release()
    saved.reload()
    saved.arrive()


@pytest.mark.parametrize("module", [Views(), nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 2))])
def test_gradients_are_the_same_to_the_last_bit(module: nn.Module) -> None:
    for grad, expected in zip(run(module, there_and_back), run(module, None), strict=True):
        assert torch.equal(grad, expected)


def test_the_memory_is_free_after_the_release_and_not_before() -> None:
    inside: list[StorageWeakRef] = []
    memory, x = HostMemory(), torch.randn(8, requires_grad=True)
    saved = SavedTensors(memory)
    with saved.save_tensors({x.untyped_storage().data_ptr()}):
        hidden = x.exp()
        inside.append(watch(hidden))
        output = hidden.exp().sum()
        del hidden
    saved.offload()
    assert not inside[0].expired()
    saved.release()
    assert inside[0].expired()
    assert memory.held == 2 * 8 * 4  # both exponentials; the input stays where it is
    saved.reload()
    saved.arrive()
    assert memory.held == 0
    output.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().exp().exp() * x.detach().exp())


def test_a_storage_with_several_views_is_moved_once() -> None:
    memory, x = HostMemory(), torch.randn(4, 4, requires_grad=True)
    saved = SavedTensors(memory)
    with saved.save_tensors(()):
        whole = x.exp()  # saves its output
        output = whole[0] * whole[1] * whole.t()[2]  # save views of it
    saved.offload([whole])
    assert memory.held == 16 * 4 + 4 * 4  # and one product
    saved.reload()
    saved.arrive()
    output.sum().backward()
    grad, x.grad = x.grad, None
    whole = x.exp()
    (whole[0] * whole[1] * whole.t()[2]).sum().backward()
    assert grad is not None
    assert torch.equal(grad, x.grad)


def test_tensors_of_the_runtime_keep_their_shape_and_get_their_values_back() -> None:
    saved, leaf = SavedTensors(HostMemory()), torch.randn(3, 4)
    expected, memory = leaf.clone(), watch(leaf)
    leaf.requires_grad_()
    with saved.save_tensors(()):
        output = leaf * 2
    saved.offload([leaf, output])
    saved.release()
    assert memory.expired()
    assert leaf.shape == output.shape == (3, 4)
    saved.reload()
    saved.arrive()
    assert torch.equal(leaf.detach(), expected)
    output.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((3, 4), 2.0))


def test_buffers_are_used_again() -> None:
    memory = HostMemory()
    for _ in range(3):
        saved, x = SavedTensors(memory), torch.randn(100, requires_grad=True)
        with saved.save_tensors(()):
            output = x.exp()
        there_and_back(saved)
        output.sum().backward()
        memory.trim()
    assert memory.peak == 400
    assert memory.kept == 400
    memory.trim()
    assert memory.kept == 0


@given(st.lists(st.lists(st.sampled_from([100, 200, 300]), max_size=6), max_size=6), st.randoms(use_true_random=False))
def test_buffers_of_the_last_step_are_kept_and_no_others(steps: list[list[int]], chance: Random) -> None:
    """Each step takes buffers of these sizes, and gives some of them back in between: as many are kept as it had at once of each size."""
    memory = HostMemory()
    for sizes in steps:
        taken: list[Tensor] = []
        most: Counter[int] = Counter()
        for size in sizes:
            taken.append(memory.take(size, pinned=False)[0])
            most |= Counter(buffer.numel() for buffer in taken)
            if chance.random() < 0.5:
                memory.give_back(taken.pop(chance.randrange(len(taken))), None)
        for buffer in taken:
            memory.give_back(buffer, None)
        memory.trim()
        assert memory.held == 0
        assert Counter({size: len(free) for size, free in memory._free.items()}) == most


def test_a_backward_before_its_reload_is_refused() -> None:
    saved, x = SavedTensors(HostMemory()), torch.randn(3, requires_grad=True)
    with saved.save_tensors(()):
        output = x.exp().sum()
    saved.offload()
    with pytest.raises(ScheduleError, match="its RELOAD has not run"):
        output.backward()


@pytest.mark.parametrize("early", [True, False])
def test_a_change_in_place_is_refused_as_autograd_does(early: bool) -> None:
    saved, x = SavedTensors(HostMemory()), torch.randn(3, requires_grad=True)
    with saved.save_tensors(()):
        hidden = x.exp()
        output = hidden.sin().sum()
    if early:
        hidden.detach().zero_()
        there_and_back(saved)
    else:
        hidden.detach().zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        output.backward()


def test_nothing_keeps_the_tensors_after_the_backward() -> None:
    gc.disable()
    try:
        saved, x = SavedTensors(HostMemory()), torch.randn(3, requires_grad=True)
        with saved.save_tensors(()):
            output = x.exp().exp()
        there_and_back(saved)
        node: Any = output.grad_fn
        back = watch(node._saved_result)
        assert not back.expired()
        output.sum().backward()
        assert back.expired()
        assert not saved._moved
        assert not saved._slots
    finally:
        gc.enable()


def test_a_step_that_failed_leaves_nothing_on_the_host() -> None:
    memory = HostMemory()
    saved, x = SavedTensors(memory), torch.randn(3, requires_grad=True)
    with saved.save_tensors(()):
        output = x.exp()
    saved.offload([output])
    saved.drop()
    assert memory.held == 0
