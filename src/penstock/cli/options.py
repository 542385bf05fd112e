"""Arguments and options that several commands take, how they are read, and how groups of them become one parameter of a command."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from penstock.errors import CostsError, FileFormatError, UsageError
from penstock.schedules.registry import algorithms
from penstock.text.units import has_byte_unit, parse_size, seconds_per

STDOUT = Path("-")
LEAST_BYTES = 2**16
"""A limit of fewer bytes must be written with a unit."""


def read_count(text: str) -> int:
    """Read an option that counts something."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def read_counts(option: str, text: str | None) -> list[int] | None:
    """Read an option with several counts, like 1,2,4."""
    try:
        return None if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a list of whole numbers, like 1,2,4") from None


def refuse_unitless(option: str, text: str | None) -> None:
    """Ask for the unit of a size that would be a few bytes; sizes below this are never meant in bytes."""
    for part in (text or "").split(","):
        if part.strip() and not has_byte_unit(part) and (read_size(option, part) or 0.0) < LEAST_BYTES:
            raise UsageError(f"{option} {part.strip()}: memory is in bytes here, so write the unit, like {part.strip()}GiB")


def read_size(option: str, text: str | None) -> float | None:
    """Read an option that is a size, like 50GB."""
    try:
        return None if text is None else parse_size(text, option)
    except CostsError as error:
        raise UsageError(str(error)) from None


def read_assignments(option: str, parts: Iterable[str], example: str) -> dict[str, Any]:
    """Read texts like `group_size=8`: numbers, booleans, None and lists as in Python, and otherwise text."""
    values: dict[str, Any] = {}
    for part in parts:
        name, equals, text = map(str.strip, part.partition("="))
        if not equals or not name.isidentifier() or not text:
            raise UsageError(f"{option}: {part.strip()!r} is not NAME=VALUE: write {example}")
        if name in values:
            raise UsageError(f"{option}: {name} is given twice")
        values[name] = _read_value(text)
    return values


def _read_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None, "nan": math.nan, "inf": math.inf, "infinity": math.inf}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float, list, tuple)) else text


def check_file(path: Path, option: str = "") -> Path:
    """Refuse a path at which there is no file."""
    if path.is_dir():
        raise UsageError(f"{option}{path} is a folder, not a file")
    if not path.exists():
        raise UsageError(f"{option}there is no file {path}")
    return path


def check_writable(path: Path | None) -> Path | None:
    """Refuse a path that no file can be written to before any work is done; `-` is stdout."""
    if path is None or path == STDOUT:
        return path
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} into")
    return path


def file_or_stdout(path: Path | None) -> Path | None:
    """Read a path to write to; None is stdout."""
    return None if path == STDOUT else check_writable(path)


def check_suffix(output: Path | None, suffixes: Sequence[str]) -> str | None:
    """Find the suffix that says what to write; refuse an unknown one before any work is done."""
    from penstock.draw.save import suffix_of

    try:
        return None if output is None else suffix_of(output, suffixes)
    except FileFormatError as error:
        raise UsageError(str(error)) from None


def check_unit(unit: str | None) -> None:
    """Refuse an unknown unit of time before any work is done."""
    try:
        seconds_per("s" if unit is None else unit)
    except UsageError as error:
        raise UsageError(f"--unit: {error}") from None


def count_option(text: str, *names: str, metavar: str = "N") -> Any:
    """Declare an option that counts something."""
    return typer.Option(*names, metavar=metavar, parser=read_count, help=text)


def text_option(text: str, metavar: str, *names: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Declare an option with a value of its own form, such as a size; `complete` lists what a shell may complete."""
    return typer.Option(*names, metavar=metavar, help=text, autocompletion=complete)


def file_option(text: str, *names: str, stdout: bool = True) -> Any:
    """Declare an option that names a file to write; with `stdout`, `-` is stdout."""
    return typer.Option(*names, metavar="FILE", callback=file_or_stdout if stdout else check_writable, help=text)


def complete_schedules(incomplete: str) -> list[str]:
    """List the schedules that a text is the start of; without any, shells complete files."""
    return [name for name in algorithms() if name.startswith(incomplete.lower())]


Source = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        autocompletion=complete_schedules,
        help="A schedule's name (see 'penstock list'), or a .csv or .json file.",
    ),
]
Ranks = Annotated[int | None, count_option("Ranks, for a NAME.  [default: 4]", "-p", "--ranks")]
Microbatches = Annotated[int | None, count_option("Microbatches, for a NAME.  [default: 8]", "-m", "--microbatches")]
CostsText = Annotated[
    str | None,
    text_option(
        'A .toml or .json file, or text like "f=1,i=1,w=1,latency=0.1".  [default: F, I and W take 1, messages nothing]', "COSTS", "--costs"
    ),
]
Unit = Annotated[str | None, text_option("The unit of the costs' times: s, ms, us or ns.", "UNIT", "--unit")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Output = Annotated[Path | None, file_option("Write to FILE, whole or not at all, instead of printing.", "-o", "--output")]


def expand_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter whose type is a dataclass by the annotated fields of that class, so that several commands share them."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: _group_parameters(hint) for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        parameters += groups.get(name, [parameter.replace(annotation=hints[name])])

    def run(**values: Any) -> Any:
        built = {name: hints[name](**{one.name: values.pop(one.name) for one in group}) for name, group in groups.items()}
        return command(**built, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = Signature([one.replace(kind=Parameter.KEYWORD_ONLY) for one in parameters])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _group_parameters(group: type) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    options = [field for field in fields(group) if hasattr(hints[field.name], "__metadata__")]
    defaults = {field.name: Parameter.empty if field.default is MISSING else field.default for field in options}
    return [Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name]) for name, default in defaults.items()]
