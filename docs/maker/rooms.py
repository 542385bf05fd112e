"""The picture of the rooms for `docs/architecture.md`; run as a script it writes `docs/architecture.svg`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "architecture.svg"
WIDTH, HEIGHT = 1000, 852
PLAIN, TORCH, PAGE = "#e8eef7", "#fdeedd", "#e6f4ea"
"""Fill of rooms without torch, of those that import it, and of the page's source."""
INNER = "#ffffff"


@dataclass(frozen=True)
class Room:
    """A box with the folder's name and a few words on it, and the rooms inside it as rows of names."""

    name: str
    words: str
    x: int
    y: int
    width: int
    height: int
    fill: str = PLAIN
    inside: tuple[tuple[str, ...], ...] = ()

    def draw(self) -> Iterator[str]:
        """The SVG elements of the room."""
        yield _box(self.x, self.y, self.width, self.height, self.fill)
        yield _text(self.x + 12, self.y + 22, self.name, bold=True)
        yield _text(self.x + 12 + 9 * len(self.name) + 12, self.y + 22, self.words)
        for row, names in enumerate(self.inside):
            width = (self.width - 24 - 8 * (len(names) - 1)) / len(names)
            for column, name in enumerate(names):
                left, top = self.x + 12 + column * (width + 8), self.y + 34 + row * 36
                yield _box(left, top, width, 28, INNER)
                yield _text(left + width / 2, top + 19, name, middle=True)


ROOMS = (
    Room("cli", "one command per file", 60, 20, 454, 68, inside=(("commands", "training"),)),
    Room("testing", "every check, for a schedule of your own", 526, 20, 454, 68),
    Room("compat", "the peers' own names over our parts", 60, 100, 452, 68, TORCH, (("torch", "deepspeed"),)),
    Room("integrations", "trainers, layouts, traces, metrics", 528, 100, 452, 68, TORCH),
    Room("draw", "timelines as pictures", 60, 180, 300, 89, inside=(("figures",),)),
    Room("studio", "the page's server", 60, 281, 300, 89),
    Room("web", "the page, in TypeScript", 60, 382, 300, 89, PAGE, (("core", "state", "draw", "parts"),)),
    Room(
        "runtime",
        "trains with a program; pipeline.py is the door",
        372,
        180,
        608,
        291,
        TORCH,
        (
            ("train", "checkpoint"),
            ("measure", "execution", "launch"),
            ("parallel", "weights"),
            ("model", "sequence"),
            ("batch", "split_backward", "transport"),
            ("tensors", "device"),
            ("torch_internals",),
        ),
    ),
    Room(
        "planner",
        "from a model and a memory limit to a plan with its bound",
        60,
        483,
        920,
        68,
        inside=(("job", "batches", "losses", "profile", "partition", "order_search", "bounds"),),
    ),
    Room("passes", "schedule to program, one pass per file", 60, 563, 454, 68, inside=(("deepspeed",),)),
    Room("schedules", "one algorithm per file", 526, 563, 454, 68),
    Room("verifier", "one rule per invariant", 60, 643, 454, 68, inside=(("rules",),)),
    Room("simulator", "when everything runs, and why ranks wait", 526, 643, 454, 68, inside=(("event_loops", "comparison"),)),
    Room("ir", "the language: actions, placements, dependencies, costs", 60, 723, 920, 68, inside=(("cluster", "formats"),)),
    Room("text", "numbers, units, tables", 60, 803, 454, 36),
    Room("errors.py", "the error tree", 526, 803, 454, 36),
)


def picture() -> str:
    """The whole picture."""
    parts = [part for room in ROOMS for part in room.draw()]
    arrow = '<path d="M30 40 V818 M22 804 L30 818 L38 804" fill="none" stroke="#8a94a6" stroke-width="2"/>'
    caption = '<text x="20" y="400" transform="rotate(-90 20 400)" text-anchor="middle" fill="#5b6472">imports go down</text>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="14">'
    label = "<title>The rooms of Penstock</title>"
    return "\n".join([head, label, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', arrow, caption, *parts, "</svg>", ""])


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}" rx="5" fill="{fill}" stroke="#8a94a6"/>'


def _text(x: float, y: float, text: str, *, bold: bool = False, middle: bool = False) -> str:
    style = ' font-weight="bold"' if bold else ""
    anchor = ' text-anchor="middle"' if middle else ""
    return f'<text x="{x:g}" y="{y:g}"{style}{anchor}>{escape(text, quote=False)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
