"""A measured timeline against its prediction: tables of both, and sentences on where and why they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.simulator.comparison.lateness import ACTION, AFTER, BETWEEN, MESSAGE, OPTIMIZER, SLACK
from penstock.simulator.comparison.totals import channel_name, totals, work_name
from penstock.text.numbers import format_count, format_number, format_percent, format_signed
from penstock.text.table import format_table

if TYPE_CHECKING:
    from penstock.simulator.comparison.differences import Both, Differences, Parting
    from penstock.simulator.comparison.lateness import Delay

MOST_ROWS = 12
"""Rows per table; of more, the ones that differ most are shown."""
MOST_DELAYS = 5
"""Delays that are described one by one."""
WORDS = ("predicted", "measured")
_SMALL = 5e-4
"""Delays below this share of the predicted makespan are not listed."""


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
    whole = differences.makespan.predicted
    yield _whole(differences, words, f"{title or ' and '.join(words)}{f', in {unit}' if unit else ''}")
    yield _shorten("by rank", ("", *_twice("busy", words), *_twice("idle", words)), _rank_rows(differences), whole)
    yield TextSection(
        "idle time of all ranks", ("", *words, "difference"), [_cause_row(cause, both) for cause, both in differences.idle_by_cause.items()]
    )
    yield _shorten("what an action takes", ("", "number", *words, "ratio"), _stage_rows(differences), whole)
    if differences.channels:
        header = ("", "number", *_twice("until sent", words)[:2], *_twice("under way", words))
        yield _shorten("what a message takes", header, _channel_rows(differences), whole)
    yield TextSection("where they part", sentences=list(_parting(differences, unit)))
    yield from _delays(differences)


def section_lines(sections: Sequence[TextSection]) -> Iterator[str]:
    """Write the sections as plain text, with an empty line between them."""
    for place, section in enumerate(sections):
        if place:
            yield ""
        yield section.title
        yield from format_table([section.header, *section.rows] if section.rows else [], indent="  ")
        yield from (f"  {sentence}" for sentence in section.sentences)


# Tables ---------------------------------------------------------------------------------------------------------------


def _whole(differences: Differences, words: tuple[str, str], title: str) -> TextSection:
    rows = [
        ("makespan", *_numbers(differences.makespan), _ratio(differences.makespan)),
        ("bubble", format_percent(differences.bubble.predicted), format_percent(differences.bubble.measured), _ratio(differences.bubble)),
        ("messages under way", *_numbers(differences.communication), _ratio(differences.communication)),
    ]
    return TextSection(title, ("", *words, "ratio"), rows, list(_notes(differences, words)))


def _notes(differences: Differences, words: tuple[str, str]) -> Iterator[str]:
    """What readers of the tables must know."""
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


def _twice(what: str, words: tuple[str, str]) -> tuple[str, str, str]:
    return f"{what}: {words[0]}", words[1], "ratio"


def _rank_rows(differences: Differences) -> list[tuple[float, list[str]]]:
    return [
        (
            max(abs(busy.difference), abs(idle.difference)),
            [f"rank {rank}", *_numbers(busy), _ratio(busy), *_numbers(idle), _ratio(idle)],
        )
        for rank, (busy, idle) in enumerate(zip(differences.busy, differences.idle, strict=True))
    ]


def _stage_rows(differences: Differences) -> list[tuple[float, list[str]]]:
    return [
        (abs(each.mean.difference) * each.count, [work_name(each.work), str(each.count), *_numbers(each.mean), _ratio(each.mean)])
        for each in differences.lengths
    ]


def _channel_rows(differences: Differences) -> list[tuple[float, list[str]]]:
    return [
        (
            abs(each.held.difference + each.travel.difference) * each.count,
            [
                channel_name(each.source, each.target, each.kind),
                str(each.count),
                *_numbers(each.held),
                *_numbers(each.travel),
                _ratio(each.travel),
            ],
        )
        for each in differences.channels
    ]


def _cause_row(cause: str, both: Both) -> tuple[str, ...]:
    return cause, *_numbers(both), format_signed(both.difference)


def _shorten(title: str, header: Sequence[str], rows: list[tuple[float, list[str]]], whole: float) -> TextSection:
    """Show the rows that differ most, in their own order, if there are too many. Each row comes with the time by which it differs."""
    if len(rows) <= MOST_ROWS:
        return TextSection(title, header, [row for _, row in rows])
    differing = [at for at, (by, _) in enumerate(rows) if by > _SMALL * whole]
    shown = sorted(sorted(differing, key=lambda at: -rows[at][0])[:MOST_ROWS])
    others = "differ less" if len(differing) > MOST_ROWS else "are as predicted"
    return TextSection(
        title,
        header,
        [rows[at][1] for at in shown],
        [f"the other {len(rows) - len(shown)} of {len(rows)} {others}; penstock compare --json lists all"],
    )


# Sentences ------------------------------------------------------------------------------------------------------------


def _parting(differences: Differences, unit: str | None) -> Iterator[str]:
    share = format_percent(differences.tolerance)
    allowed = f"{format_number(differences.allowed)}{f' {unit}' if unit else ''} ({share} of the predicted makespan)"
    first = differences.first
    if first is None:
        yield f"nowhere: no action ends more than {allowed} off"
        return
    yield f"first at {first.action} on rank {first.rank}: it ends at {_instead(first.end.measured, first.end.predicted)},"
    yield f"{format_number(abs(first.late))} too {'late' if first.late > 0 else 'early'}; all before it are within {allowed}"
    yield from _reasons(first, differences.makespan.predicted)


def _reasons(parting: Parting, whole: float) -> Iterator[str]:
    """The largest delays that made an action late."""
    worst = [total for total in totals(parting.way) if abs(total.added) > _SMALL * whole and total.what != SLACK]
    for total in worst[:MOST_DELAYS]:
        if len(total.delays) == 1:
            yield f"{format_signed(total.added)}: {describe_delay(total.delays[0])}"
        else:
            yield f"{format_signed(total.added)}: {total.name}, {format_count(len(total.delays), 'time')} on the critical path"


def _delays(differences: Differences) -> Iterator[TextSection]:
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
    instead = _instead(delay.measured, delay.predicted)
    return {
        ACTION: f"{delay.action} on rank {delay.rank} takes {instead}",
        MESSAGE: f"the message of {delay.action} from rank {delay.source} to {delay.rank} takes {instead}",
        BETWEEN: f"rank {delay.rank} has everything that {delay.action} needs, and starts it {instead} later",
        AFTER: f"rank {delay.rank} ends {instead} after its last action",
        OPTIMIZER: f"the optimizer's step on rank {delay.rank} takes {instead}",
        SLACK: f"the prediction has {format_number(delay.predicted)} to spare before {delay.action or 'the end'} on rank {delay.rank}",
    }[delay.what]


def _instead(measured: float, predicted: float) -> str:
    return f"{format_number(measured)} instead of {format_number(predicted)}"


def _numbers(both: Both) -> tuple[str, str]:
    return format_number(both.predicted), format_number(both.measured)


def _ratio(both: Both) -> str:
    if both.ratio is None:
        return "-"
    return f"{both.ratio:.3f}" if 0.1 <= both.ratio < 1000 else format_number(both.ratio)


def _share(added: float, whole: float) -> str:
    return format_percent(added / whole) if whole else "-"
