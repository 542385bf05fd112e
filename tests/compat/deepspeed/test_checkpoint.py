"""Training that is saved and goes on elsewhere: with other stages, other replicas, or without a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compat.deepspeed.training import Block, data, loss_fn
from penstock.compat.deepspeed import LayerSpec, PipeDataParallelTopology, PipelineEngine, PipelineModule, TiedLayerSpec
from penstock.errors import CheckpointError
from penstock.runtime import launch, rank
from penstock.runtime.checkpoint.checkpoints import Checkpoints

MICRO_BATCHES, SIZE = 12, 3


def specs(seed: int = 0) -> list[Any]:
    return [
        TiedLayerSpec("end", Block, seed),
        LayerSpec(Block, seed + 1),
        torch.sin,
        LayerSpec(nn.BatchNorm1d, 6, dtype=torch.float64),
        TiedLayerSpec("end", Block, seed),
    ]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


def engine_of(stages: int, replicas: int = 1, seed: int = 0, **options: Any) -> PipelineEngine:
    topology = PipeDataParallelTopology(stages, replicas)
    module = PipelineModule(specs(seed), topology=topology, loss_fn=loss_fn, partition_method="uniform")
    count = MICRO_BATCHES // replicas
    given = {"optimizer": adam, "lr_scheduler": decay, "micro_batch_size": SIZE, "deadline": 20.0, **options}
    return PipelineEngine(module, micro_batches=count, **given)


def step(engine: PipelineEngine, batch: list[Any]) -> float:
    assert engine.grid is not None
    count = engine.micro_batches
    return engine.train_batch(iter(batch[engine.grid.data_parallel_id * count :][:count])).item()


def straight(batches: list[list[Any]]) -> list[float]:
    """The uninterrupted, unpipelined run."""

    def train() -> list[float]:
        engine = engine_of(1)
        return [step(engine, batch) for batch in batches]

    return launch(train, ranks=1)[0]


@pytest.fixture
def batches() -> list[list[Any]]:
    return [data(MICRO_BATCHES, torch.float64) for _ in range(4)]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (5, 1), (1, 2), (2, 2)])
def test_training_goes_on_with_other_stages(tmp_path: Path, batches: list[list[Any]], before: int, after: int) -> None:
    def save() -> list[float]:
        engine = engine_of(before)
        losses = [step(engine, batch) for batch in batches[:2]]
        assert engine.save_checkpoint(tmp_path, client_state={"epoch": 7})
        return losses

    def load() -> list[float]:
        engine = engine_of(after, seed=50)
        path, client_state = engine.load_checkpoint(tmp_path)
        assert path is not None
        assert Path(path).parent == tmp_path / "global_step2"
        assert client_state == {"epoch": 7}
        assert (engine.global_steps, engine.global_samples) == (2, 2 * MICRO_BATCHES * SIZE)
        assert engine.get_lr() in ([pytest.approx(0.1 * 0.8**2)], [])
        return [step(engine, batch) for batch in batches[2:]]

    wanted = straight(batches)
    first = launch(save, ranks=before)[0]
    for then in launch(load, ranks=after):
        assert [*first, *then] == pytest.approx(wanted, rel=1e-10)


def test_replicas_save_and_load_too(tmp_path: Path, batches: list[list[Any]]) -> None:
    """Replicas normalise by their own microbatches, so that these are compared with a run that does not stop."""

    def train(stop: bool) -> list[float]:
        engine = engine_of(2, 2)
        losses = [step(engine, batch) for batch in batches[:2]]
        if stop:
            engine.save_checkpoint(tmp_path)
            engine = engine_of(2, 2, seed=50)
            engine.load_checkpoint(tmp_path)
        return [*losses, *(step(engine, batch) for batch in batches[2:])]

    assert launch(train, ranks=4, args=(True,)) == launch(train, ranks=4, args=(False,))


class Whole(nn.Module):
    """The same model under the names of a PipelineModule's state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"end": Block(90)})
        self.add_module("1", Block(91))
        self.add_module("3", nn.BatchNorm1d(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        end, middle, norm = self.tied_modules["end"], self.get_submodule("1"), self.get_submodule("3")
        return end(norm(torch.sin(middle(end(x)))))  # type: ignore[no-any-return]


def test_a_checkpoint_is_one_of_ours(tmp_path: Path, batches: list[list[Any]]) -> None:
    """The state dict loads into the unpipelined model."""

    def save() -> tuple[float, list[str]]:
        engine = engine_of(3)
        step(engine, batches[0])
        engine.save_checkpoint(tmp_path, tag="mine")
        return engine.eval_batch(iter(batches[1])).item(), list(engine.module.state_dict())

    found = launch(save, ranks=3)
    whole = Whole()
    assert Checkpoints(tmp_path / "mine").load_latest(whole) is not None
    whole.eval()
    with torch.no_grad():
        loss = sum(loss_fn(whole(x), y).item() for x, y in batches[1]) / MICRO_BATCHES
    assert found[0][0] == pytest.approx(loss, rel=1e-12)
    assert {name for _, names in found for name in names} == set(whole.state_dict())


def test_tags(tmp_path: Path, batches: list[list[Any]]) -> None:
    def train() -> list[Any]:
        engine = engine_of(2)
        assert engine.load_checkpoint(tmp_path) == (None, None)
        step(engine, batches[0])
        engine.save_checkpoint(tmp_path, tag="first")
        step(engine, batches[1])
        engine.save_checkpoint(tmp_path, tag="second", save_latest=False)
        taken = [engine.load_checkpoint(tmp_path)[0], engine.load_checkpoint(tmp_path, tag="second")[0]]
        steps = [engine.global_steps]
        engine.load_checkpoint(tmp_path, tag="first")
        engine.save_checkpoint(tmp_path, tag="second")  # fewer steps than the one of that name
        engine.load_checkpoint(tmp_path)
        return [*taken, *steps, engine.global_steps]

    for first, second, before, after in launch(train, ranks=2):
        assert (Path(first).parent.name, Path(second).parent.name, before, after) == ("first", "second", 2, 1)
    assert (tmp_path / "latest").read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "second"]


def test_parts_of_a_checkpoint(tmp_path: Path, batches: list[list[Any]]) -> None:
    def train() -> list[Any]:
        engine = engine_of(2)
        for batch in batches[:2]:
            step(engine, batch)
        engine.save_checkpoint(tmp_path)
        weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
        found: list[Any] = []
        for options in ({"load_module_only": True}, {"load_lr_scheduler_states": False}, {"load_optimizer_states": False}):
            fresh = engine_of(2, seed=50)
            fresh.load_checkpoint(tmp_path, **options)
            assert all(map(torch.equal, fresh.module.parameters(), weights))
            found.append((fresh.global_steps, bool(fresh.optimizer.state), fresh.lr_scheduler.last_epoch))
        return found

    assert launch(train, ranks=2) == [[(0, False, 0), (2, True, 0), (2, False, 2)]] * 2


def test_the_schedule_is_saved_where_the_first_stage_has_none(tmp_path: Path) -> None:
    batch = data(2, torch.float64)

    def train() -> Any:
        def engine() -> PipelineEngine:
            module = PipelineModule([torch.sin, LayerSpec(Block, 0)], num_stages=2, loss_fn=loss_fn, partition_method="uniform")
            return PipelineEngine(module, micro_batches=2, optimizer=adam, lr_scheduler=decay, deadline=20)

        first = engine()
        first.train_batch(iter(batch))
        first.save_checkpoint(tmp_path)
        again = engine()
        again.load_checkpoint(tmp_path)
        return again.get_lr()

    assert launch(train, ranks=2) == [[], [pytest.approx(0.08)]]


def test_a_plain_model_with_tied_layers_saves_and_loads_as_well(tmp_path: Path) -> None:
    """On each of the two stages the first parameter is a tied one."""
    batch = data(2, torch.float64)

    def train(seed: int) -> float:
        tied = Block(seed)
        whole = nn.Sequential(tied, Block(seed + 1), tied, Block(seed + 2))
        engine = PipelineEngine(whole, micro_batches=2, loss_fn=loss_fn, optimizer=adam, split=[2, 2], deadline=20)
        if seed == 0:
            engine.train_batch(iter(batch))
            engine.save_checkpoint(tmp_path)
        else:
            engine.load_checkpoint(tmp_path)
        return engine.train_batch(iter(batch)).item()

    assert launch(train, ranks=2, args=(0,)) == launch(train, ranks=2, args=(5,))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda engine, folder: engine.save_checkpoint(folder, tag=f"rank{rank()}"), "the ranks save under different tags, rank0, rank1"),
        (lambda engine, folder: engine.save_checkpoint(folder, tag="../up"), "'../up' is not the name of a checkpoint"),
        (lambda engine, folder: engine.save_checkpoint(folder, exclude_frozen_parameters=True), "hold the whole model"),
        (lambda engine, folder: engine.load_checkpoint(folder, tag="none"), "there is no checkpoint under the tag 'none'"),
        (lambda engine, folder: engine.load_checkpoint(folder, load_module_strict=False), "loaded strictly"),
    ],
)
def test_what_cannot_be_saved_or_loaded(tmp_path: Path, act: Any, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        launch(lambda: act(engine_of(2), tmp_path), ranks=2)
    assert said in str(caught.value)


def test_a_name_in_the_file_of_the_last_tag_that_leaves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="give a tag such as 'global_step100', and no path"):
        launch(lambda: engine_of(2).load_checkpoint(tmp_path), ranks=2)
