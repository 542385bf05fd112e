"""What the benchmarks ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import penstock

PACKAGES = ("torch", "numpy", "numba", "ortools")


def machine() -> dict[str, str]:
    """The machine and the versions, in words."""
    return {
        "cores": f"{_usable()} of {os.cpu_count()}",
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "Penstock": penstock.__version__,  # the package's own: a source tree is not installed
    }


def _version(package: str) -> str:
    """The version of an installed package, in words if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def moment() -> dict[str, str]:
    """The time, and how busy the machine is."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {"time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "load": f"{load} (1, 5 and 15 minutes)"}


def _usable() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """Its name as the system gives it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
