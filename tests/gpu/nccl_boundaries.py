"""The cases of `runtime.boundaries` over NCCL, with all ranks on one GPU: `PYTHONPATH=src:tests python tests/gpu/nccl_boundaries.py`.

It is not part of the test suite, which needs no GPU.
"""

from __future__ import annotations

import sys

from gpu.nccl_ranks import leave, run_ranks
from runtime.boundaries import CASES, assert_case, step

TRANSPORTS = ("direct", "edges")


def main() -> int:
    """Run every case on every transport; 1 if any failed."""
    failed = 0
    for ranks in sorted({len(case.bodies) for case in CASES.values()}):
        for transport in TRANSPORTS:
            everyone = run_ranks(__file__, ranks, transport, str(ranks))
            for name in everyone[0]:
                try:
                    assert_case(CASES[name], [of_rank[name] for of_rank in everyone], exact=False)
                except AssertionError as error:
                    failed += 1
                    print(f"{name} ({transport}, {ranks} ranks): {str(error).splitlines()[0] if str(error) else error!r}")
            print(f"{transport} on {ranks} ranks: done", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


def run_rank(transport: str, ranks: int, path: str) -> None:
    """Run the cases on this rank, and leave what was found in a file."""
    cases = {name: case for name, case in CASES.items() if len(case.bodies) == ranks}
    leave(path, {name: step(case, "1f1b", device="cuda", transport=transport) for name, case in cases.items()})


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
