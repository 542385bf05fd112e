"""Processes that are ranks of NCCL on one GPU: NCCL accepts several of them there if each says that it is a host of its own."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NCCL = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def run_ranks(script: str, ranks: int, *arguments: str) -> list[Any]:
    """Run a script once per rank, with these arguments and a path for what it leaves by `leave`; returns that of each rank."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        common = {**os.environ, **NCCL, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        started = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"}
            command = [sys.executable, script, *arguments, str(Path(folder) / str(rank))]
            started.append(subprocess.Popen(command, env=common | own))
        codes = [process.wait(timeout=300) for process in started]
        assert not any(codes), f"the processes ended with {codes}"
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(ranks)]


def leave(path: str, value: Any) -> None:
    """Leave what a rank has found for `run_ranks`."""
    Path(path).write_bytes(pickle.dumps(value))
