"""DeepSpeed's dialect: a rank's program as lists of instructions, one list per step.

Works on schedules that DeepSpeed can express: one stage per rank in a line, full backwards. Each list can be run between two
barriers: a send and its receive stand in the same step on both sides. An activation crosses in the step after the forward
that made it. A gradient crosses in the step of the backward that uses it, since DeepSpeed's engine has room for one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import PassError
from penstock.ir.kind import SPREAD, Kind
from penstock.ir.program import Program
from penstock.ir.table import Table

STYLES = ("train", "inference", "data-parallel")


@dataclass(frozen=True)
class Instruction:
    """One instruction; prints as a call: `ForwardPass(buffer_id=1)`, `OptimizerStep()`."""

    name: str
    buffer_id: int | None = None

    def __str__(self) -> str:
        return f"{self.name}({'' if self.buffer_id is None else f'buffer_id={self.buffer_id}'})"


Stream = list[list[Instruction]]


def stream(table: Table, rank: int, *, style: str | None = None) -> Stream:
    """One rank's instructions, one list per step.

    `style` is `train` (forward and backward slots that alternate), `inference` or `data-parallel`; by default a schedule
    without backwards is inference, the one called data-parallel is that, and everything else trains.
    """
    return streams(table, style=style)[rank]


def streams(table: Table, *, style: str | None = None) -> list[Stream]:
    """Every rank's instructions."""
    schedule = _check_expressible(table)
    chosen = style or ("inference" if not table.training else "data-parallel" if table.name == "data-parallel" else "train")
    _check_style(chosen, schedule)
    slots = _order_by_clock(schedule, chosen)
    write = {"train": _train, "inference": _write_inference, "data-parallel": _write_data_parallel}[chosen]
    fewest = 1 if chosen == "data-parallel" else 2
    return [_add_buffers(write(slots, rank), fewest) for rank in range(schedule.ranks)]


def _check_expressible(table: Table) -> Table:
    """Return the compute actions; refuse a table that the dialect cannot express."""
    if table.placement.copies != (tuple(range(table.ranks)),) or not table.graph.is_chain:
        raise PassError(f"DeepSpeed's instructions know one stage per rank in a line, not {table.placement.describe()}")
    if table.slices > 1:
        raise PassError(
            f"DeepSpeed's instructions load whole microbatches, not {table.slices} slices of one: build the schedule without slices"
        )
    rows = table.rows
    strange = np.flatnonzero(rows.is_kind(Kind.I, Kind.W, *SPREAD) | ~rows.heads)
    if len(strange):
        action = rows.action_at(int(strange[0]))
        raise PassError(
            f"DeepSpeed's instructions run one F or B at a time, not {action}; merge-backward{{apart=true}} makes full backwards"
        )
    return table.schedule() if isinstance(table, Program) else table


def _check_style(style: str, schedule: Table) -> None:
    if style not in STYLES:
        raise PassError(f"there is no stream style {style!r}; the styles are {', '.join(STYLES)}")
    if (style == "inference") == schedule.training:
        raise PassError(f"a schedule {'with' if schedule.training else 'without'} backwards does not make a stream of style {style}")
    if style == "data-parallel" and schedule.ranks > 1:
        raise PassError(f"a data-parallel stream has one stage, not {schedule.ranks}")


Slot = tuple[Kind, int] | None
"""The computation of a rank in a step: forward or backward, and the microbatch."""


def _order_by_clock(schedule: Table, style: str) -> list[list[Slot]]:
    """Each rank's slots: the next action of its order runs in the first step of its kind after those of the actions that it needs.

    Training alternates: a stage goes forward in the steps of its own parity and backward in the others.
    """
    rows, links = schedule.rows, schedule.links
    needs: list[list[int]] = [[] for _ in rows.codes]
    for pairs in (links.local, links.data):
        for before, after in zip(pairs.before.tolist(), pairs.after.tolist(), strict=True):
            needs[after].append(before)
    kinds, microbatches = rows.kind.tolist(), rows.microbatch.tolist()
    at, ends = rows.offsets[:-1].tolist(), rows.offsets[1:].tolist()
    ran = [-1] * len(kinds)
    slots: list[list[Slot]] = [[] for _ in range(schedule.ranks)]
    step = idle = 0
    while at != ends:
        idle += 1
        for rank, entry in enumerate(at):
            ready = entry < ends[rank] and all(0 <= ran[need] < step for need in needs[entry])
            if ready and (style != "train" or kinds[entry] == (Kind.F if step % 2 == rank % 2 else Kind.B)):
                slots[rank].append((Kind(kinds[entry]), microbatches[entry]))
                ran[entry], at[rank], idle = step, entry + 1, 0
            else:
                slots[rank].append(None)
        step += 1
        if idle > 2:
            raise PassError("the order cannot run: some rank waits forever; verify the schedule to see which")
    return slots


Steps = list[list[tuple[str, int | None]]]
"""The instructions of each step, with the microbatch in place of the buffer."""


def _runs(slots: list[list[Slot]], rank: int, step: int, kind: Kind) -> int | None:
    """The microbatch that the rank runs in the step, if that rank and step exist and it is of this kind."""
    if not 0 <= rank < len(slots) or step < 0:
        return None
    slot = slots[rank][step]
    return slot[1] if slot is not None and slot[0] is kind else None


def _train(slots: list[list[Slot]], rank: int) -> Steps:
    """Gradients down and activations in before a forward slot; gradients in and activations up before a backward slot."""
    steps: Steps = []
    last = len(slots) - 1
    for step, slot in enumerate(slots[rank]):
        if step % 2 == rank % 2:
            send = ("SendGrad", _runs(slots, rank - 1, step, Kind.B))
            exchange = [send, ("RecvActivation", _runs(slots, rank - 1, step - 1, Kind.F))]
        else:
            send = ("SendActivation", _runs(slots, rank, step - 1, Kind.F) if rank < last else None)
            exchange = [("RecvGrad", _runs(slots, rank, step, Kind.B) if rank < last else None), send]
        steps.append([message for message in exchange if message[1] is not None] + _compute(slot, rank in (0, last)))
    steps[-1] += [("ReduceTiedGrads", None), ("ReduceGrads", None), ("OptimizerStep", None)]
    return steps


def _write_inference(slots: list[list[Slot]], rank: int) -> Steps:
    """Even stages send before they receive, odd ones receive before they send."""
    steps: Steps = []
    last = len(slots) - 1
    for step, slot in enumerate(slots[rank]):
        exchange = [
            ("SendActivation", _runs(slots, rank, step - 1, Kind.F) if rank < last else None),
            ("RecvActivation", _runs(slots, rank - 1, step - 1, Kind.F)),
        ]
        talk = [message for message in exchange[:: 1 if rank % 2 == 0 else -1] if message[1] is not None]
        compute = _compute(slot, rank in (0, last))
        steps.append([*compute[:-1], *talk, *compute[-1:]])
    return steps


def _compute(slot: Slot, loads: bool) -> list[tuple[str, int | None]]:
    """The computation of a slot, after the load of a microbatch on ranks that read inputs or targets."""
    if slot is None:
        return []
    kind, microbatch = slot
    load = [("LoadMicroBatch", microbatch)] if loads and kind is Kind.F else []
    return [*load, ("ForwardPass" if kind is Kind.F else "BackwardPass", microbatch)]


def _write_data_parallel(slots: list[list[Slot]], rank: int) -> Steps:
    """Gradient accumulation: one microbatch, forward and backward, per step."""
    steps: Steps = []
    for slot in filter(None, slots[rank]):
        if slot[0] is Kind.F:
            steps.append([])
        steps[-1] += _compute(slot, loads=True)
    steps[-1] += [("ReduceGrads", None), ("OptimizerStep", None)]
    return steps


def _add_buffers(steps: Steps, fewest: int) -> Stream:
    """Buffers in turn, each taken from a microbatch's first mention to its last; as many as are taken at once."""
    mentions = [microbatch for step in steps for _, microbatch in step if microbatch is not None]
    buffers = iter(_choose_buffers(mentions, fewest))
    return [[Instruction(name, None if microbatch is None else next(buffers)) for name, microbatch in step] for step in steps]


def _choose_buffers(mentions: list[int], fewest: int) -> list[int]:
    """The buffer of each mention."""
    last = {microbatch: index for index, microbatch in enumerate(mentions)}
    free = [True] * _count_alive(mentions, last, fewest)
    held: dict[int, int] = {}
    turn = 0
    buffers: list[int] = []
    for index, microbatch in enumerate(mentions):
        if microbatch not in held:
            while not free[turn]:
                turn = (turn + 1) % len(free)
            held[microbatch], free[turn] = turn, False
            turn = (turn + 1) % len(free)
        buffers.append(held[microbatch])
        if last[microbatch] == index:
            free[held[microbatch]] = True
    return buffers


def _count_alive(mentions: list[int], last: dict[int, int], fewest: int) -> int:
    alive: set[int] = set()
    most = fewest
    for index, microbatch in enumerate(mentions):
        alive.add(microbatch)
        most = max(most, len(alive))
        if last[microbatch] == index:
            alive.remove(microbatch)
    return most
