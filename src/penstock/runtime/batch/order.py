"""Applies the order of a `BatchPlanner`, or of the caller, to the microbatches of a step."""

from __future__ import annotations

import hashlib
from typing import Any

from penstock.errors import ScheduleError
from penstock.ir.table import Table
from penstock.planner.batches.batch_planner import BatchOrder
from penstock.runtime.batch.step_input import StepInput


def apply_order(step_input: StepInput, order: Any, table: Table) -> None:
    """Put the microbatches in this order and choose its schedule; `table` is the pipeline's own schedule or program."""
    count = step_input.microbatches
    if isinstance(order, BatchOrder):
        numbers: Any = order.microbatches
        if len(numbers) == count and order.schedule != table:
            _check_schedule(order, table)
            step_input.schedule, step_input.share.schedule = order.schedule, identify_schedule(order.schedule)
    else:
        numbers = order.tolist() if hasattr(order, "tolist") else order
    is_listed = isinstance(numbers, (list, tuple, range)) and all(hasattr(number, "__index__") for number in numbers)
    if not is_listed or len(numbers) != count or set(numbers) != set(range(count)):
        raise ScheduleError(
            f"the order {numbers!r} is not one of the {count} microbatches of the step: it must have each number from 0 to {count - 1} once"
        )
    step_input.permute(numbers)


def identify_schedule(schedule: Table) -> str:
    """Name a schedule by its rows: the same on every rank, and quicker than comparing all of them."""
    return f"{schedule.name}-{hashlib.blake2b(schedule.rows.codes.tobytes(), digest_size=8).hexdigest()}"


def _check_schedule(order: BatchOrder, table: Table) -> None:
    """Refuse a schedule whose stages are on other ranks, or of a model with other edges."""
    schedule = order.schedule
    if schedule.placement.copies != table.placement.copies:
        raise ScheduleError(
            f"the order is for {schedule.name} on a {schedule.placement.describe()}, but the pipeline's placement is "
            f"{table.placement.describe()}: plan batches from the pipeline's own plan or schedule"
        )
    if schedule.slices != table.slices:
        raise ScheduleError(
            f"the order's schedule {schedule.name} cuts microbatches into {schedule.slices} slices, the pipeline's into {table.slices}: "
            "plan batches from the pipeline's own schedule with schedules=()"
        )
    if schedule.graph != table.graph:
        raise ScheduleError(
            f"the order's schedule {schedule.name} has a stage graph with the edges {schedule.graph.edges}, the pipeline's has "
            f"{table.graph.edges}: plan batches from the pipeline's own schedule with schedules=()"
        )
    if schedule.spread_stages != table.spread_stages:
        raise ScheduleError(
            f"the order's schedule {schedule.name} spreads layers of the stages {list(schedule.spread_stages)} over the ranks, the "
            f"pipeline's those of {list(table.spread_stages)}: give a list of numbers as the order"
        )
