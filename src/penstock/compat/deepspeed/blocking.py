"""Receives that block, sends that do not: who waits for ever.

The verifier's channels let a receive return at once and compute wait for the data. An instruction that receives waits by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.program import Program
from penstock.ir.steps import walk
from penstock.verifier.finding import Finding, Severity


def stuck(program: Program) -> Iterator[Finding]:
    """A finding for every rank that stops, at the receive where it does."""
    rows, messages = program.rows, program.links.messages
    reached = walk(rows, messages)
    heads = rows.group_offsets[:-1] + reached.done
    for rank in np.flatnonzero(heads < rows.group_offsets[1:]).tolist():
        receive = int(heads[rank])  # no action of a stream has parts, so that groups are entries
        send = int(messages.before[messages.after == receive][0])
        other, step = int(rows.rank[send]), int(rows.step[send])
        what, place = str(rows.action_at(send)), f"step {step} of rank {other}"
        yield Finding(
            "deadlock",
            Severity.HANG,
            rank,
            int(rows.step[receive]),
            str(rows.action_at(receive)),
            f"it waits for {what}, which is {place}, which has come as far as its step {int(reached.done[other])}",
            f"Let rank {other} run {what} before what it waits for, or receive later on rank {rank}",
            program,
        )
