"""Write timelines to files by suffix."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from penstock.errors import FileFormatError
from penstock.ir.formats.csv_form import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from penstock.simulator.comparison.differences import Differences
    from penstock.simulator.timeline import Timeline

PICTURES = (".svg", ".png", ".html")
SUFFIXES = (".trace.json", ".json", *PICTURES)


def save(timeline: Timeline, path: str | PathLike[str], **options: Any) -> None:
    """Write one timeline to a file, whole or not at all.

    `.json` is the timeline itself, for `Timeline.load`; `.trace.json` is for Perfetto, with the option `unit`; `.svg`, `.png` and
    `.html` are pictures, with the options of `penstock.draw.figures.timelines.draw_timelines`, and `dpi` for `.png`.
    """
    suffix = suffix_of(path, SUFFIXES)
    if suffix in PICTURES:
        save_picture([timeline], path, **options)
    elif suffix == ".json":
        write_whole(path, json.dumps(timeline.to_json(**options)) + "\n")
    else:
        from penstock.draw.trace import build_trace

        write_whole(path, json.dumps(build_trace(timeline, **options), separators=(",", ":")) + "\n")


def save_picture(timelines: Sequence[Timeline], path: str | PathLike[str], **options: Any) -> None:
    """Write several timelines as one `.svg`, `.png` or `.html` picture on one time axis."""
    from penstock.draw.figures.timelines import draw_timelines
    from penstock.draw.html import timelines_html

    _write_picture(path, timelines, timelines_html, draw_timelines, options)


def save_overlay(pairs: Sequence[Differences], path: str | PathLike[str], **options: Any) -> None:
    """Write measured timelines under their predictions as one picture; the options are those of `draw_overlay`."""
    from penstock.draw.figures.overlay import draw_overlay
    from penstock.draw.html import overlay_html

    _write_picture(path, pairs, overlay_html, draw_overlay, options)


def _write_picture(
    path: str | PathLike[str], shown: Sequence[Any], page: Callable[..., str], draw: Callable[..., Figure], options: dict[str, Any]
) -> None:
    from penstock.draw.figures.canvas import render

    suffix = suffix_of(path, PICTURES)
    if suffix == ".html":
        write_whole(path, page(shown, **options))
        return
    dpi = {"dpi": options.pop("dpi")} if suffix == ".png" and "dpi" in options else {}
    write_whole(path, render(draw(shown, **options), suffix.removeprefix("."), **dpi))


def suffix_of(path: str | PathLike[str], known: Sequence[str]) -> str:
    """Find which of the known suffixes the path ends in."""
    file = os.fspath(path)
    suffix = next((known_suffix for known_suffix in known if file.lower().endswith(known_suffix)), None)
    if suffix is None:
        raise FileFormatError(file, f"the suffix is not one of {', '.join(known)}")
    return suffix
