"""A schedule of ours as torchtitan's schedule file, run by torch's own pipeline runtime as torchtitan runs it.

python examples/torchtitan.py schedule.csv
"""

import sys

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn import functional

import penstock as ps
from penstock.runtime import launch, rank

RANKS, MICROBATCHES = 2, 8


def run(path: str) -> list[float]:
    """What torchtitan does with the file: stages in a loop over the ranks, torch's runtime, and its order from the file."""
    torch.manual_seed(0)
    placement = ps.load(path).placement
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(placement.stages)]
    mine = list(range(rank(), placement.stages, RANKS))
    stages = [PipelineStage(layers[stage], stage, placement.stages, torch.device("cpu")) for stage in mine]
    schedule = _PipelineScheduleRuntime(stages, n_microbatches=MICROBATCHES, loss_fn=functional.mse_loss)
    schedule._load_csv(path)
    x, losses = torch.randn(32, 16), []
    schedule.step(*((x,) if 0 in mine else ()), **({"target": x, "losses": losses} if placement.stages - 1 in mine else {}))
    return [float(loss.detach()) for loss in losses]


def main(path: str) -> list[float]:
    schedule = ps.schedule("grouped-interleaved", ranks=RANKS, microbatches=MICROBATCHES, chunks=2)
    ps.verify(ps.lower(schedule), semantics="rendezvous")  # cannot hang on one NCCL communicator
    schedule.to_csv(path)
    print(f"[training]\nlocal_batch_size = {MICROBATCHES}\n\n[parallelism]\npipeline_parallel_degree = {RANKS}")
    print(f'pipeline_parallel_schedule = "PipelineScheduleMulti"\npipeline_parallel_schedule_csv = "{path}"')
    print("pipeline_parallel_microbatch_size = 1")
    losses = next(filter(None, launch(run, RANKS, backend="gloo", args=(path,))))
    print(f"# {MICROBATCHES} microbatches through {schedule.stages} stages in torch's runtime: loss {sum(losses) / len(losses):.4f}")
    return losses


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "schedule.csv")
