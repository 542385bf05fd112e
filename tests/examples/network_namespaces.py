"""Two machines in one: network namespaces that are connected by a cable, each with an address of its own.

A namespace lives as long as a process in it. The one that keeps it here reads from this process, so it ends with this process, however
that ends: nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

ADDRESSES = ("10.77.53.1", "10.77.53.2")


@dataclass(frozen=True)
class Machine:
    """A network namespace, by the process that keeps it."""

    name: str
    process: int

    @property
    def enter(self) -> list[str]:
        """The command that runs the words after it on this machine."""
        return ["nsenter", f"--net=/proc/{self.process}/ns/net"]

    def run(self, *words: str) -> None:
        subprocess.run([*self.enter, *words], check=True, capture_output=True, text=True)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*self.enter, *command], env=dict(environment), text=True, **pipes)


@contextmanager
def _keep_namespace(name: str) -> Iterator[Machine]:
    command = ["unshare", "--net", "sh", "-c", "echo here; exec cat"]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    try:
        if not keeper.stdout.readline():
            pytest.skip(f"network namespaces cannot be made here: {keeper.stderr.read().strip()}")
        yield Machine(name, keeper.pid)
    finally:
        keeper.communicate()  # ends the input of cat


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two namespaces whose only common network is their `eth0`s. Skips the test if they cannot be made."""
    for command, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if shutil.which(command) is None:
            pytest.skip(f"network namespaces need the command {command}, of Debian's package {package}")
    if os.geteuid():
        pytest.skip("network namespaces need root")
    with ExitStack() as stack:
        first, second = (stack.enter_context(_keep_namespace(name)) for name in ("machine-a", "machine-b"))
        cable = ["ip", "link", "add", "eth0", "netns", str(first.process), "type", "veth", "peer", "name", "eth0", "netns"]
        try:
            subprocess.run([*cable, str(second.process)], check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be connected here: {error.stderr.strip()}")
        for machine, address in zip((first, second), ADDRESSES, strict=True):
            machine.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "lo", "up")
            machine.run("ip", "link", "set", "eth0", "up")
        yield first, second
