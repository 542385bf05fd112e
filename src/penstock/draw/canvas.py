"""What every picture by matplotlib shares: the style, the size of texts, and the finished file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

from penstock.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, PAPER, IDLE = "#222222", "#666666", "#ffffff", "#ebebeb"
"""Text, what stands behind it, the background, and idle time: `penstock.draw.html` gives these four another look in the dark."""
GRID = "#eeeeee"
"""The lines behind a plot."""
POINTS = 72.0
"""Points an inch."""

_STYLE = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
    "text.parse_math": False,  # a name may hold any sign
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "penstock",  # the same picture has the same ids
}


@contextmanager
def style() -> Iterator[None]:
    """Our style, whatever the user's settings are, for as long as a picture is made."""
    try:
        from matplotlib import style as styles
    except ImportError:
        raise MissingExtraError("drawing a picture", "matplotlib", "plot") from None
    with styles.context(["default", _STYLE]):
        yield


@cache
def text_width(text: str, size: float, bold: bool = False) -> float:
    """How wide a text is at most, in inches: letters are a little wider where there are few pixels for them."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return 1.05 * float(width) / POINTS


def rendered(figure: Figure, form: str, dpi: float = 200.0) -> bytes:
    """The figure as `svg` or `png`, without anything that changes from one run to the next."""
    unsaid = {"svg": dict.fromkeys(("Date", "Creator", "Format", "Type")), "png": {"Software": None}}
    made = BytesIO()
    with style():
        figure.savefig(made, format=form, dpi=dpi, metadata=unsaid[form])
    return made.getvalue()
