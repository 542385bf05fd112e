"""A schedule of ours as torchtitan's schedule file, run by torch's own pipeline runtime as torchtitan runs it.

python examples/torchtitan/schedule_file.py schedule.csv
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
    """Do with the file what torchtitan does: torch's stages and runtime, and the order from the file."""
    torch.manual_seed(0)
    placement = ps.load(path).placement
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(placement.stages)]
    mine = placement.stages_of(rank())
    stages = [PipelineStage(layers[stage], stage, placement.stages, torch.device("cpu")) for stage in mine]
    schedule = _PipelineScheduleRuntime(stages, n_microbatches=MICROBATCHES, loss_fn=functional.mse_loss)
    schedule._load_csv(path)
    x, losses = torch.randn(32, 16), []
    schedule.step(*((x,) if 0 in mine else ()), **({"target": x, "losses": losses} if placement.stages - 1 in mine else {}))
    return [float(loss.detach()) for loss in losses]


def main(path: str, name: str = "grouped-interleaved") -> list[float]:
    schedule = ps.schedule(name, ranks=RANKS, microbatches=MICROBATCHES, chunks=2)
    ps.verify(ps.lower(schedule), semantics="rendezvous")  # cannot hang on one NCCL communicator
    schedule.to_csv(path)
    placement = "ZBVZeroBubble" if schedule.placement.kind == "v" else "PipelineScheduleMulti"  # of the stages; the order is the file's
    print(f"--training.local_batch_size {MICROBATCHES} --parallelism.pipeline_parallel_microbatch_size 1")
    print(f"--parallelism.pipeline_parallel_degree {RANKS} --parallelism.pipeline_parallel_schedule {placement}")
    print(f"--parallelism.pipeline_parallel_schedule_csv {path}")
    losses = next(filter(None, launch(run, RANKS, backend="gloo", args=(path,))))
    print(f"# {MICROBATCHES} microbatches through {schedule.stages} stages in torch's runtime: loss {sum(losses) / len(losses):.4f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:] or ["schedule.csv"])
