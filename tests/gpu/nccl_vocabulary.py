"""A vocabulary on all ranks over NCCL, with all ranks on one GPU: `PYTHONPATH=src:tests python tests/gpu/nccl_vocabulary.py`.

Each case trains two steps with clipped gradients in float64, and is compared with the plain loop: losses, norms, gradients and weights, to
1e-12. It is not part of the test suite, which needs no GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpu.nccl_ranks import leave, run_ranks
from penstock.runtime import Pipeline, TokenCrossEntropy
from runtime.spread_models import build_model, compare_with_plain_loop, draw_batch, spread, train_pipeline

CASES = [(name, ranks, transport) for name in ("1f1b", "zbv") for ranks in (2, 4) for transport in ("direct", "edges")]
MICROBATCHES = 4


def main() -> int:
    """Run every case; 1 if any failed."""
    failed = 0
    for name, ranks, transport in CASES:
        schedule = spread(name, ranks, MICROBATCHES)
        found = run_ranks(__file__, ranks, name, str(ranks), transport)
        try:
            compare_with_plain_loop(found, build_model(schedule.stages), *draw_batch(), MICROBATCHES)
        except AssertionError as error:
            failed += 1
            print(f"{name} on {ranks} ranks ({transport}): {error}", flush=True)
        else:
            print(f"{name} on {ranks} ranks ({transport}): same", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


def run_rank(name: str, ranks: int, transport: str, path: str) -> None:
    """Train on this rank, and leave what it knows in a file."""
    schedule = spread(name, ranks, MICROBATCHES)
    model = build_model(schedule.stages).cuda()
    pipe = Pipeline(model, schedule, loss_fn=TokenCrossEntropy(), transport=transport, deadline=60.0)
    found: dict[str, Any] = train_pipeline(pipe, *(tensor.cuda() for tensor in draw_batch()))
    leave(path, pytree.tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, found))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        sys.exit(main())
