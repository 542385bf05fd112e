"""`PipelineStrategy` against Lightning on one process: the same losses, to rounding, and checkpoints that both load."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import penstock as ps
from penstock.errors import IntegrationError
from penstock.runtime.launch.workers import Workers

pytestmark = pytest.mark.slow

TWO_BY_TWO = ps.schedule("zb-h1", ranks=2, microbatches=4)


class Plain(LightningModule):  # type: ignore[misc]
    """Six layers, with momentum and a falling learning rate, as anyone would write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
        self.losses: list[float] = []
        self.scores: list[float] = []

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.model(x), y)

    def score(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(x, y)

    def trained(self) -> Any:
        return self.model.parameters()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.run(*batch)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.scores.append(float(self.score(*batch)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([{"params": list(self.trained())}], lr=0.5, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Piped(Plain):
    """The same on a pipeline."""

    pipeline: Any

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return self.pipeline.step(x, target=y).loss

    def score(self, x: Tensor, y: Tensor) -> Tensor:
        return self.pipeline.eval_step(x, target=y).loss

    def trained(self) -> Any:
        return self.pipeline.parameters()


def rows() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 8, generator=generator)
    return list(zip(x, x.flip(1), strict=True))


def fit(kind: str, folder: str, batch: int, strategy: dict[str, Any], options: dict[str, Any]) -> Any:
    """Train on each rank and return the module's losses, and the file that was saved."""
    import logging
    import warnings

    import lightning.pytorch as pl

    from penstock.integrations.lightning import PipelineStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    resume, save = options.pop("resume", None), options.pop("save", None)
    module = Plain() if kind == "plain" else Piped()
    world = torch.distributed.get_world_size()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="auto" if kind == "plain" else PipelineStrategy(**strategy),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    # Lightning shuffles the rows of distributed training; one process gets the same order.
    sampler = torch.utils.data.DistributedSampler(rows(), num_replicas=1, rank=0) if kind == "plain" else None
    loader = torch.utils.data.DataLoader(rows(), batch_size=batch, sampler=sampler)
    trainer.fit(module, loader, torch.utils.data.DataLoader(rows(), batch_size=batch), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return module.losses, module.scores, float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=["plain", "accumulated"])
def test_losses_are_those_of_one_process(workers: Workers, tmp_path: Path, options: dict[str, Any]) -> None:
    """On two data ranks of two stages each: they take rows in turn, so that a step sees the rows that one process does."""
    options = {"max_epochs": 8, "num_sanity_val_steps": 0, **options}
    losses, scores, logged = workers.run(fit, ("plain", str(tmp_path), 8, {}, options), ranks=1)[0]
    piped = workers.run(fit, ("piped", str(tmp_path), 4, {"plan_or_schedule": TWO_BY_TWO}, options), ranks=4)
    assert len(losses) == 48
    assert sum(losses[-6:]) < sum(losses[:6])
    for theirs, their_scores, their_logged in piped:
        assert theirs == pytest.approx(losses, rel=1e-4)
        assert their_scores == pytest.approx(scores, rel=1e-4)
        assert their_logged == pytest.approx(logged, rel=1e-4)


def test_resumed_with_other_ranks_and_loaded_by_the_plain_module(workers: Workers, tmp_path: Path) -> None:
    """Saved on 2 x 2 processes, continued on one pipeline of three, with momentum and learning rate."""
    options = {"num_sanity_val_steps": 0}
    first, last = str(tmp_path / "first.ckpt"), str(tmp_path / "last.ckpt")
    plainly = {**options, "max_epochs": 6, "save": str(tmp_path / "plain.ckpt")}
    losses = workers.run(fit, ("plain", str(tmp_path), 8, {}, plainly), ranks=1)[0][0]
    two = {"plan_or_schedule": TWO_BY_TWO}
    begun = workers.run(fit, ("piped", str(tmp_path), 4, two, {**options, "max_epochs": 3, "save": first}), ranks=4)[0][0]
    three = {"plan_or_schedule": "1f1b", "microbatches": 2}
    more = {**options, "max_epochs": 6, "resume": first, "save": last}
    resumed = workers.run(fit, ("piped", str(tmp_path), 8, three, more), ranks=3)
    for theirs, *_ in resumed:
        assert [*begun, *theirs] == pytest.approx(losses, rel=1e-4)
    module, plain = Plain.load_from_checkpoint(last), Plain.load_from_checkpoint(str(tmp_path / "plain.ckpt"))
    for (name, value), wanted in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5, msg=name)


class OfTheWholeModel(Piped):
    def trained(self) -> Any:
        return self.model.parameters()


class WithoutLayers(Piped):
    def pipeline_model(self) -> Any:
        return None


def refusal(module: Any, options: dict[str, Any], resume: str | None = None) -> str:
    import lightning.pytorch as pl

    from penstock.integrations.lightning import PipelineStrategy

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "max_epochs": 9}
    strategy = PipelineStrategy("1f1b", microbatches=2)
    try:
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, **quiet, **options)
        trainer.fit(module(), torch.utils.data.DataLoader(rows(), batch_size=8), ckpt_path=resume)
    except IntegrationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("module", "reason"),
    [(OfTheWholeModel, "self.pipeline.parameters()"), (WithoutLayers, "WithoutLayers has no layers to cut")],
)
def test_modules_that_do_not_fit_are_refused(workers: Workers, module: Any, reason: str) -> None:
    assert all(reason in said for said in workers.run(refusal, (module, {}), ranks=2))


def test_statistics_over_processes_are_refused(workers: Workers) -> None:
    assert all("sync_batchnorm" in said for said in workers.run(refusal, (Piped, {"sync_batchnorm": True}), ranks=2))


def test_an_optimizer_of_another_strategy_is_refused(workers: Workers, tmp_path: Path) -> None:
    saved = str(tmp_path / "plain.ckpt")
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "save": saved}
    workers.run(fit, ("plain", str(tmp_path), 8, {}, options), ranks=1)
    assert all("another strategy" in said for said in workers.run(refusal, (Piped, {}, saved), ranks=2))


def run_example(path: str) -> list[float]:
    spec = importlib.util.spec_from_file_location("lightning_pipeline", path)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.set_num_threads(1)
    losses: list[float] = example.train()
    return losses


def test_the_example_learns(workers: Workers) -> None:
    first, second = workers.run(run_example, (str(Path(__file__).parents[2] / "examples" / "lightning_pipeline.py"),), ranks=2)
    assert first == second
    assert len(first) == 20
    assert first[-1] < 0.9 * first[0]
