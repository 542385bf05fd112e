"""The walks on `docs/architecture.md`, and what the code visits."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.nn import functional

import penstock as ps
from docs.blocks import ROOT
from penstock.runtime import Pipeline

SOURCE = Path(ps.__file__).parent
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
STEP = "The walk of a training step"
DOOR = "runtime/pipeline.py"
T = TypeVar("T")

SPLIT_ONLY = {"runtime/split_backward/deferral.py", "runtime/split_backward/operators.py"}
"""Visited only if the schedule splits the backward."""
PROCESSES_ONLY = {f"runtime/transport/{name}.py" for name in ("processes", "framed_channels", "message_format", "all_gather")}
"""Visited only by processes."""
SLICES_ONLY = {"runtime/batch/slices.py", "runtime/sequence/prefix.py"}
"""Visited only if sequences are cut into slices."""
THREADS_ONLY = {"runtime/transport/threads.py", "runtime/device/streams.py", "runtime/device/rng.py"}
"""Visited only by virtual ranks."""


def section(heading: str) -> str:
    """The text between a heading and the next one."""
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def walk(heading: str) -> list[str]:
    """The files of a section's numbered list."""
    return re.findall(r"^\d+\. `([\w./-]+)`", section(heading), flags=re.MULTILINE)


def trace(call: Callable[[], T]) -> tuple[T, list[tuple[str, str]]]:
    """Run a function, and list its calls between files of the package on this thread: the file that is called, and the caller's."""
    calls: list[tuple[str, str]] = []
    root = f"{SOURCE}/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(root):
                caller = caller.f_back
            calls.append(
                (frame.f_code.co_filename.removeprefix(root), "" if caller is None else caller.f_code.co_filename.removeprefix(root))
            )

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, calls


def trace_step(schedule: str, shape: tuple[int, ...] = (8, 8)) -> list[str]:
    """The files that this rank visits in a steady step, by their first call; no file that the step enters calls back into the pipeline."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
    pipe = Pipeline(model, schedule=schedule, microbatches=4, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    x, y = torch.randn(shape), torch.randn(shape)
    for _ in range(3):
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    _, calls = trace(lambda: pipe.step(x, target=y).loss)
    assert [caller for called, caller in calls[1:] if called == DOOR != caller] == []
    return list(dict.fromkeys(called for called, _ in calls if called.startswith("runtime/")))


def check_step(visits: list[list[str]], backend: str, schedule: str) -> None:
    """Compare the visits of all ranks with the page."""
    left_out = (set() if schedule == "zbv" else SPLIT_ONLY) | (PROCESSES_ONLY if backend == "threads" else set())
    expected = [path for path in walk(STEP) if path not in left_out]
    assert set().union(*visits) == set(expected) | (THREADS_ONLY if backend == "threads" else set())
    if schedule == "zbv":
        assert [path for path in visits[0] if path in expected] == expected
