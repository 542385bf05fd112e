"""Pages for a browser: one file each, readable in light and dark mode, that fetches nothing.

Every page is a list of sections of text, figures and tables. `timelines_html` and `overlay_html` show timelines; `report_html` also has
a headline and cards with the main results, for a training report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from penstock.draw.figures.canvas import recolour, render
from penstock.draw.figures.timelines import draw_overlay, draw_timelines
from penstock.draw.summary import WORDS, TextSection, describe_differences, list_summary_rows, shape_of, title_of
from penstock.simulator.comparison.differences import Differences
from penstock.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="Penstock">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #222222; --faint: #666666; --idle: #ebebeb; --paper: #ffffff; --line: #e2e4e8;
  --grid: #eeeeee; --back: #f5f6f8; --accent: #0b6e99; --good: #1a7f4b; --bad: #b2182b; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8e8e8; --faint: #a4a8b0; --idle: #33363c; --paper: #1b1e23; --line: #343942; --grid: #2b2e34; --back: #121417;
    --accent: #5bb8e0; --good: #5fd39a; --bad: #ff7b86; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--back); color: var(--ink); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }}
main {{ max-width: {width}rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }}
header p {{ color: var(--faint); margin: .4rem 0 0; max-width: 50rem; }}
header p:first-of-type:not(:only-of-type) {{ color: var(--ink); font-size: 1.1rem; }}
h1 {{ margin: 0; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.01em; }}
h2 {{ margin: 0 0 .5rem; font-size: 1.25rem; }}
h3 {{ margin: 1.5rem 0 .4rem; font-size: 1rem; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(max(9.5rem, 22%), 1fr)); gap: .75rem;
  margin: 1.75rem 0; padding: 0; }}
.card {{ background: var(--paper); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }}
.card dt {{ color: var(--faint); font-size: .85rem; }}
.card dd {{ margin: 0; font-size: 1.35rem; font-weight: 600; font-variant-numeric: tabular-nums; }}
.card small {{ display: block; color: var(--faint); font-size: .8rem; font-weight: 400; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }}
section {{ background: var(--paper); border: 1px solid var(--line); border-radius: .6rem; padding: 1.25rem 1.5rem; margin: 1rem 0; }}
section > p {{ margin: .2rem 0 .9rem; color: var(--faint); max-width: 52rem; }}
figure {{ margin: 0; overflow-x: auto; }}
svg {{ display: block; width: 100%; min-width: 38rem; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }}
.wide {{ overflow-x: auto; }}
.wide p {{ margin: .3rem 0; }}
th, td {{ padding: .3rem 1.1rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: pre; }}
td:last-child {{ white-space: normal; min-width: 6rem; }}
th {{ font-weight: 600; }}
tr.chosen > * {{ color: var(--accent); font-weight: 600; }}
details {{ margin-top: 1rem; }} summary {{ cursor: pointer; color: var(--accent); }}
code, pre {{ font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; }}
pre {{ margin: 0; padding: .8rem 1rem; background: var(--back); border-radius: .4rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
footer {{ color: var(--faint); font-size: .85rem; margin-top: 1.5rem; }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
_REPORT_WIDTH, _FIGURE_WIDTH = 68, 100
"""Rem: text is easier to read in short lines, and large figures need more room."""


def timelines_html(timelines: Sequence[Timeline], **options: Any) -> str:
    """Write a page of timelines and their summaries; the options are those of `draw_timelines`."""
    names = list(options.get("names") or map(title_of, timelines))
    columns = [dict(list_summary_rows(timeline, options.get("unit"))) for timeline in timelines]
    rows = [[name, *(column.get(name, "0") for column in columns)] for name in dict.fromkeys(name for column in columns for name in column)]
    section = Section().figure(draw_timelines(timelines, **options), "the timelines").table(["", *names], rows)
    return _write_page(f"{', '.join(names)}: {', '.join(shape_of(timelines[0]))}", section.html(), _FIGURE_WIDTH)


def overlay_html(pairs: Sequence[Differences], **options: Any) -> str:
    """Write a page of measured timelines under their predictions; the options are those of `draw_overlay`."""
    names = list(options.get("names") or (title_of(pair.measured) for pair in pairs))
    sections = [Section().figure(draw_overlay(pairs, **options), "measured timelines under their predictions")]
    for name, pair in zip(names, pairs, strict=True):
        sections.append(Section(name).texts(list(describe_differences(pair, options.get("unit"), options.get("words", WORDS)))))
    return _write_page(", ".join(names), "\n".join(section.html() for section in sections), _FIGURE_WIDTH)


def report_html(title: str, lead: Sequence[str], cards: Sequence[Card], sections: Sequence[Section], footer: str) -> str:
    """Write a report: a headline, cards with the main results, then sections."""
    body = [
        f"<header><h1>{escape(title)}</h1>{''.join(f'<p>{escape(text)}</p>' for text in lead)}</header>",
        '<dl class="cards">',
        *(card.html() for card in cards),
        "</dl>",
        *(section.html() for section in sections),
        f"<footer>{escape(footer)}</footer>",
    ]
    return _write_page(title, "\n".join(body), _REPORT_WIDTH)


def _write_page(title: str, body: str, width: int) -> str:
    return _PAGE.format(title=escape(title), body=body, width=width)


@dataclass(frozen=True)
class Card:
    """One result at the top of a report; `good` says whether it is as it should be, if that can be judged."""

    name: str
    value: str
    note: str = ""
    good: bool | None = None

    def html(self) -> str:
        look = "" if self.good is None else f' class="{"good" if self.good else "bad"}"'
        note = f"<small>{escape(self.note)}</small>" if self.note else ""
        return f'<div class="card"><dt>{escape(self.name)}</dt><dd{look}>{escape(self.value)}{note}</dd></div>'


@dataclass
class Section:
    """A part of a page; figures, tables and texts are added in the order in which they are shown."""

    title: str = ""
    text: str = ""
    content: list[str] = field(default_factory=list)

    def figure(self, figure: Figure, label: str) -> Section:
        self.content.append(f'<figure role="img" aria-label="{escape(label)}">{_inline_svg(figure)}</figure>')
        return self

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], chosen: int | None = None) -> Section:
        self.content.append(f'<div class="wide">{_write_table(header, rows, chosen)}</div>')
        return self

    def texts(self, texts: Sequence[TextSection], summary: str = "") -> Section:
        """Add headings, tables and sentences; with a summary, they are folded away behind it."""
        body = "\n".join(_write_text_section(text) for text in texts)
        wide = f'<div class="wide">{body}</div>'
        self.content.append(f"<details><summary>{escape(summary)}</summary>{wide}</details>" if summary else wide)
        return self

    def code(self, text: str) -> Section:
        self.content.append(f"<pre>{escape(text)}</pre>")
        return self

    def html(self) -> str:
        title = f"<h2>{escape(self.title)}</h2>" if self.title else ""
        text = f"<p>{escape(self.text)}</p>" if self.text else ""
        return "\n".join(["<section>", *filter(None, (title, text)), *self.content, "</section>"])


def _write_text_section(text: TextSection) -> str:
    table = [_write_table(text.header, text.rows)] if text.rows else []
    return "\n".join([f"<h3>{escape(text.title)}</h3>", *table, *(f"<p>{escape(sentence)}</p>" for sentence in text.sentences)])


def _write_table(header: Sequence[str], rows: Sequence[Sequence[str]], chosen: int | None = None) -> str:
    lines = [_write_row("th", header), *(_write_row("td", row, place == chosen) for place, row in enumerate(rows))]
    return "\n".join(["<table>", *lines, "</table>"])


def _write_row(cell: str, texts: Sequence[str], chosen: bool = False) -> str:
    first, *rest = (escape(text) for text in texts)
    start = '<tr class="chosen">' if chosen else "<tr>"
    return f'{start}<th scope="row">{first}</th>' + "".join(f"<{cell}>{text}</{cell}>" for text in rest) + "</tr>"


def _inline_svg(figure: Figure) -> str:
    """The figure as a part of a page, in the colours of the page."""
    svg = render(figure, "svg").decode()
    colours = {name: f"var(--{name})" for name in ("ink", "faint", "paper", "idle", "grid")}
    return recolour(svg[svg.index("<svg") :].strip(), **colours)
