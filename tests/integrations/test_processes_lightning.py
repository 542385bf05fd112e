"""`PipelineStrategy` against Lightning on one process: the same losses, to rounding, and checkpoints that both load."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
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

logger = logging.getLogger(__name__)
TWO_BY_TWO = ps.schedule("zb-h1", ranks=2, microbatches=4)


class Plain(LightningModule):  # type: ignore[misc]
    """Six layers, with momentum and a falling learning rate, as anyone would write it. With `manual`, it steps every second batch."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
        self.losses: list[float] = []
        self.scores: list[float] = []
        self.dtypes: set[torch.dtype] = set()
        self.automatic_optimization = not manual

    def compute_loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.dtypes.add(output.dtype)
        return nn.functional.mse_loss(output.float(), target)

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        return self.compute_loss(self.model(x), y)

    def score(self, x: Tensor, y: Tensor) -> Tensor:
        return self.run(x, y)

    def trained(self) -> Any:
        return self.model.parameters()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.run(*batch)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, sync_dist=True)
        if not self.automatic_optimization:
            self.step_by_hand(loss, index)
        return loss

    def step_by_hand(self, loss: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(loss / 2)
        if index % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: Any, index: int) -> None:
        self.scores.append(float(self.score(*batch)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([{"params": list(self.trained())}], lr=0.5, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Piped(Plain):
    """The same on a pipeline."""

    pipeline: Any

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.compute_loss(output, target)

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
    """Train on each rank and return what the module has noted, and what its layers say to some input afterwards."""
    import warnings

    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from penstock.integrations.lightning import PipelineStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    resume, keep, manual = options.pop("resume", None), options.pop("keep", None), options.pop("manual", False)
    module = (Plain if kind == "plain" else Piped)(manual)
    world = torch.distributed.get_world_size()
    files = {"dirpath": folder, "enable_version_counter": False}
    kept = [ModelCheckpoint(filename="best", monitor="loss", mode="max", **files), ModelCheckpoint(filename="last", **files)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="auto" if kind == "plain" else PipelineStrategy(**strategy),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(keep),
        callbacks=kept if keep else None,
        num_sanity_val_steps=0,
        **options,
    )
    # Lightning shuffles the rows of distributed training; one process gets the same order.
    sampler = torch.utils.data.DistributedSampler(rows(), num_replicas=1, rank=0) if kind == "plain" else None
    loader = torch.utils.data.DataLoader(rows(), batch_size=batch, sampler=sampler)
    trainer.fit(module, loader, torch.utils.data.DataLoader(rows(), batch_size=batch), ckpt_path=resume)
    return Fitted(module.losses, module.scores, float(trainer.callback_metrics["loss"]), module.dtypes, *ask_model(trainer, module))


def ask_model(trainer: Any, module: Any) -> tuple[str, Any]:
    """What is said about using the layers without the pipeline, and their output once they are gathered."""
    message, x = "", torch.ones(2, 8)
    try:
        module.model(x)
    except IntegrationError as error:
        message = str(error)
    sharded = any(hasattr(parameter, "full_tensor") for parameter in module.model.parameters())
    if hasattr(trainer.strategy, "gather_model") and not sharded:
        module = trainer.strategy.gather_model()
    return message, None if sharded else module.model(x).detach()


@dataclass
class Fitted:
    losses: list[float]
    scores: list[float]
    logged: float
    dtypes: set[torch.dtype]
    message: str
    output: Any


@pytest.mark.parametrize(
    ("options", "rtol"),
    [
        ({"max_epochs": 8}, 1e-4),
        ({"max_epochs": 8, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, 1e-4),
        ({"max_epochs": 8, "manual": True}, 1e-4),
        ({"max_epochs": 2, "precision": "bf16-mixed"}, 2e-2),
    ],
    ids=["plain", "accumulated", "by hand", "mixed precision"],
)
def test_losses_are_those_of_one_process(workers: Workers, tmp_path: Path, options: dict[str, Any], rtol: float) -> None:
    """On two data ranks of two stages each: they take rows in turn, so that a step sees the rows that one process does."""
    plain = workers.run(fit, ("plain", str(tmp_path), 8, {}, options), ranks=1)[0]
    piped = workers.run(fit, ("piped", str(tmp_path), 4, {"plan_or_schedule": TWO_BY_TWO}, options), ranks=4)
    assert len(plain.losses) == 6 * options["max_epochs"]
    assert sum(plain.losses[-6:]) < sum(plain.losses[:6])
    worst = max(abs(one / other - 1) for theirs in piped for one, other in zip(theirs.losses, plain.losses, strict=True))
    logger.info("largest relative difference of a loss over %d steps: %.1e", len(plain.losses), worst)
    for theirs in piped:
        assert theirs.losses == pytest.approx(plain.losses, rel=rtol)
        assert theirs.scores == pytest.approx(plain.scores, rel=rtol)
        assert theirs.logged == pytest.approx(plain.logged, rel=rtol)
        assert "trainer.strategy.gather_model()" in theirs.message
        torch.testing.assert_close(theirs.output, plain.output, rtol=rtol, atol=rtol)
    assert plain.message == ""
    assert plain.dtypes == piped[-1].dtypes == {torch.bfloat16 if "precision" in options else torch.float32}


def test_resumed_with_other_ranks_and_shards_and_loaded_by_the_plain_module(workers: Workers, tmp_path: Path) -> None:
    """Kept by Lightning's callback: begun on three ranks, continued on 2 x 2 processes with shards and on two, with momentum and learning
    rate. The best checkpoint is the one that one process keeps."""
    plain = workers.run(fit, ("plain", str(tmp_path / "plain"), 8, {}, {"max_epochs": 6, "keep": True}), ranks=1)[0]
    folder, losses, resume = str(tmp_path / "piped"), [], None
    for ranks, batch, strategy, epochs in (
        (3, 8, {"plan_or_schedule": "1f1b", "microbatches": 2}, 2),
        (4, 4, {"plan_or_schedule": TWO_BY_TWO, "pipeline_options": {"shard": True}}, 4),
        (2, 8, {"plan_or_schedule": "1f1b", "microbatches": 2}, 6),
    ):
        options = {"max_epochs": epochs, "keep": True, "resume": resume}
        losses += workers.run(fit, ("piped", folder, batch, strategy, options), ranks=ranks)[-1].losses
        resume = f"{folder}/last.ckpt"
    assert losses == pytest.approx(plain.losses, rel=1e-4)
    for name in ("best.ckpt", "last.ckpt"):
        module, wanted = (Plain.load_from_checkpoint(str(tmp_path / kind / name)) for kind in ("piped", "plain"))
        for (key, value), other in zip(module.named_parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5, msg=key)


class OfTheWholeModel(Piped):
    def trained(self) -> Any:
        return self.model.parameters()


class WithoutLayers(Piped):
    def pipeline_model(self) -> Any:
        return None


class WithParametersOutside(Piped):
    """A layer that is trained outside the pipeline, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.fixed = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)


class WithLBFGS(Piped):
    """An optimizer that evaluates the loss as often as it likes, on each rank otherwise."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(list(self.trained()), lr=0.1)


class WithScaler(Piped):
    """As if on a GPU with precision="16-mixed": on a CPU, Lightning takes "bf16-mixed" instead."""

    def plugins(self) -> Any:
        from lightning.pytorch.plugins.precision import MixedPrecision

        return [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]


def refusals(cases: list[tuple[Any, dict[str, Any], str | None]]) -> list[str]:
    """What is said about each module, with options and a checkpoint, instead of training."""
    import lightning.pytorch as pl

    from penstock.integrations.lightning import PipelineStrategy

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "max_epochs": 9}
    messages = []
    for kind, options, resume in cases:
        module = kind()
        plugins = module.plugins() if hasattr(module, "plugins") else None
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy=PipelineStrategy("1f1b", microbatches=2), plugins=plugins, **quiet, **options
        )
        try:
            trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=8), ckpt_path=resume)
            messages.append("trained")
        except IntegrationError as error:
            messages.append(str(error))
    return messages


def test_what_does_not_fit_is_refused(workers: Workers, tmp_path: Path) -> None:
    workers.run(fit, ("plain", str(tmp_path), 8, {}, {"max_epochs": 1, "keep": True}), ranks=1)
    cases: list[tuple[Any, dict[str, Any], str | None, str]] = [
        (OfTheWholeModel, {}, None, "SGD got 6 parameters that other ranks update"),
        (WithoutLayers, {}, None, "WithoutLayers has no layers to cut"),
        (WithParametersOutside, {}, None, "which get no gradients: scale.weight, scale.bias; move them into model"),
        (WithLBFGS, {}, None, "LBFGS steps by all parameters together"),
        (WithScaler, {}, None, "precision='16-mixed' has no meaning on a pipeline"),
        (Piped, {"sync_batchnorm": True}, None, "sync_batchnorm"),
        (Piped, {}, str(tmp_path / "last.ckpt"), "another strategy"),
    ]
    for rank, messages in enumerate(workers.run(refusals, ([case[:3] for case in cases],), ranks=2)):
        for sentence, (kind, *_, reason) in zip(messages, cases, strict=True):
            assert reason in sentence, f"{kind.__name__} on rank {rank}"


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
