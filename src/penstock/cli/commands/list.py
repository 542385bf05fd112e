"""`penstock list`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from penstock.cli.options import AsJson, TextOutput
from penstock.cli.output import deliver
from penstock.schedules.registry import Algorithm, algorithms
from penstock.text.table import format_table

LEAST_ROOM = 30
"""Columns of text on the narrowest terminal."""


def list_(
    *,
    passes: Annotated[bool, typer.Option("--passes", help="List the passes for 'penstock lower --passes' instead.")] = False,
    as_json: AsJson = False,
    output: TextOutput = None,
) -> None:
    """List the schedules with their bubble and memory.

    The formulas use p ranks, r the rank, m microbatches, v chunks per rank, and F, B, I, W for the times of forward, full backward,
    backward for the input and backward for the weights. Memory counts activations of one microbatch on one rank.

    \b
    Examples:
      penstock list
      penstock list --json
      penstock list --passes
    """
    if passes:
        known = _list_passes()
        deliver(lambda width: _pass_lines(known, width), lambda: known, as_json=as_json, output=output)
        return
    schedules = list(algorithms().values())
    deliver(lambda width: _write_lines(schedules, width), lambda: list(map(_collect_data, schedules)), as_json=as_json, output=output)


def _collect_data(named: Algorithm) -> dict[str, Any]:
    options = named.options if named.layout.fixed else {"chunks": named.layout.chunks, **named.options}
    return {"name": named.name, "summary": named.summary, "bubble": named.bubble, "memory": named.memory, "options": options}


def _list_passes() -> list[dict[str, str]]:
    from penstock.passes.pass_list import passes

    return [{"name": name, "summary": summary} for name, summary in passes().items()]


def _write_lines(schedules: list[Algorithm], width: int | None) -> Iterator[str]:
    """One line per schedule, for other programs to cut; on a terminal, the formulas are below the summary."""
    if width is not None:
        return _wrap([(named.name, [named.summary, f"bubble: {named.bubble}", f"memory: {named.memory}"]) for named in schedules], width)
    header = ("name", "bubble", "memory", "summary")
    return format_table([header, *((named.name, named.bubble, named.memory, named.summary) for named in schedules)], left=None)


def _pass_lines(passes: list[dict[str, str]], width: int | None) -> Iterator[str]:
    rows = [(entry["name"], entry["summary"]) for entry in passes]
    return format_table(rows, left=None) if width is None else _wrap([(name, [summary]) for name, summary in rows], width)


def _wrap(entries: list[tuple[str, list[str]]], width: int) -> Iterator[str]:
    """Each name with its texts beside it, wrapped to the width."""
    indent = max(len(name) for name, _ in entries) + 2
    for name, texts in entries:
        lines = [line for text in texts for line in textwrap.wrap(text, max(width - indent, LEAST_ROOM))]
        for number, line in enumerate(lines):
            yield (name if number == 0 else "").ljust(indent) + line
