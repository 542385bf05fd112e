"""Cases of orders and files: generating, drawing, parsing and checking them. No step is run."""

from __future__ import annotations

from typing import Any

from benchmarks.cases.engines import PenstockEngine
from benchmarks.cases.outcome import DIFFERS, RAISES, RIGHT, Case, Outcome

import penstock as ps


def numbering(engine: Any) -> Outcome:
    """Microbatches of the last rank in 1F1B's order, with 2 ranks and 4 microbatches."""
    if isinstance(engine, PenstockEngine):
        numbers = {action.microbatch for action in ps.schedule("1f1b", 2, 4)[1]}
    else:
        rows = engine.load("_schedule_visualizer").get_schedule_ops("1F1B", 2, 4)
        numbers = {action.microbatch_index for action in rows[1] if action is not None and action.microbatch_index is not None}
    text = f"microbatches {', '.join(map(str, sorted(numbers)))}"
    return Outcome(RIGHT if numbers == {0, 1, 2, 3} else DIFFERS, text)


def draw_messages(engine: Any) -> Outcome:
    """GPipe and 1F1B with their messages: one message forward and one back per microbatch, sent and received."""
    for name, torch_name in (("gpipe", "GPipe"), ("1f1b", "1F1B")):
        if isinstance(engine, PenstockEngine):
            cells = [str(action) for row in ps.lower(ps.schedule(name, 2, 4)) for action in row]
        else:
            rows = engine.load("_schedule_visualizer").get_schedule_ops(torch_name, 2, 4, with_comms=True)
            cells = [str(action) for row in rows for action in row]
        messages = sum(kind in cell for cell in cells if "WAIT" not in cell for kind in ("SEND", "RECV"))
        if messages != 16:
            return Outcome(DIFFERS, f"{name} has {messages} sends and receives, not 16")
    return Outcome(RIGHT, "4 + 4 messages each")


def space_v(engine: Any) -> Outcome:
    """ZB-V with idle slots: every action on the rank that holds its stage."""
    if isinstance(engine, PenstockEngine):
        timeline = ps.simulate(ps.lower(ps.schedule("zbv", 2, 4)))
        rows = [[(action.stage, action.kind in (ps.Kind.F, ps.Kind.I, ps.Kind.W)) for action in row] for row in timeline.table]
        cells = [[stage for stage, computes in row if computes] for row in rows]
    else:
        spaced = engine.load("_schedule_visualizer").get_schedule_ops("ZBVZeroBubble", 2, 4, add_spacing=True)
        cells = [[action.stage_index for action in row if action is not None] for row in spaced]
    wrong = sum(stage not in (rank, 3 - rank) for rank, row in enumerate(cells) for stage in row)
    total = sum(map(len, cells))
    expected = 4 * 4 * 3  # stages, microbatches, kinds
    if wrong:
        return Outcome(DIFFERS, f"{wrong} of {total} actions on a rank without their stage")
    return Outcome(RIGHT if total == expected else DIFFERS, f"{total} actions on their ranks")


def format_short(engine: Any) -> Outcome:
    """Print an order with fewer steps than ranks."""
    if isinstance(engine, PenstockEngine):
        text = ps.schedule("inference", 4, 1).grid()
    else:
        schedules = engine.load("schedules")
        text = schedules._format_pipeline_order({rank: [schedules._Action.from_str(f"{rank}F0")] for rank in range(4)})
    return Outcome(RIGHT if "0F0" in text else DIFFERS, "a table")


def parse_junk(engine: Any) -> Outcome:
    try:
        action = ps.Action.parse("1F0xyz") if isinstance(engine, PenstockEngine) else engine.load("schedules")._Action.from_str("1F0xyz")
    except Exception as error:
        return Outcome(RIGHT, f"refused: {type(error).__name__}")
    return Outcome(DIFFERS, f"`1F0xyz` is read as `{action}`")


def validate_beyond(engine: Any) -> Outcome:
    """An order with microbatches 0 and 7 of a step with 2."""
    cells = ["0F0", "0F7", "0B0", "0B7"]
    try:
        if isinstance(engine, PenstockEngine):
            ps.verify(ps.lower(ps.Schedule.from_actions([cells], ps.schedule("1f1b", 1, 2).placement)))
        else:
            schedules = engine.load("schedules")
            schedules._validate_schedule({0: [schedules._Action.from_str(cell) for cell in cells]}, 1, 1, 2)
    except Exception as error:
        return Outcome(RIGHT, f"refused: {type(error).__name__}")
    return Outcome(DIFFERS, "microbatch 7 of 2 is accepted")


CASES = (
    Case("11a", "1F1B's own order, last rank", DIFFERS, numbering, ranks=1),
    Case("11b", "GPipe and 1F1B drawn with messages", RAISES, draw_messages, ranks=1),
    Case("11c", "ZB-V drawn with idle slots", DIFFERS, space_v, ranks=1),
    Case("12a", "an order with fewer steps than ranks, printed", RAISES, format_short, ranks=1),
    Case("12b", "a cell `1F0xyz`", DIFFERS, parse_junk, ranks=1),
    Case("12c", "microbatches beyond the last", DIFFERS, validate_beyond, ranks=1),
)
