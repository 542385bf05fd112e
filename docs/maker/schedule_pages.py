"""One page per schedule, from the registry: idea, picture, grid, formulas against the simulator, when to use it, options."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import penstock as ps
from maker.advice import advice
from maker.figures import Times, measured, needs, ranks_of
from maker.formulas import FORMULAS, messages_of
from maker.pictures import MICROBATCHES, RANKS
from maker.table import rows, schedule_table
from penstock.cli.main import main
from penstock.schedules.registry import Algorithm, algorithms

SHAPES = ((4, 8), (4, 16), (8, 16), (8, 32), (16, 64))
"""The ranks and microbatches that a page shows figures for."""
LETTERS = (
    "p ranks, r the rank, m microbatches, v chunks per rank (2 by default), w waves, N and g the group size; F, B, I and W are the times "
    "of forward, full backward, backward for the input and backward for the weights, all of a rank's share of the model unless the formula "
    "says otherwise."
)

PYTHON = """```python
import penstock as ps

schedule = ps.schedule("{name}", ranks={ranks}, microbatches={microbatches})
print(ps.verify(ps.lower(schedule)))
```"""

OPTIONS = {
    "chunks": "stages per rank",
    "waves": "times down and up the ranks, of two chunks each",
    "group_size": "microbatches that pass all chunks of a rank before the next ones start; by default chosen from ranks and microbatches",
    "costs": "a `Costs`, for which the order is searched; by default all times are equal",
    "memory_limit": 'the most that a rank may hold, in the unit of the costs, or like `"40GiB"`; by default one activation per rank',
}


def schedule_pages() -> dict[str, str]:
    """The pages by their path."""
    return {"schedules/index.md": schedule_index(), **{f"schedules/{name}.md": schedule_page(each) for name, each in algorithms().items()}}


def schedule_index() -> str:
    """All of them in one table."""
    return f"""# Schedules

{len(algorithms())} schedules ship with Penstock. Each works with any number of microbatches.

{LETTERS} Memory counts the activations of one microbatch on one rank, unless it says otherwise.

**In bold** are the simulator's measurements with 8 ranks, 32 microbatches and F = I = W: the share of time that ranks are idle, the most
activations that a rank holds until their backward for the weights, and messages per step.

{schedule_table(lambda name: f"[`{name}`]({name}.md)")}

`penstock list` has the same table, and `penstock compare` times several under your own costs:

```console
$ penstock compare 1f1b zb-h1 zbv -p 8 -m 32
{_said("compare", "1f1b", "zb-h1", "zbv", "-p", "8", "-m", "32")}
```
"""


def schedule_page(each: Algorithm) -> str:
    """One schedule."""
    return "\n\n".join(part for part in _parts(each) if part) + "\n"


def _parts(each: Algorithm) -> Iterator[str]:
    name = each.name
    ranks = ranks_of(name, RANKS)
    yield f"# {name}"
    yield f"**{each.summary}**"
    yield from _idea(each)
    yield f"![{name} on {ranks} ranks with {MICROBATCHES} microbatches](../pictures/schedules/{name}.svg)"
    shape = f"{ranks} {'ranks' if ranks > 1 else 'rank'}, {MICROBATCHES} microbatches, F = I = W"
    yield f"*{shape}: one row per rank, time from left to right; below, the memory of each rank.*"
    yield "## When to use it"
    yield advice().get(name, "")
    yield f"It needs: {needs(name)}." if needs(name) else ""
    yield "## What it costs"
    yield rows([("", "formula"), ("bubble", each.bubble), ("memory", each.memory), ("messages per step", _messages(each))])
    yield LETTERS + " Memory counts activations of one microbatch on one rank, unless it says otherwise."
    yield from _figures(each)
    yield "## Options"
    yield _options(each)
    yield "## The order"
    shown = ("show", name, "-p", str(ranks), "-m", str(MICROBATCHES))
    yield f"```console\n$ penstock {' '.join(shown)}\n{_said(*shown)}\n```"
    yield "One row per step, one column per rank; `2F0` is stage 2, forward, microbatch 0. In Python:"
    yield PYTHON.format(name=name, ranks=ranks, microbatches=MICROBATCHES)
    yield from _references(each)


def _idea(each: Algorithm) -> Iterator[str]:
    """The docstring's paragraphs between the summary and the formulas."""
    text = (inspect.getdoc(each.generate) or "").partition(">>>")[0]
    for paragraph in text.split("\n\n")[1:]:
        if not paragraph.startswith(("Bubble:", "Memory:", "Needs:")):
            yield " ".join(paragraph.split())


def _placement(each: Algorithm, ranks: int, microbatches: int) -> str:
    return ps.schedule(each.name, ranks=ranks, microbatches=microbatches).placement.kind


def _messages(each: Algorithm) -> str:
    return messages_of(each.name, _placement(each, ranks_of(each.name, RANKS), 1))[0]


def _figures(each: Algorithm) -> Iterator[str]:
    """What the formulas say and what the simulator measures, side by side."""
    known = FORMULAS.get(each.name)
    times = known.times if known is not None else Times()
    yield f"Measured by the simulator, with {times}, in units of F and of one activation; in brackets, the formula's value:"
    head = ("ranks", "microbatches", "idle per rank", "bubble", "peak of the fullest rank", "messages")
    shapes = sorted({(ranks_of(each.name, ranks), microbatches) for ranks, microbatches in SHAPES})
    yield rows([head, *(_measured(each, ranks, microbatches, times) for ranks, microbatches in shapes)])
    if known is not None and known.of_span:
        yield "Idle time is counted from a rank's first action to its last here, as in the formula; the bubble counts the whole step."


def _measured(each: Algorithm, ranks: int, microbatches: int, times: Times) -> tuple[str, ...]:
    found, known = measured(each.name, ranks, microbatches, times), FORMULAS.get(each.name)
    schedule = ps.schedule(each.name, ranks=ranks, microbatches=microbatches)
    shape = (ranks, microbatches, max(1, schedule.stages // ranks))
    idle = found.span_idle if known is not None and known.of_span else found.idle
    most = "at most " if known is not None and known.at_most else ""
    said_idle = f" ({most}{known.idle(*shape, times):g})" if known is not None and known.idle is not None else ""
    said_peak = f" ({known.peak(*shape):g})" if known is not None and known.peak is not None else ""
    messages = messages_of(each.name, schedule.placement.kind)[1](*shape)
    return (
        str(ranks),
        str(microbatches),
        f"{round(idle, 9):g}{said_idle}",
        f"{found.bubble:.1%}",
        f"{found.peak:g}{said_peak}",
        f"{found.messages} ({messages})",
    )


def _options(each: Algorithm) -> str:
    named: dict[str, Any] = {**dict.fromkeys(each.layout.counts), **each.options}
    if not named:
        return "None beyond `ranks` and `microbatches`."
    defaults = {unit: each.layout.chunks // (each.layout.unit[1] if unit == each.layout.unit[0] else 1) for unit in each.layout.counts}
    return rows([("option", "default", "meaning"), *((f"`{name}`", _default(name, defaults), OPTIONS.get(name, "")) for name in named)])


def _default(name: str, defaults: dict[str, int]) -> str:
    return str(defaults.get(name, "`None`"))


def _said(*words: str) -> str:
    """What a command prints."""
    said = StringIO()
    with redirect_stdout(said):
        main(words)
    return "\n".join(line.rstrip() for line in said.getvalue().splitlines())


def _references(each: Algorithm) -> Iterator[str]:
    found = re.findall(r"arXiv (\d{4}\.\d{5})", inspect.getdoc(each.generate) or "")
    if found:
        yield "## Reference"
        yield ", ".join(f"[arXiv {number}](https://arxiv.org/abs/{number})" for number in found)
