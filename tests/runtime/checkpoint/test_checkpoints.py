"""Activation checkpointing in a split backward: everything is recomputed once, and nothing is held that will be recomputed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import penstock as ps
from penstock.runtime import Pipeline, launch
from runtime.live import Live, watch
from runtime.models import by_loop
from runtime.splitting import SPLIT, Half, assert_same_grads, check, grads_of, in_two, names, wants


class Counted(nn.Module):
    """A block that counts its forwards and watches the tensor inside."""

    def __init__(self, wide: int = 5) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(wide, wide), nn.Linear(wide, wide), nn.LayerNorm(wide)
        self.forwards = 0
        self.inside: StorageWeakRef | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        hidden = torch.relu(self.one(x))
        self.inside = watch(hidden)
        return self.norm(x + self.two(hidden))  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        made = Counted(self.one.in_features)
        made.load_state_dict(self.state_dict())
        return made


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inner, x, **self.options)
        return made


REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


@REENTRANT
@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5)], ids=str)
def test_checkpointed_parts_give_the_same_gradients(reentrant: bool, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(*(Checkpointed(Counted(), use_reentrant=reentrant) for _ in range(3)), nn.Linear(5, 5))
    waited = check(model, (wants(*shape),), (wants(*shape),))
    assert waited == {name for name in names(model) if "norm" not in name}


@REENTRANT
def test_checkpointed_parts_run_forward_twice_and_no_more(reentrant: bool) -> None:
    block = Counted()
    model = nn.Sequential(nn.Linear(5, 5), Checkpointed(block, use_reentrant=reentrant), nn.Linear(5, 5))
    Half(model).through(wants(4, 5))
    assert block.forwards == 2


@REENTRANT
def test_row_17_checkpointing_in_a_split_pipeline_recomputes_once(reentrant: bool) -> None:
    """8 blocks and 4 microbatches take 32 forwards and 32 recomputed ones; torch's split backward takes 112."""
    inner = [Counted() for _ in range(8)]
    model = nn.Sequential(*(Checkpointed(block, use_reentrant=reentrant) for block in inner))
    schedule = ps.schedule(SPLIT, ranks=2, microbatches=4)
    x, y = torch.randn(8, 5), torch.randn(8, 5)
    launch(lambda: Pipeline(model, schedule, loss_fn=functional.mse_loss).step(x.clone().requires_grad_(), target=y), 2)
    assert sum(block.forwards for block in inner) == 64
    wanted = by_loop(nn.Sequential(*inner), x, y, 4)
    assert_same_grads({name.replace(".inner", ""): grad for name, grad in grads_of(model).items()}, wanted.grads)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the inner one, while the outer runs without gradient
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_checkpoints_inside_checkpoints(outer: bool, inner: bool) -> None:
    nested = nn.Sequential(Counted(), Checkpointed(Counted(), use_reentrant=inner), nn.Linear(5, 5))
    model = nn.Sequential(nn.Linear(5, 5), Checkpointed(nested, use_reentrant=outer), nn.Linear(5, 5))
    waited = check(model, (wants(4, 5),), (wants(4, 5),))
    assert waited == {name for name in names(model) if "norm" not in name}


@REENTRANT
def test_a_checkpoint_on_an_input_without_gradient(reentrant: bool) -> None:
    model = nn.Sequential(Checkpointed(Counted(), use_reentrant=reentrant), nn.Linear(5, 5))
    if reentrant:  # torch itself gives the parameters in it no gradient then
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
            assert check(model, (torch.randn(4, 5),)) == {"1.weight", "1.bias"}
    else:
        assert {name for name in names(model) if "norm" not in name} == check(model, (torch.randn(4, 5),))


@REENTRANT
def test_recomputed_values_are_not_held(reentrant: bool) -> None:
    block = Counted()
    model = nn.Sequential(nn.Linear(5, 5), Checkpointed(block, use_reentrant=reentrant), nn.Linear(5, 5))
    half = Half(model)
    gc.disable()
    try:
        half.forward(wants(4, 5))
        assert block.inside is not None
        assert block.inside.expired(), "held between the forward and the backward"
    finally:
        gc.enable()
    plain = Counted()
    kept = Half(plain)
    kept.forward(wants(4, 5))
    assert plain.inside is not None
    assert not plain.inside.expired(), "without a checkpoint the same tensor is held"


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_forward_that_is_recorded_holds_what_autograd_would(checkpoints: bool) -> None:
    """The stash holds each weight's input once, to the byte, and nothing that a checkpoint will recompute."""

    def held(split: bool) -> list[int]:
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        model = nn.Sequential(*(Checkpointed(block, use_reentrant=False) if checkpoints else block for block in blocks))
        x, half = wants(2, 4, 64), Half(model)
        with Live() as live:
            live.forget(x, *model.parameters())
            out = half.forward(x) if split else model(x)
            sizes = live.sizes
        assert out.requires_grad
        return sizes

    assert held(True) == held(False)
    assert (max(held(True)) >= 8 * 256 * 4) == (not checkpoints)


@pytest.mark.parametrize("wanting", [True, False], ids=["input gradient", "no input gradient"])
def test_selective_checkpointing(wanting: bool) -> None:
    """A selective checkpoint that keeps the outputs of matrix products and recomputes everything else."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])

    model = nn.Sequential(Checkpointed(Counted(), use_reentrant=False, context_fn=contexts), nn.Linear(5, 5))
    for shape in ((4, 5), (2, 4, 5)):
        microbatches = [(torch.randn(shape, requires_grad=wanting),) for _ in range(2)]
        assert check(model, *microbatches) == {name for name in names(model) if "norm" not in name}


def test_saved_tensors_moved_elsewhere() -> None:
    """Saved-tensor hooks, as for offloading, also see the inputs of deferred weights."""
    packed: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    def offloaded(model: nn.Module, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return model(x)

    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    x = wants(4, 5)
    assert check(model, (x,), forward=offloaded) == names(model)
    packed.clear()
    in_two(model, (x,), forward=offloaded)
    assert {(4, 5), (4, 6)} <= set(packed)
