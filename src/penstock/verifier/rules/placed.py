"""Every action is on a rank that holds its stage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.kind import SPREAD, Kind
from penstock.ir.rows import Flags, Rows
from penstock.verifier.context import Context
from penstock.verifier.finding import Finding


def placed(context: Context) -> Iterator[Finding]:
    """Compute and messages run on the rank of their stage and microbatch, sharding and reduction on a rank that holds their stage.

    The actions of a spread vocabulary run on every rank.
    """
    rows = context.rows
    of_microbatch = _mark_microbatches(rows)
    for entry in np.flatnonzero(context.inside & of_microbatch & ~context.at_home).tolist():
        stage, microbatch, home = int(rows.stage[entry]), int(rows.microbatch[entry]), int(context.home[entry])
        which = f" for microbatch {microbatch}" if len(context.placement.copies) > 1 else ""
        message = f"{context.name(entry)} runs on rank {int(rows.rank[entry])}, but stage {stage} is on rank {home}{which}"
        yield context.report("placed", entry, message, f"Move it to rank {home}, or change the placement")
    yield from _report_stages(context)


def _mark_microbatches(rows: Rows) -> Flags:
    return rows.is_kind(*(kind for kind in Kind if kind.has_microbatch and not kind.is_spread))


def _report_stages(context: Context) -> Iterator[Finding]:
    rows, stages, placement = context.rows, context.table.stages, context.placement
    placed_cells = np.unique([rank * stages + stage for copy in placement.copies for stage, rank in enumerate(copy)])
    here = np.isin(rows.rank * stages + rows.stage, placed_cells)
    for entry in np.flatnonzero(context.inside & ~_mark_microbatches(rows) & ~rows.is_kind(*SPREAD) & ~here).tolist():
        stage, rank = int(rows.stage[entry]), int(rows.rank[entry])
        homes = sorted({copy[stage] for copy in placement.copies})
        message = f"{context.name(entry)} runs on rank {rank}, but stage {stage} is on rank {' and '.join(map(str, homes))}"
        yield context.report("placed", entry, message, f"Move it to rank {homes[0]}, or remove it")
