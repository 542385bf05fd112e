"""The reference of the public names, from their signatures and docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from penstock import errors

WIDTH = 100
"""Characters of a signature on one line."""


@dataclass(frozen=True)
class Group:
    """One page of names."""

    path: str
    title: str
    about: str
    module: str
    names: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    """What a reader looks for, at the top of the page."""

    @cached_property
    def all_names(self) -> list[str]:
        """The library's own names: `first`, then the others in the order of the package, errors last."""
        module = importlib.import_module(self.module)
        listed = [name for name in self.names or module.__all__ if not name.startswith("_")]
        own = [name for name in listed if getattr(getattr(module, name), "__module__", self.module).startswith("penstock")]
        return [*self.first, *sorted((name for name in own if name not in self.first), key=lambda name: name.endswith("Error"))]


def _error_names() -> tuple[str, ...]:
    return tuple(name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.PenstockError))


GROUPS = (
    Group(
        "reference/penstock.md",
        "penstock",
        "`import penstock as ps` loads next to nothing; each name is imported when it is first used.",
        "penstock",
        first=("schedule", "available", "lower", "verify", "simulate", "Costs", "plan", "Profile", "Layer", "Plan", "plan_job", "Job"),
    ),
    Group(
        "reference/runtime.md",
        "penstock.runtime",
        "Training, with the `torch` extra.",
        "penstock.runtime",
        first=("Pipeline", "StepResult", "launch", "rank", "Checkpoints"),
    ),
    Group("reference/testing.md", "penstock.testing", "The conformance suite for schedules of your own.", "penstock.testing"),
    Group(
        "reference/torch.md",
        "penstock.compat.torch",
        "The names of `torch.distributed.pipelining`, see [Coming from PyTorch](../from-pytorch.md). "
        "`SplitPoint` and `pipe_split` are torch's own.",
        "penstock.compat.torch",
    ),
    Group(
        "reference/deepspeed.md",
        "penstock.compat.deepspeed",
        "See [Coming from DeepSpeed](../from-deepspeed.md).",
        "penstock.compat.deepspeed",
    ),
    Group("reference/errors.md", "penstock.errors", "Every error that the library raises on purpose.", "penstock.errors", _error_names()),
)


def api_pages() -> dict[str, str]:
    """The pages by their path."""
    return {group.path: "\n\n".join(_page(group)) + "\n" for group in GROUPS}


def _page(group: Group) -> Iterator[str]:
    module = importlib.import_module(group.module)
    yield f"# {group.title}"
    yield group.about
    for name in group.all_names:
        yield from _described(name, getattr(module, name), group)


def _described(name: str, value: Any, group: Group) -> Iterator[str]:
    yield f"## {name}"
    if inspect.isclass(value):
        yield f"```text\nclass {name}{_bases(value)}\n```" if issubclass(value, BaseException) else _signature(name, value)
    elif callable(value):
        yield _signature(name, value)
    yield from _text(inspect.getdoc(value) if inspect.isclass(value) or callable(value) else None)
    if inspect.isclass(value):
        yield from _members(name, value)


def _bases(value: type) -> str:
    return f"({', '.join(base.__name__ for base in value.__bases__)})"


def _signature(name: str, value: Any) -> str:
    """The call, one parameter a line where it is long."""
    found = inspect.signature(value)
    parts = list(_parameters(found))
    untold = inspect.isclass(value) or found.return_annotation is found.empty
    result = "" if untold else f" -> {_annotation(found.return_annotation)}"
    flat = f"{name}({', '.join(parts)}){result}"
    if len(flat) > WIDTH:
        flat = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"
    return f"```text\n{flat}\n```"


def _parameters(found: inspect.Signature) -> Iterator[str]:
    star = False
    for each in found.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            yield "*"
        star = star or each.kind in (each.VAR_POSITIONAL, each.KEYWORD_ONLY)
        mark = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
        typed = "" if each.annotation is each.empty else f": {_annotation(each.annotation)}"
        yield f"{mark}{each.name}{typed}{_default(each.default)}"


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def _default(value: Any) -> str:
    """A default as it would be written, or dots for an object."""
    if value is inspect.Parameter.empty:
        return ""
    return f" = {value!r}" if isinstance(value, (str, int, float, tuple, type(None))) else " = ..."


def _members(name: str, value: type) -> Iterator[str]:
    """Fields with their remarks, then properties and methods of the library's own classes, in the order of the source."""
    fields = [(field, said) for field, said in _remarks(value).items() if not field.startswith("_")]
    if fields:
        yield "\n".join(f"- **`{field}`**: {' '.join(said.split())}" for field, said in fields)
    for member, found in _own(value):
        if isinstance(found, (property, cached_property)) or hasattr(found, "func"):
            getter = found.fget if isinstance(found, property) else found.func
            yield f"### {name}.{member}"
            yield from _text(inspect.getdoc(getter))
        else:
            yield f"### {name}.{member}()"
            yield _signature(member, getattr(value, member))
            yield from _text(inspect.getdoc(found.__func__ if isinstance(found, (classmethod, staticmethod)) else found))


def _own(value: type) -> Iterator[tuple[str, Any]]:
    """What the class and its bases in the library define, and say something about."""
    seen: set[str] = set()
    for base in value.__mro__:
        if base.__module__.startswith("penstock"):
            for member, found in vars(base).items():
                if member.startswith("_") or member in seen or not _documented(found):
                    continue
                seen.add(member)
                yield member, found


def _documented(found: Any) -> bool:
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    if isinstance(found, (property, cached_property)) or inspect.isfunction(found):
        return bool(found.__doc__)
    return False


def _remarks(value: type) -> dict[str, str]:
    """The strings below the fields of a class."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, remark in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and (said := _string(remark)) is not None:
            found[field.target.id] = said
    return found


def _string(node: ast.stmt) -> str | None:
    """The text of a statement that is nothing else."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _text(doc: str | None) -> Iterator[str]:
    """A docstring as Markdown: examples become code."""
    for paragraph in (doc or "").split("\n\n"):
        if paragraph.lstrip().startswith(">>>"):
            yield f"```pycon\n{textwrap.dedent(paragraph)}\n```"
        elif paragraph.startswith("    "):
            yield f"```text\n{textwrap.dedent(paragraph)}\n```"
        elif paragraph.strip():
            yield paragraph.replace("\n- ", "\n\n- ", 1) if paragraph.lstrip()[0] != "-" else paragraph
