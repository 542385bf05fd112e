"""One report of a run: Markdown with figures, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rows import Found, Row, amount

from penstock.errors import MissingExtraError

STATES = {True: "met", False: "**not met**", None: ""}


@dataclass
class Report:
    """A run as far as it has come."""

    command: str
    machine: dict[str, str]
    begun: dict[str, str]
    short: bool = False
    suites: list[Found] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def judged(self) -> list[Row]:
        """The rows with a limit, if limits count: sizes of a short run are too small for them."""
        return [] if self.short else [row for suite in self.suites for row in suite.rows if row.met is not None]

    @property
    def red(self) -> list[Row]:
        return [row for row in self.judged if not row.met]

    @property
    def errors(self) -> list[tuple[str, str, str]]:
        """Suite, case and what it raised."""
        return [(suite.name, case, error) for suite in self.suites for case, error in suite.errors]

    @property
    def code(self) -> int:
        """The exit code: 130 if the run was interrupted, 1 if a row is red or a case failed."""
        return 130 if self.interrupted else int(bool(self.red or self.errors))

    def write(self, folder: Path) -> Path:
        """Write report.md, report.json and a figure a suite; the path of the first."""
        from benchmarks.figures import ratios

        folder.mkdir(parents=True, exist_ok=True)
        for suite in (suite for suite in self.suites if suite.rows):
            try:
                (folder / f"{suite.name}.svg").write_bytes(ratios(suite, judged=not self.short))
            except MissingExtraError as error:
                suite.skipped.append(("the figure", str(error)))
        (folder / "report.json").write_text(json.dumps(self.data(), indent=1) + "\n", encoding="utf-8")
        path = folder / "report.md"
        path.write_text("\n".join(self.lines()) + "\n", encoding="utf-8")
        return path

    def data(self) -> dict[str, Any]:
        """All of it as plain values."""
        suites = {
            suite.name: {
                "about": suite.about,
                "seconds": suite.seconds,
                "rows": [row.data() | ({"met": None} if self.short else {}) for row in suite.rows],
                "errors": [{"case": case, "error": error} for case, error in suite.errors],
                "skipped": [{"case": case, "reason": reason} for case, reason in suite.skipped],
            }
            for suite in self.suites
        }
        about = {"command": self.command, "machine": self.machine, "begun": self.begun, "ended": self.ended}
        return about | {"short": self.short, "interrupted": self.interrupted, "code": self.code, "suites": suites}

    def lines(self) -> Iterator[str]:
        """The report in Markdown."""
        yield from ("# Benchmarks", "", *self.summary(), "")
        yield from ("|  |  |", "|---|---|", f"| command | `{self.command}` |")
        yield from (f"| {name} | {value} |" for name, value in self.machine.items())
        for when, told in (("begun", self.begun), ("ended", self.ended)):
            yield from (f"| {when}: {name} | {value} |" for name, value in told.items())
        yield from (
            "",
            "A ratio is ours over what it is held against, both measured in this run; less is better. It is the median of the rounds' own "
            "ratios, with their quartiles (their ends if there are fewer than four rounds) behind it.",
        )
        for suite in self.suites:
            yield from self._section(suite)

    def summary(self) -> list[str]:
        """How it went, in a few lines."""
        told = [f"{len(self.judged) - len(self.red)} of {len(self.judged)} rows with a limit are met."]
        if self.short:
            told = ["A short run, at sizes that say nothing of speed: limits are not judged."]
        if self.interrupted:
            told.append("The run was interrupted: what it had until then is here.")
        told += [f"- not met: {row.case}, against {row.against}: {row.ratio:.3g}, at most {row.limit:.3g}" for row in self.red]
        told += [f"- left out: {suite.name}, {case}: {reason}" for suite in self.suites for case, reason in suite.skipped]
        return told + [f"- failed: {suite}, {case}: {error}" for suite, case, error in self.errors]

    def _section(self, suite: Found) -> Iterator[str]:
        yield from ("", f"## {suite.name}", "", suite.about, "")
        if suite.rows:
            yield from (
                "| case | against | ratio | spread | at most | | ours | other | rounds | |",
                "|---|---|--:|--:|--:|---|--:|--:|--:|---|",
            )
            yield from (f"| {' | '.join(cells(row, judged=not self.short))} |" for row in suite.rows)
            if not any(case == "the figure" for case, _ in suite.skipped):
                yield from ("", f"![ratios of {suite.name}]({suite.name}.svg)", "")
        yield from (f"- left out: {case}: {reason}" for case, reason in suite.skipped)
        yield from (f"- failed: {case}: {error}" for case, error in suite.errors)
        yield f"{suite.seconds:.0f} s in all."


def cells(row: Row, judged: bool = True) -> Sequence[str]:
    """A row as it stands in a table."""
    found = row.data()
    low, high = found["spread"]
    faster = f" ({1 / row.ratio:.3g}x)" if row.ratio < 0.1 else ""
    limit = "" if row.limit is None else f"{row.limit:.3g}"
    spread = f"{low:.3g} .. {high:.3g}" if found["rounds"] > 1 else ""
    state = STATES[row.met] if judged else ""
    amounts = amount(found["ours"], row.unit), amount(found["peer"], row.unit)
    return row.case, row.against, f"{row.ratio:.3g}{faster}", spread, limit, state, *amounts, str(found["rounds"]), row.note
