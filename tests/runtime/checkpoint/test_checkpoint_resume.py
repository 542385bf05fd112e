"""A run that continues from a checkpoint has bitwise the losses of the uninterrupted run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import functional

from penstock.errors import CheckpointError
from penstock.runtime import Checkpoints, Pipeline, launch, rank
from penstock.runtime.transport.threads import VirtualGroup
from runtime.models import blocks
from runtime.resuming import MICROBATCHES, SPLIT, Run, curve, model, pipelined

AGAIN = 99
"""A seed for models whose values are to be replaced."""


def start(make: Callable[..., nn.Module], schedule: str, ranks: int, folder: Path, steps: int) -> list[float]:
    def train() -> list[float]:
        run = pipelined(make(), schedule)
        losses = run.train(steps)
        run.save(folder, steps)
        return losses

    return launch(train, ranks)[0]


def resume(make: Callable[..., nn.Module], schedule: str, ranks: int, folder: Path, steps: int) -> list[float]:
    def train() -> list[float]:
        run = pipelined(make(AGAIN), schedule)
        first = run.load(folder)
        losses = run.train(steps, first)
        run.save(folder, first + steps)
        return losses

    return launch(train, ranks)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ways",
    [
        [("1f1b", 4), ("zbv", 2), ("1f1b", 1)],
        [("interleaved-zb", 2), ("gpipe", 4), ("zb-h1", 2)],
        [("1f1b", 1), ("dualpipe-v", 4), ("hanayo", 2)],
    ],
    ids=str,
)
def test_losses_continue_bitwise(ways: list[tuple[str, int]], tmp_path: Path) -> None:
    """Dropout draws the same numbers too, although the model is cut into other stages."""
    make = partial(model, dropout=0.3)
    losses = start(make, *ways[0], tmp_path, 3)
    for way in ways[1:]:
        losses += resume(make, *way, tmp_path, 2)
    assert losses == curve(make, 7)


@pytest.mark.slow
def test_into_the_unpipelined_model_and_back(tmp_path: Path) -> None:
    make = partial(model, dropout=0.3)
    losses = start(make, "zbv", 2, tmp_path, 3)
    run = Run.of(make(AGAIN))
    assert run.load(tmp_path) == 3
    losses += run.train(2, 3)
    run.save(tmp_path, 5)
    losses += resume(make, "1f1b", 4, tmp_path, 2)
    assert losses == curve(make, 7)


@pytest.mark.parametrize("tied", [False, True])
def test_plain_torch_loads_a_checkpoint(tmp_path: Path, tied: bool) -> None:
    """torch alone loads the model and the optimizer."""
    make = partial(model, tied=tied)
    start(make, "1f1b", 4, tmp_path, 3)
    folder = next(tmp_path.iterdir())
    wanted = Run.of(make(AGAIN))
    wanted.load(tmp_path)

    plain = make(AGAIN)
    optimizer = Run.of(plain).optimizer
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, optimizer, options=flat)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that it is not distributed
        dcp.load(state, checkpoint_id=folder)
    plain.load_state_dict(state["model"])
    set_optimizer_state_dict(plain, optimizer, state["optimizer"], options=flat)

    assert_same_state(plain.state_dict(), wanted.model.state_dict())
    assert_same_state(optimizer.state_dict(), wanted.optimizer.state_dict())


def test_torch_converts_a_checkpoint(tmp_path: Path) -> None:
    """torch converts a checkpoint into one file with the model's state dict, all names of tied parameters included."""
    start(partial(model, tied=True), "1f1b", 2, tmp_path, 1)
    dcp_to_torch_save(next(tmp_path.iterdir()), tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=False)["model"]
    plain = model(AGAIN, tied=True)
    plain.load_state_dict(state)
    wanted = Run.of(model(AGAIN, tied=True))
    Checkpoints(tmp_path).load_latest(wanted.model)
    assert_same_state(plain.state_dict(), wanted.model.state_dict())


def assert_same_state(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same_state(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same_state(one, other)
    else:
        assert found == wanted


# Tied parameters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [("1f1b", 4), ("1f1b", 1), ("chimera", 4)], ids=str)
def test_tied_parameters_are_saved_once(way: tuple[str, int], tmp_path: Path) -> None:
    """A tied head is listed under its name, but written once: one tensor less than for the untied model."""
    for name, tied in (("tied", True), ("apart", False)):

        def save(tied: bool = tied, name: str = name) -> None:
            made = model(tied=tied, depth=4)
            pipe = Pipeline(made, schedule=way[0], microbatches=4, loss_fn=functional.mse_loss, split=SPLIT)
            Checkpoints(tmp_path / name).save(pipe, step=1)

        launch(save, way[1])
    saved = [dcp.FileSystemReader(next((tmp_path / name).iterdir())).read_metadata() for name in ("tied", "apart")]
    assert saved[0].state_dict_metadata.keys() == saved[1].state_dict_metadata.keys()
    written = [
        {(each.relative_path, each.offset) for index, each in one.storage_data.items() if index.fqn.startswith("model.")} for one in saved
    ]
    assert len(written[0]) == len(written[1]) - 1


def test_tied_by_name(tmp_path: Path) -> None:
    """Parameters tied by `ties=` are saved once too, and loaded on both ranks."""
    ties = [["embed.tokens.weight", "head.weight"]]
    losses = {}

    def train(first: bool, folder: Path, steps: int) -> list[float]:
        run = pipelined(model(0 if first else AGAIN), "1f1b", ties=ties)
        if first:
            made = run.train(steps)
            run.save(folder, steps)
            return made + run.train(2, steps)
        return run.train(2, run.load(folder))

    losses["whole"] = launch(train, 4, args=(True, tmp_path, 2))[0]
    losses["rest"] = launch(train, 4, args=(False, tmp_path, 2))[0]
    assert losses["rest"] == losses["whole"][2:]


def test_separate_parameters_are_not_tied_by_loading(tmp_path: Path) -> None:
    start(model, "1f1b", 2, tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"has embed.tokens.weight and head.weight as separate parameters, but the model ties them"):
        resume(partial(model, tied=True), "1f1b", 2, tmp_path, 1)


# Not only models and optimizers ------------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def state_dict(self) -> dict[int, list[int]]:
        return self.seen

    def load_state_dict(self, state: dict[int, list[int]]) -> None:
        self.seen = state


def test_extra_stateful_objects(tmp_path: Path) -> None:
    """Keys that are not strings and empty containers are restored unchanged."""
    one, other = Counter(), Counter()
    one.seen = {3: [1, 2], 5: []}
    plain = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(plain, step=1, extra={"counter": one}, data=Counter())
    found = checkpoints.load_latest(plain, extra={"counter": other})
    assert found is not None
    assert other.seen == {3: [1, 2], 5: []}
    with pytest.raises(CheckpointError, match=r"has no extra\.scaler"):
        checkpoints.load_latest(plain, extra={"scaler": other})


def test_random_state_of_every_rank(tmp_path: Path) -> None:
    """A run without a seed continues its random numbers."""

    def draws() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    def train(save: bool) -> list[float]:
        torch.manual_seed(rank() if save else AGAIN)
        pipe = Pipeline(blocks(2), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
        checkpoints = Checkpoints(tmp_path)
        if save:
            torch.rand(rank() + 3)
            checkpoints.save(pipe, step=1)
        else:
            checkpoints.load_latest(pipe)
        return [torch.rand(()).item()]

    saved, loaded = launch(train, 2, args=(True,)), launch(train, 2, args=(False,))
    assert saved == loaded
    assert saved[0] != saved[1]

    checkpoints, plain = Checkpoints(tmp_path / "one"), nn.Linear(2, 2)
    checkpoints.save(plain, step=1)
    first = draws()
    assert draws() != first
    checkpoints.load_latest(plain)
    assert draws() == first


class Batched(nn.Module):
    """A module with a persistent buffer, one that is not saved, and extra state that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.calls = {"forward": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls["forward"] += 1
        return self.norm(x)

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = dict(state)


def test_buffers_and_extra_state(tmp_path: Path) -> None:
    def train(save: bool) -> dict[str, Any]:
        made = nn.Sequential(*(Batched() for _ in range(4)))
        pipe = Pipeline(made, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
        checkpoints = Checkpoints(tmp_path)
        if save:
            pipe.step(torch.randn(8, 3) + 2, target=torch.zeros(8, 3))
            checkpoints.save(pipe, step=1)
        else:
            checkpoints.load_latest(pipe)
        mine = [f"{stage * 2 + k}." for stage in pipe.stages for k in range(2)]
        return {name: value for name, value in made.state_dict().items() if name.startswith(tuple(mine))}

    saved = {name: value for theirs in launch(train, 2, args=(True,)) for name, value in theirs.items()}
    assert saved["0._extra_state"] == {"forward": 2}
    assert saved["3.norm.num_batches_tracked"] == 2
    loaded = {name: value for theirs in launch(train, 2, args=(False,)) for name, value in theirs.items()}
    assert_same_state(loaded, saved)


def test_compiled_and_wrapped_layers_keep_their_names(tmp_path: Path) -> None:
    plain = blocks(2)
    wrapped = nn.Sequential(*(torch.compile(block, backend="eager") for block in blocks(2)))
    assert "0._orig_mod.factor" in wrapped.state_dict()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.5), step=1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    checkpoints.load_latest(plain, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert torch.equal(plain[1].factor, wrapped[1].factor)


def test_several_optimizers(tmp_path: Path) -> None:
    """Each of several optimizers finds the state of its parameters, even if they are distributed differently."""
    plain = blocks(2)
    ours = [torch.optim.SGD(plain[k].parameters(), lr=0.5 + k, momentum=0.9) for k in range(2)]
    plain(torch.randn(4, 6)).sum().backward()
    for optimizer in ours:
        optimizer.step()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(plain, ours, step=1)
    other = blocks(2)
    theirs = torch.optim.SGD([{"params": other[k].parameters()} for k in (1, 0)], lr=0.1, momentum=0.9)
    checkpoints.load_latest(other, theirs)
    assert [group["lr"] for group in theirs.param_groups] == [1.5, 0.5]
    for k in range(2):
        for one, two in zip(plain[k].parameters(), other[k].parameters(), strict=True):
            assert torch.equal(ours[k].state[one]["momentum_buffer"], theirs.state[two]["momentum_buffer"])
    mixed = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(
        CheckpointError, match=r"0\.factor and 1\.\w+.* are in one group of the optimizer, but were saved with lr = 0.5 and 1.5"
    ):
        checkpoints.load_latest(other, mixed)


def test_optimizer_state_in_higher_precision(tmp_path: Path) -> None:
    """A float32 average of a bfloat16 parameter is not rounded, unlike with torch's own load."""
    plain = nn.Linear(4, 4, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    kept = torch.randn(4, 4)
    optimizer.state[plain.weight] = {"momentum_buffer": kept}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(plain, optimizer, step=1)
    other = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    checkpoints.load_latest(plain, other)
    assert torch.equal(other.state[plain.weight]["momentum_buffer"], kept)


# While training goes on ---------------------------------------------------------------------------------------------------


def test_asynchronous_save_holds_the_state_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save_async` saves the state at the time of the call, although it is written during later steps."""
    import threading

    from penstock.runtime.checkpoint.storage import RankLayout

    gate, write = threading.Event(), RankLayout.write

    def late(layout: RankLayout) -> Any:
        assert gate.wait(60)
        return write(layout)

    monkeypatch.setattr(RankLayout, "write", late)

    def train() -> list[float]:
        run = pipelined(model(), "1f1b")
        losses = run.train(3)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save_async(run.model, run.optimizer, step=3, **run.parts)
            losses += run.train(2, 3)
            assert gate.is_set() or not checkpoints.whole()  # virtual ranks take turns: the first of them opens the gate
            gate.set()
        assert [each.step for each in checkpoints.whole()] == [3]
        return losses

    losses = launch(train, 4)[0]
    assert losses == curve(model, 5)
    assert resume(model, "zbv", 2, tmp_path, 2) == losses[3:]


def test_asynchronous_save_completes_without_wait(tmp_path: Path) -> None:
    plain, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path)
    checkpoints.save_async(plain, step=1)
    while not checkpoints.whole():
        torch.rand(1)
    assert checkpoints.wait() == checkpoints.whole()[0].path
    assert checkpoints.wait() is None


# What cannot be loaded ----------------------------------------------------------------------------------------------------


def test_another_model_is_rejected(tmp_path: Path) -> None:
    plain, checkpoints = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), Checkpoints(tmp_path)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    path = checkpoints.save(plain, optimizer, step=1)

    def refused(other: nn.Module, match: str, given: Any = None) -> None:
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(CheckpointError, match=match):
            checkpoints.load_latest(other, given)
        assert_same_state(other.state_dict(), before)

    where = f"checkpoint {path} "
    refused(nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 2)), rf"{where}has 0.weight with shape \[3, 2\], but the model's has \[4, 2\]")
    refused(plain.double(), f"{where}has 0.weight with type torch.float32, but the model's has torch.float64")
    plain.float()
    refused(nn.Sequential(nn.Linear(2, 3)), f"{where}has names that the model has on no rank: 1.bias, 1.weight")
    refused(nn.Sequential(*plain, nn.Linear(2, 2)), f"{where}has no 2.bias, 2.weight")
    refused(plain, "has a parameter of shape .* that does not belong to the model", torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    plain[0].bias.requires_grad_(False)
    path = checkpoints.save(plain, torch.optim.SGD([plain[1].weight], lr=0.5), step=2)
    nn.init.zeros_(plain[0].weight)
    refused(plain, f"checkpoint {path} has no optimizer state for 0.weight", optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([{"params": plain[0].weight}, {"params": plain[1].weight}], lr=0.5), 2)
    checkpoints.save(plain, step=3, scheduler=scheduler)
    with pytest.raises(CheckpointError, match="saved with 2 optimizer groups, but has 1 here: give the optimizer the same groups"):
        checkpoints.load_latest(plain, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
    with pytest.raises(CheckpointError, match=r"step, .*got -1"):
        checkpoints.save(plain, step=-1)
    with pytest.raises(CheckpointError, match=r"keep .*must be a whole number of at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)


def test_ranks_must_save_the_same_step(tmp_path: Path) -> None:
    def save() -> None:
        pipe = Pipeline(blocks(2), schedule="1f1b", microbatches=MICROBATCHES, loss_fn=functional.mse_loss)
        Checkpoints(tmp_path).save(pipe, step=1 + rank())

    with pytest.raises(CheckpointError, match=r"the ranks save different steps, \[1, 2\]"):
        launch(save, 2)
    assert not any(tmp_path.iterdir())


def test_failure_on_one_rank_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full on one rank, all ranks raise the same error, nothing is left behind, and the next save works."""
    from penstock.runtime.checkpoint.storage import RankLayout

    write, full = RankLayout.write, [True]

    def fail(layout: RankLayout) -> Any:
        if layout.rank == 1 and full[0]:
            raise OSError(28, "No space left on device")
        return write(layout)

    monkeypatch.setattr(RankLayout, "write", fail)

    def save() -> str:
        pipe = Pipeline(blocks(2), schedule="1f1b", microbatches=MICROBATCHES, loss_fn=functional.mse_loss)
        checkpoints = Checkpoints(tmp_path)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.save(pipe, step=1)
        pipe.gather("failed", None)
        full[0] = False
        assert not any(tmp_path.iterdir())
        pipe.gather("looked", None)
        checkpoints.save(pipe, step=1)
        return str(caught.value)

    said = launch(save, 2)
    assert said[0] == said[1] == "rank 1 failed to write a checkpoint: OSError: [Errno 28] No space left on device"
    assert [each.step for each in Checkpoints(tmp_path).whole()] == [1]


def test_tied_parameter_is_the_first_on_several_ranks(tmp_path: Path) -> None:
    """Each rank lists the tied parameter first, with its own aliases of its options; no alias is lost."""

    class Tied(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    def make() -> nn.Sequential:
        weight = nn.Parameter(torch.eye(6))
        return nn.Sequential(Tied(weight), nn.Linear(6, 6), Tied(weight), nn.Linear(6, 6))

    def train(load: bool) -> float:
        torch.manual_seed(AGAIN if load else 0)
        pipe = Pipeline(make(), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, split=[2, 2])
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        checkpoints = Checkpoints(tmp_path)
        if load:
            checkpoints.load_latest(pipe, optimizer)
        else:
            pipe.step(torch.ones(4, 6), target=torch.zeros(4, 6))
            optimizer.step()
            checkpoints.save(pipe, optimizer, step=1)
            optimizer.zero_grad()
        return float(pipe.step(torch.ones(4, 6), target=torch.zeros(4, 6)).loss)

    saved = launch(train, 2, args=(False,))
    assert launch(train, 2, args=(True,)) == saved


class LosesOnce:
    """Stands for the recovery of a pipeline that loses a rank at the end of each call: the ranks that are left make it again."""

    alone = False

    def __init__(self) -> None:
        self.exchanges: list[str] = []

    def run(self, call: Callable[[], Any]) -> Any:
        call()
        return call()

    def decide(self, name: str, value: Any, undo: Callable[[], None], complete: Callable[[list[Any]], Any]) -> Any:
        self.exchanges.append(name)
        return complete([value])

    def find_members(self) -> tuple[Any, int]:
        return VirtualGroup(1), 0


def test_a_load_in_which_a_rank_is_lost_is_made_again(tmp_path: Path) -> None:
    layers = blocks(1)
    pipe: Any = Pipeline(layers, schedule="1f1b", microbatches=1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(pipe, step=3)
    before = torch.nn.utils.parameters_to_vector(pipe.parameters()).detach()
    for load in (checkpoints.load_latest, partial(checkpoints.load, "step-00000003")):
        pipe.recovery = LosesOnce()
        torch.nn.utils.vector_to_parameters(torch.zeros_like(before), pipe.parameters())
        found = load(pipe)
        assert found is not None
        assert found.step == 3
        assert pipe.recovery.exchanges == ["checkpoint"] * 2
        assert torch.equal(torch.nn.utils.parameters_to_vector(pipe.parameters()), before)
