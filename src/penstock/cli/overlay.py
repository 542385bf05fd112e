"""Timelines of the same work laid over each other: the part of `penstock compare` that says where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.draw.terminal.lines import Line
    from penstock.simulator.differences import Differences
    from penstock.simulator.timeline import Timeline


def read_scale(text: str) -> str:
    """`auto`, or a number above 0."""
    from penstock.simulator.differences import AUTO

    try:
        fine = text == AUTO or 0 < float(text) < float("inf")
    except ValueError:
        fine = False
    if not fine:
        raise typer.BadParameter(f"{text!r} is neither a number above 0 nor 'auto'")
    return text


@dataclass(frozen=True)
class Entry:
    """One timeline under the name it was asked for by."""

    name: str
    timeline: Timeline

    @property
    def is_measured(self) -> bool:
        return self.timeline.source != "simulated"


@dataclass(frozen=True)
class Pair:
    """Two timelines of the same work, and the one that is the prediction."""

    base: Entry
    other: Entry
    found: Differences

    @property
    def words(self) -> tuple[str, str]:
        """What the two are called."""
        return ("predicted", "measured") if self.other.is_measured and not self.base.is_measured else ("first", "second")

    @property
    def title(self) -> str:
        return f"{self.other.name} against {self.base.name}"


@dataclass(frozen=True)
class Overlay:
    """Every pair, the timelines in one unit, and what could not be laid over the prediction, with the reason."""

    entries: list[Entry]
    pairs: list[Pair] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether everything is in a pair."""
        return bool(self.pairs) and len(self.pairs) == len(self.entries) - 1

    def data(self, unit: str | None) -> dict[str, Any]:
        from penstock.simulator.differences_json import encode

        found = [{"predicted": pair.base.name, "measured": pair.other.name, "unit": unit, **encode(pair.found)} for pair in self.pairs]
        return {"differences": found, "refused": [{"source": name, "reason": reason} for name, reason in self.refused.items()]}

    def lines(self, unit: str | None) -> Iterator[Line]:
        from penstock.draw.differences import describe_differences, section_lines
        from penstock.draw.terminal.lines import text_lines

        for pair in self.pairs:
            yield []
            yield from text_lines(section_lines(list(describe_differences(pair.found, unit, pair.words, pair.title))))
        for name, reason in self.refused.items():
            yield []
            yield [(f"{name} is not laid over the prediction: {reason}", None)]


def lay(entries: Sequence[Entry], asked: bool | None, scale: str | None, tolerance: float | None) -> Overlay:
    """Each measured timeline over the first that is not; with `asked`, each over the first."""
    from penstock.simulator.differences import TOLERANCE

    base, others = _split(entries, asked)
    if not others:
        _refuse_unused(asked, scale, tolerance)
        return Overlay(list(entries))
    made = Overlay(list(entries))
    factor: float | str = 1.0 if scale is None else scale if scale == "auto" else float(scale)
    for other in others:
        found = _differences(base, other, factor, TOLERANCE if tolerance is None else tolerance)
        if isinstance(found, str):
            if asked:
                raise UsageError(f"{other.name} cannot be laid over {base.name}: {found}")
            made.refused[other.name] = found
        else:
            factor = found.scale  # one for all
            made.pairs.append(Pair(base, other, found))
    return _rescaled(made)


def _split(entries: Sequence[Entry], asked: bool | None) -> tuple[Entry, list[Entry]]:
    """The prediction, and what is laid over it."""
    if asked is False:
        return entries[0], []
    base = next((entry for entry in entries if not entry.is_measured), entries[0])
    return base, [entry for entry in entries if entry is not base and (asked or entry.is_measured)]


def _refuse_unused(asked: bool | None, scale: str | None, tolerance: float | None) -> None:
    if asked:
        raise UsageError("--overlay lays timelines over the first: give two or more")
    for option, value in (("--scale", scale), ("--tolerance", tolerance)):
        if value is not None:
            raise UsageError(f"{option} is for timelines laid over each other: one of two must be measured, or give --overlay")


def _differences(base: Entry, other: Entry, scale: float | str, tolerance: float) -> Differences | str:
    """What they differ in, or why that cannot be said."""
    from penstock.simulator.differences import differences
    from penstock.simulator.matching import match

    try:
        match(base.timeline, other.timeline)
    except UsageError as error:
        return str(error)
    return differences(base.timeline, other.timeline, scale=scale, tolerance=tolerance)


def _rescaled(made: Overlay) -> Overlay:
    """The simulated timelines in the unit of the measured ones."""
    from penstock.simulator.scaling import scaled

    factor = made.pairs[0].found.scale if made.pairs else 1.0
    kept = [
        entry if entry.is_measured or factor == 1.0 else replace(entry, timeline=scaled(entry.timeline, factor)) for entry in made.entries
    ]
    return replace(made, entries=kept)
