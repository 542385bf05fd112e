"""Reads a schedule that the page exported, proves it, and prints what the library says of it."""

from __future__ import annotations

import json
import sys

import penstock as ps

table = ps.load(sys.argv[1])
proof = ps.verify(table)
timeline = ps.simulate(table)
ranks = [table.placement.rank_of(stage) for stage in range(table.stages)]
sys.stdout.write(
    json.dumps(
        {
            "actions": proof.actions,
            "makespan": timeline.makespan,
            "ranks": ranks,
            "microbatches": table.microbatches,
            "slices": table.slices,
            "rows": [[str(action) for action in row] for row in table],
        }
    )
)
