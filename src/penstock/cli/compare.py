"""`penstock compare`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.costs import Per, PerOption
from penstock.cli.options import AsJson, CostsText, Fsdp, Lower, MergeBackward, Microbatches, Ranks, Receive, Unit, file_or_stdout
from penstock.cli.overlay import Entry, Overlay, lay, read_scale
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.source import Wanted
    from penstock.cli.timed import Timed
    from penstock.draw.terminal.lines import Line
    from penstock.simulator.timeline import Timeline


class By(StrEnum):
    """The figure that timelines are ranked by, the least first."""

    MAKESPAN = "makespan"
    BUBBLE = "bubble"
    PEAK = "peak"
    MESSAGES = "messages"


def compare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME|FILE",
            help="Schedules by name, with options like 'interleaved-1f1b{chunks=4}', .csv or .json files, and saved timelines.",
        ),
    ],
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    costs: CostsText = None,
    per: PerOption = Per.RANK,
    by: Annotated[By, typer.Option("--by", help="What to rank by.")] = By.MAKESPAN,
    lower: Lower = False,
    fsdp: Fsdp = False,
    merge_backward: MergeBackward = False,
    receive: Receive = None,
    overlay: Annotated[
        bool | None,
        typer.Option(
            "--overlay/--no-overlay", help="Lay timelines of the same work over the first.  [default: measured ones over the prediction]"
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",
            metavar="FACTOR",
            parser=read_scale,
            help="Multiply predicted times by this where measured ones are laid over them; 'auto' makes the median action agree.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            min=0,
            max=10,
            help="How late an action may be and still be as predicted, as a share of the makespan.  [default: 0.01]",
        ),
    ] = None,
    unit: Unit = None,
    as_json: AsJson = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            callback=file_or_stdout,
            help="Draw the timelines too, below each other on one time axis, rank by rank if laid over each other: .svg, .png or .html.",
        ),
    ] = None,
) -> None:
    """Time several schedules and rank them, and lay what was measured over what was predicted.

    So that schedules with one and with several stages a rank do the same work, the costs are those of a rank's share of the model,
    divided among its stages; with --per stage every stage costs as much. Timelines that were saved stay as they are unless there
    are --costs, and measured ones always.

    A measured timeline is laid over the first that is not, if both are of the same work: figures of both, where they part, and what
    makes the measured one longer. Measured times are seconds; with --unit they are told in the unit of the prediction.

    \b
    Examples:
      penstock compare zbv 1f1b dualpipe-v -p 8 -m 32
      penstock compare 1f1b "interleaved-1f1b{chunks=4}" -p 4 -m 16 --costs "f=1,i=1,w=1,latency=0.1" -o compare.png
      penstock compare before.json after.json --by bubble
      penstock compare predicted.json measured.json --unit ms -o overlay.svg
      penstock compare 1f1b measured.json -p 4 -m 16 --costs costs.toml --per stage --scale auto
    """
    from penstock.cli.output import deliver
    from penstock.cli.progress import progress
    from penstock.cli.timed import Timed, check_output, check_unit, recipe
    from penstock.draw.save import PICTURES

    check_unit(unit)
    check_output(output, PICTURES)
    how = recipe(lower, fsdp, merge_backward, receive)
    wanted = wanted_sources(sources, ranks, microbatches)
    timed = [Timed.read(each, costs, per, how) for each in wanted]
    entries: list[Entry] = []
    with progress(len(timed) + 2) as step:
        for name, each in zip(sources, timed, strict=True):
            step(f"timing {name}")
            entries.append(Entry(name, _timeline(each, unit)))
        step("comparing")
        laid = lay(entries, overlay, scale, tolerance)
        if laid.pairs and unit is None and any(entry.is_measured for entry in entries):
            unit = "s"
        found = sorted(laid.entries, key=lambda entry: (_value(entry, by), _value(entry, By.PEAK)))
        said = {"by": by.value, "results": [_data(entry, found[0], by) for entry in found], **(laid.data(unit) if as_json else {})}
        step("drawing")
        if output is not None:
            _draw(laid, found, output, {} if unit is None else {"unit": unit})
    deliver(lambda _: chain(_lines(found, by, unit), laid.lines(unit)), lambda: said, as_json=as_json, output=None)


def _timeline(timed: Timed, unit: str | None) -> Timeline:
    """What ran is not timed anew; it is in seconds."""
    from penstock.simulator.scaling import scaled
    from penstock.text.units import seconds_per

    measured = timed.measured()
    if measured is None:
        return timed.timeline()
    return measured if unit is None else scaled(measured, 1 / seconds_per(unit))


def _draw(laid: Overlay, found: list[Entry], output: Path, options: dict[str, Any]) -> None:
    """The pairs if everything is in one, else the timelines below each other."""
    from penstock.draw.save import save_overlay, save_picture

    if laid.is_whole:
        pairs = laid.pairs
        save_overlay([pair.found for pair in pairs], output, names=[pair.title for pair in pairs], words=pairs[0].words, **options)
    else:
        save_picture([entry.timeline for entry in found], output, names=[entry.name for entry in found], **options)


def _value(entry: Entry, by: By) -> float:
    timeline = entry.timeline
    return {
        By.MAKESPAN: timeline.makespan,
        By.BUBBLE: timeline.bubble,
        By.PEAK: max(timeline.peak_memory),
        By.MESSAGES: float(timeline.num_messages),
    }[by]


def wanted_sources(sources: list[str], ranks: int | None, microbatches: int | None) -> list[Wanted]:
    """Each source with its own options; the shape is for those that are names."""
    found = [_one(source, ranks, microbatches) for source in sources]
    if (ranks or microbatches) and all(each.is_file for each in found):
        raise UsageError("--ranks and --microbatches are for schedules by name; files hold their own shape")
    return found


def _one(source: str, ranks: int | None, microbatches: int | None) -> Wanted:
    """`NAME{OPTION=VALUE,...}`; ranks, microbatches and chunks may stand there too."""
    from penstock.cli.source import Wanted

    match = re.fullmatch(r"([^{}]+)\{([^{}]*)\}", source)
    if match is None:
        return Wanted(source) if Wanted(source).is_file else Wanted(source, ranks, microbatches)
    shape: dict[str, Any] = {} if Wanted(match[1]).is_file else {"ranks": ranks, "microbatches": microbatches}
    options = []
    for text in filter(None, map(str.strip, match[2].split(","))):
        key, _, value = text.partition("=")
        if key in ("ranks", "microbatches", "chunks"):
            shape[key] = _count(source, key, value)
        else:
            options.append(text)
    return Wanted(match[1], **shape, options=options or None)


def _count(source: str, key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"{source}: {key}={value} is not a whole number") from None


def _data(entry: Entry, best: Entry, by: By) -> dict[str, Any]:
    from penstock.cli.simulate import data

    return {"source": entry.name, "relative": _relative(entry, best, by), "timeline": data(entry.timeline)}


def _relative(entry: Entry, best: Entry, by: By) -> float | None:
    """How many times the best; None where the best is 0 and this is not."""
    value, least = _value(entry, by), _value(best, by)
    return value / least if least else 1.0 if not value else None


def _lines(found: list[Entry], by: By, unit: str | None) -> Iterator[Line]:
    """A row a timeline, the best first."""
    from penstock.text.numbers import format_number, format_percent

    header = (
        "",
        "schedule",
        "ranks",
        "microbatches",
        f"makespan{f' ({unit})' if unit else ''}",
        "bubble",
        "peak",
        "messages",
        f"{by} / best",
    )
    rows = [header]
    for place, entry in enumerate(found, start=1):
        timeline, relative = entry.timeline, _relative(entry, found[0], by)
        shape = (str(timeline.ranks), str(timeline.table.microbatches))
        peak = format_number(max(timeline.peak_memory))
        said = (format_number(timeline.makespan), format_percent(timeline.bubble), peak, str(timeline.num_messages))
        rows.append((str(place), entry.name, *shape, *said, "-" if relative is None else f"{relative:.3f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) if at == 1 else text.rjust(width) for at, (text, width) in enumerate(zip(row, widths, strict=True))]
        yield [("  ".join(cells), None)]
    if len({(entry.timeline.ranks, entry.timeline.table.microbatches) for entry in found}) > 1:
        yield [("the shapes differ: these makespans are not of the same work", None)]
