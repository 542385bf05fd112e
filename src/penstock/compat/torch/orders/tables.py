"""Torch's orders, a dict with a list of actions for each rank, as our tables; and their text forms."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.compat.torch.orders.actions import _Action, pack, unpack
from penstock.ir import codes
from penstock.ir.csv_form import write_whole
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows

Row = Sequence[_Action | None]
Order = Mapping[int, Row]
Actions = dict[int, list[_Action]]
Spaced = dict[int, list[_Action | None]]
StageToRank = Callable[[int], int]


def pack_row(row: Row, idle: int | None = None) -> Ints:
    """One rank's packed row; idle slots are left out, or become the code `idle`."""
    entries: list[int] = []
    for action in row:
        if action is not None:
            entries += pack(action)
        elif idle is not None:
            entries.append(idle)
    return np.array(entries, dtype=np.int64)


def pack_rows(order: Order, idle: int | None = None) -> Rows:
    """Every rank's packed row; ranks that the order does not name have empty ones."""
    return Rows.join([pack_row(order.get(rank, ()), idle) for rank in range(max(order, default=-1) + 1)])


def unpack_rows(rows: Rows) -> Actions:
    """The order that the rows hold."""
    return {rank: list(unpack(rows.row(rank).tolist())) for rank in range(len(rows))}


def idle_code(stages: int) -> int:
    """Stands for an idle slot: an action of a stage beyond the last, which depends on nothing and which nothing depends on."""
    return int(codes.pack(stages, int(Kind.RESHARD)))


def row_program(rows: Rows) -> Program:
    """One rank's row as a program of a pipeline of which that rank is all, as the passes on single rows take it."""
    return start_program(rows, Placement.custom([0] * (int(rows.stage.max(initial=0)) + 1)))


def start_program(rows: Rows, placement: Placement, lowered: bool = False) -> Program:
    """The rows as a program with as many microbatches as they name."""
    has_microbatch = rows.kind <= Kind.RECV_B
    microbatches = int(rows.microbatch[has_microbatch].max(initial=0)) + 1
    return Program(rows, placement, microbatches, lowered=lowered)


def placed_by(stage_to_rank: StageToRank, stages: int, ranks: int) -> Placement:
    """The placement that a function of torch's kind describes."""
    where = [stage_to_rank(stage) for stage in range(stages)]
    return Placement.custom(where, ranks=max(ranks, *(rank + 1 for rank in where)))


# Files and pictures ---------------------------------------------------------------------------------------------------


def read_csv(filename: str) -> Spaced:
    """The order of a CSV file, idle slots and all."""
    with open(filename, newline="", encoding="utf-8") as file:
        return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}


def write_csv(order: Order, filename: str) -> None:
    """A row a rank, a cell an action, an empty cell for an idle slot; all of it or nothing."""
    lines = [",".join("" if action is None else str(action) for action in row) for row in order.values()]
    write_whole(filename, "".join(f"{line}\r\n" for line in lines))


def _format_pipeline_order(pipeline_order: Order, error_step_number: int | None = None) -> str:
    """A line a step, a column a rank, idle slots empty; the line of `error_step_number` is marked."""
    columns = [["" if action is None else str(action) for action in pipeline_order[rank]] for rank in sorted(pipeline_order)]
    steps = max(map(len, columns), default=0)
    labels = [f"Step {step:0{len(str(steps - 1))}}" for step in range(steps)]
    first = len(labels[0]) if labels else 0
    widths = [max(first, *map(len, column), 0) for column in columns]
    header = " " * (first + 2) + " ".join(f"{f'Rank {rank}':<{width}}" for rank, width in enumerate(widths))
    lines = [header]
    for step, label in enumerate(labels):
        cells = (f"{column[step] if step < len(column) else '':<{width}}" for column, width in zip(columns, widths, strict=True))
        lines.append(f"{label}: {' '.join(cells)}{' <-- ERROR HERE' if step == error_step_number else ''}")
    return "\n".join(lines) + "\n"
