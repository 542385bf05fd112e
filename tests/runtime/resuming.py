"""A training run to be interrupted, and the curve that it must follow: the unpipelined model in a loop over microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR

from penstock.runtime import Checkpoints, DataOrder, Layers, Pipeline
from runtime.models import GPT, loop_step, token_loss

SPLIT = Layers("blocks", head=["embed"], tail=["norm", "head"])
SAMPLES, BATCH, MICROBATCHES, SEED = 20, 8, 4, 7


def texts() -> Tensor:
    return torch.randint(0, 11, (SAMPLES, 8), generator=torch.Generator().manual_seed(3))


def model(seed: int = 0, *, dropout: float = 0.0, tied: bool = False, depth: int = 6) -> GPT:
    torch.manual_seed(seed)
    return GPT(depth, dropout=dropout, tied=tied)


@dataclass
class Run:
    """One process's view of a run: whatever it has to continue with."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: MultiStepLR
    data: DataOrder

    @classmethod
    def of(cls, trained: Pipeline | nn.Module) -> Run:
        named = list(trained.named_parameters())
        matrices = [parameter for _, parameter in named if parameter.ndim > 1]
        vectors = [parameter for _, parameter in named if parameter.ndim <= 1]
        groups = [{"params": each, "weight_decay": decay} for each, decay in ((matrices, 0.1), (vectors, 0.0))]
        optimizer = torch.optim.AdamW(groups, lr=0.02)
        return cls(trained, optimizer, MultiStepLR(optimizer, [2, 5], gamma=0.5), DataOrder(SAMPLES, BATCH, seed=1))

    @property
    def parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "data": self.data}

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        return Checkpoints(folder, **options).save(self.model, self.optimizer, step=step, **self.parts)

    def load(self, folder: Path) -> int:
        found = Checkpoints(folder).load_latest(self.model, self.optimizer, **self.parts)
        assert found is not None
        return found.step

    def train(self, steps: int, first: int = 0) -> list[float]:
        """The losses of so many steps."""
        losses = []
        for step in range(first, first + steps):
            tokens = texts()[next(self.data)]
            losses.append(self._loss(tokens, step))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def _loss(self, tokens: Tensor, step: int) -> float:
        if isinstance(self.model, Pipeline):
            loss = self.model.step(tokens, target=tokens).loss
        else:
            pieces = tokens.tensor_split(MICROBATCHES)
            with drawing(self.model, step):
                loss = loop_step(
                    self.model, [(each, each) for each in pieces], [len(each) / len(tokens) for each in pieces], token_loss
                ).loss
        assert loss is not None
        return loss.item()


def pipelined(trained: nn.Module, schedule: str, **options: Any) -> Run:
    return Run.of(Pipeline(trained, schedule=schedule, microbatches=MICROBATCHES, loss_fn=token_loss, split=SPLIT, seed=SEED, **options))


def curve(make: Callable[[], nn.Module], steps: int) -> list[float]:
    """The losses of the unpipelined model."""
    return Run.of(make()).train(steps)


@contextmanager
def drawing(trained: nn.Module, step: int) -> Iterator[None]:
    """Every layer draws from a stream of (seed, step, layer, microbatch), as written down for pipelines."""
    names = ["embed", *(f"blocks.{k}" for k in range(len(trained.blocks))), "norm", "head"]
    microbatch = -1

    def begin(*_: Any) -> None:
        nonlocal microbatch
        microbatch += 1

    def draw(name: str) -> Callable[..., None]:
        return lambda *_: torch.manual_seed(number(number(f"{SEED}/{step}", "layers", microbatch), name)) and None

    hooks = [trained.register_forward_pre_hook(begin)]
    hooks += [trained.get_submodule(name).register_forward_pre_hook(draw(name)) for name in names]
    yield
    for hook in hooks:
        hook.remove()


def number(*key: object) -> int:
    return int.from_bytes(hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest(), "little") >> 1
