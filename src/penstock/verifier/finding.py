"""Findings: one broken rule at one place each, and the report of all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from penstock.ir.action import Action, unpack_actions
from penstock.ir.grid import Grid
from penstock.ir.table import Table

_STEPS_AROUND = 3
_RANKS_SHOWN = 8


class Severity(IntEnum):
    """How bad a finding is, the worst first."""

    HANG = 0
    """Ranks wait for each other forever."""
    WRONG = 1
    """Work is missing, repeated, or done on the wrong data."""
    MEMORY = 2
    """A rank holds more than it may."""
    UNTIDY = 3
    """The numbers would be right, but the state is not kept as it must be."""


@dataclass(frozen=True)
class Finding:
    """One broken rule at one place; `step` is the index of the action in its rank's row."""

    rule: str
    severity: Severity
    rank: int
    step: int
    action: str
    message: str
    remedy: str
    table: Table | None = field(default=None, repr=False, compare=False)
    """The source of the excerpt."""
    cycle: tuple[tuple[int, int, int, int], ...] = field(default=(), repr=False, compare=False)
    """The waits of a deadlock: rank and step of the action that waits, rank and step of the action it waits for."""

    @cached_property
    def excerpt(self) -> str:
        """The grid around the place, its step marked; empty if the rows cannot be read as actions."""
        return "" if self.table is None else excerpt(self.table, self.rank, self.step)

    @property
    def place(self) -> str:
        return f"rank {self.rank}, step {self.step}" + (f" ({self.action})" if self.action else "")

    def __str__(self) -> str:
        return f"{self.rule}: {self.place}: {self.message}. {self.remedy}."

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "severity": self.severity.name.lower(),
            "rank": self.rank,
            "step": self.step,
            "action": self.action,
            "message": self.message,
            "remedy": self.remedy,
            "excerpt": self.excerpt,
        }


def excerpt(table: Table, rank: int, step: int) -> str:
    """A few steps before and after, a few ranks to either side; only these are unpacked."""
    first = max(0, min(rank - _RANKS_SHOWN // 2, table.ranks - _RANKS_SHOWN))
    ranks = range(first, min(first + _RANKS_SHOWN, table.ranks))
    steps = range(max(0, step - _STEPS_AROUND), step + _STEPS_AROUND + 1)
    columns: list[tuple[Action | None, ...]] = [()] * table.ranks
    for shown in ranks:
        columns[shown] = (None,) * steps.start + tuple(_cut(table, shown, steps))
    longest = max(step + 1, *(len(columns[shown]) for shown in ranks))
    return Grid(tuple(columns)).text(mark=step, steps=range(steps.start, min(steps.stop, longest)), ranks=ranks)


def _cut(table: Table, rank: int, steps: range) -> Iterable[Action]:
    """The actions of one rank in these steps."""
    rows = table.rows
    begin, end = (int(g) for g in rows.group_offsets[rank : rank + 2])
    first, last = rows.group.searchsorted([min(begin + steps.start, end), min(begin + steps.stop, end)]).tolist()
    return unpack_actions(rows.codes[first:last].tolist(), rows.slices)


_SHOWN = 20


def report(table: Table, semantics: str, findings: Sequence[Finding]) -> str:
    """The findings with their excerpts, the worst first; of many only the first few."""
    many = f"{len(findings)} finding{'s'[: len(findings) > 1]}"
    name = f"{table.name!r}, " if table.name else ""
    order = ", the worst first" if len(findings) > 1 else ""
    head = f"{many} in {name}{table.describe()} ({semantics}){order}:"
    parts = [head, *(_write_entry(number, finding) for number, finding in enumerate(findings[:_SHOWN], start=1))]
    if len(findings) > _SHOWN:
        parts.append(f"and {len(findings) - _SHOWN} more")
    return "\n\n".join(parts)


def _write_entry(number: int, finding: Finding) -> str:
    lines = [f"{number}. {finding.rule}, {finding.place}:", f"   {finding.message}.", f"   {finding.remedy}."]
    if finding.excerpt:
        lines += ["", textwrap.indent(finding.excerpt, "     ")]
    return "\n".join(lines)
