"""The private names of torch that the package uses exist in the installed torch."""

from __future__ import annotations

import ast
import importlib
from typing import Any

import pytest

from private_torch_names import find_attributes, find_dotted, scan

DOTTED, ATTRIBUTES = scan()

CODE = """
import torch
import torch.distributed as dist
from torch import _C as core
from torch.utils._pytree import tree_map
def use(x, self):
    core._first(dist._second.third, torch.ops._fourth, torch.add)
    x._fifth, self._own, getattr(x, "_sixth", None), x._replace()
"""


def test_the_scan_follows_aliases() -> None:
    names = {"torch._C", "torch._C._first", "torch.distributed._second.third", "torch.ops._fourth", "torch.utils._pytree.tree_map"}
    assert set(find_dotted(ast.parse(CODE))) == names
    assert set(find_attributes(ast.parse(CODE), own={"_own", "_replace"})) == {"_fifth", "_sixth"}


def test_the_scan_finds_names_that_are_surely_used() -> None:
    assert "torch.utils._pytree" in DOTTED
    assert "_is_view" in ATTRIBUTES


def resolve(name: str) -> Any:
    """Import the longest module in a dotted name and read the rest from it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", DOTTED)
def test_the_name_exists(name: str) -> None:
    assert resolve(name) is not None
