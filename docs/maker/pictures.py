"""The pictures of the documentation, drawn by the library when the pages are built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import penstock as ps
from maker.figures import simulated
from penstock.draw.figures.canvas import recolour, render
from penstock.draw.figures.plots import draw_tradeoff
from penstock.draw.figures.timelines import draw_timelines
from penstock.schedules.registry import algorithms

RANKS, MICROBATCHES = 4, 8
WIDTH = 8.0
UNEVEN = (1.0, 1.0, 1.5, 1.0)


def schedule_picture(name: str) -> bytes:
    """One schedule with equal times."""
    return _drawn([simulated(name, RANKS, MICROBATCHES)])


def _drawn(timelines: Sequence[ps.Timeline], memory: bool = True, names: Sequence[str] | None = None) -> bytes:
    return render(draw_timelines(timelines, width=WIDTH, memory=memory, names=names), "svg")


def _compared(*names: str) -> bytes:
    return _drawn([simulated(name, RANKS, MICROBATCHES) for name in names], memory=False)


def _timed(name: str, costs: ps.Costs, title: str) -> tuple[str, ps.Timeline]:
    schedule = ps.schedule(name, ranks=RANKS, microbatches=MICROBATCHES)
    return title, ps.simulate(ps.lower(schedule), costs, engine="plain")


def _latency() -> bytes:
    """Two schedules with messages that take half as long as a forward."""
    pairs = [_timed(name, ps.Costs(latency=0.5), f"{name}, messages of half a forward") for name in ("1f1b", "eager-1f1b")]
    return _drawn([timeline for _, timeline in pairs], memory=False, names=[title for title, _ in pairs])


def _uneven() -> bytes:
    """A stage that takes longer than the others."""
    even = _timed("1f1b", ps.Costs(), "equal stages")
    slow = _timed("1f1b", ps.Costs(f=UNEVEN, i=UNEVEN, w=UNEVEN), "stage 2 takes half as long again")
    return _drawn([even[1], slow[1]], memory=False, names=[even[0], slow[0]])


def _candidates() -> bytes:
    """What a plan for unequal layers is chosen from: forwards of 5 and 7.5 ms, activations of 1 and 1.5 GiB."""
    ms, gib = 1e-3, 2.0**30
    layers = [
        ps.Layer(
            f=5 * ms * share, i=5 * ms * share, w=5 * ms * share, activation=gib * share, weight_stash=gib * share / 2, parameters=2 * gib
        )
        for share in (1.0, *UNEVEN, 1.0, *UNEVEN[:2])
    ]
    profile = ps.Profile(layers=layers, latency=0.5 * ms, time_unit="s")
    plan = ps.plan(profile, ranks=RANKS, microbatches=MICROBATCHES, memory_limit="16GiB", seconds=0.5)
    return render(draw_tradeoff(plan), "svg")


CONCEPTS: dict[str, Callable[[], bytes]] = {
    "bubble": lambda: _compared("gpipe", "1f1b"),
    "memory": lambda: _drawn([simulated("1f1b", RANKS, MICROBATCHES)]),
    "interleaved": lambda: _compared("1f1b", "interleaved-1f1b"),
    "split": lambda: _compared("1f1b", "zb-h1", "zbv"),
    "latency": _latency,
    "uneven": _uneven,
    "candidates": _candidates,
}
"""What the pages of `docs` show as `pictures/NAME.svg`."""


DARK = {"ink": "#e4e8ea", "faint": "#a3adb3", "paper": "#0e171c", "idle": "#2c383f", "grid": "#223038"}
"""The colours of text, lines and idle time on the dark ground of `style.css`."""


def dark_path(path: str) -> str:
    """The path of a picture's version for the dark mode."""
    return path.removesuffix(".svg") + "-dark.svg"


def pictures() -> dict[str, Callable[[], bytes]]:
    """Every picture by its path, each also in the colours of the dark mode."""
    drawn: dict[str, Callable[[], bytes]] = {f"pictures/{name}.svg": draw for name, draw in CONCEPTS.items()}
    for name in algorithms():
        drawn[f"pictures/schedules/{name}.svg"] = partial(schedule_picture, name)
    light = {path: cache(draw) for path, draw in drawn.items()}
    dark = {dark_path(path): partial(_darken, draw) for path, draw in light.items()}
    return {**light, **dark}


def _darken(draw: Callable[[], bytes]) -> bytes:
    return recolour(draw().decode(), **DARK).encode()
