"""A report as one file for a browser: a headline, figures in words, then parts with pictures and tables. Nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from penstock.draw.html import HEAD, inline, row, section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from penstock.draw.differences import Part

_PAGE = (
    HEAD
    + """<style>
:root {{ color-scheme: light dark; --ink: #222222; --faint: #666666; --idle: #ebebeb; --paper: #ffffff; --line: #e2e4e8;
  --grid: #eeeeee; --back: #f5f6f8; --accent: #0b6e99; --good: #1a7f4b; --bad: #b2182b; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8e8e8; --faint: #a4a8b0; --idle: #33363c; --paper: #1b1e23; --line: #343942; --grid: #2b2e34; --back: #121417;
    --accent: #5bb8e0; --good: #5fd39a; --bad: #ff7b86; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--back); color: var(--ink); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }}
main {{ max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }}
header p {{ color: var(--faint); margin: .25rem 0 0; max-width: 50rem; }}
h1 {{ margin: 0; font-size: 1.9rem; line-height: 1.2; letter-spacing: -.01em; }}
h2 {{ margin: 0 0 .5rem; font-size: 1.25rem; }}
h3 {{ margin: 1.5rem 0 .4rem; font-size: 1rem; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1.75rem 0; padding: 0; }}
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
th, td {{ padding: .3rem 1.4rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: pre; }}
th {{ font-weight: 600; }}
tr.chosen > * {{ color: var(--accent); font-weight: 600; }}
details {{ margin-top: 1rem; }} summary {{ cursor: pointer; color: var(--accent); }}
code, pre {{ font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, monospace; }}
pre {{ margin: 0; padding: .8rem 1rem; background: var(--back); border-radius: .4rem; overflow-x: auto; }}
footer {{ color: var(--faint); font-size: .85rem; margin-top: 1.5rem; }}
</style>
</head>
<body>
<main>
<header><h1>{title}</h1><p>{lead}</p></header>
<dl class="cards">
{cards}
</dl>
{sections}
<footer>{footer}</footer>
</main>
</body>
</html>
"""
)


@dataclass(frozen=True)
class Card:
    """One figure at the top; `good` says whether it is as it should be, where that can be said."""

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
    """A part of the page, put together piece by piece."""

    title: str
    text: str = ""
    pieces: list[str] = field(default_factory=list)

    def figure(self, drawn: Figure, label: str) -> Section:
        self.pieces.append(f'<figure role="img" aria-label="{escape(label)}">{inline(drawn)}</figure>')
        return self

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], chosen: int | None = None) -> Section:
        lines = [row("td", each) for each in rows]
        if chosen is not None:
            lines[chosen] = lines[chosen].replace("<tr>", '<tr class="chosen">', 1)
        self.pieces.append("\n".join(['<div class="wide"><table>', row("th", header), *lines, "</table></div>"]))
        return self

    def parts(self, summary: str, parts: Sequence[Part]) -> Section:
        """Further tables, folded away."""
        body = "\n".join(section(part).replace("h2>", "h3>") for part in parts)
        self.pieces.append(f'<details><summary>{escape(summary)}</summary><div class="wide">{body}</div></details>')
        return self

    def code(self, text: str) -> Section:
        self.pieces.append(f"<pre>{escape(text)}</pre>")
        return self

    def html(self) -> str:
        text = f"<p>{escape(self.text)}</p>" if self.text else ""
        return f"<section>\n<h2>{escape(self.title)}</h2>\n{text}\n" + "\n".join(self.pieces) + "\n</section>"


def page(title: str, lead: str, cards: Sequence[Card], sections: Sequence[Section], footer: str) -> str:
    """The whole file."""
    made = {"title": escape(title), "lead": escape(lead), "footer": escape(footer)}
    return _PAGE.format(cards="\n".join(each.html() for each in cards), sections="\n".join(each.html() for each in sections), **made)
