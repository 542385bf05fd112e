"""Two machines in one: network namespaces that are connected by a cable, each with an address and a host name of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.77.53.1", "10.77.53.2")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_machines() -> Iterator[tuple[str, str]]:
    """Two namespaces by name, whose only common network is their `eth0`s. Skips the test if they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip, of Debian's package iproute2")
    if os.geteuid():
        pytest.skip("network namespaces need root")
    names = (f"machine-a-{os.getpid()}", f"machine-b-{os.getpid()}")
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start_on(machine: str, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", machine, *command],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
