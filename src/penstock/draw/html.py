"""One file for a browser: the figure and the table of figures, readable in light and dark, with nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from penstock.draw.canvas import FAINT, GRID, IDLE, INK, PAPER, rendered
from penstock.draw.differences import WORDS, Part, parts
from penstock.draw.summary import shape_of, summary, title_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from penstock.simulator.differences import Differences
    from penstock.simulator.timeline import Timeline

# The figure's own colours of text and background, as the page's.
_THEMED = {
    f": {INK}": ": var(--ink)",
    f": {FAINT}": ": var(--faint)",
    f": {IDLE}": ": var(--idle)",
    f": {GRID}": ": var(--grid)",
    f"stroke: {PAPER}": "stroke: var(--paper)",
}
HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="Penstock">
<title>{title}</title>
"""
"""How every page begins, up to its style."""
_PAGE = (
    HEAD
    + """<style>
:root {{ color-scheme: light dark; --ink: #222222; --faint: #666666; --idle: #ebebeb; --paper: #ffffff; --line: #dddddd; --grid: #eeeeee; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8e8e8; --faint: #a8a8a8; --idle: #33363c; --paper: #17191d; --line: #3c4048; --grid: #2b2e34; }}
}}
body {{ margin: 2rem auto; padding: 0 1.5rem; max-width: 100rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }}
svg {{ display: block; width: 100%; height: auto; }}
table {{ margin-top: 2rem; border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem 2rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: pre; }}
th {{ font-weight: 600; }}
h1 {{ margin: 2.5rem 0 0; font-size: 1.4rem; }}
h2 {{ margin: 2rem 0 .5rem; font-size: 1.1rem; }}
h2 + table {{ margin-top: 0; }}
p {{ margin: .3rem 0; }}
</style>
</head>
<body>
{figure}
{body}
</body>
</html>
"""
)


def html(timelines: Sequence[Timeline], **options: Any) -> str:
    """The page; options are those of `penstock.draw.figure.figure`."""
    from penstock.draw.figure import figure

    drawn = figure(timelines, **options)
    names = list(options.get("names") or map(title_of, timelines))
    return _page(f"{', '.join(names)}: {', '.join(shape_of(timelines[0]))}", drawn, _table(timelines, names, options.get("unit")))


def overlay_html(found: Sequence[Differences], **options: Any) -> str:
    """The page of measured timelines under their predictions; options are those of `penstock.draw.overlay.overlay`."""
    from penstock.draw.overlay import overlay

    names = list(options.get("names") or (title_of(each.measured) for each in found))
    body: list[str] = []
    for name, each in zip(names, found, strict=True):
        body.append(f"<h1>{escape(name)}</h1>")
        body += [section(part) for part in parts(each, options.get("unit"), options.get("words", WORDS))]
    return _page(", ".join(names), overlay(found, **options), "\n".join(body))


def _page(title: str, drawn: Figure, body: str) -> str:
    return _PAGE.format(title=escape(title), figure=inline(drawn), body=body)


def inline(drawn: Figure) -> str:
    """The drawing as a part of a page, in the page's colours."""
    for patch in (drawn.patch, *(axes.patch for axes in drawn.axes)):
        patch.set_visible(False)
    svg = rendered(drawn, "svg").decode()
    svg = svg[svg.index("<svg") :].strip()
    for said, themed in _THEMED.items():
        svg = svg.replace(said, themed)
    return svg


def _table(timelines: Sequence[Timeline], names: Sequence[str], unit: str | None) -> str:
    """A row a figure, a column a timeline."""
    columns = [dict(summary(timeline, unit)) for timeline in timelines]
    rows = list(dict.fromkeys(name for column in columns for name in column))
    lines = [row("th", ["", *names])]
    lines += [row("td", [name, *(column.get(name, "0") for column in columns)]) for name in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def section(part: Part) -> str:
    """A heading, a table and sentences."""
    lines = [f"<h2>{escape(part.title)}</h2>"]
    if part.rows:
        lines += ["<table>", row("th", part.header), *(row("td", texts) for texts in part.rows), "</table>"]
    return "\n".join([*lines, *(f"<p>{escape(sentence)}</p>" for sentence in part.said)])


def row(cell: str, texts: Sequence[str]) -> str:
    first, *rest = (escape(text) for text in texts)
    return f'<tr><th scope="row">{first}</th>' + "".join(f"<{cell}>{text}</{cell}>" for text in rest) + "</tr>"
