"""A brute-force interpreter of programs: every rank runs its row, tokens stand for data, and what goes wrong is said.

Written from the meaning of actions alone. It knows nothing of links, walks or rules, and takes from a program only its
actions, placement, graph, microbatch count and buffers, so that it can contradict the verifier. A schedule, which has no
messages yet, runs too: what another rank makes is there once it is made.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from random import Random
from typing import NamedTuple

from ir.naive import numbered
from penstock.ir.action import Action
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.table import Table

Token = tuple[Kind, int, int]
"""What a compute action makes: F an activation, I an input gradient, W a weight gradient; of a stage and a microbatch."""


class Message(NamedTuple):
    """Data under way: an activation (F) or a gradient (I), from a stage to a stage."""

    data: Kind
    source: int
    target: int
    microbatch: int


class Wrong(Exception):  # noqa: N818 - the opposite of right, not an error of the tests
    """Something happened that must not."""


def message_of(action: Action) -> Message:
    """The message that a send or receive is one end of."""
    stage, microbatch = action.stage, action.microbatch
    assert microbatch is not None
    up = action.kind in (Kind.SEND_F, Kind.RECV_B)
    other = action.peer if action.peer is not None else stage + 1 if up else stage - 1
    data = Kind.F if action.kind in (Kind.SEND_F, Kind.RECV_F) else Kind.I
    return Message(data, stage, other, microbatch) if is_send(action) else Message(data, other, stage, microbatch)


def is_send(action: Action) -> bool:
    return action.kind in (Kind.SEND_F, Kind.SEND_B)


def awaited_by(wait: Action) -> Message:
    """The message of the send that a WAIT_SEND is for."""
    kind = Kind.SEND_F if wait.kind is Kind.WAIT_SEND_F else Kind.SEND_B
    return message_of(Action(wait.stage, kind, wait.microbatch, peer=wait.peer))


class Channels:
    """First in, first out from rank to rank for each sort of data; a send waits while all slots are taken."""

    def __init__(self, program: Table) -> None:
        self.slots = program.buffers.channels if isinstance(program, Program) and program.buffers is not None else None
        self.sent: dict[tuple[int, int, Kind], list[Message]] = defaultdict(list)
        self.posted: dict[tuple[int, int, Kind], list[Message]] = defaultdict(list)
        self.arrived: set[Message] = set()

    def send(self, message: Message, here: int, there: int) -> bool:
        channel = (here, there, message.data)
        under_way = max(0, len(self.sent[channel]) - len(self.posted[channel]))
        kind = Kind.SEND_F if message.data is Kind.F else Kind.SEND_B
        if self.slots is not None and under_way >= self.slots[here, there, kind]:
            return False
        self.sent[channel].append(message)
        self._meet(channel)
        return True

    def receive(self, message: Message, here: int, there: int) -> None:
        channel = (there, here, message.data)
        self.posted[channel].append(message)
        self._meet(channel)

    def _meet(self, channel: tuple[int, int, Kind]) -> None:
        for came, wanted in zip(self.sent[channel], self.posted[channel], strict=False):
            if came != wanted:
                raise Wrong(f"{wanted} is received, but {came} comes")
            self.arrived.add(came)

    def left_over(self) -> object:
        return next(((c, self.sent[c], self.posted[c]) for c in {*self.sent, *self.posted} if self.sent[c] != self.posted[c]), None)


class Rendezvous:
    """One queue for each rank and peer, in program order; two heads leave together when they are the two ends of one message."""

    def __init__(self, program: Table) -> None:
        self.queues: dict[tuple[int, int], deque[tuple[bool, Message]]] = defaultdict(deque)
        self.arrived: set[Message] = set()

    def send(self, message: Message, here: int, there: int) -> bool:
        self._post((True, message), here, there)
        return True

    def receive(self, message: Message, here: int, there: int) -> None:
        self._post((False, message), here, there)

    def _post(self, entry: tuple[bool, Message], here: int, there: int) -> None:
        mine, theirs = self.queues[here, there], self.queues[there, here]
        mine.append(entry)
        while mine and theirs and mine[0][1] == theirs[0][1] and mine[0][0] != theirs[0][0]:
            self.arrived.add(mine.popleft()[1])
            theirs.popleft()

    def left_over(self) -> object:
        return next(((ranks, list(queue)) for ranks, queue in self.queues.items() if queue), None)


class Machine:
    """All ranks, each somewhere in its row."""

    def __init__(self, program: Table, semantics: str) -> None:
        self.lowered = program.lowered
        self.rows = numbered(program)
        self.placement, self.graph, self.microbatches = program.placement, program.graph, program.units
        self.slices = program.slices
        self.at = [0] * len(self.rows)
        self.wires: Channels | Rendezvous = {"channels": Channels, "rendezvous": Rendezvous}[semantics](program)
        kinds = {part.kind for row in self.rows for action in row for part in action.parts}
        self.trains = bool(kinds & {Kind.B, Kind.I, Kind.W})
        self.shards = bool(kinds & {Kind.UNSHARD, Kind.RESHARD})
        self.reduces = Kind.REDUCE_GRAD in kinds
        actions = (action for row in self.rows for action in row)
        self.named = {message_of(action) for action in actions if action.kind.is_communication}
        self.made: set[Token] = set()
        self.contexts: set[tuple[int, int]] = set()  # kept by F for the backward
        self.stashes: set[tuple[int, int]] = set()  # kept by I for W
        self.sent: set[Message] = set()
        self.posted: set[Message] = set()
        self.unsharded: set[tuple[int, int]] = set()
        self.reduced: Counter[tuple[int, int]] = Counter()
        self.retires = bool(kinds & {Kind.WAIT_SEND_F, Kind.WAIT_SEND_B})
        self.retired: set[Message] = set()
        self.awaits_sums = Kind.WAIT_REDUCE_GRAD in kinds
        self.summed: set[tuple[int, int]] = set()

    # One step of one rank ---------------------------------------------------------------------------------------------

    def finished(self, rank: int) -> bool:
        return self.at[rank] == len(self.rows[rank])

    def step(self, rank: int) -> bool:
        """Run the rank's next action; False if it has to wait."""
        action = self.rows[rank][self.at[rank]]
        if action.is_compute:
            ran = self._compute(rank, action)
        elif action.kind.is_communication:
            ran = self._communicate(rank, action)
        elif action.kind in (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B):
            ran = self._retire(rank, action)
        else:
            ran = self._whole_stage(rank, action)
        self.at[rank] += ran
        return ran

    def _check_place(self, rank: int, action: Action) -> tuple[int, int]:
        stage, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        if stage >= self.graph.stages or microbatch >= self.microbatches:
            raise Wrong(f"{action}: no such stage or microbatch")
        if self.placement.rank_of(stage, microbatch) != rank:
            raise Wrong(f"{action} runs on rank {rank}")
        return stage, microbatch

    # Compute ----------------------------------------------------------------------------------------------------------

    def _compute(self, rank: int, action: Action) -> bool:
        awaited = [message for part in action.parts for message in self._needs(rank, part)]
        if not all(map(self._is_here, awaited)):
            return False
        for part in action.parts:
            self._make(rank, part)
        return True

    def _is_here(self, message: Message) -> bool:
        if self.lowered:
            return message in self.wires.arrived
        return (message.data, message.source, message.microbatch) in self.made

    def _needs(self, rank: int, part: Action) -> list[Message]:
        """Check what must be on this rank before the action; the messages it has to wait for."""
        stage, microbatch = self._check_place(rank, part)
        if self.shards and (rank, stage) not in self.unsharded:
            raise Wrong(f"{part} computes on a sharded stage")
        if part.kind is Kind.W:
            if (stage, microbatch) not in self.stashes:
                raise Wrong(f"{part} without an I before")
            return []
        if part.kind is Kind.F:
            if microbatch % self.slices and (Kind.F, stage, microbatch - 1) not in self.made:
                raise Wrong(f"{part} before the keys and values of the slice before it")
            return self._data(rank, part, Kind.F, self.graph.inputs_of(stage))
        if (stage, microbatch) not in self.contexts:
            raise Wrong(f"{part} without an F before, or after another backward")
        if (microbatch + 1) % self.slices and (Kind.I, stage, microbatch + 1) not in self.made:
            raise Wrong(f"{part} before the slice after it has added to the gradients of its keys and values")
        return self._data(rank, part, Kind.I, self.graph.outputs_of(stage))

    def _data(self, rank: int, part: Action, data: Kind, sources: tuple[int, ...]) -> list[Message]:
        awaited = []
        for source in sources:
            assert part.microbatch is not None
            message = Message(data, source, part.stage, part.microbatch)
            if self.placement.rank_of(source, part.microbatch) == rank:
                if (data, source, part.microbatch) not in self.made:
                    raise Wrong(f"{part} before its own rank made {message}")
            elif not self.lowered:
                awaited.append(message)
            elif self._carrier(message) not in self.posted:
                raise Wrong(f"{part} before its receive of {message}")
            else:
                awaited.append(self._carrier(message))
        return awaited

    def _carrier(self, message: Message) -> Message:
        """The message that brings what one would: itself if the program has it, else that of the farthest reader on the rank."""
        if message in self.named:
            return message
        forward, microbatch = message.data is Kind.F, message.microbatch
        source, reader = (message.source, message.target) if forward else (message.target, message.source)
        farthest = max(self._readers(source, self.placement.rank_of(reader, microbatch), microbatch))
        return message._replace(**{"target" if forward else "source": farthest})

    def _readers(self, source: int, rank: int, microbatch: int) -> list[int]:
        """The stages of a rank that read a stage's output."""
        return [b for a, b in self.graph.edges if a == source and self.placement.rank_of(b, microbatch) == rank]

    def _parts(self, rank: int, message: Message) -> list[int]:
        """The stages whose work a message carries: all those whose gradients are summed in it."""
        if message.data is Kind.F:
            return [message.source]
        others = self._readers(message.target, rank, message.microbatch)
        return [stage for stage in others if self._carrier(message._replace(source=stage)) == message]

    def _make(self, rank: int, part: Action) -> None:
        stage, microbatch = part.stage, part.microbatch
        assert microbatch is not None
        cell = (stage, microbatch)
        products = {Kind.F: (Kind.F,), Kind.B: (Kind.I, Kind.W), Kind.I: (Kind.I,), Kind.W: (Kind.W,)}[part.kind]
        for product in products:
            if (product, *cell) in self.made:
                raise Wrong(f"{part} makes what was made before")
            self.made.add((product, *cell))
        if part.kind is Kind.F:
            self.contexts.add(cell)
        if part.kind in (Kind.B, Kind.I):
            self.contexts.remove(cell)
        if part.kind is Kind.I:
            self.stashes.add(cell)
        if part.kind is Kind.W:
            self.stashes.remove(cell)
        if Kind.W in products and self.reduced[rank, stage]:
            raise Wrong(f"{part} adds to a gradient that was reduced")

    # Messages ---------------------------------------------------------------------------------------------------------

    def _communicate(self, rank: int, action: Action) -> bool:
        self._check_place(rank, action)
        message = message_of(action)
        edge = (message.source, message.target) if message.data is Kind.F else (message.target, message.source)
        if edge not in self.graph.edges:
            raise Wrong(f"{action} goes along no edge")
        ends = [self.placement.rank_of(stage, message.microbatch) for stage in (message.source, message.target)]
        if ends[0] == ends[1]:
            raise Wrong(f"{action} stays on its rank")
        if not is_send(action):
            if message in self.posted:
                raise Wrong(f"{action} receives again")
            self.posted.add(message)
            self.wires.receive(message, ends[1], ends[0])
            return True
        if any((message.data, stage, message.microbatch) not in self.made for stage in self._parts(rank, message)):
            raise Wrong(f"{action} sends what is not there")
        if message in self.sent:
            raise Wrong(f"{action} sends again")
        if not self.wires.send(message, *ends):
            return False
        self.sent.add(message)
        return True

    def _retire(self, rank: int, action: Action) -> bool:
        """Wait until the rank's own message has left and been received."""
        self._check_place(rank, action)
        message = awaited_by(action)
        if message in self.retired:
            raise Wrong(f"{action} waits again")
        if message not in self.sent:
            raise Wrong(f"{action} waits for what was not sent")
        if message not in self.wires.arrived:
            return False
        self.retired.add(message)
        return True

    # Whole stages -----------------------------------------------------------------------------------------------------

    def _whole_stage(self, rank: int, action: Action) -> bool:
        held = (rank, action.stage)
        if action.stage not in self.placement.stages_of(rank):
            raise Wrong(f"{action} on rank {rank}, which does not hold the stage")
        if action.kind is Kind.REDUCE_GRAD:
            self._reduce(action, held)
        elif action.kind is Kind.WAIT_REDUCE_GRAD:
            if not self.reduced[held] or held in self.summed:
                raise Wrong(f"{action} waits for no reduction")
            self.summed.add(held)
        elif (held in self.unsharded) == (action.kind is Kind.UNSHARD):
            raise Wrong(f"{action}: it already is")
        else:
            self.unsharded ^= {held}
        return True

    def _reduce(self, action: Action, held: tuple[int, int]) -> None:
        if self.reduced[held]:
            raise Wrong(f"{action} reduces again")
        if not self.trains or not self._microbatches_of(held):
            raise Wrong(f"{action} reduces nothing")
        if any((Kind.W, action.stage, microbatch) not in self.made for microbatch in self._microbatches_of(held)):
            raise Wrong(f"{action} before all weight gradients")
        self.reduced[held] += 1

    def _microbatches_of(self, held: tuple[int, int]) -> list[int]:
        rank, stage = held
        return [m for m in range(self.microbatches) if self.placement.rank_of(stage, m) == rank]

    # The end ----------------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        for rank in range(len(self.rows)):
            if not self.finished(rank):
                raise Wrong(f"rank {rank} hangs at {self.rows[rank][self.at[rank]]}")
        for product in (Kind.F, Kind.I, Kind.W) if self.trains else (Kind.F,):
            for stage in range(self.graph.stages):
                for microbatch in range(self.microbatches):
                    if (product, stage, microbatch) not in self.made:
                        raise Wrong(f"{product.name} of stage {stage}, microbatch {microbatch} was never made")
        if (left := self.wires.left_over()) is not None:
            raise Wrong(f"messages are left over: {left}")
        if self.retires and self.sent != self.retired:
            raise Wrong(f"never retired: {self.sent - self.retired}")
        if self.awaits_sums and set(self.reduced) - self.summed:
            raise Wrong(f"never waited for: {set(self.reduced) - self.summed}")
        if self.unsharded:
            raise Wrong(f"unsharded at the end: {sorted(self.unsharded)}")
        holders = {(rank, stage) for rank in range(len(self.rows)) for stage in self.placement.stages_of(rank)}
        missing = [held for held in holders if self._microbatches_of(held) and not self.reduced[held]]
        if self.reduces and missing:
            raise Wrong(f"never reduced: {sorted(missing)}")


def interpret(program: Table, semantics: str = "channels", random: Random | None = None) -> str | None:
    """None if the program is right, else the first thing that goes wrong; ranks take turns by chance if `random` is given."""
    machine = Machine(program, semantics)
    try:
        _run(machine, random)
        machine.check_end()
    except Wrong as wrong:
        return str(wrong)
    return None


def _run(machine: Machine, random: Random | None) -> None:
    """Step until every rank is at its end or waits."""
    waiting: set[int] = set()
    ranks = list(range(len(machine.rows)))
    while can := [rank for rank in ranks if rank not in waiting and not machine.finished(rank)]:
        rank = can[0] if random is None else random.choice(can)
        if machine.step(rank):
            waiting.clear()
        else:
            waiting.add(rank)


def explore(program: Table, semantics: str = "channels") -> set[str | None]:
    """The outcome of every interleaving, each state visited once: what a state holds follows from where the ranks are."""
    outcomes: set[str | None] = set()
    seen: set[tuple[int, ...]] = set()
    stack = [Machine(program, semantics)]
    while stack:
        machine = stack.pop()
        if tuple(machine.at) in seen:
            continue
        seen.add(tuple(machine.at))
        moved = False
        for rank in range(len(machine.rows)):
            if machine.finished(rank):
                continue
            following = copy.deepcopy(machine)
            try:
                if following.step(rank):
                    moved = True
                    stack.append(following)
            except Wrong as wrong:
                moved = True
                outcomes.add(str(wrong))
        if not moved:
            outcomes.add(_outcome(machine))
    return outcomes


def _outcome(machine: Machine) -> str | None:
    try:
        machine.check_end()
    except Wrong as wrong:
        return str(wrong)
    return None
