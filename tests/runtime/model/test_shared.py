"""Tied parameters, and pipelines that hold two copies of the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PlacementError, ScheduleError
from penstock.runtime import Layers, Pipeline, launch, rank
from runtime.models import GPT, assert_close, assert_equal, blocks, by_batch, by_loop, by_pipeline, gradients, token_loss

LAYERS = Layers("blocks", head=["embed"], tail=["norm", "head"])
TOKENS = torch.randint(11, (9, 8), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "interleaved-1f1b", "dualpipe", "dualpipe-v"])
def test_tied_embedding_of_one_model(name: str, microbatches: int) -> None:
    """On virtual ranks that share a model, both uses of a tied parameter add to one gradient."""
    model = GPT(depth=5, tied=True).double()
    schedule = ps.schedule(name, ranks=2, microbatches=microbatches)
    found = by_pipeline(model, schedule, TOKENS, TOKENS, token_loss, split=LAYERS)
    assert_close(found, by_batch(model, TOKENS, TOKENS, token_loss), 1e-12)


def _train(model: nn.Module, schedule: ps.Schedule, spoilt: Sequence[str]) -> dict[str, Tensor]:
    """Run some steps with clipping and an optimizer on a copy of the model; return this rank's parameters."""
    mine = copy.deepcopy(model)
    if rank():
        with torch.no_grad():
            for name in spoilt:
                mine.get_parameter(name).mul_(1.5)
    pipe = Pipeline(mine, schedule, loss_fn=token_loss, split=LAYERS)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.5, momentum=0.9)
    for _ in range(3):
        pipe.step(TOKENS, target=TOKENS.roll(1, 1))
        pipe.step(TOKENS.flip(0), target=TOKENS, microbatches=3)  # gradients of two steps are added up
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in pipe.local_parameters()}


def _unpipelined(model: nn.Module, microbatches: int, steps: int = 3) -> nn.Module:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for _ in range(steps):
        for x, y, count in ((TOKENS, TOKENS.roll(1, 1), microbatches), (TOKENS.flip(0), TOKENS, 3)):
            for xx, yy in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
                (token_loss(model(xx), yy) * (len(xx) / len(x))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_module_that_some_of_the_ranks_share(name: str) -> None:
    """The middle one of three virtual ranks takes no part in the module that the others share, but in everything that they exchange."""
    model, x, y = blocks(6).double(), torch.randn(8, 6).double(), torch.randn(8, 6).double()
    model[4 if name == "1f1b" else 2] = model[0]  # on ranks 0 and 2
    schedule = ps.schedule(name, ranks=3, microbatches=4)
    pipes = launch(lambda: _evaluate(Pipeline(model, schedule, loss_fn=functional.mse_loss), x, y), ranks=3)
    model.eval()
    torch.testing.assert_close(pipes[1], functional.mse_loss(model(x), y), rtol=1e-12, atol=0)


def _evaluate(pipe: Pipeline, x: Tensor, y: Tensor) -> Tensor:
    loss = pipe.eval_step(x, target=y).loss
    assert all(module.training for stage in pipe.stages.values() for module in stage.module.modules())
    return loss


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "dualpipe", "chimera"])
def test_separate_copies_stay_equal(name: str, tied: bool) -> None:
    """With one model per rank, as in processes, all copies are bitwise equal after three steps.

    All copies start from the values of the first.
    """
    torch.manual_seed(2)
    model = GPT(depth=4, tied=tied).double()
    schedule = ps.schedule(name, ranks=2, microbatches=4)
    spoilt = [key for key, _ in model.named_parameters()] if len(schedule.placement.copies) > 1 else ["embed.tokens.weight"]
    results = launch(_train, 2, args=(model, schedule, spoilt))
    wanted = _unpipelined(model, 4)
    seen: dict[int, Tensor] = {}
    for result in results:
        for key, value in result.items():
            parameter = wanted.get_parameter(key)
            torch.testing.assert_close(value, parameter.detach(), rtol=1e-9, atol=1e-11)
            assert_equal(value, seen.setdefault(id(parameter), value), key)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_bidirectional_copies_have_the_whole_gradient(name: str, microbatches: int) -> None:
    """Each copy sees half of the microbatches, and both get the sum, even if one copy has seen none."""
    model, x, y = blocks(4).double(), torch.randn(7, 6).double(), torch.randn(7, 6).double()
    schedule = ps.schedule(name, ranks=4, microbatches=microbatches)

    def train() -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=functional.mse_loss)
        pipe.step(x, target=y)
        grads = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        return {name: grad.clone() for name, grad in grads.items()}, {name: _scaled(pipe, grad) for name, grad in grads.items()}

    def _scaled(pipe: Pipeline, grad: Tensor) -> Tensor:
        pipe.gather("before", None)
        grad.mul_(0.5)  # no other gradient is the same tensor
        pipe.gather("after", None)
        return grad

    wanted = by_batch(model, x, y)
    results = launch(train, 4)
    assert sum(len(grads) for grads, _ in results) == 2 * len(wanted.grads)
    for grads, halves in results:
        for key, grad in grads.items():
            torch.testing.assert_close(grad, wanted.grads[key], rtol=1e-11, atol=1e-13)
            assert_equal(halves[key], grad * 0.5)


def test_copies_that_partly_share_objects() -> None:
    """Ranks 0 and 1 share a model, ranks 2 and 3 another: a parameter tied over two stages is two objects on four ranks."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    model[1].weight = model[0].weight
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    pair = [copy.deepcopy(model), copy.deepcopy(model)]
    schedule = ps.schedule("dualpipe", ranks=4, microbatches=4)
    wanted = by_batch(model, x, y)

    def train() -> Tensor:
        pipe = Pipeline(pair[rank() // 2], schedule, loss_fn=functional.mse_loss)
        for _ in range(2):
            pipe.step(x, target=y)
        return pipe.clip_grad_norm_(1e9)

    for norm in launch(train, 4):
        torch.testing.assert_close(norm, 2 * wanted.norm, rtol=1e-11, atol=0)
    for each in pair:
        for key, grad in gradients(each).items():
            torch.testing.assert_close(grad, 2 * wanted.grads[key], rtol=1e-11, atol=1e-13)


def test_two_pipes_of_one_model_side_by_side() -> None:
    """Copies on ranks that do not communicate: one may have finished before the other begins."""
    rows = [["0F0", "0B0"], ["1F0", "1B0"], ["0F1", "0B1"], ["1F1", "1B1"]]
    schedule = ps.Schedule.from_actions(rows, ps.Placement.custom([0, 1], [2, 3]))
    model, x, y = blocks(2).double(), torch.randn(4, 6).double(), torch.randn(4, 6).double()
    broken = False

    class Loss(nn.Module):
        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            if broken and rank() == 3:
                raise ValueError("no loss today")
            return functional.mse_loss(out, target)

    def train() -> None:
        nonlocal broken
        pipe = Pipeline(model, schedule, loss_fn=Loss())
        pipe.step(x, target=y)
        pipe.gather("once", None)
        once = gradients(model)
        assert pipe.parity(x, target=y).loop.worst < 1e-12
        pipe.gather("compared", None)
        for key, grad in gradients(model).items():
            assert_equal(grad, once[key], key)
        pipe.gather("checked", None)
        broken = True
        with pytest.raises(ps.PenstockError, match="no loss today"):
            pipe.step(x, target=y)
        pipe.gather("failed", None)
        broken = False
        for key, grad in gradients(model).items():
            assert_equal(grad, once[key], key)

    launch(train, 4)
    wanted = by_batch(model, x, y)
    for key, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted.grads[key], rtol=1e-11, atol=1e-13)


class Untied(nn.Module):
    """One end of a tied model, built on its own rank with its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_declared_ties(name: str) -> None:
    """Parameters tied by `ties=` start equal, their gradients are summed, and the norm counts them once."""
    schedule = ps.schedule(name, ranks=2, microbatches=3)
    stages = schedule.stages
    last = stages - 1
    model = nn.ModuleList(Untied() for _ in range(stages)).double()
    x, y = torch.randn(7, 6).double(), torch.randn(7, 6).double()
    one = copy.deepcopy(model)
    one[last].weight = one[0].weight
    whole = nn.Sequential(*one)
    wanted = by_loop(whole, x, y, 3)
    functional.mse_loss(whole(x), y).backward()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)

    def train() -> tuple[Tensor, dict[str, Tensor | None], Tensor]:
        held = {stage: copy.deepcopy(model[stage]) for stage in schedule.placement.stages_of(rank())}
        pipe = Pipeline(held, schedule, loss_fn=functional.mse_loss, ties=[("0.weight", f"{last}.weight")])
        loss = pipe.step(x, target=y).loss
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in pipe.named_parameters()}
        assert loss is not None
        return loss, grads, pipe.clip_grad_norm_(0.01)

    for loss, grads, found in launch(train, 2):
        torch.testing.assert_close(loss, wanted.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found, norm, rtol=1e-11, atol=0)
        for key, grad in grads.items():
            torch.testing.assert_close(grad, wanted.grads["0.weight" if key == f"{last}.weight" else key], rtol=1e-11, atol=1e-13)


def test_invalid_declared_ties_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    with pytest.raises(
        PlacementError, match=r"ties name '2.weight', which is not a parameter of the model: did you mean '1.weight' or '0.weight'"
    ):
        Pipeline(model, schedule="1f1b-v", microbatches=1, ties=[("0.weight", "2.weight")])
    with pytest.raises(PlacementError, match=r"shape \[6, 6\] in stage 0 on rank 0, \[3, 6\] in stage 1 on rank 0"):
        Pipeline(model, schedule="1f1b-v", microbatches=1, ties=[("0.weight", "1.weight")])


def test_tied_gradients_accumulate_over_steps() -> None:
    """A step adds to accumulated gradients once, on every rank that has a copy."""
    model = GPT(depth=2, tied=True).double()
    schedule = ps.schedule("1f1b", ranks=2, microbatches=2)

    def train() -> dict[str, Tensor | None]:
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=token_loss, split=LAYERS)
        for _ in range(3):
            pipe.step(TOKENS, target=TOKENS)
        return {name: p.grad for name, p in pipe.named_parameters()}

    wanted = by_batch(model, TOKENS, TOKENS, token_loss)
    for grads in launch(train, 2):
        for key, grad in grads.items():
            name = "embed.tokens.weight" if key == "head.weight" else key
            torch.testing.assert_close(grad, 3 * wanted.grads[name], rtol=1e-11, atol=1e-13)


def test_failure_restores_tied_gradients() -> None:
    """A failed step restores gradients, also those that were set aside for the sum over copies."""
    broken = False

    class Loss(nn.Module):
        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            if broken:
                raise ValueError("no loss today")
            return token_loss(out, target)

    model = GPT(depth=2, tied=True)
    schedule = ps.schedule("1f1b", ranks=2, microbatches=2)

    def train() -> None:
        nonlocal broken
        pipe = Pipeline(copy.deepcopy(model), schedule, loss_fn=Loss(), split=LAYERS)
        pipe.step(TOKENS, target=TOKENS)
        before = {name: p.grad.clone() for name, p in pipe.local_parameters() if p.grad is not None}
        broken = True
        with pytest.raises(ps.PenstockError, match="no loss today"):
            pipe.step(TOKENS, target=TOKENS)
        broken = False
        for name, parameter in pipe.local_parameters():
            assert_equal(parameter.grad, before[name], name)
        pipe.step(TOKENS, target=TOKENS)
        for name, parameter in pipe.local_parameters():
            torch.testing.assert_close(parameter.grad, 2 * before[name])

    launch(train, 2)


def test_parallel_ranks_do_not_share_parameters() -> None:
    """Parallel virtual ranks cannot share a model, because two threads would add to one gradient at the same time."""
    model = GPT(depth=2, tied=True)
    schedule = ps.schedule("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="cannot share parameters: build a model on each rank"):
        launch(lambda: Pipeline(model, schedule, loss_fn=token_loss, split=LAYERS, deadline=20), 2, parallel=True)


def test_two_pipelines_of_one_model() -> None:
    """Two pipelines on one model have separate programs and add to the same gradients."""
    model, x, y = blocks(4).double(), torch.randn(8, 6).double(), torch.randn(8, 6).double()

    def train() -> None:
        first = Pipeline(model, schedule="zbv", microbatches=2, loss_fn=functional.mse_loss)
        second = Pipeline(model, ps.schedule("interleaved-1f1b", ranks=2, microbatches=4), loss_fn=functional.mse_loss)
        for _ in range(2):
            first.step(x, target=y)
            second.step(x, target=y)

    launch(train, 2)
    wanted = by_batch(model, x, y)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, 4 * wanted.grads[name], rtol=1e-11, atol=1e-13)
