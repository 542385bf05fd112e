"""Fixtures for running pages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.blocks import ROOT
from penstock.schedules import registry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a new folder that contains the examples, and undo everything that a page sets up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry.algorithms()))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]  # a file of this page


@pytest.fixture
def torch_as_it_was() -> Iterator[None]:
    """Restore torch: pages may set its number of threads and initialize a process group."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
