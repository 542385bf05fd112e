"""When the k-th action of each kind on a stage can start, and how much time must follow it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.ir.rows import Floats
from penstock.planner.bounds.terms import ModelCopy, Terms

FREE = -math.inf
"""The remaining time of an action that nothing has to follow."""


@dataclass(frozen=True, eq=False)
class Events:
    """Times of the k-th forward, gradient and weight part of each stage, of any microbatch: one row per stage, one column per k.

    Every stage works through the same microbatches, so the k-th action of a stage waits for the k-th action that it needs: when
    k + 1 actions have their inputs, k + 1 of those inputs have ended. So each rule of the pipeline holds between the k-th
    actions, with the least time of any microbatch. The rules are: dependencies with their messages; one action at a time on a
    stage and one message at a time on a channel; and a forward whose activation only fits after an earlier one is freed.
    """

    forward: Floats
    gradient: Floats
    weight: Floats

    def of(self, kind: str) -> Floats:
        table: Floats = getattr(self, kind)
        return table


class Wait(NamedTuple):
    """At most `most` forwards of a stage are ahead of the gradients of the same or a later stage of its rank."""

    forward: int
    gradient: int
    most: int


def list_waits(terms: Terms, copy: ModelCopy) -> list[Wait]:
    """How memory delays forwards, for each pair of stages of a rank.

    Take all microbatches that have begun their forward on the first stage and not ended their gradient on the second. Each
    holds its activations on all of the rank's stages up to the first, until its gradient on the second has ended. At two
    moments more is held:

    - while the first of them to end its gradient on the second stage runs it: its activations up to there, and the received gradient;
    - when the last of them to begin on the first stage runs its forward there, or, if none of them had begun on the second
      stage by then, when one does: the activations up to there, and the message received for that forward. The message for the
      second stage alone does not count, because it may be freed before the last one begins on the first stage.
    """
    least, delays = copy.least, []
    for rank in sorted(set(copy.ranks)):
        mine, room = copy.stages_of(rank), terms.room[rank]
        for at, first in enumerate(mine if room < math.inf else ()):
            held = float(least.activation[list(mine[: at + 1]), 0].sum())
            for second in mine[at:]:
                message = max(float(least.returned[second, 0]), min(float(least.received[first, 0]), float(least.received[second, 0])))
                more = float(least.activation[[own for own in mine if first < own <= second], 0].sum()) + message
                if held > 0 and held * copy.count > room - more:
                    # Room for less than one microbatch was refused before: less than 1 is rounding.
                    delays.append(Wait(first, second, max(1, int((room - more) / held))))
    return delays


def earliest_starts(terms: Terms, copy: ModelCopy, first: int = 0) -> Events:
    """Earliest start of each k-th action if the first forward of stage `first` may start at 0. Stages before it stay at 0."""
    least, held = copy.least, _by_stage(copy, list_waits(terms, copy), by_forward=True)
    f, g, w, hop = (table[:, 0].tolist() for table in (least.forward, least.gradient, least.weight, least.travel))
    stages, count = copy.stages, copy.count
    start_f, start_g, start_w = ([[0.0] * stages for _ in range(count)] for _ in range(3))
    up, down = [FREE] * stages, [FREE] * stages  # when the last message into each stage arrived
    for k in range(count):
        now_f, now_g, now_w = start_f[k], start_g[k], start_w[k]
        for s in range(first, stages):
            begin = start_f[k - 1][s] + f[s] if k else 0.0
            if s > first:
                up[s] = max(now_f[s - 1] + f[s - 1], up[s]) + hop[s]
                begin = max(begin, up[s])
            for other, most in held[s]:
                if k >= most:
                    begin = max(begin, start_g[k - most][other] + g[other])
            now_f[s] = begin
        for s in range(stages - 1, first - 1, -1):
            begin = max(now_f[s] + f[s], start_g[k - 1][s] + g[s] if k else 0.0)
            if s + 1 < stages:
                down[s] = max(now_g[s + 1] + g[s + 1], down[s]) + hop[s + 1]
                begin = max(begin, down[s])
            now_g[s] = begin
            now_w[s] = max(begin + g[s], start_w[k - 1][s] + w[s] if k else 0.0)
    return Events(*(np.array(starts).T for starts in (start_f, start_g, start_w)))


def remaining_times(terms: Terms, copy: ModelCopy, only: int | None = None) -> Events:
    """Least time from the start of each k-th action to the end of everything, or to the end of rank `only`."""
    least, held = copy.least, _by_stage(copy, list_waits(terms, copy), by_forward=False)
    f, g, w, hop = (table[:, 0].tolist() for table in (least.forward, least.gradient, least.weight, least.travel))
    stages, count = copy.stages, copy.count
    after = [terms.after[rank][s] if only in (None, rank) else FREE for s, rank in enumerate(copy.ranks)]
    rest_f, rest_g, rest_w = ([[FREE] * stages for _ in range(count)] for _ in range(3))
    up, down = [FREE] * stages, [FREE] * stages  # from the departure of the next message out of each stage
    for k in range(count - 1, -1, -1):
        now_f, now_g, now_w = rest_f[k], rest_g[k], rest_w[k]
        later = k + 1 < count
        for s in range(stages):
            now_w[s] = w[s] + max(after[s], rest_w[k + 1][s] if later else FREE)
            follows = max(now_w[s], rest_g[k + 1][s] if later else FREE)
            if s:
                down[s] = hop[s] + max(now_g[s - 1], down[s])
                follows = max(follows, down[s])
            for other, most in held[s]:
                if k + most < count:
                    follows = max(follows, rest_f[k + most][other])
            now_g[s] = g[s] + follows
        for s in range(stages - 1, -1, -1):
            follows = max(now_g[s], rest_f[k + 1][s] if later else FREE)
            if s + 1 < stages:
                up[s] = hop[s + 1] + max(now_f[s + 1], up[s])
                follows = max(follows, up[s])
            now_f[s] = f[s] + follows
    return Events(*(np.array(rests).T for rests in (rest_f, rest_g, rest_w)))


def _by_stage(copy: ModelCopy, delays: list[Wait], by_forward: bool) -> list[list[tuple[int, int]]]:
    """Per stage, the other stage of each of its waits, and the most forwards ahead."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(copy.stages)]
    for wait in delays:
        one, other = (wait.forward, wait.gradient) if by_forward else (wait.gradient, wait.forward)
        held[one].append((other, wait.most))
    return held
