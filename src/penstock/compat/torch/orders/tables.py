"""Translation between torch's orders (a dict of one list of actions per rank) and our tables, and the orders' text forms."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.compat.torch.orders.actions import WAITS, _Action, pack, unpack
from penstock.ir import codes
from penstock.ir.formats.csv_form import write_whole
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.rows import Ints, Rows

Row = Sequence[_Action | None]
Order = Mapping[int, Row]
"""An order as an argument: for each rank its row, with or without idle slots."""
DenseOrder = dict[int, list[_Action]]
"""An order without idle slots."""
SpacedOrder = dict[int, list[_Action | None]]
"""An order with idle slots."""
StageToRank = Callable[[int], int]


def pack_row(row: Row, idle: int | None = None, wait: int | None = None) -> Ints:
    """Pack one rank's row. Idle slots are left out, or become the code `idle`; so do waits, or become the code `wait`."""
    entries: list[int] = []
    for action in row:
        if action is None:
            entries += [] if idle is None else [idle]
        elif action.computation_type in WAITS:
            entries += [] if wait is None else [wait]
        else:
            entries += pack(action)
    return np.array(entries, dtype=np.int64)


def pack_rows(order: Order, idle: int | None = None, wait: int | None = None) -> Rows:
    """Pack the row of every rank. Ranks that the order does not name get an empty row."""
    return Rows.join([pack_row(order.get(rank, ()), idle, wait) for rank in range(max(order, default=-1) + 1)])


def unpack_rows(rows: Rows) -> DenseOrder:
    """Unpack rows into an order."""
    return {rank: list(unpack(rows.row(rank).tolist())) for rank in range(len(rows))}


def idle_code(stages: int) -> int:
    """Return the code that marks an idle slot: an action of a stage beyond the last, without dependencies."""
    return int(codes.pack(stages, int(Kind.RESHARD)))


def wait_code(stages: int) -> int:
    """Return the code that stands for a wait, which `penstock.ir` has no kind for: like an idle slot, but kept."""
    return int(codes.pack(stages + 1, int(Kind.RESHARD)))


def restore_waits(lowered: Order, order: Order, stages: int) -> DenseOrder:
    """Put the waits of `order` back in the places that `wait_code` holds in `lowered`; passes keep their order on each rank."""
    restored: DenseOrder = {}
    for rank, row in lowered.items():
        waits = (action for action in order.get(rank, ()) if action is not None and action.computation_type in WAITS)
        restored[rank] = [next(waits) if action.stage_index == stages + 1 else action for action in row if action is not None]
    return restored


def build_row_program(row: Row) -> Program:
    """Build a program of one rank's row, as if that rank held the whole pipeline: passes on single rows take it so."""
    rows = Rows.join([pack_row(row)])
    return build_program(rows, Placement.custom([0] * (int(rows.stage.max(initial=0)) + 1)))


def build_program(rows: Rows, placement: Placement, lowered: bool = False) -> Program:
    """Build a program of the rows, with as many microbatches as they name."""
    has_microbatch = rows.kind <= Kind.RECV_B
    microbatches = int(rows.microbatch[has_microbatch].max(initial=0)) + 1
    return Program(rows, placement, microbatches, lowered=lowered)


def build_placement(stage_to_rank: StageToRank, stages: int, ranks: int) -> Placement:
    """Build the placement that torch's function from stages to ranks describes."""
    rank_of_stage = [stage_to_rank(stage) for stage in range(stages)]
    return Placement.custom(rank_of_stage, ranks=max(ranks, *(rank + 1 for rank in rank_of_stage)))


# Files and text -------------------------------------------------------------------------------------------------------


def read_csv(filename: str) -> SpacedOrder:
    """Read an order with its idle slots from a CSV file."""
    with open(filename, newline="", encoding="utf-8") as file:
        return {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}


def write_csv(order: Order, filename: str) -> None:
    """Write an order to a CSV file, whole or not at all: one row per rank, one cell per action, an empty cell per idle slot."""
    lines = [",".join("" if action is None else str(action) for action in row) for row in order.values()]
    write_whole(filename, "".join(f"{line}\r\n" for line in lines))


def _format_pipeline_order(pipeline_order: Order, error_step_number: int | None = None) -> str:
    """Format an order as a table of one line per step and one column per rank; the line of `error_step_number` is marked."""
    columns = [["" if action is None else str(action) for action in pipeline_order[rank]] for rank in sorted(pipeline_order)]
    steps = max(map(len, columns), default=0)
    labels = [f"Step {step:0{len(str(steps - 1))}}" for step in range(steps)]
    label_width = len(labels[0]) if labels else 0
    widths = [max(label_width, *map(len, column), 0) for column in columns]
    header = " " * (label_width + 2) + " ".join(f"{f'Rank {rank}':<{width}}" for rank, width in enumerate(widths))
    lines = [header]
    for step, label in enumerate(labels):
        cells = (f"{column[step] if step < len(column) else '':<{width}}" for column, width in zip(columns, widths, strict=True))
        lines.append(f"{label}: {' '.join(cells)}{' <-- ERROR HERE' if step == error_step_number else ''}")
    return "\n".join(lines) + "\n"
