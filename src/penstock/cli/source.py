"""What a command works on: a schedule by name, or a file."""

from __future__ import annotations

import ast
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
"""What a schedule is built from besides its own options, and where a command takes it."""


@dataclass(frozen=True)
class Wanted:
    """NAME|FILE and the shape that was asked for with it."""

    source: str
    ranks: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    options: list[str] | None = field(default=None)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Options of the schedule that are no text."""

    @property
    def is_file(self) -> bool:
        """Whether a file is meant: by its suffix, or because it is there and no schedule has that name."""
        from penstock.schedules.registry import algorithms

        path = Path(self.source)
        return path.suffix.lower() in SUFFIXES or (self.source not in algorithms() and (path.exists() or len(path.parts) > 1))

    def table(self, *, strict: bool = True) -> Table:
        """The schedule or program."""
        return self._load(strict) if self.is_file else self._build()

    def _load(self, strict: bool) -> Table:
        from penstock.ir.files import load

        self.refuse_shape()
        path = self.path()
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(f"{path} ends in none of {', '.join(SUFFIXES)}: 'penstock convert --from FORMAT' reads other names")
        return load(path, strict=strict)

    def path(self) -> Path:
        """The file, once it is clear that it can be one."""
        path = Path(self.source)
        if path.is_dir():
            raise UsageError(f"{path} is a folder, not a file")
        if not path.exists():
            raise UsageError(f"there is no file {path}")
        return path

    def refuse_shape(self) -> None:
        """A file says itself how many ranks and microbatches it has."""
        given = [
            name
            for name, value in (
                ("--ranks", self.ranks),
                ("--microbatches", self.microbatches),
                ("--chunks", self.chunks),
                ("--option", self.options),
            )
            if value
        ]
        if given:
            raise UsageError(f"{given[0]} is for schedules by name; {self.source} is a file and holds its own shape")

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
            try:  # no pipeline at all, as with data-parallel, has but one rank
                return schedule(self.source, 1, microbatches, chunks=self.chunks, **options)
            except ScheduleError:
                raise error from None


def parse_options(given: list[str] | None) -> dict[str, Any]:
    """`["group_size=8"]` as keywords; values are Python's numbers, booleans and None, anything else is text."""
    options: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"{text!r} is not an option of a schedule: write KEY=VALUE, like -O group_size=8")
        if key in SHAPE:
            raise UsageError(f"{key} is no option of a schedule but part of its shape: {SHAPE[key]}")
        if key in options:
            raise UsageError(f"option {key} is given twice")
        options[key] = _value(value)
    return options


def _value(text: str) -> Any:
    known = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text
