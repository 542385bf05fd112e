"""Tables of schedules: all with their formulas for the documentation, and five for the README, which it writes as a script."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from maker.figures import measured
from maker.formulas import messages_of
from penstock.schedules.registry import Algorithm, Shape, algorithms

README = Path(__file__).parents[2] / "README.md"
RANKS, MICROBATCHES = 8, 32
IN_README = ("1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v")
PLACE = re.compile(r"(<!-- schedules:[^>]*-->\n)(.*?)(\n<!-- end of schedules -->)", flags=re.DOTALL)


def rows(cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ["| " + " | ".join(map(_cell, row)) + " |" for row in cells]
    return "\n".join([head, "|" + "---|" * len(cells[0]), *body])


def _cell(text: str) -> str:
    """Text whose bars do not end the cell; in code they do not anyway."""
    return "`".join(part if place % 2 else part.replace("|", "\\|") for place, part in enumerate(text.split("`")))


def schedule_table(link: Callable[[str], str] = "`{}`".format) -> str:
    """Every schedule with its formulas, and below each what the simulator measures."""
    head = ("name", "idea", "bubble", "memory", "messages")
    return rows([head, *(_row(each, link) for each in algorithms().values())])


def _row(each: Algorithm, link: Callable[[str], str]) -> tuple[str, ...]:
    placement = each.layout.place(Shape(2, each.layout.chunks, 1)).kind
    found = measured(each.name, RANKS, MICROBATCHES)
    return (
        link(each.name),
        each.summary,
        f"{each.bubble}<br>**{found.bubble:.1%}**",
        f"{each.memory}<br>**{found.peak:g}**",
        f"{messages_of(each.name, placement)[0]}<br>**{found.messages}**",
    )


def readme_table() -> str:
    """A few schedules with what the simulator measures."""
    head = ("name", "idea", "time that ranks are idle", "activations held")
    known = algorithms()
    figures = {name: measured(name, RANKS, MICROBATCHES) for name in IN_README}
    return rows([head, *((f"`{name}`", known[name].summary, f"{each.bubble:.1%}", f"{each.peak:g}") for name, each in figures.items())])


def with_table(readme: str) -> str:
    """The README's text with its table made anew."""
    return PLACE.sub(lambda place: place[1] + readme_table() + place[3], readme)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
