"""A measured timeline against its prediction in words: tables of both, and where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.draw.numbers import count, number, percent
from penstock.simulator.lateness import ACTION, AFTER, BETWEEN, MESSAGE, OPTIMIZER, SLACK
from penstock.simulator.totals import channel_name, totals, work_name

if TYPE_CHECKING:
    from penstock.draw.terminal import Line
    from penstock.simulator.differences import Both, Differences, Parting
    from penstock.simulator.lateness import Delay

MOST_ROWS = 12
"""Rows of a table; of more only those that differ the most are shown."""
MOST_DELAYS = 5
"""Single delays that are named."""
WORDS = ("predicted", "measured")
_SMALL = 5e-4
"""Of the predicted makespan: what adds less is not worth a line."""


@dataclass(frozen=True)
class Part:
    """A heading, then rows under a header, then sentences; rows and sentences may be none."""

    title: str
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    said: Sequence[str] = ()


def parts(found: Differences, unit: str | None = None, words: tuple[str, str] = WORDS, title: str | None = None) -> Iterator[Part]:
    """Everything there is to say; `words` are what the two timelines are called, and `title` stands over it all."""
    whole = found.makespan.predicted
    yield _whole(found, words, f"{title or ' and '.join(words)}{f', in {unit}' if unit else ''}")
    yield _shortened("by rank", ("", *_twice("busy", words), *_twice("idle", words)), _rank_rows(found), whole)
    yield Part("idle time of all ranks", ("", *words, "difference"), [_cause_row(*each) for each in found.idle_by_cause.items()])
    yield _shortened("what an action takes", ("", "number", *words, "ratio"), _stage_rows(found), whole)
    if found.channels:
        header = ("", "number", *_twice("until sent", words)[:2], *_twice("under way", words))
        yield _shortened("what a message takes", header, _channel_rows(found), whole)
    yield Part("where they part", said=list(_parting(found, unit)))
    yield from _delays(found)


def lines(found: Sequence[Part]) -> Iterator[Line]:
    """The parts for the terminal, with an empty line between them."""
    for place, part in enumerate(found):
        if place:
            yield []
        yield [(part.title, None)]
        table = [part.header, *part.rows] if part.rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = [cell.rjust(width) if at else cell.ljust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))]
            yield [(f"  {'  '.join(cells)}", None)]
        yield from ([(f"  {sentence}", None)] for sentence in part.said)


# Tables ---------------------------------------------------------------------------------------------------------------


def _whole(found: Differences, words: tuple[str, str], title: str) -> Part:
    rows = [
        ("makespan", *_numbers(found.makespan), _ratio(found.makespan)),
        ("bubble", percent(found.bubble.predicted), percent(found.bubble.measured), _ratio(found.bubble)),
        ("messages under way", *_numbers(found.communication), _ratio(found.communication)),
    ]
    return Part(title, ("", *words, "ratio"), rows, list(_notes(found, words)))


def _notes(found: Differences, words: tuple[str, str]) -> Iterator[str]:
    """What must be known to read the tables."""
    if found.scale != 1.0:
        yield f"the {words[0]} times are multiplied by {number(found.scale)}"
    if found.unlike is not None:
        yield (
            f"the median action takes {number(found.unlike)} times as long as {words[0]}: the units must differ; "
            "name the prediction's with --unit, or let --scale auto find the factor"
        )
    if found.match.other_order is not None:
        rank, one, other = found.match.other_order
        yield f"the orders differ: rank {rank} runs {one} where it runs {other} as {words[1]}"


def _twice(what: str, words: tuple[str, str]) -> tuple[str, str, str]:
    return f"{what}: {words[0]}", words[1], "ratio"


def _rank_rows(found: Differences) -> list[tuple[float, list[str]]]:
    return [
        (
            max(abs(busy.difference), abs(idle.difference)),
            [f"rank {rank}", *_numbers(busy), _ratio(busy), *_numbers(idle), _ratio(idle)],
        )
        for rank, (busy, idle) in enumerate(zip(found.busy, found.idle, strict=True))
    ]


def _stage_rows(found: Differences) -> list[tuple[float, list[str]]]:
    return [
        (abs(each.mean.difference) * each.count, [work_name(each.work), str(each.count), *_numbers(each.mean), _ratio(each.mean)])
        for each in found.lengths
    ]


def _channel_rows(found: Differences) -> list[tuple[float, list[str]]]:
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
        for each in found.channels
    ]


def _cause_row(cause: str, both: Both) -> tuple[str, ...]:
    return cause, *_numbers(both), signed(both.difference)


def _shortened(title: str, header: Sequence[str], rows: list[tuple[float, list[str]]], whole: float) -> Part:
    """If there are too many rows, those that differ the most, in their own order; each comes with the time by which it differs."""
    if len(rows) <= MOST_ROWS:
        return Part(title, header, [row for _, row in rows])
    apart = [at for at, (by, _) in enumerate(rows) if by > _SMALL * whole]
    shown = sorted(sorted(apart, key=lambda at: -rows[at][0])[:MOST_ROWS])
    others = "differ less" if len(apart) > MOST_ROWS else "are as predicted"
    return Part(
        title,
        header,
        [rows[at][1] for at in shown],
        [f"the other {len(rows) - len(shown)} of {len(rows)} {others}; penstock compare --json has all"],
    )


# Sentences ------------------------------------------------------------------------------------------------------------


def _parting(found: Differences, unit: str | None) -> Iterator[str]:
    allowed = f"{number(found.allowed)}{f' {unit}' if unit else ''} ({percent(found.tolerance)} of the predicted makespan)"
    first = found.first
    if first is None:
        yield f"nowhere: no action ends more than {allowed} off"
        return
    yield f"first at {first.action} on rank {first.rank}: it ends at {number(first.end.measured)} instead of {number(first.end.predicted)},"
    yield f"{number(abs(first.late))} too {'late' if first.late > 0 else 'early'}; all before it are within {allowed}"
    yield from _reasons(first, found.makespan.predicted)


def _reasons(parting: Parting, whole: float) -> Iterator[str]:
    """The largest of what made an action late."""
    worst = [total for total in totals(parting.way) if abs(total.added) > _SMALL * whole and total.what != SLACK]
    for total in worst[:MOST_DELAYS]:
        if len(total.delays) == 1:
            yield f"{signed(total.added)}: {sentence(total.delays[0])}"
        else:
            yield f"{signed(total.added)}: {total.name}, {count(len(total.delays), 'time')} on the way"


def _delays(found: Differences) -> Iterator[Part]:
    """What the difference of the makespans is made of: by stage, channel and rank, then the largest one by one."""
    difference, least = found.makespan.difference, _SMALL * found.makespan.predicted
    all_totals = [total for total in totals(found.way) if abs(total.added) > least]
    if not all_totals:
        return
    longer = "longer" if difference >= 0 else "shorter"
    rows = [(total.name, str(len(total.delays)), signed(total.added), _share(total.added, difference)) for total in all_totals[:MOST_ROWS]]
    rest = difference - sum(total.added for total in all_totals[:MOST_ROWS])
    if abs(rest) > least:
        rows.append(("all the rest", "", signed(rest), _share(rest, difference)))
    title = f"what makes it {number(abs(difference))} {longer}, on the way to the end"
    yield Part(title, ("", "number", "adds", "share"), rows)
    single = sorted((delay for delay in found.way if delay.what != SLACK), key=lambda delay: -abs(delay.added))[:MOST_DELAYS]
    named = [f"{signed(delay.added)}: {sentence(delay)}" for delay in single if abs(delay.added) > least]
    if named:
        yield Part("the largest of it, one by one", said=named)


def sentence(delay: Delay) -> str:
    """One delay in words."""
    instead = f"{number(delay.measured)} instead of {number(delay.predicted)}"
    return {
        ACTION: f"{delay.action} on rank {delay.rank} takes {instead}",
        MESSAGE: f"the message of {delay.action} from rank {delay.source} to {delay.rank} takes {instead}",
        BETWEEN: f"rank {delay.rank} has all that {delay.action} needs, and begins {instead} later",
        AFTER: f"rank {delay.rank} ends {instead} after its last action",
        OPTIMIZER: f"the optimizer's step on rank {delay.rank} takes {instead}",
        SLACK: f"the prediction has {number(delay.predicted)} to spare before {delay.action or 'the end'} on rank {delay.rank}",
    }[delay.what]


def signed(value: float) -> str:
    """
    >>> signed(1.5), signed(-0.25)
    ('+1.5', '-0.25')
    """
    return f"{'-' if value < 0 else '+'}{number(abs(value))}"


def _numbers(both: Both) -> tuple[str, str]:
    return number(both.predicted), number(both.measured)


def _ratio(both: Both) -> str:
    if both.ratio is None:
        return "-"
    return f"{both.ratio:.3f}" if 0.1 <= both.ratio < 1000 else number(both.ratio)


def _share(added: float, whole: float) -> str:
    return percent(added / whole) if whole else "-"
