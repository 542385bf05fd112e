"""Waits as actions: torch 2.15 writes into its orders where a rank waits for a send (`WAIT_SEND_F`, `WAIT_SEND_B`) or for the reduction
of gradients (`WAIT_REDUCE_GRAD`).

`penstock.ir` has no such kinds, so everything that packs an order leaves them out (`tables.pack_row`) or packs a placeholder
(`tables.wait_code`). Here they are added, checked, and moved so that few sends are under way at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.compat.torch._debug import schedule_log
from penstock.compat.torch.orders.actions import (
    BACKWARD_INPUT,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WAIT_REDUCE_GRAD,
    WAIT_SEND_B,
    WAIT_SEND_F,
    _Action,
    _ComputationType,
    split_action,
)
from penstock.compat.torch.orders.tables import DenseOrder, Order, Row, StageToRank

_WAIT_FOR = {SEND_F: WAIT_SEND_F, SEND_B: WAIT_SEND_B}
_SEND_OF = {wait: send for send, wait in _WAIT_FOR.items()}
_RECEIVER = {SEND_F: (RECV_F, 1), SEND_B: (RECV_B, -1)}
"""By kind of send: the kind of the receive, and how far away its stage is."""


def _list_parts(row: Row) -> Iterator[_Action]:
    return (part for action in row if action is not None for part in split_action(action))


def _build_wait(send: _Action) -> _Action:
    return _Action(send.stage_index, _WAIT_FOR[send.computation_type], send.microbatch_index)


def _find_send(wait: _Action) -> _Action:
    return _Action(wait.stage_index, _SEND_OF[wait.computation_type], wait.microbatch_index)


# Reductions -----------------------------------------------------------------------------------------------------------


def add_reduction_waits(row: Row, defer: bool) -> list[_Action | None]:
    """Add a WAIT_REDUCE_GRAD right after each REDUCE_GRAD; if deferred, before the rank's next REDUCE_GRAD, or at the end."""
    waited: list[_Action | None] = []
    pending: list[_Action | None] = []
    for action in row:
        if action is None or action.computation_type != REDUCE_GRAD:
            waited.append(action)
            continue
        waited += [*pending, action]
        pending = [_Action(action.stage_index, WAIT_REDUCE_GRAD)]
        if not defer:
            waited += pending
            pending = []
    return waited + pending


def validate_reduction_waits(order: Order) -> None:
    """Refuse reductions and waits that do not alternate on a rank. An order without any such wait is accepted."""
    for rank, row in order.items():
        parts = list(_list_parts(row))
        if not any(part.computation_type == WAIT_REDUCE_GRAD for part in parts):
            continue
        pending: int | None = None
        for part in parts:
            if part.computation_type == REDUCE_GRAD:
                if pending is not None:
                    raise ValueError(
                        f"Rank {rank} cannot start REDUCE_GRAD for stage {part.stage_index} while stage {pending} has a pending reduction: "
                        f"put {pending}WAIT_REDUCE_GRAD before it"
                    )
                pending = part.stage_index
            elif part.computation_type == WAIT_REDUCE_GRAD:
                if pending != part.stage_index:
                    reason = "without a pending reduction" if pending is None else f"but stage {pending} has the pending reduction"
                    raise ValueError(f"Rank {rank} has WAIT_REDUCE_GRAD for stage {part.stage_index}, {reason}")
                pending = None
        if pending is not None:
            raise ValueError(f"Stage {pending} at rank {rank} has REDUCE_GRAD without WAIT_REDUCE_GRAD")


# Sends ----------------------------------------------------------------------------------------------------------------


def add_send_waits(comm_actions: Order) -> DenseOrder:
    """Add a wait for each send: of activations after their backward on this rank, which needs the receiver's answer; else at the end."""
    return {rank: _add_waits_to_row(row) for rank, row in comm_actions.items()}


def _add_waits_to_row(row: Row) -> list[_Action]:
    waited: list[_Action] = []
    pending: dict[_Action, None] = {}
    for action in row:
        if action is None:
            continue
        waited.append(action)
        if action.computation_type in _WAIT_FOR:
            if action in pending:
                raise AssertionError(f"Duplicate pipeline send {action}")
            pending[action] = None
        for part in split_action(action):
            send = _Action(part.stage_index, SEND_F, part.microbatch_index)
            if part.computation_type in (FULL_BACKWARD, BACKWARD_INPUT) and send in pending:
                del pending[send]
                waited.append(_build_wait(send))
    return waited + [_build_wait(send) for send in pending]


def has_send_waits(order: Order) -> bool:
    """Return whether an order writes out any wait for a send."""
    return any(part.computation_type in _SEND_OF for row in order.values() for part in _list_parts(row))


def validate_send_waits(comm_actions: Order) -> None:
    """Refuse an order in which a send has no wait after it, or a wait no send before it."""
    for rank, row in comm_actions.items():
        pending: dict[_Action, None] = {}
        started: set[_Action] = set()
        for part in _list_parts(row):
            kind = part.computation_type
            if (kind in _WAIT_FOR or kind in _SEND_OF) and part.microbatch_index is None:
                what = "Send" if kind in _WAIT_FOR else "Wait"
                raise ValueError(f"{what} action {part} at rank {rank} has no microbatch index")
            if kind in _WAIT_FOR:
                if part in started:
                    raise ValueError(f"Duplicate pipeline send {part} at rank {rank}")
                started.add(part)
                pending[part] = None
            elif kind in _SEND_OF:
                if _find_send(part) not in pending:
                    raise ValueError(f"Pipeline wait {part} at rank {rank} has no pending send")
                del pending[_find_send(part)]
        if pending:
            raise ValueError(f"Pipeline sends at rank {rank} have no matching wait: {', '.join(map(str, pending))}")


class _SendGraph:
    """What comes before what when a wait lasts until the message is received: each rank's actions in their order, each send before its
    receive, and each receive before the action that follows the wait for it."""

    def __init__(self, order: Order, stage_to_rank: StageToRank) -> None:
        self.rows: dict[int, list[_Action]] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        """By rank and position in its row: the number of each action but the waits."""
        self.after: list[list[int]] = []
        """By number: the actions that must come later."""
        of_action: dict[_Action, int] = {}
        for rank in sorted(order):
            self.rows[rank] = [action for action in order[rank] if action is not None]
            before: int | None = None
            for position, action in enumerate(self.rows[rank]):
                if action.computation_type in _SEND_OF:
                    continue
                number = self.numbers[rank, position] = len(self.after)
                self.after.append([])
                of_action[action] = number
                if before is not None:
                    self.after[before].append(number)
                before = number
        self.receive: dict[_Action, int] = {}
        """By send: the number of its receive."""
        for action, number in of_action.items():
            if action.computation_type in _RECEIVER:
                self.receive[action] = self._find_receive(action, of_action, stage_to_rank)
                self.after[number].append(self.receive[action])
        self.next: dict[_Action, int] = {}
        """By send: the number of the action that follows its wait."""
        for rank, row in self.rows.items():
            following: int | None = None
            for position in range(len(row) - 1, -1, -1):
                action = row[position]
                if action.computation_type not in _SEND_OF:
                    following = self.numbers[rank, position]
                elif following is not None:
                    self.place_wait(_find_send(action), following)

    @staticmethod
    def _find_receive(send: _Action, of_action: dict[_Action, int], stage_to_rank: StageToRank) -> int:
        kind, distance = _RECEIVER[send.computation_type]
        receive = _Action(send.stage_index + distance, kind, send.microbatch_index)
        if receive not in of_action:
            peer = stage_to_rank(receive.stage_index)
            raise ValueError(f"Pipeline send {send} has no matching receive: rank {peer} has no {receive}")
        return of_action[receive]

    def place_wait(self, send: _Action, following: int) -> None:
        """Put the wait for a send before an action, instead of where it was."""
        self.remove_wait(send)
        self.next[send] = following
        self.after[self.receive[send]].append(following)

    def remove_wait(self, send: _Action) -> int | None:
        """Take the wait for a send away; return the action that followed it."""
        following = self.next.pop(send, None)
        if following is not None:
            self.after[self.receive[send]].remove(following)
        return following

    def reaches(self, first: int, last: int) -> bool:
        """Return whether one action must come before another, or is that action."""
        seen, open_ends = {first}, [first]
        while open_ends:
            number = open_ends.pop()
            if number == last:
                return True
            for later in self.after[number]:
                if later not in seen:
                    seen.add(later)
                    open_ends.append(later)
        return False

    def has_cycle(self) -> bool:
        missing = [0] * len(self.after)
        for later in self.after:
            for number in later:
                missing[number] += 1
        ready, done = deque(number for number, count in enumerate(missing) if not count), 0
        while ready:
            done += 1
            for number in self.after[ready.popleft()]:
                missing[number] -= 1
                if not missing[number]:
                    ready.append(number)
        return done < len(self.after)


def refuse_wait_cycles(order: Order, stage_to_rank: StageToRank) -> None:
    """Refuse an order in which ranks wait for sends whose receives come only after those waits."""
    if _SendGraph(order, stage_to_rank).has_cycle():
        raise ValueError("Pipeline sends, receives, and waits form a cycle: move each wait behind the actions that its receiver needs")


def limit_sends(comm_actions: Order, stage_to_rank: StageToRank, max_outstanding_sends: int) -> DenseOrder:
    """Move waits forward so that no rank has more than `max_outstanding_sends` sends under way; refuse an order that cannot be kept so.

    Before a send that would exceed the limit, the rank waits for an earlier one: if possible one whose receive must have been posted by
    then, else any for which waiting cannot block its own receiver.
    """
    validate_send_waits(comm_actions)
    graph = _SendGraph(comm_actions, stage_to_rank)
    if graph.has_cycle():
        raise ValueError("Pipeline sends, receives, and waits form a cycle")
    budgeted: DenseOrder = {}
    for rank, row in graph.rows.items():
        kept = budgeted[rank] = list[_Action]()
        pending: list[_Action] = []
        moved: set[_Action] = set()
        for position, action in enumerate(row):
            kind = action.computation_type
            if kind in _SEND_OF:
                send = _find_send(action)
                if send in moved:
                    continue
                pending.remove(send)
            elif kind in _WAIT_FOR:
                while len(pending) >= max_outstanding_sends:
                    chosen = _choose_send(graph, pending, graph.numbers[rank, position])
                    if chosen is None:
                        raise ValueError(
                            f"Cannot satisfy max_outstanding_sends={max_outstanding_sends} on pipeline rank {rank} before {action}. "
                            f"Outstanding: {pending}. Increase the limit or change the schedule."
                        )
                    pending.remove(chosen)
                    moved.add(chosen)
                    graph.place_wait(chosen, graph.numbers[rank, position])
                    kept.append(_build_wait(chosen))
                pending.append(action)
            kept.append(action)
        schedule_log.debug("Pipeline rank %d: %d waits moved to keep %d sends under way", rank, len(moved), max_outstanding_sends)
    return budgeted


def _choose_send(graph: _SendGraph, pending: list[_Action], before: int) -> _Action | None:
    """Choose the send to wait for before an action; `None` if every wait might last forever."""
    stalling: _Action | None = None
    for send in pending:
        following = graph.remove_wait(send)
        receive = graph.receive[send]
        safe = not graph.reaches(before, receive)
        posted = safe and graph.reaches(receive, before)
        if following is not None:
            graph.place_wait(send, following)
        if posted:
            return send
        if safe and stalling is None:
            stalling = send
    return stalling


def list_waited_stages(row: Row, kind: _ComputationType = WAIT_REDUCE_GRAD) -> frozenset[int]:
    """List the stages of a row that have a wait of a kind."""
    return frozenset(part.stage_index for part in _list_parts(row) if part.computation_type == kind)
