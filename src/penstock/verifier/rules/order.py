"""An action comes after everything that it needs of its own rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.verifier.context import Context
from penstock.verifier.finding import Finding


def order(context: Context) -> Iterator[Finding]:
    """Every action runs after everything that it needs of its own rank; parts of one overlap do not count as before each other."""
    rows, (before, after) = context.rows, context.table.links.local
    wrong = (rows.rank[before] == rows.rank[after]) & (rows.group[before] >= rows.group[after])
    at = np.flatnonzero(wrong)
    for pair in at[np.argsort(after[at], kind="stable")].tolist():
        yield _report_misplaced(context, int(before[pair]), int(after[pair]))


def _report_misplaced(context: Context, needed: int, entry: int) -> Finding:
    name, what, rank = context.name(entry), context.name(needed), int(context.rows.rank[entry])
    if context.rows.group[needed] == context.rows.group[entry]:
        message = f"{name} needs {what}, but the two run together as parts of one overlap"
        return context.report("order", entry, message, f"Run {what} in a step of its own before {name}")
    message = f"{name} needs {what}, which rank {rank} runs only in step {int(context.rows.step[needed])}"
    return context.report(
        "order", entry, message, f"Move {what} before step {int(context.rows.step[entry])} of rank {rank}, or {name} behind it"
    )
