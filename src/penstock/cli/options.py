"""Arguments and options that several commands take, how they are read, and how groups of them become one parameter of a command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from penstock.errors import CostsError, FileFormatError, UsageError
from penstock.schedules.registry import CLASS_NAMES, algorithms
from penstock.text.units import LEAST_BYTES, SECONDS, has_byte_unit, has_time_unit, parse_rate, parse_size, parse_time, seconds_per

STDOUT = Path("-")
TEXT = ("", ".txt", ".md", ".log")
"""Suffixes of files that hold the text that would be printed."""


def read_count(text: str) -> int:
    """Read an option that counts something."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def read_number(text: str) -> float:
    """Read an option that is a plain number."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def read_counts(option: str, text: str | None) -> list[int] | None:
    """Read an option with several counts, like 1,2,4."""
    try:
        return None if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a list of whole numbers, like 1,2,4") from None


def refuse_unitless(option: str, text: str | None, what: str = "memory is in bytes", unit: str = "GiB") -> None:
    """Ask for the unit of a size that would be a few bytes; sizes below this are never meant in bytes."""
    for part in (text or "").split(","):
        if part.strip() and not has_byte_unit(part) and (read_size(option, part) or 0.0) < LEAST_BYTES:
            raise UsageError(f"{option} {part.strip()}: {what} here, so write the unit, like {part.strip()}{unit}")


def read_rate(option: str, text: str | None, in_bytes: bool = True) -> float | None:
    """Read an option that is a bandwidth, like 50GB; if sizes are in bytes, its unit must be written."""
    try:
        rate = None if text is None else parse_rate(text, option)
    except CostsError as error:
        raise UsageError(str(error)) from None
    if in_bytes:
        refuse_unitless(option, text, "bandwidth is in bytes per second", "GB")
    return rate


def read_time(option: str, text: str | None, unit: str = "s") -> float | None:
    """Read an option that is a time, like 5us, in `unit`; a plain number is in that unit, and must not be a whole second or more."""
    if text is None:
        return None
    try:
        time = parse_time(text, option, unit)
    except CostsError as error:
        raise UsageError(str(error)) from None
    if not has_time_unit(text) and unit in SECONDS and time * SECONDS[unit] >= 1.0:
        raise UsageError(f"{option} {text}: that would be {time:g} {unit}, so write the unit, like {time:g}us")
    return time


def read_size(option: str, text: str | None) -> float | None:
    """Read an option that is a size, like 50GB."""
    try:
        return None if text is None else parse_size(text, option)
    except CostsError as error:
        raise UsageError(str(error)) from None


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


def refuse_overwrite(option: str, path: Path | None, others: Mapping[str, Path | None]) -> None:
    """Refuse to write a result over a file that another option names, before any work is done."""
    for name, other in others.items():
        if path is not None and path != STDOUT and other is not None and path.resolve() == other.resolve():
            raise UsageError(f"{option} and {name} both name {path}, and one would overwrite the other: give each a file of its own")


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


def number_option(text: str, metavar: str, *names: str) -> Any:
    """Declare an option that is a plain number."""
    return typer.Option(*names, metavar=metavar, parser=read_number, help=text)


def text_option(text: str, metavar: str, *names: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Declare an option with a value of its own form, such as a size; `complete` lists what a shell may complete."""
    return typer.Option(*names, metavar=metavar, help=text, autocompletion=complete)


def file_option(text: str, *names: str, stdout: bool = True) -> Any:
    """Declare an option that names a file to write; with `stdout`, `-` is stdout."""
    return typer.Option(*names, metavar="FILE", callback=file_or_stdout if stdout else check_writable, help=text)


def complete_schedules(incomplete: str) -> list[str]:
    """List the names of schedules that a text is the start of, in its case; without any, shells complete files.

    Shells drop what does not start with the text itself. A text with a capital letter may also be a class name of PyTorch's.

    >>> complete_schedules("zbv"), complete_schedules("ZBV"), complete_schedules("Zbv")
    (['zbv'], ['ZBV', 'ZBVZeroBubble'], ['Zbv'])
    """
    typed = incomplete.lower()
    names = [incomplete + name[len(typed) :] for name in algorithms() if name.startswith(typed)]
    if incomplete.isupper():
        names = [name.upper() for name in names]
    if incomplete != typed:
        names += [name for name in CLASS_NAMES if name.startswith(incomplete) and name not in names]
    return names


def complete_schedule_list(incomplete: str) -> list[str]:
    """Complete the last name of a list of schedules, among them `searched`.

    >>> complete_schedule_list("1f1b,zbv"), complete_schedule_list("sear")
    (['1f1b,zbv'], ['searched'])
    """
    before, comma, last = incomplete.rpartition(",")
    names = complete_schedules(last) + [name for name in ("searched",) if name.startswith(last)]
    return [f"{before}{comma}{name}" for name in names]


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
ClusterFile = Annotated[
    Path | None,
    text_option(
        "Devices of different speeds, memory and links, device k as rank k: a .toml or .json file (see 'penstock profile --ranks').",
        "FILE",
        "--cluster",
    ),
]
Unit = Annotated[
    str | None,
    text_option("The unit of the costs' times: s, ms, us or ns. Times whose unit is known are converted to it.", "UNIT", "--unit"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def _check_text_file(path: Path | None) -> Path | None:
    """Refuse a suffix of anything but text before any work is done."""
    if path is not None and path.suffix.lower() not in (*TEXT, ".json"):
        raise UsageError(f"{path}: the suffix is neither .txt nor .json, and the result is text")
    return file_or_stdout(path)


def _check_program_file(path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in (*TEXT, ".csv", ".json"):
        hint = "'penstock simulate --lower -o' draws pictures"
        raise UsageError(f"{path}: the suffix is not one of .csv, .json, .txt; {hint}")
    return file_or_stdout(path)


def _check_schedule_file(path: Path | None) -> Path | None:
    from penstock.draw.save import PICTURES

    if path is not None and path.suffix.lower() not in TEXT:
        check_suffix(path, (".csv", ".json", ".txt", *PICTURES))
    return file_or_stdout(path)


def _declare_output(check: Callable[[Path | None], Path | None], forms: str) -> Any:
    text = f"Write to FILE, whole or not at all, instead of printing: {forms}."
    return typer.Option("-o", "--output", metavar="FILE", callback=check, help=text)


TextOutput = Annotated[Path | None, _declare_output(_check_text_file, ".txt or .json")]
ProgramOutput = Annotated[
    Path | None, _declare_output(_check_program_file, ".csv (for PyTorch too) or .json to load it again, .txt as printed")
]
ScheduleOutput = Annotated[
    Path | None,
    _declare_output(_check_schedule_file, ".csv or .json to load it again, .svg, .pdf, .png or .html as a picture, .txt as printed"),
]


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
