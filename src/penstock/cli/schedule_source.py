"""The NAME|FILE argument of a command: a schedule by name, or a file."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.ir.table import Table

RANKS, MICROBATCHES = 4, 8
SUFFIXES = (".csv", ".json")
SHAPE = {
    "name": "it is the first argument",
    "ranks": "use -p",
    "microbatches": "use -m",
    "chunks": "use --chunks",
    "graph": "use a .json file",
}
"""The arguments of a schedule that are not its own options, and how to give them to a command."""


@dataclass(frozen=True)
class ScheduleSource:
    """NAME|FILE, and the shape and options that were given with it."""

    source: str
    ranks: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    options: list[str] | None = field(default=None)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Options of the schedule that are not text."""

    @property
    def is_file(self) -> bool:
        """Whether this is a file: by its suffix, or because it exists and no schedule has that name."""
        from penstock.schedules.registry import algorithms

        path = Path(self.source)
        return path.suffix.lower() in SUFFIXES or (self.source not in algorithms() and (path.exists() or len(path.parts) > 1))

    def table(self, *, strict: bool = True) -> Table:
        """Load or build the schedule or program."""
        return self._load(strict) if self.is_file else self._build()

    def _load(self, strict: bool) -> Table:
        from penstock.ir.formats.files import load

        self.refuse_shape()
        path = self.path()
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(f"{path} ends in none of {', '.join(SUFFIXES)}: 'penstock convert --from FORMAT' reads other names")
        return load(path, strict=strict)

    def path(self) -> Path:
        """Give the path of the file; refuse one that is not there."""
        path = Path(self.source)
        if path.is_dir():
            raise UsageError(f"{path} is a folder, not a file")
        if not path.exists():
            raise UsageError(f"there is no file {path}")
        return path

    def refuse_shape(self) -> None:
        """Refuse a shape or options for a file, which has its own."""
        options = {"--ranks": self.ranks, "--microbatches": self.microbatches, "--chunks": self.chunks, "--option": self.options}
        for option, value in options.items():
            if value:
                raise UsageError(f"{option} is for schedules by name; {self.source} is a file and has its own shape")

    def _build(self) -> Table:
        from penstock.errors import ScheduleError
        from penstock.schedules.registry import schedule

        microbatches = MICROBATCHES if self.microbatches is None else self.microbatches
        options = {**self.extra, **parse_options(self.options)}
        if self.ranks is not None:
            return schedule(self.source, self.ranks, microbatches, chunks=self.chunks, **options)
        try:
            return schedule(self.source, RANKS, microbatches, chunks=self.chunks, **options)
        except ScheduleError as error:
            try:  # schedules without a pipeline, like data-parallel, have one rank
                return schedule(self.source, 1, microbatches, chunks=self.chunks, **options)
            except ScheduleError:
                raise error from None


def parse_sources(texts: list[str], ranks: int | None, microbatches: int | None) -> list[ScheduleSource]:
    """Read several sources, each with its own options; the shape is for the names among them."""
    sources = [_parse_source(text, ranks, microbatches) for text in texts]
    if (ranks or microbatches) and all(source.is_file for source in sources):
        raise UsageError("--ranks and --microbatches are for schedules by name; files have their own shape")
    return sources


def _parse_source(text: str, ranks: int | None, microbatches: int | None) -> ScheduleSource:
    """Read `NAME{OPTION=VALUE,...}`; ranks, microbatches and chunks may be among the options."""
    match = re.fullmatch(r"([^{}]+)\{([^{}]*)\}", text)
    name = text if match is None else match[1]
    shape: dict[str, Any] = {} if ScheduleSource(name).is_file else {"ranks": ranks, "microbatches": microbatches}
    if match is None:
        return ScheduleSource(name, **shape)
    options = []
    for option in filter(None, map(str.strip, match[2].split(","))):
        key, _, value = option.partition("=")
        if key in ("ranks", "microbatches", "chunks"):
            try:
                shape[key] = int(value)
            except ValueError:
                raise UsageError(f"{text}: {key}={value} is not a whole number") from None
        else:
            options.append(option)
    return ScheduleSource(name, **shape, options=options or None)


def parse_options(texts: list[str] | None) -> dict[str, Any]:
    """Read `["group_size=8"]` as keywords; values are Python's numbers, booleans and None, and otherwise text."""
    options: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"{text!r} is not an option of a schedule: write KEY=VALUE, like -O group_size=8")
        if key in SHAPE:
            raise UsageError(f"{key} is part of the shape of a schedule, not one of its options: {SHAPE[key]}")
        if key in options:
            raise UsageError(f"option {key} is given twice")
        options[key] = _parse_value(value)
    return options


def _parse_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Read a .json file that holds an object; None for any other file, whose mistakes are reported when it is loaded."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
