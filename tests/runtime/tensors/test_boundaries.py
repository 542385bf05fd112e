"""What stages pass to each other, on virtual ranks and within one rank."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.errors import CopyError, PenstockError, PlacementError, ScheduleError
from penstock.runtime import Pipeline, launch
from penstock.runtime.batch import microbatch as mb
from penstock.runtime.tensors.boundary import storage_overlaps
from runtime.between import Map
from runtime.boundaries import CASES, Bag, assert_case, schedule_of, stages_of, step
from runtime.boundaries import data as boundary_data

pytestmark = pytest.mark.filterwarnings("ignore:.*prototype.*:UserWarning")


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "interleaved-zb"])
@pytest.mark.parametrize("case", CASES)
def test_case_on_threads(case: str, name: str) -> None:
    ranks, stages = schedule_of(CASES[case], name).ranks, stages_of(CASES[case])
    assert_case(CASES[case], launch(step, ranks, args=(CASES[case], name, stages)))


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].refused and "changes" in CASES[case].refused])
def test_evaluation_refuses_the_same(case: str) -> None:
    stages, (x, y) = stages_of(CASES[case]), boundary_data()
    before = copy.deepcopy(stages.state_dict())

    def evaluate() -> None:
        Pipeline(stages, schedule_of(CASES[case], "1f1b"), loss_fn=functional.mse_loss).eval_step(x, target=y)

    with pytest.raises(PenstockError, match=CASES[case].refused):
        launch(evaluate, len(stages))
    assert all(torch.equal(value, before[key]) for key, value in stages.state_dict().items())


def test_overlap_is_exact_for_pieces_of_one_tensor() -> None:
    base = torch.arange(4 * 6 * 5).view(4, 6, 5)
    pieces = [*base.chunk(2, 0), *base.chunk(3, 1), *base.split([2, 3], 2), base[1:3, 2:4, 1:2], base[:, ::2], base[:, 1::2]]
    for one in pieces:
        for other in pieces:
            common = bool(set(one.flatten().tolist()) & set(other.flatten().tolist()))
            assert storage_overlaps(one, other) == common if one.stride() == other.stride() else storage_overlaps(one, other) >= common


# Batches --------------------------------------------------------------------------------------------------------------


class Takes(nn.Module):
    """A stage that says what it was given and reads all tensors of it."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)
        self.seen: list[Any] = []

    def forward(self, *args: Any) -> Tensor:
        self.seen.append(args)
        found = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        return self.map(sum(found[1:], found[0]))


def _shape(value: Any) -> Any:
    """A value with sizes in place of tensors."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: _shape(part) for key, part in value.items()}
    return type(value)(map(_shape, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(
    "args",
    [
        lambda x: ([x],),
        lambda x: ((x,),),
        lambda x: ({"a": x},),
        lambda x: (x, [x]),
        lambda x: (x, (x,)),
        lambda x: ([x], {"b": x}),
        lambda x: ([x, x], [x]),
        lambda x: ([], x),
        lambda x: (x, []),
        lambda x: ([[x]], None, "name"),
    ],
)
def test_a_batch_keeps_its_structure(args: Any) -> None:
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    given, stage = args(x), Takes()
    Pipeline([stage], schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss).step(*given, target=y)
    assert [_shape(seen) for seen in stage.seen] == [_shape(args(torch.empty(2, 6)))] * 3


@pytest.mark.parametrize("target", [lambda y: ({"y": y},), lambda y: [y], lambda y: {"y": [y]}, lambda y: ([y],)])
def test_a_target_keeps_its_structure(target: Any) -> None:
    seen: list[Any] = []

    def loss_fn(out: Tensor, given: Any) -> Tensor:
        seen.append(_shape(given))
        return functional.mse_loss(out, torch.utils._pytree.tree_leaves(given)[0])

    x, y = torch.randn(6, 6), torch.randn(6, 6)
    Pipeline([nn.Linear(6, 6)], schedule="1f1b", microbatches=3, loss_fn=loss_fn).step(x, target=target(y))
    assert seen == [_shape(target(torch.empty(2, 6)))] * 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Bag, "object of the class Bag that holds a tensor"),
        (lambda x: UserDict(x=x), "object of the class UserDict that holds a tensor"),
        (lambda x: x.numpy(), r"NumPy array of shape \[6, 6\]"),
    ],
)
@pytest.mark.parametrize("where", ["input", "target", "stage_kwargs", "step_list"])
def test_a_batch_that_cannot_be_split_is_refused(make: Any, message: str, where: str) -> None:
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    pipe = Pipeline([Map()], schedule="1f1b", microbatches=2, loss_fn=lambda out, target: out.sum(), loss_reduction="sum")
    calls = {
        "input": lambda: pipe.step(make(x), target=y),
        "target": lambda: pipe.step(x, target=make(y)),
        "stage_kwargs": lambda: pipe.step(x, target=y, stage_kwargs={0: {"note": make(x)}}),
        "step_list": lambda: pipe.step_list([make(x), make(x)], [y, y]),
    }
    with pytest.raises(ScheduleError, match=message):
        calls[where]()


def test_none_gives_every_microbatch_the_whole_object() -> None:
    x, y, note = torch.randn(6, 6), torch.randn(6, 6), np.ones(6)
    stage = Takes()
    Pipeline([stage], schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, batch_dims=(0, None)).step(x, note, target=y)
    assert [seen[1] is note for seen in stage.seen] == [True, True]


def test_random_trees_are_split_and_keep_their_structure() -> None:
    """Against plain slicing of every leaf, for trees of tuples, lists and dicts."""
    generator = np.random.default_rng(0)

    def draw(depth: int) -> Any:
        kind = generator.integers(0, 5 if depth else 2)
        if kind < 2:
            return torch.randn(6, 2) if kind == 0 or depth == 0 else ("plain", None, 3)[generator.integers(0, 3)]
        parts = [draw(depth - 1) for _ in range(generator.integers(0, 4))]
        return {2: tuple, 3: list, 4: lambda given: {str(k): part for k, part in enumerate(given)}}[int(kind)](parts)

    def cut(value: Any, rows: slice) -> Any:
        if isinstance(value, dict):
            return {key: cut(part, rows) for key, part in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(cut(part, rows) for part in value)
        return value[rows] if isinstance(value, Tensor) else value

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor):
            return torch.equal(one, other)
        if isinstance(one, dict):
            return type(other) is dict and one.keys() == other.keys() and all(same(part, other[key]) for key, part in one.items())
        if isinstance(one, (list, tuple)):
            return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
        return bool(one == other)

    for _ in range(1000):
        value = tuple(draw(2) for _ in range(generator.integers(1, 4)))
        found = mb.split_batch(value, 0, [2, 2, 2])
        assert all(same(part, cut(value, slice(2 * k, 2 * k + 2))) for k, part in enumerate(found)), value


class ChangesMask(Map):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * mask.mul_(0.5)


def test_objects_shared_by_all_microbatches_may_not_be_changed() -> None:
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    pipe = Pipeline([ChangesMask()], schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss, batch_dims=(0, None))
    with pytest.raises(PenstockError, match="stage 0 changes in place a tensor of the batch that other microbatches get too: clone it"):
        pipe.step(x, torch.ones(6), target=y)
    pipe.step(x, torch.ones(6), target=y, microbatches=1)


def test_memory_shared_with_the_target_may_not_be_changed() -> None:
    class Changes(Map):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    x = torch.randn(6, 6)
    pipe = Pipeline([Changes()], schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
    with pytest.raises(PenstockError, match="a tensor of the batch that the target or another stage's arguments have too: clone it"):
        pipe.step(x, target=x)
    pipe.step(x, target=x.clone())
    pipe.step_list([*x.chunk(2)], [*x.clone().chunk(2)])


# Around the step ------------------------------------------------------------------------------------------------------


def test_pipelines_stepped_in_different_orders_are_refused() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)

    def train() -> None:
        pipes = [Pipeline([Map(), Map()], schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss) for _ in range(2)]
        for pipe in pipes if ps.runtime.rank() == 0 else reversed(pipes):
            pipe.step(x, target=y)

    with pytest.raises(PenstockError, match="rank 0 runs another step than rank 1"):
        launch(train, 2)


def test_retained_gradient_of_an_input() -> None:
    class Retains(Map):
        seen: list[Tensor]

        def forward(self, x: Tensor) -> Tensor:
            x.retain_grad()
            self.seen.append(x)
            return super().forward(x)

    stages = [Map(), Retains()]
    stages[1].seen = []
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    launch(lambda: Pipeline(stages, schedule="1f1b", microbatches=3, loss_fn=functional.mse_loss).step(x, target=y), 2)
    for seen, yy in zip(stages[1].seen, y.chunk(3), strict=True):
        again = seen.detach().requires_grad_()
        (functional.mse_loss(torch.tanh(stages[1].map(again)), yy) / 3).backward()
        assert torch.equal(seen.grad, again.grad)


def test_a_parameter_added_later_is_refused() -> None:
    stages = nn.ModuleList([Map()])
    pipe = Pipeline(stages, schedule="1f1b", microbatches=2, loss_fn=functional.mse_loss)
    stages[0].late = nn.Parameter(torch.ones(6))
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    for call in (lambda: list(pipe.parameters()), lambda: pipe.clip_grad_norm_(1.0), lambda: pipe.step(x, target=y)):
        with pytest.raises(PenstockError, match=r"'0\.late' was added to the model after the pipeline was created"):
            call()


def test_trainable_parameters_of_a_loss_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return functional.mse_loss(out * self.scale, target)

    loss = Scaled()
    x, y = torch.randn(4, 6), torch.randn(4, 6)

    def train() -> None:
        Pipeline([Map(), Map()], schedule="1f1b", microbatches=2, loss_fn=loss).step(x, target=y)

    with pytest.raises(PenstockError, match="loss_fn has a trainable parameter, 'scale', that is not in the last stage"):
        launch(train, 2)
    loss.requires_grad_(False)
    launch(train, 2)


def test_a_lazy_layer_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"'weight' has no shape before its layer has run: run the model on a sample"):
        Pipeline([nn.LazyLinear(6)], schedule="1f1b", microbatches=2)


def test_a_pipeline_is_not_copied() -> None:
    import pickle

    pipe = Pipeline([Map()], schedule="1f1b", microbatches=2)
    for call in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(CopyError, match="cannot be copied or pickled"):
            call(pipe)


def test_a_rank_without_parameters_to_update_is_warned() -> None:
    pipe = Pipeline([nn.Tanh()], schedule="1f1b", microbatches=2)
    with pytest.warns(UserWarning, match="rank 0 has no parameters to update"):
        assert list(pipe.parameters()) == []
    torch.optim.AdamW([{"params": []}])


@pytest.mark.parametrize("case", [case for case in CASES if "memory" in (CASES[case].refused or "") or "buffer" in case])
def test_recomputed_stages_follow_the_same_rule(case: str) -> None:
    ranks, stages = schedule_of(CASES[case], "1f1b").ranks, stages_of(CASES[case])
    assert_case(CASES[case], launch(step, ranks, args=(CASES[case], "1f1b", stages, True)))
