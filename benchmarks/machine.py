"""What the benchmarks ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

PACKAGES = ("torch", "numpy", "numba", "ortools")


def machine() -> dict[str, str]:
    """The machine and the versions, in words."""
    return {
        "cores": f"{_usable()} of {os.cpu_count()}",
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "Penstock": importlib.metadata.version("penstock"),
    }


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
