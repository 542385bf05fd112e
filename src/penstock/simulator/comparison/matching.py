"""Two timelines of the same work: which action and which message of one is which of the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.errors import UsageError
from penstock.ir import codes
from penstock.ir.action import Action
from penstock.ir.kind import WORK
from penstock.ir.rows import Ints
from penstock.simulator.timeline import Timeline
from penstock.simulator.waits import WaitCauses


@dataclass(frozen=True, eq=False)
class Match:
    """For each computation and message of `measured`, the same one of `predicted`.

    One may be of a schedule and the other of its program: computations are matched by stage, kind and microbatch, not by place.
    """

    predicted: WaitCauses
    measured: WaitCauses
    action: Ints
    """For each computation of `measured`, its place among those of `predicted`."""
    message: Ints

    @cached_property
    def other_order(self) -> tuple[int, Action, Action] | None:
        """The first rank that computes in another order: the rank, and its first actions that differ, predicted and measured."""
        wrong = np.flatnonzero(self.action != np.arange(len(self.action)))
        if not len(wrong):
            return None
        place = int(wrong[0])
        return int(self.measured.rank[place]), self.predicted.action(place), self.measured.action(place)


def match(predicted: Timeline, measured: Timeline) -> Match:
    """The pairs; a `UsageError` says why there are none if these are not timelines of the same work."""
    _check_shapes(predicted, measured)
    one, other = _Sorted.of(predicted), _Sorted.of(measured)
    if not np.array_equal(one.computations, other.computations):
        raise UsageError(f"they do not compute the same: {_find_first_difference(predicted, measured)}")
    waits = predicted.waits, measured.waits
    action = np.empty(len(waits[1].node), dtype=np.int64)
    action[waits[1].place[other.groups]] = waits[0].place[one.groups]
    message = np.empty(measured.num_messages, dtype=np.int64)
    if not np.array_equal(one.messages, other.messages):
        raise UsageError("they do not send the same: their stages are joined in other ways, or stand on other ranks")
    message[other.message_order] = one.message_order
    return Match(*waits, action, message)


def _check_shapes(one: Timeline, other: Timeline) -> None:
    for what in ("ranks", "stages", "microbatches", "slices"):
        counts = getattr(one.table, what), getattr(other.table, what)
        if counts[0] != counts[1]:
            raise UsageError(f"one has {counts[0]} {what} and the other {counts[1]}")


@dataclass(frozen=True, eq=False)
class _Sorted:
    """A timeline's computations and messages in an order that does not depend on when they ran."""

    computations: Ints
    """The code and the rank of each part, by rank and by the first part of the action."""
    groups: Ints
    messages: Ints
    """The actions that make and use each message, and its ranks."""
    message_order: Ints

    @classmethod
    def of(cls, timeline: Timeline) -> _Sorted:
        rows, messages = timeline.table.rows, timeline.messages
        entries, plain = np.flatnonzero(rows.is_kind(*WORK)), rows.codes & ~codes.JOIN
        entries = entries[np.lexsort((entries, plain[rows.group_starts[entries]], rows.rank[entries]))]
        makers, users = plain[messages.maker], plain[messages.after]
        order = np.lexsort((users, makers))
        return cls(
            np.stack((rows.codes[entries], rows.rank[entries])),
            rows.group[entries[rows.heads[entries]]],
            np.stack((makers, users, messages.source, messages.target))[:, order],
            order,
        )


def _find_first_difference(predicted: Timeline, measured: Timeline) -> str:
    for rank in range(predicted.ranks):
        one, other = ([action for action in timeline.table[rank] if action.is_compute] for timeline in (predicted, measured))
        for who, actions, others in (("first", one, set(other)), ("second", other, set(one))):
            alone = next((action for action in actions if action not in others), None)
            if alone is not None:
                return f"{alone} of rank {rank} is in the {who} alone"
    return "some of it is there twice"
