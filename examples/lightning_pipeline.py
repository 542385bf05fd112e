"""Lightning on a pipeline of two processes.

torchrun --nproc-per-node 2 examples/lightning_pipeline.py    # or: python examples/lightning_pipeline.py, which starts the processes itself
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from penstock.integrations.lightning import PipelineStrategy
from penstock.runtime import launch

RANKS = 2


class Mirror(pl.LightningModule):
    """Learns to turn vectors around."""

    pipeline: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # every rank builds the same model
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(7)), nn.Linear(16, 16))
        self.losses: list[float] = []

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss: Tensor = self.pipeline.step(x, target=y).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": list(self.pipeline.parameters())}], lr=1e-2)


def train(epochs: int = 5) -> list[float]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    rows = list(zip(x, x.flip(1), strict=True))
    module = Mirror()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=PipelineStrategy("zb-h1", microbatches=4),
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=16))
    return module.losses


if __name__ == "__main__":
    losses = launch(train, RANKS, backend="gloo")[0]
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end")
