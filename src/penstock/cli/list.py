"""`penstock list`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, Output

if TYPE_CHECKING:
    from penstock.draw.terminal.lines import Line
    from penstock.schedules.registry import Algorithm

LEAST_ROOM = 30
"""Columns that a text gets however narrow the terminal."""


def list_(
    *,
    passes: Annotated[bool, typer.Option("--passes", help="List the passes of 'penstock lower --passes' instead.")] = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """List the schedules with their bubble and memory.

    In the formulas: p ranks, r the rank, m microbatches, v chunks a rank; F, B, I, W the times of forward, full backward,
    backward for the input and for the weights. Memory counts activations of one microbatch on one rank.

    \b
    Examples:
      penstock list
      penstock list --json
      penstock list --passes
    """
    from penstock.cli.output import deliver
    from penstock.schedules.registry import algorithms

    if passes:
        named = _passes()
        deliver(lambda width: _named(named, width), lambda: named, as_json=as_json, output=output)
        return
    known = list(algorithms().values())
    deliver(lambda width: _lines(known, width), lambda: [_data(each) for each in known], as_json=as_json, output=output)


def _data(each: Algorithm) -> dict[str, Any]:
    return {"name": each.name, "summary": each.summary, "bubble": each.bubble, "memory": each.memory, "options": _options(each)}


def _options(each: Algorithm) -> dict[str, Any]:
    """Every option and its default; `chunks` is one where the placement leaves it open."""
    return each.options if each.layout.fixed else {"chunks": each.layout.chunks, **each.options}


def _passes() -> list[dict[str, str]]:
    from penstock.passes.registry import passes

    return [{"name": name, "summary": summary} for name, summary in passes().items()]


def _lines(known: list[Algorithm], width: int | None) -> Iterator[Line]:
    """A line a schedule, for other programs to cut; on a terminal the formulas stand below the summary."""
    if width is not None:
        return _fitted([(each.name, [each.summary, f"bubble: {each.bubble}", f"memory: {each.memory}"]) for each in known], width)
    header = ("name", "bubble", "memory", "summary")
    return _table([header, *((each.name, each.bubble, each.memory, each.summary) for each in known)])


def _named(named: list[dict[str, str]], width: int | None) -> Iterator[Line]:
    rows: list[tuple[str, ...]] = [(each["name"], each["summary"]) for each in named]
    return _table(rows) if width is None else _fitted([(name, texts) for name, *texts in rows], width)


def _table(rows: list[tuple[str, ...]]) -> Iterator[Line]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield [("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)), None)]


def _fitted(entries: list[tuple[str, list[str]]], width: int) -> Iterator[Line]:
    """Each name with its texts beside it, wrapped to the width."""
    indent = max(len(name) for name, _ in entries) + 2
    for name, texts in entries:
        lines = [line for text in texts for line in textwrap.wrap(text, max(width - indent, LEAST_ROOM))]
        for number, line in enumerate(lines):
            yield [((name if number == 0 else "").ljust(indent) + line, None)]
