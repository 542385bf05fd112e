"""Write timelines to files by suffix."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from penstock.errors import FileFormatError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from penstock.simulator.differences import Differences
    from penstock.simulator.timeline import Timeline

PICTURES = (".svg", ".png", ".html")
SUFFIXES = (".trace.json", ".json", *PICTURES)


def save(timeline: Timeline, path: str | PathLike[str], **options: Any) -> None:
    """Write one timeline, all of it or nothing.

    `.json` is the timeline itself, for `Timeline.load`; `.trace.json` is for Perfetto, with the option `unit`; `.svg`, `.png` and
    `.html` are pictures, with the options of `penstock.draw.figure.figure`, and `dpi` for `.png`.
    """
    suffix = suffix_of(path, SUFFIXES)
    if suffix in PICTURES:
        save_picture([timeline], path, **options)
    elif suffix == ".json":
        _write(path, lambda: json.dumps(timeline.to_json(**options)) + "\n")
    else:
        from penstock.draw.trace import trace

        _write(path, lambda: json.dumps(trace(timeline, **options), separators=(",", ":")) + "\n")


def save_picture(timelines: Sequence[Timeline], path: str | PathLike[str], **options: Any) -> None:
    """Write several timelines as one `.svg`, `.png` or `.html` picture on one time axis."""
    from penstock.draw.figure import figure
    from penstock.draw.html import html

    _write_picture(path, timelines, html, figure, options)


def save_overlay(found: Sequence[Differences], path: str | PathLike[str], **options: Any) -> None:
    """Write measured timelines under their predictions as one picture; options are those of `penstock.draw.overlay.overlay`."""
    from penstock.draw.html import overlay_html
    from penstock.draw.overlay import overlay

    _write_picture(path, found, overlay_html, overlay, options)


def _write_picture(
    path: str | PathLike[str], what: Sequence[Any], page: Callable[..., str], figure: Callable[..., Figure], options: dict[str, Any]
) -> None:
    from penstock.draw.canvas import rendered

    suffix = suffix_of(path, PICTURES)
    if suffix == ".html":
        _write(path, lambda: page(what, **options))
        return
    dpi = {"dpi": options.pop("dpi")} if suffix == ".png" and "dpi" in options else {}
    _write(path, lambda: rendered(figure(what, **options), suffix.removeprefix("."), **dpi))


def suffix_of(path: str | PathLike[str], known: Sequence[str]) -> str:
    """Which of the suffixes the path ends in."""
    file = os.fspath(path)
    found = next((suffix for suffix in known if file.lower().endswith(suffix)), None)
    if found is None:
        raise FileFormatError(file, f"the suffix is not one of {', '.join(known)}")
    return found


def _write(path: str | PathLike[str], make: Callable[[], str | bytes]) -> None:
    from penstock.ir.csv_form import write_whole

    write_whole(path, make())
