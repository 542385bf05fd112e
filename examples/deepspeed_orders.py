"""Train in DeepSpeed's own pipeline engine with orders that it does not have: GPipe's and eager 1F1B's, on CPU.

Each order trains the same model on the same data; all must give the losses of the unpipelined model. Needs the deepspeed
package, which compiles a small extension when it first runs.
"""

import contextlib
import io
import os
import socket
import sys
import warnings

import torch
import torch.multiprocessing as mp
from torch import nn

from penstock.compat.deepspeed import as_deepspeed

STAGES, MICROBATCHES, BATCHES, WIDTH, RATE = 3, 6, 4, 16, 0.1
ORDERS = {"DeepSpeed's own 1F1B": None, "gpipe": "gpipe", "eager-1f1b": "eager-1f1b"}


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2 * STAGES)]


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)) for _ in range(BATCHES * MICROBATCHES)]


def unpipelined() -> list[float]:
    model, losses = nn.Sequential(*layers()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for start in range(0, BATCHES * MICROBATCHES, MICROBATCHES):
        each = [nn.functional.mse_loss(model(x), y) for x, y in data()[start : start + MICROBATCHES]]
        loss = torch.stack(each).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(rank: int, port: int, results) -> None:
    """One process of DeepSpeed's."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(STAGES), LOCAL_SIZE=str(STAGES), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed
        from deepspeed.runtime.pipe import schedule
        from deepspeed.utils import logger

        logger.setLevel("ERROR")
        deepspeed.init_distributed(dist_backend="gloo")
        own = schedule.TrainSchedule
    for name, order in ORDERS.items():
        schedule.TrainSchedule = own if order is None else as_deepspeed(order)  # the one line that changes
        with contextlib.redirect_stdout(io.StringIO()):
            engine = make_engine(deepspeed)
        batches = iter(data())
        losses = [float(engine.train_batch(batches)) for _ in range(BATCHES)]
        results.put((name, rank, engine.num_pipe_buffers, losses))
    torch.distributed.destroy_process_group()


def make_engine(deepspeed):
    model = deepspeed.pipe.PipelineModule(
        layers=layers(), num_stages=STAGES, loss_fn=nn.functional.mse_loss, partition_method="uniform", seed_layers=False
    )
    parameters = list(model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICROBATCHES,
        "steps_per_print": 10**9,
    }
    return deepspeed.initialize(model=model, model_parameters=parameters, optimizer=torch.optim.SGD(parameters, lr=RATE), config=config)[0]


def main() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    ranks = mp.start_processes(train, args=(port, results), nprocs=STAGES, join=False, start_method="spawn")
    while not ranks.join():  # raises what a process raised
        pass
    found = [results.get() for _ in range(STAGES * len(ORDERS))]
    wanted = unpipelined()
    print(f"{STAGES} stages, {MICROBATCHES} microbatches, {BATCHES} batches; losses of the unpipelined model: {said(wanted)}")
    worst = 0.0
    for name in ORDERS:
        rows = sorted(row[1:] for row in found if row[0] == name)
        losses = rows[0][2]
        worst = max(worst, *(abs(loss - right) for loss, right in zip(losses, wanted, strict=True)))
        print(f"{name:>22}: {said(losses)}; pipe buffers by stage {[row[1] for row in rows]}")
    print(f"largest difference from the unpipelined model: {worst:.1e}")
    return int(worst > 1e-6)


def said(losses: list[float]) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)


if __name__ == "__main__":
    sys.exit(main())
