"""Train a small language model with any number of processes, and resume by itself from the last whole checkpoint.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_resume.py /tmp/run
    torchrun --standalone --nproc-per-node 2 examples/train_resume.py /tmp/run --steps 60

A killed process is started again with all others, which go on from the last checkpoint; a later run may have fewer or more of
them, or be `python examples/train_resume.py /tmp/run`, and the loss goes on as if nothing had happened. With `--schedule auto` a plan
is made each time, for as many ranks as there are.
"""

import argparse
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.runtime import Checkpoints, DataOrder, Layers, Pipeline, rank

VOCABULARY, WIDTH, LENGTH, SAMPLES, DEPTH = 32, 32, 16, 96, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix, self.map = nn.Linear(LENGTH, LENGTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(functional.gelu(self.map(mixed)))


class Model(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)


def loss_fn(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def planned(ranks: int) -> ps.Plan:
    """The best of some schedules and cuts for so many ranks. All ranks reckon with the same figures, so that they make the same plan."""
    ends, block = ps.Layer(f=0.3, i=0.3, w=0.3, output=1.0), ps.Layer(f=1.0, i=1.0, w=1.0, activation=4.0, weight_stash=2.0, output=1.0)
    profile = ps.Profile([ends, *[block] * DEPTH, ends], latency=0.1)
    return ps.plan(profile, ranks=ranks, microbatches=4, schedules=["1f1b", "zb-h1", "zbv"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints")
    parser.add_argument("--schedule", default="1f1b", help="a name, or auto for a plan")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1))
    split = Layers("blocks", head=["embed"], tail=["head"])
    # The schedule is made for as many ranks as there are this time, and the stages' random streams do not depend on them.
    schedule: Any = options.schedule
    if schedule == "auto":
        schedule = planned(int(os.environ.get("WORLD_SIZE", "1")))
    pipe = Pipeline(Model(), schedule=schedule, microbatches=4, split=split, loss_fn=loss_fn, seed=0)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    data = DataOrder(SAMPLES, batch=8)

    with Checkpoints(options.folder, keep=2) as checkpoints:
        found = checkpoints.load_latest(pipe, optimizer, scheduler=scheduler, data=data)
        for step in range(found.step + 1 if found else 1, options.steps + 1):
            batch = tokens[next(data)]
            result = pipe.step(batch[:, :-1], target=batch[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if rank() == 0:
                print(f"step {step} loss {result.loss}", flush=True)
            if step % options.every == 0:
                checkpoints.save_async(pipe, optimizer, scheduler=scheduler, step=step, data=data)


if __name__ == "__main__":
    main()
