"""The figures of a timeline, for tables and titles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.text.numbers import format_count, format_number, format_percent

if TYPE_CHECKING:
    from penstock.simulator.timeline import Timeline


def title_of(timeline: Timeline) -> str:
    """Give the name of a timeline, or say that it has none."""
    return timeline.table.name or f"unnamed {type(timeline.table).__name__.lower()}"


def shape_of(timeline: Timeline) -> list[str]:
    """List ranks, chunks if a rank has several, and microbatches."""
    table = timeline.table
    chunks = [f"{table.chunks} chunks per rank"] if table.chunks > 1 else []
    return [format_count(table.ranks, "rank"), *chunks, format_count(table.microbatches, "microbatch")]


def fullest_rank(timeline: Timeline) -> int:
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
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "peak_memory": timeline.peak_memory,
        "peak": max(timeline.peak_memory),
        "messages": timeline.num_messages,
        "idle_by_cause": timeline.idle_by_cause,
    }


def summary_rows(timeline: Timeline, unit: str | None = None) -> list[tuple[str, str]]:
    """Sum up a timeline as rows of a name and a text."""
    idle = timeline.idle_by_cause
    total = sum(idle.values())
    peak = fullest_rank(timeline)
    rows = [
        ("makespan", f"{format_number(timeline.makespan)} {unit or ''}".rstrip()),
        ("bubble", f"{format_percent(timeline.bubble)} of all ranks' time"),
        ("span bubble", f"{format_percent(timeline.span_bubble)} of the longest rank's span"),
        ("peak memory", f"{format_number(timeline.peak_memory[peak])} on rank {peak}, least {format_number(min(timeline.peak_memory))}"),
        ("messages", str(timeline.num_messages)),
        ("idle", f"{format_number(total)} {unit or ''}".rstrip()),
    ]
    causes = ((cause, spent) for cause, spent in idle.items() if spent > 0)
    return rows + [(f"  {cause}", f"{format_number(spent)} ({format_percent(spent / total)})") for cause, spent in causes]
