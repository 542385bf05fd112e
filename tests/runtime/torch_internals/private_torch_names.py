"""The private names of torch that the package uses: `python tests/runtime/torch_internals/private_torch_names.py` prints a table of them.

Imported and dotted names (`torch._C._x`) are followed through aliases, and those that `find_private` and `check_names` look up by their
text count too. Private attributes of objects (`tensor._is_view()`) have no type in the syntax tree: an attribute counts as torch's if
nothing in the package defines it, or if it is read from another object than `self` and is among the attributes of torch's usual classes.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import Node
from torch.distributed.pipelining.stage import PipelineStage, _PipelineStage
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import penstock

SOURCE = Path(penstock.__file__).parent
STANDARD = {"_asdict", "_fields", "_make", "_replace", "_value2member_map_", "_field_defaults", "_exit"}
"""Underscore names of the standard library."""

KNOWN = {name for kind in (nn.Module(), Tensor, GradScaler, Node, PipelineStage, _PipelineStage, DTensor, Optimizer) for name in dir(kind)}
"""Attributes of torch's usual classes."""


@lru_cache(maxsize=1)
def list_nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a file, which are gone through many times."""
    return list(ast.walk(tree))


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def read_aliases(tree: ast.AST) -> dict[str, str]:
    """Map each name that a file imports from torch to its full name."""
    aliases: dict[str, str] = {}
    for node in list_nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return aliases


def spell(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Return the full name of a dotted expression that begins at torch."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        base = spell(node.value, aliases)
        return None if base is None else f"{base}.{node.attr}"
    return None


def read_texts(tree: ast.AST, *functions: str) -> Iterator[str]:
    """Yield the texts that a file gives to these functions as arguments."""
    for node in list_nodes(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            yield from (
                part.value
                for argument in node.args
                for part in ast.walk(argument)
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and not _is_formatted(argument)
            )


def _is_formatted(argument: ast.AST) -> bool:
    return any(isinstance(part, ast.JoinedStr) for part in ast.walk(argument))


def find_dotted(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a file imports, reaches from `torch`, or looks up."""
    aliases = read_aliases(tree)
    inner = {id(node.value) for node in list_nodes(tree) if isinstance(node, ast.Attribute)}
    full_names = set(aliases.values()) | set(read_texts(tree, "find_private", "check_names"))
    full_names |= {name for node in list_nodes(tree) if id(node) not in inner and (name := spell(node, aliases)) is not None}
    for name in full_names:
        if any(map(is_private, name.split("."))):
            yield name


def find_attributes(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield torch's private attributes that a file reads, sets, checks, or names in `getattr`, `attrgetter` and the like."""
    aliases = read_aliases(tree)
    for node in list_nodes(tree):
        if not (isinstance(node, ast.Attribute) and is_private(node.attr) and spell(node, aliases) is None):
            continue
        if node.attr not in own or (node.attr in KNOWN and not is_own(node.value)):
            yield node.attr
    for text in read_texts(tree, "getattr", "hasattr", "setattr", "attrgetter", "methodcaller", "check_private"):
        if is_private(text) and (text not in own or text in KNOWN):
            yield text


def find_definitions(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a file defines: functions, classes, variables, and attributes set on `self` or `cls`."""
    for node in list_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def scan() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the files that use each private dotted name and each private attribute of torch."""
    trees = {str(path.relative_to(SOURCE)): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    own = {name for tree in trees.values() for name in find_definitions(tree)} | STANDARD
    dotted, attributes = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for path, tree in trees.items():
        for name in sorted(set(find_dotted(tree))):
            dotted[name].append(path)
        for name in sorted(set(find_attributes(tree, own))):
            attributes[name].append(path)
    return dict(sorted(dotted.items())), dict(sorted(attributes.items()))


if __name__ == "__main__":
    for title, names in zip(("name", "attribute of an object"), scan(), strict=True):
        print(f"| {title} | files |\n|---|---|")
        for name, files in names.items():
            print(f"| `{name}` | {', '.join(files)} |")
        print()
