"""The terms of every bound: times and sizes that no schedule can undercut, and when the k-th action of each kind can run.

The waits here, and the arguments of `rank_bounds` and `overall`, are closed forms derived from the lifetimes in `ir.memory_ledger`: counts
and areas, which cannot be read off a list of changes. `solver_bounds` reads the list, and tests compare all of them with the simulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.ir.kind import Kind
from penstock.ir.rows import Floats
from penstock.planner.problem import SLACK, Problem

_MOST_SUMS = 20_000
NAMES = {Kind.F: "forward", Kind.I: "gradient", Kind.W: "weight"}
KINDS = tuple(NAMES.values())
FREE = -math.inf
"""The remaining time of an action that nothing has to follow."""


@dataclass(frozen=True, eq=False)
class ModelCopy:
    """The stages that the microbatches of one copy of the model run through. Tables have one row per stage and one column per microbatch.

    If microbatches are cut into slices, each slice counts as a microbatch: an order of slices is an order of so many microbatches, with
    further dependencies.

    Every backward counts as a gradient followed by a weight part, which undercuts everything that a schedule may do: a full
    backward includes the weight part and holds its activation throughout, so if it may be chosen, the gradient takes the lesser
    of the two times, both parts together no more than the full backward, and the stash is no larger than the activation.
    """

    ranks: tuple[int, ...]
    forward: Floats
    gradient: Floats
    weight: Floats
    """Zero if nothing is left to do after the gradient."""
    activation: Floats
    """What is held from the forward to the gradient, keys and values of slices included."""
    stash: Floats
    travel: Floats
    """Time of the message from the stage before; zero for the first stage and within a rank."""
    travel_back: Floats
    """Time of the gradient's message to the stage before."""
    received: Floats
    """Size of the received message that a forward holds while it runs."""
    returned: Floats
    """The same for a gradient."""
    slices: int = 1
    """Columns in a row that belong to one microbatch."""

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def count(self) -> int:
        """Number of microbatches."""
        return int(self.forward.shape[1])

    @cached_property
    def uniform(self) -> bool:
        """Whether all microbatches are alike."""
        return all(bool((table == table[:, :1]).all()) for table in self.times)

    @property
    def times(self) -> tuple[Floats, ...]:
        """Forward, gradient, weight part, and the message each way."""
        return self.forward, self.gradient, self.weight, self.travel, self.travel_back

    @cached_property
    def least(self) -> ModelCopy:
        """The least value over the microbatches, in a single column."""
        tables = {item.name: getattr(self, item.name) for item in fields(self)[1:-1]}
        return replace(self, **{name: table.min(axis=1, keepdims=True) for name, table in tables.items()})

    @cached_property
    def heads(self) -> Floats:
        """Earliest start of each forward, counted from the first forward of its microbatch."""
        heads = np.zeros_like(self.forward)
        heads[1:] = np.cumsum(self.forward[:-1] + self.travel[1:], axis=0)
        return heads

    @cached_property
    def feet(self) -> Floats:
        """Time from the start of each gradient to the start of the last gradient of its microbatch."""
        feet = np.zeros_like(self.forward)
        feet[1:] = np.cumsum(self.gradient[1:] + self.travel_back[1:], axis=0)
        return feet

    @cached_property
    def turns(self) -> Floats:
        """Time from the start of each forward to the start of its gradient: the round trip."""
        top = self.heads[-1] + self.forward[-1] - self.heads
        return np.asarray(top + self.feet[-1] - self.feet, dtype=np.float64)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, of in enumerate(self.ranks) if of == rank)


@dataclass(frozen=True, eq=False)
class Terms:
    """A problem as its bounds see it: one entry per copy of the model."""

    problem: Problem
    copies: tuple[ModelCopy, ...]
    after: tuple[tuple[float, ...], ...]
    """Time after a stage's last action, by rank and stage: the gradient reduction and the optimizer step."""
    room: tuple[float, ...]
    """Memory of each rank beyond its parameters, tolerance included: the most that sizes can add up to within the limit."""

    @classmethod
    def of(cls, problem: Problem) -> Terms:
        costs, copies = problem.costs, _list_model_copies(problem)
        reduce, steps = costs.per_stage("reduce", problem.stages), costs.per_rank("optimizer", problem.placement)
        after = tuple(tuple(time + step for time in reduce) for step in steps.tolist())
        room = (
            limit * (1 + 2 * SLACK) - static if limit < math.inf else limit
            for limit, static in zip(problem.limits, problem.static_memory, strict=True)
        )
        return cls(problem, copies, after, tuple(_find_usable(copies, rank, size) for rank, size in enumerate(room)))


def _list_model_copies(problem: Problem) -> tuple[ModelCopy, ...]:
    costs, shape, placed = problem.costs, (problem.stages, problem.units), problem.placement.copies
    f, i, w, b, stash, output = (costs.table(name, *shape) for name in ("f", "i", "w", "b", "weight_stash", "output"))
    activation = costs.tabulate_held(*shape)
    together = min(1.0, costs.overlap)  # overlapped actions take this share of their sum, and no action takes less
    gradient = np.minimum(i, b) if problem.split else b
    weight = np.minimum(i + w, b) - gradient if problem.split else np.zeros(shape)
    held = np.where(weight > 0, np.minimum(stash, activation), 0.0)
    tables = f * together, gradient * together, weight * together, activation, held, *problem.hops, output
    copies = []
    for place, ranks in enumerate(placed[: problem.microbatches]):
        f, i, w, activation, stash, up, back, output = (np.ascontiguousarray(table[:, place :: len(placed)]) for table in tables)
        crosses = np.array([before != after for before, after in pairwise(ranks)], dtype=np.float64).reshape(-1, 1)
        none, sent = np.zeros_like(output[:1]), output[:-1] * crosses
        received, returned = (np.concatenate(parts) for parts in ((none, sent), (sent, none)))
        copies.append(ModelCopy(ranks, f, i, w, activation, stash, up, back, received, returned, problem.slices))
    return tuple(copies)


def _find_usable(copies: tuple[ModelCopy, ...], rank: int, room: float) -> float:
    """The largest sum of the rank's sizes within the room; the room itself if there are too many sums."""
    sizes: set[float] = set()
    for copy in copies:
        stages = list(copy.stages_of(rank))
        for table in (copy.activation, copy.stash, copy.received, copy.returned):
            sizes.update(table[stages].ravel().tolist())
    shares = [share for size in sizes if (share := size / room) > 0] if 0 < room < math.inf else []
    if not shares or math.prod(1 / share + 1 for share in shares) > _MOST_SUMS:
        return room
    sums = np.zeros(1)
    for share in shares:
        sums = np.unique((sums[:, None] + np.arange(int(1 / share) + 1) * share).round(12))
        sums = sums[sums <= 1]
    return min(room, float(sums.max()) * room * (1 + SLACK))


# Events ---------------------------------------------------------------------------------------------------------------

Events = dict[str, Floats]
"""Times of the k-th forward, gradient and weight part of each stage, of any microbatch: one row per stage, one column per k.

Every stage works through the same microbatches, so the k-th action of a stage waits for the k-th action that it needs: when
k + 1 actions have their inputs, k + 1 of those inputs have ended. So each rule of the pipeline holds between the k-th
actions, with the least time of any microbatch. The rules are: dependencies with their messages; one action at a time on a
stage and one message at a time on a channel; and a forward whose activation only fits after an earlier one is freed.

If q slices make up a microbatch, the first gradient of a microbatch comes after all its forwards on the stage. When k + 1 gradients have
begun, they belong to k // q + 1 microbatches or more, so that (k // q + 1) q forwards have ended. So the events of q slices go together.
"""


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
        stages, room = copy.stages_of(rank), terms.room[rank]
        for at, first in enumerate(stages if room < math.inf else ()):
            held = float(least.activation[list(stages[: at + 1]), 0].sum())
            for second in stages[at:]:
                message = max(float(least.returned[second, 0]), min(float(least.received[first, 0]), float(least.received[second, 0])))
                more = float(least.activation[[own for own in stages if first < own <= second], 0].sum()) + message
                if held > 0 and held * copy.count > room - more:
                    # Room for less than one microbatch was refused before: less than all of its slices is rounding.
                    delays.append(Wait(first, second, max(copy.slices, int((room - more) / held))))
    return delays


def find_earliest_starts(terms: Terms, copy: ModelCopy, first: int = 0) -> Events:
    """Earliest start of each k-th action if the first forward of stage `first` may start at 0. Stages before it stay at 0."""
    least, held = copy.least, _group_by_stage(copy, list_waits(terms, copy), by_forward=True)
    f, g, w, hop, hop_back = (table[:, 0].tolist() for table in least.times)
    stages, count = copy.stages, copy.count
    start_f, start_g, start_w = ([[0.0] * stages for _ in range(count)] for _ in range(3))
    up, down = [FREE] * stages, [FREE] * stages  # when the last message into each stage arrived
    for block in range(0, count, copy.slices):
        last = block + copy.slices - 1
        for k in range(block, last + 1):
            now_f = start_f[k]
            for s in range(first, stages):
                begin = start_f[k - 1][s] + f[s] if k else 0.0
                if s > first:
                    up[s] = max(now_f[s - 1] + f[s - 1], up[s]) + hop[s]
                    begin = max(begin, up[s])
                for other, most in held[s]:
                    if k >= most:
                        begin = max(begin, start_g[k - most][other] + g[other])
                now_f[s] = begin
        for k in range(block, last + 1):
            now_g, now_w = start_g[k], start_w[k]
            for s in range(stages - 1, first - 1, -1):
                begin = max(start_f[last][s] + f[s], start_g[k - 1][s] + g[s] if k else 0.0)
                if s + 1 < stages:
                    down[s] = max(now_g[s + 1] + g[s + 1], down[s]) + hop_back[s + 1]
                    begin = max(begin, down[s])
                now_g[s] = begin
                now_w[s] = max(begin + g[s], start_w[k - 1][s] + w[s] if k else 0.0)
    return _collect_events(start_f, start_g, start_w)


def find_remaining_times(terms: Terms, copy: ModelCopy, only: int | None = None) -> Events:
    """Least time from the start of each k-th action to the end of everything, or to the end of rank `only`."""
    least, held = copy.least, _group_by_stage(copy, list_waits(terms, copy), by_forward=False)
    f, g, w, hop, hop_back = (table[:, 0].tolist() for table in least.times)
    stages, count = copy.stages, copy.count
    after = [terms.after[rank][s] if only in (None, rank) else FREE for s, rank in enumerate(copy.ranks)]
    rest_f, rest_g, rest_w = ([[FREE] * stages for _ in range(count)] for _ in range(3))
    up, down = [FREE] * stages, [FREE] * stages  # from the departure of the next message out of each stage
    for block in range(count - copy.slices, -1, -copy.slices):
        for k in range(block + copy.slices - 1, block - 1, -1):
            now_g, now_w = rest_g[k], rest_w[k]
            later = k + 1 < count
            for s in range(stages):
                now_w[s] = w[s] + max(after[s], rest_w[k + 1][s] if later else FREE)
                follows = max(now_w[s], rest_g[k + 1][s] if later else FREE)
                if s:
                    down[s] = hop_back[s] + max(now_g[s - 1], down[s])
                    follows = max(follows, down[s])
                for other, most in held[s]:
                    if k + most < count:
                        follows = max(follows, rest_f[k + most][other])
                now_g[s] = g[s] + follows
        for k in range(block + copy.slices - 1, block - 1, -1):
            now_f = rest_f[k]
            for s in range(stages - 1, -1, -1):
                follows = max(rest_g[block][s], rest_f[k + 1][s] if k + 1 < count else FREE)
                if s + 1 < stages:
                    up[s] = hop[s + 1] + max(now_f[s + 1], up[s])
                    follows = max(follows, up[s])
                now_f[s] = f[s] + follows
    return _collect_events(rest_f, rest_g, rest_w)


def _group_by_stage(copy: ModelCopy, delays: list[Wait], by_forward: bool) -> list[list[tuple[int, int]]]:
    """Per stage, the other stage of each of its waits, and the most forwards ahead."""
    held: list[list[tuple[int, int]]] = [[] for _ in range(copy.stages)]
    for wait in delays:
        one, other = (wait.forward, wait.gradient) if by_forward else (wait.gradient, wait.forward)
        held[one].append((other, wait.most))
    return held


def _collect_events(*times: list[list[float]]) -> Events:
    return {kind: np.array(table).T for kind, table in zip(KINDS, times, strict=True)}
