"""Which rooms of the runtime import which, and that importing the runtime does not import torch's slow modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import penstock.runtime

ROOT = Path(penstock.runtime.__file__).parent
ROOMS = {
    "split_backward": {"tensors"},
    "batch": {"tensors"},
    "model": {"tensors", "split_backward", "device", "batch.side_outputs"},
    "parallel": {"tensors", "model", "batch", "transport"},
}
"""What each room may import of the others."""


def imported_modules(path: Path) -> set[str]:
    """The modules of the runtime that a file imports, anywhere in it and for types too, without the common prefix."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    return {name.removeprefix("penstock.runtime.") for name in names if name.startswith("penstock.runtime.")}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_that_it_may(room: str) -> None:
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        for name in imported_modules(path):
            assert any(name.startswith(f"{allowed}.") for allowed in {room, *ROOMS[room]}), f"{path.name} imports {name}"


def test_the_runtime_is_imported_without_torch_modules_that_take_seconds() -> None:
    slow = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint")
    code = f"import sys, penstock.runtime; print([name for name in {slow!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
