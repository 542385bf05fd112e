"""The behaviour that torch's own tests of traced pipelines (pipes, unflattened modules, transformers) require, on both packages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compat.torch.both import BOTH, Package
from compat.torch.models import assert_same, block, grads, schedule

both = pytest.mark.parametrize("package", BOTH, ids=repr)
pytestmark = pytest.mark.filterwarnings("ignore")


class Splitting(nn.Module):
    """Marks its own splits; a parameter is used on both sides of one, and a value skips a stage."""

    def __init__(self, package: Package) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.register_buffer("shift", torch.ones(6))
        self.one, self.two, self.split = nn.Linear(6, 6), nn.Linear(6, 6), package.top.pipe_split

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.mm(x, self.weight)
        skip = x + self.shift
        x = torch.relu(x)
        self.split()
        x = self.one(torch.mm(x, self.weight) + y)
        self.split()
        out: Tensor = self.two(x) + skip
        return out


class Chain(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(count)])

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return x if y is None else x - y


def names_of(pipe: Any) -> set[str]:
    return {name for k in range(pipe.num_stages) for name in pipe.get_stage_module(k).state_dict()}


# Pipes ----------------------------------------------------------------------------------------------------------------


@both
def test_pipe_split_in_the_model(package: Package) -> None:
    model, x, y = Splitting(package), torch.randn(4, 6), torch.randn(4, 6)
    pipe = package.top.pipeline(model, mb_args=(x, y))
    assert pipe.num_stages == 3
    assert pipe.info().num_stages == 3
    assert_same(pipe(x, y)[0], model(x, y))
    assert names_of(pipe) == set(model.state_dict())


@both
@pytest.mark.parametrize("place", ["BEGINNING", "END"])
def test_split_spec(package: Package, place: str) -> None:
    model, x, y = Chain(4), torch.randn(4, 6), torch.randn(4, 6)
    where = getattr(package.top.SplitPoint, place)
    at = range(1, 4) if place == "BEGINNING" else range(3)
    pipe = package.top.pipeline(model, (x, y), split_spec={f"blocks.{k}": where for k in at})
    assert pipe.num_stages == 4
    assert_same(pipe(x, y)[0], model(x, y))
    for k in range(4):
        own = set(pipe.get_stage_module(k).state_dict())
        assert own == {name for name in model.state_dict() if name.startswith(f"blocks.{k}.")}


@both
def test_split_policy(package: Package) -> None:
    def policy(graph: Any) -> Any:
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and "tanh" in str(node.target):
                with graph.graph.inserting_after(node):
                    graph.graph.call_function(torch.ops.pippy._pipe_split.default, ())
        graph.recompile()
        return graph

    model, x = Chain(2), torch.randn(4, 6)
    pipe = package.top.pipeline(model, (x,), split_policy=policy)
    assert pipe.num_stages == 3
    assert_same(pipe(x)[0], model(x))


@both
def test_keyword_arguments(package: Package) -> None:
    model, x, y = Chain(2), torch.randn(4, 6), torch.randn(4, 6)
    pipe = package.top.pipeline(model, mb_args=(x,), mb_kwargs={"y": y}, split_spec={"blocks.1": package.top.SplitPoint.BEGINNING})
    assert_same(pipe(x, y=y)[0], model(x, y))


@both
def test_a_model_without_splits(package: Package) -> None:
    model, x = Chain(2), torch.randn(4, 6)
    pipe = package.top.Pipe.from_tracing(model, (x,))
    assert pipe.num_stages == 1
    assert isinstance(pipe, package.top.Pipe)
    assert_same(pipe(x)[0], model(x))


@both
def test_an_unknown_name_in_the_split_spec(package: Package) -> None:
    with pytest.raises(AttributeError):
        package.top.pipeline(Chain(2), (torch.ones(2, 6),), split_spec={"blocks.7": package.top.SplitPoint.END})


@both
def test_splitting_leaves_the_model_unchanged(package: Package) -> None:
    model, x = Chain(2), torch.randn(4, 6)
    before = copy.deepcopy(model.state_dict())
    package.top.pipeline(model, (x,), split_spec={"blocks.1": package.top.SplitPoint.BEGINNING})
    assert_same(list(model.state_dict().values()), list(before.values()), exact=True)


# Unflattened modules --------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Nested modules."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleDict({"a": nn.Sequential(nn.Linear(6, 6), nn.ReLU()), "b": nn.Sequential(nn.Linear(6, 6), nn.Tanh())})
        self.norm, self.last = nn.LayerNorm(6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.outer["a"](x))
        out: Tensor = self.last(self.outer["b"](x))
        return out


@both
def test_stages_keep_the_module_tree(package: Package) -> None:
    model, x = Nested(), torch.randn(4, 6)
    pipe = package.top.pipeline(model, (x,), split_spec={"outer.b": package.top.SplitPoint.BEGINNING})
    first, second = (pipe.get_stage_module(k) for k in range(2))
    passed = first(x)
    assert_same(second(passed) if isinstance(passed, Tensor) else second(*passed), model(x))
    assert names_of(pipe) == set(model.state_dict())
    paths = {name for name, _ in first.named_modules()}
    assert {"outer", "outer.a", "outer.a.0", "norm"} <= paths
    assert "outer.b" not in paths


@both
def test_stages_share_the_parameters_of_the_model(package: Package) -> None:
    model, x = Nested(), torch.randn(4, 6)
    pipe = package.top.pipeline(model, (x,), split_spec={"outer.b": package.top.SplitPoint.BEGINNING})
    for k in range(2):
        for name, value in pipe.get_stage_module(k).state_dict().items():
            assert_same(value, model.state_dict()[name], exact=True)


# Transformers ---------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(count)])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


@both
def test_a_transformer_split_between_layers(package: Package) -> None:
    model, tokens = Layers(4), torch.randint(0, 11, (2, 5))
    model.train()
    pipe = package.top.pipeline(model, (tokens,), split_spec={f"layers.{k}": package.top.SplitPoint.BEGINNING for k in (1, 2, 3)})
    assert pipe.num_stages == 4
    layers = [
        sum(isinstance(getattr(each, "self_attn", None), nn.Module) for _, each in pipe.get_stage_module(k).named_modules())
        for k in range(4)
    ]
    assert layers == [1] * 4
    assert names_of(pipe) == set(model.state_dict())
    assert_same(pipe(tokens)[0], model(tokens))


@both
@pytest.mark.usefixtures("alone")
def test_a_traced_transformer_trains(package: Package) -> None:
    model, tokens, y = Layers(2), torch.randint(0, 11, (4, 5)), torch.randn(4, 5, 11)
    alone = copy.deepcopy(model)
    pipe = package.top.pipeline(model, (tokens[:2],))
    stage = pipe.build_stage(0, torch.device("cpu"))
    made = schedule(package, "ScheduleGPipe", [stage], 2, loss_fn=functional.mse_loss)
    out = made.step(tokens, target=y)
    for part, wanted in zip(tokens.split(2), y.split(2), strict=True):
        (functional.mse_loss(alone(part), wanted) / 2).backward()
    assert_same(out, alone(tokens))
    mine = {name: parameter.grad for name, parameter in stage.submod.named_parameters()}
    assert_same([mine[name] for name, _ in alone.named_parameters()], grads([alone]))


@both
@pytest.mark.usefixtures("alone")
def test_building_a_stage_twice(package: Package) -> None:
    model, x = Chain(2), torch.randn(4, 6)
    pipe = package.top.pipeline(model, (x,), split_spec={"blocks.1": package.top.SplitPoint.BEGINNING})
    for k in range(2):
        one = pipe.build_stage(k, torch.device("cpu"))
        other = package.top.build_stage(pipe.get_stage_module(k), k, pipe.info(), torch.device("cpu"))
        assert type(one) is type(other)
        assert (one.stage_index, one.num_stages, one.is_first, one.is_last) == (k, 2, k == 0, k == 1)
        assert isinstance(one, package.stage._PipelineStageBase)
