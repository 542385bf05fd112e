"""The cases of `runtime.boundaries` over NCCL, with all ranks on one GPU: `PYTHONPATH=src:tests python tests/gpu/nccl_boundaries.py`.

NCCL takes several processes on one GPU if each says that it is a host of its own. It is not part of the test suite, which needs no GPU.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runtime.boundaries import CASES, assert_case, step

TRANSPORTS = ("direct", "edges")
NCCL = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def main() -> int:
    """Run every case on every transport; 1 if any failed."""
    failed = 0
    for ranks in sorted({len(case.bodies) for case in CASES.values()}):
        for transport in TRANSPORTS:
            for name, found in run_ranks(ranks, transport).items():
                try:
                    assert_case(CASES[name], found, exact=False)
                except AssertionError as error:
                    failed += 1
                    print(f"{name} ({transport}, {ranks} ranks): {str(error).splitlines()[0] if str(error) else error!r}")
            print(f"{transport} on {ranks} ranks: done", flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


def run_ranks(ranks: int, transport: str) -> dict[str, list[Any]]:
    """What each rank found in each case of so many stages."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        common = {**os.environ, **NCCL, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        started = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"}
            arguments = [sys.executable, __file__, transport, str(ranks), str(Path(folder) / str(rank))]
            started.append(subprocess.Popen(arguments, env=common | own))
        codes = [process.wait(timeout=300) for process in started]
        assert not any(codes), f"the processes ended with {codes}"
        found = [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]
    return {name: [theirs[name] for theirs in found] for name in found[0]}


def run_rank(transport: str, ranks: int, path: Path) -> None:
    """Run the cases on this rank, and leave what was found in a file."""
    cases = {name: case for name, case in CASES.items() if len(case.bodies) == ranks}
    path.write_bytes(pickle.dumps({name: step(case, "1f1b", device="cuda", transport=transport) for name, case in cases.items()}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(main())
