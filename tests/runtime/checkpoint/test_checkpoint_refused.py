"""Checkpoints that do not match the run are refused before anything in it has changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import MultiStepLR, StepLR

from penstock.errors import CheckpointError
from penstock.runtime import Checkpoints, DataOrder, Pipeline, launch, rank
from runtime.models import blocks


class Picky:
    """State that only one rank refuses to load."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and self.refuses:
            raise CheckpointError("not this one")


def groups(model: nn.Module, count: int) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.SGD([{"params": parameters[k::count], "lr": 0.1 * (k + 1)} for k in range(count)], momentum=0.9)


def saved(folder: Path) -> None:
    model = blocks(2)
    optimizer = groups(model, 2)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    Checkpoints(folder).save(model, optimizer, step=4, scheduler=MultiStepLR(optimizer, [1]), data=DataOrder(10, 2, seed=1))


@pytest.mark.parametrize(
    ("count", "seed", "why"),
    [(2, 2, "in an order with seed=1, and this one has seed=2"), (1, 1, "are in one group of the optimizer, but were saved with")],
    ids=["data", "options"],
)
def test_rejected_load_changes_nothing(tmp_path: Path, count: int, seed: int, why: str) -> None:
    saved(tmp_path)
    model = blocks(2)
    optimizer = groups(model, count)
    parts = {"scheduler": MultiStepLR(optimizer, [5, 7]), "data": DataOrder(10, 3, seed=seed)}
    next(parts["data"])
    held = {"model": model, "optimizer": optimizer, **parts}
    before = {name: copy.deepcopy(each.state_dict()) for name, each in held.items()}
    stream = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=why):
        Checkpoints(tmp_path).load_latest(model, optimizer, **parts)
    for name, value in before.pop("model").items():
        assert torch.equal(model.state_dict()[name], value)
    assert all(held[name].state_dict() == state for name, state in before.items())
    assert torch.equal(torch.get_rng_state(), stream)


def test_scheduler_with_other_groups(tmp_path: Path) -> None:
    saved(tmp_path)
    model = blocks(2)
    optimizer = groups(model, 2)
    optimizer.add_param_group({"params": []})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match="the scheduler was saved with 2 optimizer groups, but has 3 here"):
        Checkpoints(tmp_path).load_latest(model, optimizer, scheduler=StepLR(optimizer, 5), data=DataOrder(10, 2, seed=1))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rejection_on_one_rank_fails_all(tmp_path: Path) -> None:
    """If one rank refuses the saved state, no rank has loaded anything."""

    def train() -> tuple[str, bool, int]:
        torch.manual_seed(rank())
        pipe = Pipeline(blocks(2), schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
        data, checkpoints = DataOrder(10, 2), Checkpoints(tmp_path)
        checkpoints.save(pipe, step=1, data=data, extra={"picky": Stated()})
        for _, parameter in pipe.local_parameters():
            parameter.detach().add_(1.0)
        next(data)
        before = [parameter.detach().clone() for parameter in pipe.parameters()]
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load_latest(pipe, data=data, extra={"picky": Picky(rank() == 1)})
        same = all(torch.equal(one, other) for one, other in zip(pipe.parameters(), before, strict=True))
        return str(caught.value), same, data.position

    for text, same, position in launch(train, ranks=2):
        assert "not this one" in text
        assert same
        assert position == 2


class Stated(Picky):
    def __init__(self) -> None:
        super().__init__(refuses=False)

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}


def updated(optimizer: type[torch.optim.Optimizer], seed: int, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """A model after one update."""
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    made = optimizer(model.parameters(), **options)
    model(torch.ones(2, 3)).sum().backward()
    made.step()
    return model, made


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ("SGD", "AdamW", "options dampening, lr, momentum, nesterov, weight_decay, but AdamW has amsgrad, betas"),
        ("AdamW", "SGD", "options amsgrad, betas, eps, lr, weight_decay, but SGD has dampening"),
        ("Adamax", "AdamW", "but AdamW has amsgrad"),
        ("NAdam", "RAdam", "momentum_decay"),
    ],
)
@pytest.mark.parametrize("used", [False, True])
def test_optimizer_of_another_kind(tmp_path: Path, one: str, other: str, why: str, used: bool) -> None:
    """Refused before anything has changed, whether or not the optimizer already has state."""
    model, optimizer = updated(getattr(torch.optim, one), 0, lr=0.1)
    Checkpoints(tmp_path).save(model, optimizer, step=1)
    model, optimizer = updated(getattr(torch.optim, other), 1, lr=0.2)
    if not used:
        optimizer.state.clear()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(CheckpointError, match=f"weight was saved with an optimizer of the .*{why}.*: load with the kind"):
        Checkpoints(tmp_path).load_latest(model, optimizer)
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


class Own(torch.optim.Adam):
    """An optimizer with Adam's options but different state."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = parameter.grad.clone()


def test_optimizer_state_of_another_kind(tmp_path: Path) -> None:
    """Optimizers with equal options are told apart by the state that they keep; additional keys, as with `amsgrad`, are accepted."""
    model, optimizer = updated(torch.optim.Adam, 0, amsgrad=True)
    Checkpoints(tmp_path).save(model, optimizer, step=1)
    model, other = updated(Own, 1)
    with pytest.raises(CheckpointError, match=r"state of weight was saved as exp_avg, .*, but Own keeps mean"):
        Checkpoints(tmp_path).load_latest(model, other)
    model, other = updated(torch.optim.AdamW, 1)
    torch.optim.lr_scheduler.OneCycleLR(other, 0.1, total_steps=5)
    Checkpoints(tmp_path).load_latest(model, other)
    assert set(other.state[model.weight]) == set(optimizer.state_dict()["state"][0])
    assert other.param_groups[0]["amsgrad"] is True
