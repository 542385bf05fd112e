"""Profile a step of torch's own pipelining on two processes, and read the traces: bubble, waits, the slow rank, and what a plan would gain.

torchrun is not needed: python examples/read_traces.py starts the processes itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import penstock as ps
from penstock.integrations.profiler_traces import find_busiest_rank, find_slow_rank, read_step, stage_profile, waits_between_ranks
from penstock.runtime import launch

RANKS, CHUNKS, MICROBATCHES = 2, 2, 4
SIZE = 256


def profile_step(folder: str) -> None:
    """Run on each rank: train one step under `torch.profiler` after one that warms up, and write this rank's trace."""
    rank, stages = dist.get_rank(), RANKS * CHUNKS
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every rank builds the same model
    modules = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)) for _ in range(stages)]
    mine = [PipelineStage(modules[index], index, stages, torch.device("cpu")) for index in range(rank, stages, RANKS)]
    schedule = ScheduleInterleaved1F1B(mine, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x = torch.randn(128 * MICROBATCHES, SIZE)

    def step() -> None:
        schedule.step(*([x] if rank == 0 else []), target=x)

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")


def report(folder: str) -> list[str]:
    """What `penstock read` and `penstock plan` say about the traces."""
    step = read_step(sorted(Path(folder).glob("rank*.json")))
    timeline, waits = step.timeline, waits_between_ranks(step.timeline)
    plan = ps.plan(stage_profile(timeline), ranks=RANKS, microbatches=MICROBATCHES, seconds=0)
    return [
        f"bubble {timeline.bubble:.1%} of {timeline.makespan * 1e3:.1f} ms",
        *(f"rank {rank} waited {sum(by_rank) * 1e3:.1f} ms for others" for rank, by_rank in enumerate(waits)),
        str(find_slow_rank(step) or find_busiest_rank(timeline) or "no rank is slow"),
        f"on these times, {plan.name} would take {plan.predicted.makespan * 1e3:.1f} ms",
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        launch(profile_step, RANKS, backend="gloo", args=(folder,))
        print("\n".join(report(folder)))
