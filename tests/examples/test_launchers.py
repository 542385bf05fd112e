"""The launchers: their settings checked by the parsers that read them, and each run on two machines in network namespaces."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from examples.network_namespaces import ADDRESSES, Machine, two_machines
from penstock.cli.main import main

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "examples" / "launchers"
SMALL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)]
    return layers, torch.randn(4, 12), nn.functional.mse_loss, torch.randn(4, 12)

def data():
    source = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(48, 12, generator=source), torch.randn(48, 12, generator=source))
"""
TRAIN = ["--schedule", "1f1b", "-m", "4", "--batch", "16", "--steps", "3", "--json"]
TIMEOUT = 240.0


def read_task() -> dict[str, Any]:
    task: dict[str, Any] = yaml.safe_load((LAUNCHERS / "skypilot.yaml").read_text(encoding="utf-8"))
    return task


# Settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(LAUNCHERS / name)], check=True)
    text = (LAUNCHERS / name).read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


def test_skypilot_task_has_what_it_needs() -> None:
    task = read_task()
    assert set(task) == {"name", "num_nodes", "resources", "workdir", "file_mounts", "envs", "setup", "run"}
    assert task["num_nodes"] >= 2
    assert re.fullmatch(r"\w+:\d+", task["resources"]["accelerators"])
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)
    (mount,) = task["file_mounts"]
    words = shlex.split(task["envs"]["TRAIN"])
    assert words[words.index("--checkpoints") + 1].startswith(f"{mount}/")  # what the machines share, and what outlives them
    assert (ROOT / words[0]).is_file()


def record_torchrun(folder: Path) -> dict[str, str]:
    """An environment whose `torchrun`, `ip` and `nvidia-smi` are stand-ins; torchrun writes its arguments to a file."""
    address = ADDRESSES[0]
    route = f'case "$*" in *route*) echo "local {address} dev lo src {address} uid 0";; *) echo "2: eth7 inet {address}/24";; esac'
    names = '"$GLOO_SOCKET_IFNAME" "$NCCL_SOCKET_IFNAME"'
    stand_ins = {
        "ip": route,
        "nvidia-smi": "printf 'GPU 0\\nGPU 1\\nGPU 2\\n'",
        "torchrun": f'printf "%s\\n" {names} "$@" > {folder}/arguments',
    }
    for name, body in stand_ins.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_torchrun_arguments_are_what_torch_reads(tmp_path: Path) -> None:
    environment = record_torchrun(tmp_path) | {"FIRST": ADDRESSES[0], "MACHINES": "4"}
    subprocess.run(["bash", str(LAUNCHERS / "torchrun.sh"), "examples/gpt.py", "--schedule", "zbv"], env=environment, check=True)
    gloo, nccl, *arguments = (tmp_path / "arguments").read_text().splitlines()
    assert (gloo, nccl) == ("eth7", "eth7")
    read = get_args_parser().parse_args(arguments)
    assert (read.nnodes, read.nproc_per_node, read.max_restarts) == ("4", "3", 3)
    assert (read.rdzv_backend, read.rdzv_endpoint, read.rdzv_conf) == ("c10d", f"{ADDRESSES[0]}:29500", "is_host=true")
    assert read.local_addr == ADDRESSES[0]
    assert (read.module, read.training_script, read.training_script_args) == (
        True,
        "penstock",
        ["train", "examples/gpt.py", "--schedule", "zbv"],
    )


def test_the_address_of_the_first_machine_is_asked_for() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "FIRST"}
    done = subprocess.run(["bash", str(LAUNCHERS / "torchrun.sh")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "set FIRST to the IP address of one of the machines" in done.stderr


# Two machines -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("launchers") / "small.py"
    path.write_text(SMALL)
    return path


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as names:
        yield names


@pytest.fixture
def environment() -> dict[str, str]:
    """One rank per machine, and the torchrun of this Python first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    source = str(ROOT / "src")
    return {**os.environ, "PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PROCESSES": "1"}


@pytest.fixture(scope="module")
def expected(file: Path) -> list[float]:
    """The losses of the same run on one rank."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["train", str(file), "-p", "1", *TRAIN]) == 0
    losses: list[float] = json.loads(output.getvalue())["losses"]
    return losses


def wait_for_losses(processes: Sequence[subprocess.Popen[str]]) -> list[float]:
    """Wait for all; the losses that the first rank printed. The machine that hosts the rendezvous need not have it."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    (printed,) = [output for output, _ in outputs if output.strip()]
    losses: list[float] = json.loads(printed)["losses"]
    return losses


def test_machines_end_with_the_process_that_made_them() -> None:
    """Also when it is killed, so that it cannot clean up."""
    code = "from examples.network_namespaces import two_machines\nwith two_machines() as machines:\n"
    code += "    print(*(machine.process for machine in machines), flush=True)\n    input()"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    maker = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    keepers = [Path("/proc", number, "ns", "net") for number in maker.stdout.readline().split()]
    maker.kill()
    _, errors = maker.communicate(timeout=TIMEOUT)
    if "Skipped" in errors:
        pytest.skip(errors.splitlines()[-1])
    assert len(keepers) == 2
    until = time.monotonic() + TIMEOUT
    while any(path.exists() for path in keepers):
        assert time.monotonic() < until, "a network namespace is left"
        time.sleep(0.05)


@pytest.mark.slow
def test_torchrun_on_two_machines(
    machines: tuple[Machine, Machine], file: Path, environment: dict[str, str], expected: list[float]
) -> None:
    environment |= {"FIRST": ADDRESSES[0]}
    command = ["bash", str(LAUNCHERS / "torchrun.sh"), str(file), *TRAIN]
    assert wait_for_losses([machine.start(command, environment) for machine in machines]) == expected


@pytest.mark.slow
def test_skypilot_task_on_two_machines(
    machines: tuple[Machine, Machine], file: Path, environment: dict[str, str], expected: list[float]
) -> None:
    """SkyPilot runs the same lines on every machine, and tells each about all."""
    environment |= {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES),
        "SKYPILOT_TASK_ID": "sky-2026-01-01",
        "TRAIN": shlex.join([str(file), *TRAIN]),
    }
    command = ["bash", "-c", f"cd {ROOT}\n{read_task()['run']}"]
    assert wait_for_losses([machine.start(command, environment) for machine in machines]) == expected


@pytest.mark.slow
def test_slurm_on_two_machines(
    machines: tuple[Machine, Machine], file: Path, environment: dict[str, str], expected: list[float], tmp_path: Path
) -> None:
    """Stand-ins take the place of SLURM's two commands: one lists the machines, one runs a command on one of them or on all."""
    enter = [" ".join(machine.enter) for machine in machines]
    stand_ins = {
        "scontrol": f"printf '{machines[0].name}\\n{machines[1].name}\\n'",
        "srun": f'case "$1$3" in\n--nodes=1--nodelist={machines[0].name}) shift 3; exec {enter[0]} "$@";;\n'
        f'--kill-on-bad-exit=1*) shift;;\n*) exit 9;;\nesac\n{enter[0]} "$@" & first=$!\n{enter[1]} "$@" & second=$!\n'
        "wait $first && wait $second",
    }
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment |= {
        "PATH": f"{tmp_path}:{environment['PATH']}",
        "SLURM_JOB_NODELIST": "machine-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456",
        "INTERFACE": "eth0",
    }
    command = ["bash", str(LAUNCHERS / "slurm.sbatch"), str(file), *TRAIN]
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_for_losses([process]) == expected
