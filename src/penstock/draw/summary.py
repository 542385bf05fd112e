"""The figures of a timeline, for tables and titles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.draw.numbers import count, number, percent

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


def title_of(timeline: Timeline) -> str:
    """Its name, or that it has none."""
    return timeline.table.name or f"unnamed {type(timeline.table).__name__.lower()}"


def shape_of(timeline: Timeline) -> list[str]:
    """Ranks, chunks where a rank has several, and microbatches."""
    table = timeline.table
    chunks = [f"{table.chunks} chunks a rank"] if table.chunks > 1 else []
    return [count(table.ranks, "rank"), *chunks, count(table.microbatches, "microbatch")]


def fullest_rank(timeline: Timeline) -> int:
    """The rank with the highest peak, the first of them."""
    peaks = timeline.peak_memory
    return peaks.index(max(peaks))


def figures(timeline: Timeline) -> dict[str, Any]:
    """Everything that a summary says, as plain data."""
    table = timeline.table
    return {
        "name": table.name,
        "source": timeline.source,
        "ranks": table.ranks,
        "stages": table.stages,
        "microbatches": table.microbatches,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "peak_memory": timeline.peak_memory,
        "peak": max(timeline.peak_memory),
        "messages": timeline.num_messages,
        "idle_by_cause": timeline.idle_by_cause,
    }


def summary(timeline: Timeline, unit: str | None = None) -> list[tuple[str, str]]:
    """The figures as rows of a name and a text."""
    idle = timeline.idle_by_cause
    total = sum(idle.values())
    peak = fullest_rank(timeline)
    rows = [
        ("makespan", f"{number(timeline.makespan)} {unit or ''}".rstrip()),
        ("bubble", f"{percent(timeline.bubble)} of all ranks' time"),
        ("span bubble", f"{percent(timeline.span_bubble)} of the longest rank's span"),
        ("peak memory", f"{number(timeline.peak_memory[peak])} on rank {peak}, least {number(min(timeline.peak_memory))}"),
        ("messages", str(timeline.num_messages)),
        ("idle", f"{number(total)} {unit or ''}".rstrip()),
    ]
    return rows + [(f"  {cause}", f"{number(spent)} ({percent(spent / total)})") for cause, spent in idle.items() if spent > 0]
