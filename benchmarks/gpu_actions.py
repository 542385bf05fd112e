"""What an action costs beside its work: the executor against a bare loop and torch's own, and stages as CUDA graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from benchmarks.gpu_models import blocks, mean_loss
from benchmarks.gpu_time import cleared, seconds
from benchmarks.measure import steady
from benchmarks.overhead import _bare, _order
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn import functional

import penstock as ps
from penstock.runtime import Pipeline

STAGES, MICROBATCHES, WIDTH, EACH = 4, 32, 64, 4
PEERS = {"interleaved-1f1b": ScheduleInterleaved1F1B, "interleaved-zb": ScheduleInterleavedZeroBubble}
WANTED = 130.0


def overhead(device: Any, small: bool) -> dict[str, Any]:
    rounds = 2 if small else 30
    with steady():
        rows = [_overhead(name, device, rounds) for name in PEERS]
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with steady():
            for row in rows:
                row["torch us"] = _peer(row["schedule"], device, rounds)
    finally:
        dist.destroy_process_group()
    what = (
        f"One rank with {STAGES} stages of {WIDTH}x{WIDTH} linear maps and {MICROBATCHES} microbatches of {EACH} rows: "
        "microseconds for each compute action, of the whole step from an idle device until it is idle. The bare loop runs the "
        "same forwards and full backwards and nothing else, "
        "so that it has fewer and larger actions if the schedule splits its backwards."
    )
    return {"what": what, "rows": rows}


def _overhead(name: str, device: Any, rounds: int) -> dict[str, Any]:
    schedule = ps.schedule(name, 1, MICROBATCHES, chunks=STAGES)
    x, y = torch.randn(2, MICROBATCHES * EACH, WIDTH, device=device).unbind()
    bare, ours, recorded = (_stages(device) for _ in range(3))
    order = _order(schedule)
    pipe = Pipeline(ours, schedule=schedule, loss_fn=functional.mse_loss)
    graphed = Pipeline(recorded, schedule=schedule, loss_fn=functional.mse_loss, graphs=True)
    works = {
        "ours us": cleared(ours, lambda: pipe.step(x, target=y)),
        "with graphs us": cleared(recorded, lambda: graphed.step(x, target=y)),
        "bare loop us": cleared(bare, lambda: _bare(bare, order, x, y)),
    }
    found: dict[str, Any] = {what: seconds(work, rounds) / len(schedule[0]) * 1e6 for what, work in works.items()}
    backwards = len(order) / len(schedule[0])
    found["bare loop us"] /= backwards
    good = "yes" if found["ours us"] <= WANTED else "NO"
    share = found["ours us"] / found["bare loop us"]
    return {"schedule": name, **found, "ours over bare loop": share, "wanted us": f"<= {WANTED:g}", "good": good}


def _peer(name: str, device: Any, rounds: int) -> float | str:
    """torch's own schedule of that name, if it runs here."""
    count = len(ps.schedule(name, 1, MICROBATCHES, chunks=STAGES)[0])
    x, y = torch.randn(2, MICROBATCHES * EACH, WIDTH, device=device).unbind()
    modules = _stages(device)
    try:
        stages = [PipelineStage(module, k, STAGES, device) for k, module in enumerate(modules)]
        peer = PEERS[name](stages, MICROBATCHES, loss_fn=functional.mse_loss)
        return seconds(cleared(modules, lambda: peer.step(x, target=y)), rounds) / count * 1e6
    except RuntimeError as error:
        return f"does not run: {str(error)[:60]}"


def _stages(device: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, device=device) for _ in range(STAGES)]


def graphs(device: Any, small: bool) -> dict[str, Any]:
    sizes = [(16, 1, 8)] if small else [(256, 4, 128), (1024, 4, 512)]
    rows = [_graphs(name, size, device, 2 if small else 10) for size in sizes for name in PEERS]
    what = "One rank, 4 stages of bf16 blocks, 8 microbatches: a step with each stage's work as CUDA graphs and without."
    return {"what": what, "rows": rows}


def _graphs(name: str, size: tuple[int, int, int], device: Any, rounds: int) -> dict[str, Any]:
    width, deep, tokens = size
    schedule = ps.schedule(name, 1, 8, chunks=STAGES)
    x = torch.randn(8, tokens, width, device=device, dtype=torch.bfloat16)
    modules = [[blocks(deep, width, device) for _ in range(STAGES)] for _ in range(2)]
    pipes = [Pipeline(list(each), schedule, loss_fn=mean_loss, graphs=flag) for each, flag in zip(modules, (False, True), strict=True)]
    for pipe in pipes:
        pipe.step(x, target=x)
    pairs = zip(pipes[0].parameters(), pipes[1].parameters(), strict=True)
    same = all(one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad) for one, other in pairs)
    works = [cleared(each, lambda pipe=pipe: pipe.step(x, target=x)) for pipe, each in zip(pipes, modules, strict=True)]
    plain, recorded = (seconds(work, rounds) for work in works)
    row = {"schedule": name, "hidden": width, "blocks a stage": deep, "tokens": tokens, "plain ms": plain * 1e3}
    return row | {"graphs ms": recorded * 1e3, "gain": f"{plain / recorded:.2f}x", "same to the last bit": "yes" if same else "NO"}
