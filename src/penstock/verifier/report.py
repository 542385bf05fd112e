"""All findings in one text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from penstock.ir.table import Table
from penstock.verifier.finding import Finding

_SHOWN = 20


def report(table: Table, semantics: str, findings: Sequence[Finding]) -> str:
    """The findings with their excerpts, the worst first; of many only the first few."""
    many = f"{len(findings)} finding{'s'[: len(findings) > 1]}"
    name = f"{table.name!r}, " if table.name else ""
    order = ", the worst first" if len(findings) > 1 else ""
    head = f"{many} in {name}{table.placement.describe()}, {table.microbatches} microbatches ({semantics}){order}:"
    parts = [head, *(_entry(number, finding) for number, finding in enumerate(findings[:_SHOWN], start=1))]
    if len(findings) > _SHOWN:
        parts.append(f"and {len(findings) - _SHOWN} more")
    return "\n\n".join(parts)


def _entry(number: int, finding: Finding) -> str:
    lines = [f"{number}. {finding.rule}, {finding.place}:", f"   {finding.message}.", f"   {finding.remedy}."]
    if finding.excerpt:
        lines += ["", textwrap.indent(finding.excerpt, "     ")]
    return "\n".join(lines)
