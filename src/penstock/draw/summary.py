"""The figures of a timeline, for tables and titles; and a measured one against its prediction, where and why they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.simulator.comparison.differences import Both, Differences, Parting
from penstock.simulator.comparison.differences import differences as compare_timelines
from penstock.simulator.comparison.lateness import ACTION, AFTER, BETWEEN, MESSAGE, OPTIMIZER, SLACK, Delay, channel_name, totals, work_name
from penstock.simulator.timeline import Timeline
from penstock.text.numbers import format_count, format_number, format_percent, format_signed
from penstock.text.table import format_table
from penstock.text.units import SECONDS, Units, seconds_per


def choose_unit(value: float, unit: str | None) -> tuple[str, float]:
    """Choose the unit in which a time has one to three digits before the point, and the factor to it; without a unit, 1 and no name.

    >>> choose_unit(0.0105, "s"), choose_unit(0.0, "s"), choose_unit(0.0105, None)
    (('ms', 1000.0), ('s', 1.0), ('', 1.0))
    """
    if unit is None:
        return "", 1.0
    seconds = abs(value) * seconds_per(unit) * (1 + 1e-9)
    name = next((name for name, length in SECONDS.items() if seconds >= length), unit if not seconds else "ns")
    return name, float(f"{seconds_per(unit) / SECONDS[name]:.6g}")


def format_time(value: float, unit: str | None) -> str:
    """
    >>> format_time(0.0105, "s"), format_time(9.997e-05, "s"), format_time(33.0, None)
    ('10.5 ms', '99.97 us', '33')
    """
    name, factor = choose_unit(value, unit)
    return f"{format_number(value * factor)} {name}".rstrip()


def format_memory(value: float, in_bytes: bool) -> str:
    """
    >>> format_memory(1.5 * 2**30, True), format_memory(2.5, False)
    ('1.5GiB', '2.5')
    """
    return Units(in_bytes=True).size(value) if in_bytes else format_number(value)


def memory_unit(timeline: Timeline) -> str:
    """Name the unit of memory that is not in bytes: activations, if the costs count those of a stage or of a rank as 1."""
    if timeline.units.in_bytes:
        return ""
    table = timeline.table
    sizes = timeline.costs.per_stage("activation", table.stages)
    of_ranks = {sum(sizes[stage] for stage in table.placement.stages_of(rank)) for rank in range(table.ranks)}
    if all(abs(size - 1.0) < 1e-9 for size in of_ranks):
        return "activations"
    return "activations of a stage" if set(sizes) == {1.0} else "in units of the costs"


def unit_of(timeline: Timeline, unit: str | None) -> str | None:
    """Give the unit of a timeline's times: the one that is named, or else the timeline's own if it is a unit of time."""
    return unit or (timeline.units.time_unit if timeline.units.time_unit in SECONDS else None)


def title_of(timeline: Timeline) -> str:
    """Give the name of a timeline, or say that it has none."""
    return timeline.table.name or f"unnamed {type(timeline.table).__name__.lower()}"


def shape_of(timeline: Timeline) -> list[str]:
    """List ranks, chunks if a rank has several, and microbatches with their slices."""
    table = timeline.table
    chunks = [f"{table.chunks} chunks per rank"] if table.chunks > 1 else []
    slices = f" of {table.slices} slices" if table.slices > 1 else ""
    return [format_count(table.ranks, "rank"), *chunks, format_count(table.microbatches, "microbatch") + slices]


def find_fullest_rank(timeline: Timeline) -> int:
    """Find the first rank with the highest peak memory."""
    peaks = timeline.peak_memory
    return peaks.index(max(peaks))


def summarize(timeline: Timeline) -> dict[str, Any]:
    """Sum up a timeline as plain data."""
    table = timeline.table
    return {
        "name": table.name,
        "source": timeline.source,
        "ranks": table.ranks,
        "stages": table.stages,
        "microbatches": table.microbatches,
        **({"slices": table.slices} if table.slices > 1 else {}),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "peak_memory": timeline.peak_memory,
        "peak": max(timeline.peak_memory),
        "messages": timeline.num_messages,
        "idle_by_cause": timeline.idle_by_cause,
    }


def list_summary_rows(timeline: Timeline, unit: str | None = None) -> list[tuple[str, str]]:
    """Sum up a timeline as rows of a name and a text; `unit` is the unit of its times, if it does not know it."""
    unit, in_bytes = unit_of(timeline, unit), timeline.units.in_bytes
    idle = timeline.idle_by_cause
    total = sum(idle.values())
    unit_name = " activations" if memory_unit(timeline).startswith("activations") else ""
    peak, peaks = find_fullest_rank(timeline), [format_memory(size, in_bytes) for size in timeline.peak_memory]
    rows = [
        ("makespan", format_time(timeline.makespan, unit)),
        ("bubble", f"{format_percent(timeline.bubble)} of all ranks' time"),
        ("span bubble", f"{format_percent(timeline.span_bubble)} of the longest rank's span"),
        ("peak memory", f"{peaks[peak]}{unit_name} on rank {peak}, least {format_memory(min(timeline.peak_memory), in_bytes)}"),
        ("messages", str(timeline.num_messages)),
        ("idle", format_time(total, unit)),
    ]
    causes = ((cause, spent) for cause, spent in idle.items() if spent > 0)
    return rows + [(f"  {cause}", f"{format_time(spent, unit)} ({format_percent(spent / total)})") for cause, spent in causes]


# Where two timelines part ---------------------------------------------------------------------------------------------


MOST_ROWS = 12
"""Rows per table; of more, the ones that differ most are shown."""
MOST_DELAYS = 5
"""Delays that are described one by one."""
WORDS = ("predicted", "measured")
_SMALL = 5e-4
"""Delays below this share of the predicted makespan are not listed."""
_Row = tuple[float, list[str]]
"""The time by which a row of a table differs, and its cells."""


@dataclass(frozen=True)
class TextSection:
    """A heading, a table and sentences; the table and the sentences may be empty."""

    title: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    sentences: Sequence[str] = ()


def describe_differences(
    differences: Differences, unit: str | None = None, words: tuple[str, str] = WORDS, title: str | None = None
) -> Iterator[TextSection]:
    """Describe all differences; `words` are the names of the two timelines, and `title` is the first heading."""
    longest = max(differences.makespan.predicted, differences.makespan.measured)
    (name, factor), notes = choose_unit(longest, unit), list(_list_notes(differences, words))
    unit = name or None
    if factor != 1.0:
        differences = _convert(differences, factor)
    whole = differences.makespan.predicted
    yield _build_totals(differences, words, f"{title or ' and '.join(words)}{f', in {unit}' if unit else ''}", notes)
    yield _shorten("by rank", ("", *_pair_titles("busy", words), *_pair_titles("idle", words)), _list_rank_rows(differences), whole)
    causes = [(cause, *_format_numbers(both), format_signed(both.difference)) for cause, both in differences.idle_by_cause.items()]
    yield TextSection("idle time of all ranks", ("", *words, "difference"), causes)
    yield _shorten("what an action takes", ("", "number", *words, "ratio"), _list_stage_rows(differences), whole)
    if differences.channels:
        header = ("", "number", *_pair_titles("until sent", words)[:2], *_pair_titles("under way", words))
        yield _shorten("what a message takes", header, _list_channel_rows(differences), whole)
    yield TextSection("where they part", sentences=list(_describe_parting(differences, unit)))
    yield from _describe_delays(differences)


def _convert(differences: Differences, factor: float) -> Differences:
    """Multiply all times of both timelines."""
    both = (timeline.scaled(factor) for timeline in (differences.predicted, differences.measured))
    return compare_timelines(*both, scale=1.0, tolerance=differences.tolerance)


def write_sections(sections: Sequence[TextSection]) -> Iterator[str]:
    """Write the sections as plain text, with an empty line between them."""
    for place, section in enumerate(sections):
        if place:
            yield ""
        yield section.title
        yield from format_table([section.header, *section.rows] if section.rows else [], indent="  ")
        yield from (f"  {sentence}" for sentence in section.sentences)


# Tables ---------------------------------------------------------------------------------------------------------------


def _build_totals(differences: Differences, words: tuple[str, str], title: str, notes: list[str]) -> TextSection:
    rows = [
        ("makespan", *_format_numbers(differences.makespan), _format_ratio(differences.makespan)),
        (
            "bubble",
            format_percent(differences.bubble.predicted),
            format_percent(differences.bubble.measured),
            _format_ratio(differences.bubble),
        ),
        ("messages under way", *_format_numbers(differences.communication), _format_ratio(differences.communication)),
    ]
    return TextSection(title, ("", *words, "ratio"), rows, notes)


def _list_notes(differences: Differences, words: tuple[str, str]) -> Iterator[str]:
    """Notes for readers of the tables."""
    if differences.scale != 1.0:
        yield f"the {words[0]} times are multiplied by {format_number(differences.scale)}"
    if differences.unlike is not None:
        yield (
            f"the median action takes {format_number(differences.unlike)} times as long as {words[0]}: the units must differ; "
            "name the unit of the prediction with --unit, or let --scale auto find the factor"
        )
    if differences.match.other_order is not None:
        rank, one, other = differences.match.other_order
        yield f"the orders differ on rank {rank}: {words[0]} {one}, {words[1]} {other}"


def _pair_titles(what: str, words: tuple[str, str]) -> tuple[str, str, str]:
    return f"{what}: {words[0]}", words[1], "ratio"


def _list_rank_rows(differences: Differences) -> Iterator[_Row]:
    for rank, (busy, idle) in enumerate(zip(differences.busy, differences.idle, strict=True)):
        by = max(abs(busy.difference), abs(idle.difference))
        yield by, [f"rank {rank}", *_format_numbers(busy), _format_ratio(busy), *_format_numbers(idle), _format_ratio(idle)]


def _list_stage_rows(differences: Differences) -> Iterator[_Row]:
    for stage in differences.lengths:
        cells = [work_name(stage.work), str(stage.count), *_format_numbers(stage.mean), _format_ratio(stage.mean)]
        yield abs(stage.mean.difference) * stage.count, cells


def _list_channel_rows(differences: Differences) -> Iterator[_Row]:
    for channel in differences.channels:
        name, held, travel = channel_name(channel.source, channel.target, channel.kind), channel.held, channel.travel
        cells = [name, str(channel.count), *_format_numbers(held), *_format_numbers(travel), _format_ratio(travel)]
        yield abs(held.difference + travel.difference) * channel.count, cells


def _shorten(title: str, header: Sequence[str], all_rows: Iterator[_Row], whole: float) -> TextSection:
    """Show the rows that differ most, in their own order, if there are too many."""
    rows = list(all_rows)
    if len(rows) <= MOST_ROWS:
        return TextSection(title, header, [row for _, row in rows])
    differing = [at for at, (by, _) in enumerate(rows) if by > _SMALL * whole]
    shown = sorted(sorted(differing, key=lambda at: -rows[at][0])[:MOST_ROWS])
    others = "differ less" if len(differing) > MOST_ROWS else "are as predicted"
    note = f"the other {len(rows) - len(shown)} of {len(rows)} {others}; penstock compare --json lists all"
    return TextSection(title, header, [rows[at][1] for at in shown], [note])


# Sentences ------------------------------------------------------------------------------------------------------------


def _describe_parting(differences: Differences, unit: str | None) -> Iterator[str]:
    share = format_percent(differences.tolerance)
    allowed = f"{format_number(differences.allowed)}{f' {unit}' if unit else ''} ({share} of the predicted makespan)"
    first = differences.first
    if first is None:
        yield f"nowhere: no action ends more than {allowed} off"
        return
    yield f"first at {first.action} on rank {first.rank}: it ends at {_compare_numbers(first.end.measured, first.end.predicted)},"
    yield f"{format_number(abs(first.late))} too {'late' if first.late > 0 else 'early'}; all before it are within {allowed}"
    yield from _list_reasons(first, differences.makespan.predicted)


def _list_reasons(parting: Parting, whole: float) -> Iterator[str]:
    """The largest delays that made an action late."""
    worst = [total for total in totals(parting.way) if abs(total.added) > _SMALL * whole and total.what != SLACK]
    for total in worst[:MOST_DELAYS]:
        if len(total.delays) == 1:
            yield f"{format_signed(total.added)}: {describe_delay(total.delays[0])}"
        else:
            yield f"{format_signed(total.added)}: {total.name}, {format_count(len(total.delays), 'time')} on the critical path"


def _describe_delays(differences: Differences) -> Iterator[TextSection]:
    """The parts of the difference of the makespans: by stage, channel and rank, then the largest one by one."""
    difference, least = differences.makespan.difference, _SMALL * differences.makespan.predicted
    all_totals = [total for total in totals(differences.way) if abs(total.added) > least]
    if not all_totals:
        return
    longer = "longer" if difference >= 0 else "shorter"
    rows = [
        (total.name, str(len(total.delays)), format_signed(total.added), _share(total.added, difference))
        for total in all_totals[:MOST_ROWS]
    ]
    rest = difference - sum(total.added for total in all_totals[:MOST_ROWS])
    if abs(rest) > least:
        rows.append(("all others", "", format_signed(rest), _share(rest, difference)))
    title = f"what makes it {format_number(abs(difference))} {longer}, along the critical path"
    yield TextSection(title, ("", "number", "adds", "share"), rows)
    single = sorted((delay for delay in differences.way if delay.what != SLACK), key=lambda delay: -abs(delay.added))[:MOST_DELAYS]
    named = [f"{format_signed(delay.added)}: {describe_delay(delay)}" for delay in single if abs(delay.added) > least]
    if named:
        yield TextSection("the largest delays, one by one", sentences=named)


def describe_delay(delay: Delay) -> str:
    """Describe one delay in a sentence."""
    instead = _compare_numbers(delay.measured, delay.predicted)
    return {
        ACTION: f"{delay.action} on rank {delay.rank} takes {instead}",
        MESSAGE: f"the message of {delay.action} from rank {delay.source} to {delay.rank} takes {instead}",
        BETWEEN: f"rank {delay.rank} has everything that {delay.action} needs, and starts it {instead} later",
        AFTER: f"rank {delay.rank} ends {instead} after its last action",
        OPTIMIZER: f"the optimizer's step on rank {delay.rank} takes {instead}",
        SLACK: f"the prediction has {format_number(delay.predicted)} to spare before {delay.action or 'the end'} on rank {delay.rank}",
    }[delay.what]


def _compare_numbers(measured: float, predicted: float) -> str:
    return f"{format_number(measured)} instead of {format_number(predicted)}"


def _format_numbers(both: Both) -> tuple[str, str]:
    return format_number(both.predicted), format_number(both.measured)


def _format_ratio(both: Both) -> str:
    if both.ratio is None:
        return "-"
    return f"{both.ratio:.3f}" if 0.1 <= both.ratio < 1000 else format_number(both.ratio)


def _share(added: float, whole: float) -> str:
    return format_percent(added / whole) if whole else "-"
