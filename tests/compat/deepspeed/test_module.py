"""Lists of layers: where they are cut, what each rank builds of them, and how they train against the unpipelined model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from compat.deepspeed.training import WIDTH, Block, by_loop, data, loss_fn, sgd
from penstock.compat.deepspeed import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineEngine,
    PipelineModule,
    ProcessTopology,
    TiedLayerSpec,
    as_deepspeed,
)
from penstock.compat.deepspeed.module import partition_balanced, partition_uniform
from penstock.errors import PenstockError, PlacementError, ScheduleError
from penstock.runtime import launch

Layers = Callable[[], list[Any]]

# Where lists are cut --------------------------------------------------------------------------------------------------

# What DeepSpeed 0.19.8 gives for these weights.
BALANCED = [
    ([1, 1, 1, 1], 2, [0, 2, 4]),
    ([0, 1, 1, 1, 1, 0], 2, [0, 3, 6]),
    ([5, 1, 1, 1], 2, [0, 1, 4]),
    ([1, 2, 3, 4, 5], 3, [0, 3, 4, 5]),
    ([4, 1, 1, 1, 1, 4], 3, [0, 1, 5, 6]),
    ([0, 0, 0], 2, [0, 2, 3]),
    ([100, 7, 3, 9, 100, 0], 4, [0, 1, 3, 4, 6]),
    ([1, 2], 4, [0, 1, 2, 2, 2]),
]


@pytest.mark.parametrize(("weights", "parts", "bounds"), BALANCED)
def test_weights_are_balanced_as_in_deepspeed(weights: list[int], parts: int, bounds: list[int]) -> None:
    assert partition_balanced(weights, parts) == bounds


@given(weights=st.lists(st.integers(0, 50), min_size=3, max_size=12))
def test_the_best_of_two_parts_is_found(weights: list[int]) -> None:
    def gap(cut: int) -> int:
        return abs(sum(weights[:cut]) - sum(weights[cut:]))

    first, cut, last = partition_balanced(weights, 2)
    assert (first, last) == (0, len(weights))
    assert gap(cut) == min(map(gap, range(1, len(weights))))


@given(items=st.integers(0, 40), parts=st.integers(1, 12))
def test_equal_parts_differ_by_one_at_most(items: int, parts: int) -> None:
    bounds = partition_uniform(items, parts)
    sizes = [after - before for before, after in pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(sizes)) == (0, items, parts)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


class Wide(Block):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.more = nn.Parameter(torch.zeros(1000))


@pytest.mark.parametrize(
    ("method", "bounds"),
    [
        ("uniform", [0, 2, 4, 6]),
        ("parameters", partition_balanced([1042, 0, 42, 0, 42, 1042], 3)),
        ("Parameters", [0, 2, 5, 6]),
        ("type:wide", partition_balanced([1, 0, 0, 0, 0, 1], 3)),
        ("type:Block|Wide", partition_balanced([1, 0, 1, 0, 1, 1], 3)),
        ("type:^tanh$", partition_balanced([0, 1, 0, 1, 0, 0], 3)),
    ],
)
def test_methods_of_cutting(method: str, bounds: list[int]) -> None:
    def cut() -> tuple[list[int], list[int], list[str]]:
        layers = [LayerSpec(Wide, 0), torch.tanh, Block(1), nn.Tanh(), Block(2), Wide(3)]
        if method == "parameters":
            layers[3] = nn.Linear(500, 500).requires_grad_(False)  # what is not trained does not count
        module = PipelineModule(layers, num_stages=3, partition_method=method)
        return module.partitions(), [module.stage_owner(k) for k in range(6)], sorted(module.fwd_map)

    for stage, (found, owners, mine) in enumerate(launch(cut, ranks=3)):
        owner = [next(stage for stage in range(3) if layer < bounds[stage + 1]) for layer in range(6)]
        assert owners == owner
        assert found == bounds
        assert mine == [str(k) for k in range(6) if owner[k] == stage and k != 1]


class Counted(Block):
    built: list[int] = []  # noqa: RUF012 - what all ranks have built on a device with values

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        if not torch.empty(0).is_meta:
            self.built.append(seed)


@pytest.mark.parametrize("method", ["uniform", "parameters"])
def test_a_rank_builds_its_own_layers_alone(method: str) -> None:
    Counted.built.clear()

    def build() -> tuple[list[str], bool]:
        before = torch.get_rng_state()
        module = PipelineModule([LayerSpec(Counted, k) for k in range(4)], num_stages=2, partition_method=method)
        assert module.topology().get_dim("pipe") == module.num_pipeline_stages() == module.mpu().pipe_parallel_size == 2
        return [name for name, _ in module.named_parameters()], torch.equal(before, torch.get_rng_state())

    for stage, (names, same) in enumerate(launch(build, ranks=2)):
        assert names == [f"{k}.{name}" for k in (2 * stage, 2 * stage + 1) for name in ("weight", "bias")]
        assert same
    assert Counted.built == [0, 1, 2, 3]


def test_layers_that_cannot_be_built_without_values_are_counted_too() -> None:
    class Fussy(Block):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            assert torch.ones(1).item() == 1

    assert launch(lambda: PipelineModule([LayerSpec(Fussy, 0), Block(1)], num_stages=2).partitions(), ranks=2) == [[0, 1, 2]] * 2


# Training -------------------------------------------------------------------------------------------------------------


def scale(x: Tensor) -> Tensor:
    return 1.5 * x


def project(module: Block, x: Tensor) -> Tensor:
    """The weight of a tied layer used the other way."""
    return x @ module.weight


def mixed() -> list[Any]:
    """Modules, specs and functions."""
    return [Block(0), scale, LayerSpec(Block, 1), nn.Tanh(), lambda x: x + 1, LayerSpec(Block, seed=2), Block(3)]


def mixed_whole() -> nn.Module:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(map(Block, range(4)))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.blocks[1](1.5 * self.blocks[0](x)))
            return self.blocks[3](self.blocks[2](x + 1))  # type: ignore[no-any-return]

    return Whole()


def tied() -> list[Any]:
    """Both ends are one layer, whose weight is used once more in the middle, after a change of units."""
    return [
        TiedLayerSpec("end", Block, 0),
        LayerSpec(Block, 1),
        TiedLayerSpec("end", Block, 0, forward_fn=project),
        LayerSpec(Block, 2),
        TiedLayerSpec("end", Block, 0),
    ]


def tied_whole() -> nn.Module:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(map(Block, range(3)))

        def forward(self, x: Tensor) -> Tensor:
            end, first, second = self.blocks
            return end(second(project(end, first(end(x)))))  # type: ignore[no-any-return]

    return Whole()


def train(layers: Layers, batches: list[Any], micro_batches: int, stages: int, **options: Any) -> list[Any]:
    """On one rank: the losses, and the parameters afterwards by name."""
    module = PipelineModule(layers(), num_stages=stages, loss_fn=loss_fn, **options)
    engine = PipelineEngine(module, micro_batches=micro_batches, optimizer=sgd, deadline=20)
    source = iter(batches)
    losses = [engine.train_batch(source).item() for _ in range(len(batches) // micro_batches)]
    return [losses, {name: parameter.detach() for name, parameter in module.named_parameters()}]


def assert_alike(found: list[Any], whole: nn.Module, batches: list[Any], micro_batches: int, names: dict[str, str]) -> None:
    """The losses and parameters of all ranks against the unpipelined model, whose names these are."""
    wanted = [loss.item() for loss in by_loop(whole, batches, micro_batches)]
    seen = set()
    for losses, parameters in found:
        assert losses == pytest.approx(wanted, rel=1e-12)
        for name, value in parameters.items():
            layer, _, last = name.rpartition(".")
            torch.testing.assert_close(value, whole.get_parameter(f"{names[layer]}.{last}"), rtol=1e-12, atol=1e-12)
            seen.add(layer)
    assert seen == set(names)


MIXED = {"0": "blocks.0", "2": "blocks.1", "5": "blocks.2", "6": "blocks.3"}
TIED = {"1": "blocks.1", "3": "blocks.2", "tied_modules.end": "blocks.0"}


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("method", ["uniform", "parameters", "type:block"])
@pytest.mark.parametrize("interval", [0, 2])
def test_layers_of_all_kinds(stages: int, method: str, interval: int) -> None:
    batches = data(8, torch.float64)
    options = {"partition_method": method, "activation_checkpoint_interval": interval}
    found = launch(lambda: train(mixed, batches, 4, stages, **options), ranks=stages)
    assert_alike(found, mixed_whole(), batches, 4, MIXED)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_tied_layers(stages: int) -> None:
    batches = data(8, torch.float64)
    found = launch(lambda: train(tied, batches, 4, stages, partition_method="uniform"), ranks=stages)
    assert_alike(found, tied_whole(), batches, 4, TIED)


def test_tied_layers_start_from_the_first() -> None:
    """Independent of what a later stage has built."""

    def layers() -> list[Any]:
        return [TiedLayerSpec("end", Block, 0), LayerSpec(Block, 1), TiedLayerSpec("end", Block, 7)]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.end, self.middle = Block(0), Block(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.end(self.middle(self.end(x)))  # type: ignore[no-any-return]

    batches = data(4, torch.float64)
    found = launch(lambda: train(layers, batches, 2, 3, partition_method="uniform"), ranks=3)
    assert_alike(found, Whole(), batches, 2, {"tied_modules.end": "end", "1": "middle"})


class Inner(nn.Module):
    """Holds a block's weight as an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.block.weight)


def test_tied_layers_of_two_classes_share_what_they_name() -> None:
    def layers() -> list[Any]:
        return [
            TiedLayerSpec("end", Inner, tied_weight_attr="block.weight"),
            LayerSpec(Block, 1),
            TiedLayerSpec("end", Other, tied_weight_attr=["block.weight"]),
        ]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = Inner(), Block(1), Other()
            self.last.block.weight = self.first.block.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]

    batches = data(4, torch.float64)
    whole = Whole()
    wanted = [loss.item() for loss in by_loop(whole, batches, 2)]
    found = launch(lambda: train(layers, batches, 2, 3, partition_method="uniform"), ranks=3)
    assert all(losses == pytest.approx(wanted, rel=1e-12) for losses, _ in found)
    torch.testing.assert_close(found[2][1]["tied_modules.end.block.bias"], whole.last.block.bias, rtol=1e-12, atol=1e-12)


class Other(Inner):
    """Uses the bias as well."""

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("shared", [True, False])
def test_modules_that_are_one_object_are_tied_over_stages(shared: bool) -> None:
    """As one object on all virtual ranks, or a copy on each; DeepSpeed trains these apart."""

    def layers() -> list[Any]:
        block, other = Block(0), Block(2)
        other.weight = block.weight
        return [block, Block(1), block, other]

    batches = data(4, torch.float64)
    common = layers()
    whole = nn.Sequential(*copy.deepcopy(common))
    names = {str(k): str(k) for k in range(4)}
    found = launch(lambda: train(lambda: common if shared else layers(), batches, 2, 4, partition_method="uniform"), ranks=4)
    assert_alike(found, whole, batches, 2, names)


def test_a_loss_with_parameters_of_its_own() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = Block(9)

        def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.mse_loss(self.map(outputs), labels)

    def train_all() -> tuple[list[float], list[str], Tensor]:
        module = PipelineModule([LayerSpec(Block, 0), LayerSpec(Block, 1)], num_stages=2, loss_fn=Loss())
        engine = PipelineEngine(module, micro_batches=2, optimizer=sgd, deadline=20)
        source = iter(batches)
        losses = [engine.train_batch(source).item() for _ in range(2)]
        return losses, [name for name, _ in engine.named_parameters()], module.loss_fn.map.weight.detach()

    batches = data(4, torch.float64)
    whole = nn.Sequential(Block(0), Block(1), Block(9))
    wanted = [loss.item() for loss in by_loop(whole, batches, 2)]
    (first, names, _), (second, last_names, weight) = launch(train_all, ranks=2)
    assert first == second == pytest.approx(wanted, rel=1e-12)
    assert names == ["0.weight", "0.bias"]
    assert sorted(last_names) == ["1.bias", "1.weight", "loss_fn.map.bias", "loss_fn.map.weight"]
    torch.testing.assert_close(weight, whole[2].weight, rtol=1e-12, atol=1e-12)


def test_stages_without_layers() -> None:
    batches = data(4, torch.float64)
    found = launch(lambda: train(lambda: [Block(0), Block(1)], batches, 2, 4), ranks=4)
    assert_alike(found, nn.Sequential(Block(0), Block(1)), batches, 2, {"0": "0", "1": "1"})


@pytest.mark.parametrize("interval", [0, 1])
def test_layers_that_pass_on_tuples(interval: int) -> None:
    class Pair(Block):
        def forward(self, given: Any) -> Any:
            x, y = given
            return torch.tanh(x @ self.weight), x + y

    def last(given: Any) -> Tensor:
        return given[0] * given[1]  # type: ignore[no-any-return]

    def inputs(x: Tensor) -> list[Tensor]:
        return [x, 2 * x]  # a loader gives lists

    batches = [(inputs(x), y) for x, y in data(4, torch.float64)]

    class Whole(nn.Sequential):
        def forward(self, given: Any) -> Tensor:
            return last(super().forward(given))

    options = {"activation_checkpoint_interval": interval, "partition_method": "uniform"}
    found = launch(lambda: train(lambda: [Pair(0), Pair(1), Pair(2), last], batches, 2, 2, **options), ranks=2)
    assert_alike(found, Whole(Pair(0), Pair(1), Pair(2)), batches, 2, {str(k): str(k) for k in range(3)})


# Recomputation and seeds ----------------------------------------------------------------------------------------------


class Watched(Block):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Unwatched(Watched):
    pass


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, [1, 1, 1, 1]),
        ({"activation_checkpoint_interval": 1}, [2, 2, 2, 2]),
        ({"activation_checkpoint_interval": 3}, [2, 2, 2, 2]),
        ({"activation_checkpoint_interval": 1, "checkpointable_layers": ["Unwatched"]}, [1, 1, 2, 1]),
        ({"activation_checkpoint_interval": 2, "checkpointable_layers": ["Unwatched"]}, [1, 1, 1, 1]),
        ({"activation_checkpoint_interval": 1, "activation_checkpoint_func": lambda run, *given: run(*given)}, [1, 1, 1, 1]),
        (
            {
                "activation_checkpoint_interval": 1,
                "activation_checkpoint_func": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
            },
            [2, 2, 2, 2],
        ),
    ],
)
def test_recomputed_blocks_run_again_in_the_backward(options: dict[str, Any], calls: list[int]) -> None:
    layers: list[Any] = [Watched(0), Watched(1), Unwatched(2), Watched(3)]
    whole = nn.Sequential(*map(Block, range(4)))
    batches = data(2, torch.float64)
    found = launch(lambda: train(lambda: layers, batches, 2, 2, partition_method="uniform", **options), ranks=2)
    assert [layer.calls for layer in layers] == [2 * count for count in calls]
    assert_alike(found, whole, batches, 2, {str(k): str(k) for k in range(4)})


def test_the_interval_may_change() -> None:
    layers = [Watched(0), Watched(1)]
    module = PipelineModule(layers, num_stages=1, activation_checkpoint_interval=1)
    for interval, calls in ((1, 2), (0, 1), (2, 2)):
        layers[0].calls = 0
        module.set_checkpoint_interval(interval)
        module(torch.randn(1, WIDTH, dtype=torch.float64)).sum().backward()
        assert layers[0].calls == calls


@pytest.mark.parametrize("interval", [0, 1])
def test_seeded_layers_do_not_depend_on_the_cut(interval: int) -> None:
    """The initial values and the random numbers do not depend on it."""
    batches = data(8)

    def layers() -> list[Any]:
        return [layer for _ in range(3) for layer in (LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Dropout, 0.5))]

    options = {"seed_layers": True, "base_seed": 3, "activation_checkpoint_interval": interval}
    losses = [launch(lambda n=stages: train(layers, batches, 4, n, **options)[0], ranks=stages)[0] for stages in (1, 2, 3)]
    assert losses[0] == losses[1] == losses[2]
    other = launch(lambda: train(layers, batches, 4, 2, seed_layers=True, base_seed=4)[0], ranks=2)[0]
    assert other != losses[0]


def test_a_seed_function_is_called_for_every_layer() -> None:
    seeds: list[int] = []
    module = PipelineModule([LayerSpec(Block, 0), Block(1)], num_stages=1, seed_layers=True, seed_fn=seeds.append, base_seed=100)
    assert seeds == [100, 101]
    x = torch.randn(1, WIDTH, dtype=torch.float64)
    module(x)
    module(x)
    assert seeds[2:] == [200, 201, 300, 301]


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: PipelineModule([Block(0)]), ScheduleError, "needs num_stages or a topology"),
        (lambda: PipelineModule([Block(0)], num_stages=3), ScheduleError, "num_stages=3 does not divide the 2 ranks"),
        (lambda: PipelineModule([Block(0)], topology=ProcessTopology(["data"], [2])), ScheduleError, "it needs one called 'pipe'"),
        (
            lambda: PipelineModule([Block(0)], num_stages=2, topology=PipeDataParallelTopology(1, 2)),
            ScheduleError,
            "num_stages=2, but the topology has 1 along 'pipe'",
        ),
        (lambda: PipelineModule([Block(0), 3], num_stages=2), PlacementError, "layer 1 is a int: give a module, a LayerSpec or a function"),
        (lambda: PipelineModule([Block(0)], num_stages=2, partition_method="profile"), ScheduleError, "partition_method 'profile'"),
        (lambda: PipelineModule([Block(0)], num_stages=2, partition_method="type:x"), PlacementError, "the names are Block"),
        (lambda: PipelineModule([Block(0)], num_stages=2, activation_checkpoint_interval=-1), ScheduleError, "interval -1"),
        (lambda: LayerSpec(scale), PlacementError, "takes a class of nn.Module"),
        (
            lambda: PipelineModule([PipelineModule([Block(0)], num_stages=2)], num_stages=2),
            PlacementError,
            "layer 0 is a PipelineModule itself",
        ),
        (
            lambda: PipelineEngine(PipelineModule([Block(0), Block(1)], num_stages=2), micro_batches=1, split=[1, 1]),
            ScheduleError,
            "cut by its partition_method",
        ),
        (
            lambda: PipelineEngine(
                PipelineModule([TiedLayerSpec("a", Block, 0), TiedLayerSpec("a", Block, 0, 3)], num_stages=2), micro_batches=1
            ),
            PlacementError,
            "give layers of one key the same arguments",
        ),
        (
            lambda: PipelineEngine(
                PipelineModule([TiedLayerSpec("a", Block, 0, tied_weight_attr="wait")] * 2, num_stages=2), micro_batches=1
            ),
            PlacementError,
            "its Block has no 'wait'",
        ),
    ],
)
def test_what_cannot_be(make: Callable[[], Any], error: type[PenstockError], said: str) -> None:
    with pytest.raises(error) as caught:
        launch(make, ranks=2)
    assert said in str(caught.value)


def test_a_spec_prints_as_a_call() -> None:
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "Linear(2, 3, bias=False)"
    assert LayerSpec(nn.Linear, 2, 3, bias=False).build().bias is None
    assert TiedLayerSpec("a", nn.Linear, 2, 3, tied_weight_attr="x.y").tied_weight_attr == ["x.y"]


# Anything that can be written -----------------------------------------------------------------------------------------


KINDS = ("module", "spec", "function", "tied a", "tied b", "weight of a", "object")


class Drawn(nn.Module):
    """A drawn list of layers without a pipeline: one module for each that has one, under the name that a PipelineModule gives it."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.tied_modules = nn.ModuleDict({key: Block(100 + ord(key)) for key in "ab" if any(kind.endswith(f" {key}") for kind in kinds)})
        one = Block(99)
        for index, kind in enumerate(kinds):
            if kind in ("module", "spec", "object"):
                self.add_module(str(index), one if kind == "object" else Block(index))

    def forward(self, x: Tensor) -> Tensor:
        for index, kind in enumerate(self.kinds):
            if kind == "function":
                x = scale(x)
            elif kind in ("module", "spec", "object"):
                x = self.get_submodule(str(index))(x)
            else:
                module = self.tied_modules[kind[-1]]
                x = project(module, x) if kind.startswith("weight") else module(x)  # type: ignore[arg-type]
        return x


def drawn_layers(kinds: list[str]) -> list[Any]:
    one = Block(99)
    made = {
        "module": Block,
        "spec": lambda index: LayerSpec(Block, index),
        "function": lambda _: scale,
        "object": lambda _: one,
        "tied a": lambda _: TiedLayerSpec("a", Block, 100 + ord("a")),
        "tied b": lambda _: TiedLayerSpec("b", Block, 100 + ord("b")),
        "weight of a": lambda _: TiedLayerSpec("a", Block, 100 + ord("a"), forward_fn=project),
    }
    return [made[kind](index) for index, kind in enumerate(kinds)]


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8).filter(lambda kinds: set(kinds) != {"function"}),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 2)),
    micro_batches=st.integers(1, 4),
    method=st.sampled_from(["uniform", "parameters"]),
    interval=st.integers(0, 3),
    order=st.sampled_from(["1f1b", "gpipe", "eager-1f1b"]),
)
def test_drawn_lists_train_like_the_unpipelined_model(
    kinds: list[str], shape: tuple[int, int], micro_batches: int, method: str, interval: int, order: str
) -> None:
    stages, replicas = shape
    batches = data(2 * micro_batches * replicas, torch.float64)

    def train_one() -> tuple[list[float], dict[str, Tensor]]:
        topology = PipeDataParallelTopology(stages, replicas)
        options = {"partition_method": method, "activation_checkpoint_interval": interval, "loss_fn": loss_fn}
        module = PipelineModule(drawn_layers(kinds), topology=topology, **options)
        engine = PipelineEngine(module, micro_batches=micro_batches, optimizer=sgd, train_schedule=as_deepspeed(order), deadline=20)
        start = micro_batches * module.mpu().data_parallel_id
        size = micro_batches * replicas
        source = iter([each for first in (0, size) for each in batches[first + start :][:micro_batches]])
        losses = [engine.train_batch(source).item() for _ in range(2)]
        return losses, {name: parameter.detach() for name, parameter in module.named_parameters()}

    whole = Drawn(kinds)
    wanted = [loss.item() for loss in by_loop(whole, batches, micro_batches * replicas)]
    for losses, parameters in launch(train_one, ranks=stages * replicas):
        assert losses == pytest.approx(wanted, rel=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(value, dict(whole.named_parameters(remove_duplicate=False))[name], rtol=1e-9, atol=1e-9)
