"""`penstock compare`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import (
    AsJson,
    ClusterFile,
    CostsText,
    Microbatches,
    Ranks,
    Unit,
    check_suffix,
    check_unit,
    complete_schedules,
    file_option,
)
from penstock.cli.output import deliver, show_steps
from penstock.cli.sources import OptionalLowering, Per, PerOption, TimelineSource, parse_sources, read_cluster
from penstock.errors import UsageError
from penstock.text.numbers import format_percent
from penstock.text.table import format_table
from penstock.text.units import SECONDS, seconds_per

if TYPE_CHECKING:
    from penstock.simulator.comparison.differences import Differences
    from penstock.simulator.timeline import Timeline


MOST_TOLERANCE = 10.0


def read_scale(text: str) -> str:
    """`auto`, or a number above 0."""
    from penstock.simulator.comparison.differences import AUTO

    try:
        fine = text == AUTO or 0 < float(text) < float("inf")
    except ValueError:
        fine = False
    if not fine:
        raise typer.BadParameter(f"{text!r} is neither a number above 0 nor 'auto'")
    return text


def read_tolerance(text: str) -> float:
    """A share of the makespan."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= MOST_TOLERANCE:
        raise typer.BadParameter(f"{text!r} is not a number from 0 to {MOST_TOLERANCE:g}")
    return share


class By(StrEnum):
    """The figure that timelines are ranked by, the smallest first."""

    MAKESPAN = "makespan"
    BUBBLE = "bubble"
    PEAK = "peak"
    MESSAGES = "messages"


def compare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|FILE",
            autocompletion=complete_schedules,
            help="Schedules by name, with options like 'interleaved-1f1b{chunks=4}', .csv or .json files, and saved timelines.",
        ),
    ],
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    costs: CostsText = None,
    per: PerOption = Per.RANK,
    cluster: ClusterFile = None,
    by: Annotated[By, typer.Option("--by", help="The figure to rank by.")] = By.MAKESPAN,
    lowering: OptionalLowering,
    overlay: Annotated[
        bool | None,
        typer.Option(
            "--overlay/--no-overlay", help="Lay all timelines over the first.  [default: measured timelines over the first predicted one]"
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",
            metavar="FACTOR",
            parser=read_scale,
            help="Multiply predicted times by this before measured ones are laid over them; 'auto' makes the median action agree.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="SHARE",
            parser=read_tolerance,
            help="How late an action may be and still count as predicted, as a share of the makespan.  [default: 0.01]",
        ),
    ] = None,
    unit: Unit = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        file_option(
            "Also draw the timelines, below each other or laid over each other rank by rank: .svg, .pdf, .png or .html.", "-o", "--output"
        ),
    ] = None,
) -> None:
    """Time several schedules and rank them.

    By default the costs are those of all stages of a rank together, so that schedules with one and with several stages per rank do
    the same work; with --per stage, every stage has these costs. Saved timelines stay as they are unless --costs are given, and
    measured ones always do.

    A measured timeline is laid over the first predicted one if both do the same work: the output compares their figures, and shows
    where they begin to differ and what makes the measured one longer. Measured times are in seconds. --unit names the unit of the
    predicted times, if they do not have one.

    \b
    Examples:
      penstock compare zbv 1f1b dualpipe-v -p 8 -m 32
      penstock compare 1f1b "interleaved-1f1b{chunks=4}" -p 4 -m 16 --costs "f=1,i=1,w=1,latency=0.1" -o compare.png
      penstock compare before.json after.json --by bubble
      penstock compare predicted.json measured.json --unit ms -o overlay.svg
      penstock compare 1f1b measured.json -p 4 -m 16 --costs costs.toml --per stage --scale auto
    """
    from penstock.draw.save import PICTURES

    check_unit(unit)
    check_suffix(output, PICTURES)
    checked, devices = lowering.read_lowering(), read_cluster(cluster)
    timed = [TimelineSource.read(source, costs, per, checked, devices, unit=unit) for source in parse_sources(sources, ranks, microbatches)]
    entries: list[NamedTimeline] = []
    with show_steps(len(timed) + 2) as step:
        for name, source in zip(sources, timed, strict=True):
            step(f"timing {name}")
            entries.append(NamedTimeline(name, _read_timeline(source, unit)))
        step("comparing")
        laid = lay_over(entries, overlay, scale, tolerance)
        if unit is None and any(entry.is_measured for entry in entries):
            unit = "s"
        ranked = sorted(laid.entries, key=lambda entry: (_get_value(entry, by), _get_value(entry, By.PEAK)))
        data = {
            "by": by.value,
            "results": [_collect_data(entry, ranked[0], by) for entry in ranked],
            **(laid.data(unit) if as_json else {}),
        }
        step("drawing")
        if output is not None:
            _draw(laid, ranked, output, {} if unit is None else {"unit": unit})
    deliver(lambda _: chain(_write_lines(ranked, by, unit), laid.lines(unit)), lambda: data, as_json=as_json, output=None)


def _read_timeline(timed: TimelineSource, unit: str | None) -> Timeline:
    """A prediction, in `unit`; a measured timeline is not simulated, only converted from seconds."""
    measured = timed.get_measured()
    if measured is not None:
        scaled = measured if unit is None else measured.scaled(1 / seconds_per(unit))
        return scaled if unit is None else scaled.in_units(replace(scaled.units, time_unit=unit))
    return timed.timeline(unit)


def _knows_unit(timeline: Timeline) -> bool:
    return timeline.units.time_unit in SECONDS


def _draw(laid: Overlay, ranked: list[NamedTimeline], output: Path, options: dict[str, Any]) -> None:
    """Draw the pairs if every timeline is in one, else the timelines below each other."""
    from penstock.draw.save import save_overlay, save_picture

    if laid.is_whole:
        pairs = laid.pairs
        save_overlay([pair.differences for pair in pairs], output, names=[pair.title for pair in pairs], words=pairs[0].words, **options)
    else:
        save_picture([entry.timeline for entry in ranked], output, names=[entry.name for entry in ranked], **options)


def _get_value(entry: NamedTimeline, by: By) -> float:
    timeline = entry.timeline
    return {
        By.MAKESPAN: timeline.makespan,
        By.BUBBLE: timeline.bubble,
        By.PEAK: max(timeline.peak_memory),
        By.MESSAGES: float(timeline.num_messages),
    }[by]


def _collect_data(entry: NamedTimeline, best: NamedTimeline, by: By) -> dict[str, Any]:
    from penstock.cli.commands.simulate import data

    return {"source": entry.name, "relative": _compute_ratio(entry, best, by), "timeline": data(entry.timeline)}


def _compute_ratio(entry: NamedTimeline, best: NamedTimeline, by: By) -> float | None:
    """The ratio to the best; None if only the best is 0."""
    value, least = _get_value(entry, by), _get_value(best, by)
    return value / least if least else 1.0 if not value else None


def _write_lines(ranked: list[NamedTimeline], by: By, unit: str | None) -> Iterator[str]:
    """One row per timeline, the best first."""
    from penstock.draw.summary import format_memory, format_time, unit_of

    rows = [("", "schedule", "ranks", "microbatches", "makespan", "bubble", "peak", "messages", f"{by} / best")]
    in_bytes = any(entry.timeline.units.in_bytes for entry in ranked)  # peaks in another unit cannot be compared with those
    for place, entry in enumerate(ranked, start=1):
        timeline, relative = entry.timeline, _compute_ratio(entry, ranked[0], by)
        slices = f" x {timeline.table.slices}" if timeline.table.slices > 1 else ""
        shape = entry.name, str(timeline.ranks), f"{timeline.table.microbatches}{slices}"
        makespan = format_time(timeline.makespan, unit_of(timeline, unit))
        peak = format_memory(max(timeline.peak_memory), timeline.units.in_bytes) if timeline.units.in_bytes >= in_bytes else "-"
        figures = makespan, format_percent(timeline.bubble), peak
        rows.append((str(place), *shape, *figures, str(timeline.num_messages), "-" if relative is None else f"{relative:.3f}"))
    yield from format_table(rows, left=(1,))
    if len({(entry.timeline.ranks, entry.timeline.table.microbatches) for entry in ranked}) > 1:
        yield "the shapes differ: these makespans are not of the same work"


# Overlays -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedTimeline:
    """A timeline, and the source that the user named."""

    name: str
    timeline: Timeline

    @property
    def is_measured(self) -> bool:
        return self.timeline.source != "simulated"


@dataclass(frozen=True)
class Pair:
    """Two timelines of the same work; `base` is the prediction."""

    base: NamedTimeline
    other: NamedTimeline
    differences: Differences

    @property
    def words(self) -> tuple[str, str]:
        """The names of the two in tables."""
        return ("predicted", "measured") if self.other.is_measured and not self.base.is_measured else ("first", "second")

    @property
    def title(self) -> str:
        return f"{self.other.name} against {self.base.name}"


@dataclass(frozen=True)
class Overlay:
    """All pairs, all timelines in one unit, and the timelines that do not match the prediction, with the reason."""

    entries: list[NamedTimeline]
    pairs: list[Pair] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every timeline is in a pair."""
        return bool(self.pairs) and len(self.pairs) == len(self.entries) - 1

    def data(self, unit: str | None) -> dict[str, Any]:
        from penstock.simulator.comparison.differences import encode

        pairs = [
            {"predicted": pair.base.name, "measured": pair.other.name, "unit": unit, **encode(pair.differences)} for pair in self.pairs
        ]
        return {"differences": pairs, "refused": [{"source": name, "reason": reason} for name, reason in self.refused.items()]}

    def lines(self, unit: str | None) -> Iterator[str]:
        from penstock.draw.summary import describe_differences, write_sections

        for pair in self.pairs:
            yield ""
            yield from write_sections(list(describe_differences(pair.differences, unit, pair.words, pair.title)))
        for name, reason in self.refused.items():
            yield ""
            yield f"{name} is not laid over the prediction: {reason}"


def lay_over(entries: Sequence[NamedTimeline], asked: bool | None, scale: str | None, tolerance: float | None) -> Overlay:
    """Lay each measured timeline over the first predicted one; with `asked`, lay each timeline over the first, and with False none.

    Either way, predictions get the unit of the measured timelines, and are refused if there is no telling how.
    """
    from penstock.simulator.comparison.differences import TOLERANCE, differences
    from penstock.simulator.comparison.matching import match

    base, others = _split(entries, bool(asked))
    if not others:
        _refuse_unused(asked, scale, tolerance)
        return Overlay(list(entries))
    laid = Overlay(list(entries))
    factor: float | str | None = None if scale is None else scale if scale == "auto" else float(scale)
    for other in others:
        try:
            match(base.timeline, other.timeline)
        except UsageError as error:
            if asked:
                raise UsageError(f"{other.name} cannot be laid over {base.name}: {error}") from None
            laid.refused[other.name] = str(error)
        else:
            compared = differences(base.timeline, other.timeline, scale=factor, tolerance=TOLERANCE if tolerance is None else tolerance)
            factor = compared.scale  # one factor for all pairs
            laid.pairs.append(Pair(base, other, compared))
    laid = replace(laid, entries=_convert(laid.entries, factor))
    return Overlay(laid.entries) if asked is False else laid


def _split(entries: Sequence[NamedTimeline], all_over_first: bool) -> tuple[NamedTimeline, list[NamedTimeline]]:
    """Find the prediction and the timelines to lay over it."""
    base = next((entry for entry in entries if not entry.is_measured), entries[0])
    return base, [entry for entry in entries if entry is not base and (all_over_first or entry.is_measured)]


def _refuse_unused(asked: bool | None, scale: str | None, tolerance: float | None) -> None:
    if asked:
        raise UsageError("--overlay lays timelines over the first one: give two or more")
    for option, value in (("--scale", scale), ("--tolerance", tolerance)):
        if value is not None:
            raise UsageError(f"{option} is for timelines laid over each other: one of them must be measured, or give --overlay")


def _convert(entries: Sequence[NamedTimeline], factor: float | str | None) -> list[NamedTimeline]:
    """Convert the predictions to the unit of the measured timelines: from their own unit, or by the factor if they do not know it."""
    from penstock.simulator.comparison.differences import is_alike

    measured = next((entry.timeline for entry in entries if entry.is_measured), None)
    if measured is None:
        return list(entries)

    def convert(timeline: Timeline) -> Timeline:
        if _knows_unit(timeline) and _knows_unit(measured):
            return timeline.scaled(seconds_per(timeline.units.time_unit) / seconds_per(measured.units.time_unit))
        if isinstance(factor, float):
            return timeline.scaled(factor)
        ratio = float(measured.busy.sum() / timeline.busy.sum()) if timeline.busy.sum() else 1.0
        if not is_alike(ratio):
            raise UsageError(
                f"the unit of the predicted times is not known, and the measured work takes {ratio:.4g} times as long as the predicted: "
                "name the unit of the costs with --unit, or give the factor with --scale"
            )
        return timeline

    return [entry if entry.is_measured else replace(entry, timeline=convert(entry.timeline)) for entry in entries]
