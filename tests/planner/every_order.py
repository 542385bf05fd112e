"""An exact solver for tiny problems that shares nothing with the planner: branch and bound over the orders of all ranks.

It places actions in the order of their starts, each as early as it can go, so that it meets every order once. A message holds memory
only while the action that uses it runs, and messages queue only on their own edge between two stages of one copy of the model. Both ask for
less than the simulator does: no order that the simulator times is quicker than the best one here, and every bound must hold here as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.planner.problem import Problem

ROUNDING = 1e-7


class TooManyOrdersError(Exception):
    """A problem that is too large for this solver: draw a smaller one."""


class Job(NamedTuple):
    """One action: F, I, W, or B for a whole backward."""

    kind: str
    stage: int
    microbatch: int


class Lane(NamedTuple):
    """One rank half-way through an order."""

    free: float
    """When its last action ended."""
    held: float
    left: float
    """The work that it has yet to do."""
    begun: float | None = None


class State(NamedTuple):
    """The beginning of an order."""

    jobs: tuple[Job, ...]
    lanes: tuple[Lane, ...]
    ends: dict[Job, float]
    """When the result of each placed action is at hand for the actions that need it on the same rank."""
    arrivals: dict[Job, float]
    """When the message that an action waits for has arrived."""
    links: dict[tuple[str, int, int], float]
    """When the last message on an edge arrived, by kind, lower stage and copy of the model."""


@dataclass
class EveryOrder:
    """All orders of a problem within the memory limit."""

    problem: Problem
    most_nodes: int = 2_000
    nodes: int = 0

    def __post_init__(self) -> None:
        problem = self.problem
        shape = problem.stages, problem.units
        names = ("f", "i", "w", "b", "activation", "weight_stash", "output", "kept", "kept_gradients")
        self.costs = {name: problem.costs.table(name, *shape).tolist() for name in names}
        self.copies = problem.placement.copies
        self.reduce = problem.costs.per_stage("reduce", problem.stages)
        self.back = "I" if problem.split else "B"
        kinds = ("F", "I", "W") if problem.split else ("F", "B")
        self.jobs = [Job(kind, stage, m) for m in range(problem.units) for stage in range(problem.stages) for kind in kinds]
        self.alike = problem.slices == 1 and all(len(set(row)) == 1 for table in self.costs.values() for row in table)
        """Whether all microbatches are the same, so that they may as well start in their order."""
        self.before = {job: (*self.needs(job), *self._turn(job)) for job in self.jobs}
        """What each action comes after."""
        self.taken = {job: self.takes(job) for job in self.jobs}
        self.change = {job: self.held(job) for job in self.jobs}
        self.reader = {job: self.user(job) for job in self.jobs}
        self.way = {other: self.travel(other) for other in self.reader.values() if other is not None}

    def beat(self, cutoff: float = math.inf) -> tuple[float, tuple[Job, ...]]:
        """The least objective below the cutoff and its actions by start; infinity and nothing if there is none."""
        self.cutoff, self.best = cutoff, ()
        left = [sum(self.takes(job) for job in self.jobs if self.rank_of(job) == rank) for rank in range(self.problem.ranks)]
        lanes = tuple(Lane(0.0, held, work) for held, work in zip(self.problem.static_memory, left, strict=True))
        self._descend(State((), lanes, {}, {}, {}), (-1.0, -1))
        return (self.cutoff, self.best) if self.best else (math.inf, ())

    # What an action needs, takes and holds ----------------------------------------------------------------------------

    def rank_of(self, job: Job) -> int:
        return self.copies[job.microbatch % len(self.copies)][job.stage]

    def takes(self, job: Job) -> float:
        return float(self.costs[job.kind.lower()][job.stage][job.microbatch])

    def edge_into(self, job: Job) -> int | None:
        """The lower stage of the edge between ranks that its input comes over."""
        edge = {"F": job.stage - 1, self.back: job.stage}.get(job.kind, -1)
        ranks = self.copies[job.microbatch % len(self.copies)]
        return edge if 0 <= edge < self.problem.stages - 1 and ranks[edge] != ranks[edge + 1] else None

    def received(self, job: Job) -> float:
        edge = self.edge_into(job)
        return 0.0 if edge is None else float(self.costs["output"][edge][job.microbatch])

    def travel(self, job: Job) -> float:
        """Of the message that the action waits for."""
        costs, source = self.problem.costs, self.rank_of(job._replace(stage=job.stage - 1 if job.kind == "F" else job.stage + 1))
        latency, bandwidth = (
            value[source][self.rank_of(job)] if isinstance(value, tuple) else value for value in (costs.latency, costs.bandwidth)
        )
        return latency + (0.0 if bandwidth is None else self.received(job) / bandwidth)

    def needs(self, job: Job) -> list[Job]:
        if job.kind == "W":
            return [job._replace(kind="I")]
        slices, number = self.problem.slices, job.microbatch % self.problem.slices
        if job.kind == "F":
            earlier = [job._replace(microbatch=job.microbatch - 1)] if number else []
            return [*([job._replace(stage=job.stage - 1)] if job.stage else []), *earlier]
        above = [job._replace(stage=job.stage + 1)] if job.stage + 1 < self.problem.stages else []
        later = [job._replace(microbatch=job.microbatch + 1)] if number + 1 < slices else []
        return [job._replace(kind="F"), *above, *later]

    def user(self, job: Job) -> Job | None:
        """The action on another rank that waits for what this one sends."""
        step = {"F": 1, self.back: -1}.get(job.kind)
        if step is None or not 0 <= job.stage + step < self.problem.stages:
            return None
        other = job._replace(stage=job.stage + step)
        return None if self.edge_into(other) is None else other

    @cached_property
    def tails(self) -> dict[Job, float]:
        """The least time from the start of each action to the end of everything that needs it."""
        tails: dict[Job, float] = {}
        for job in sorted(
            self.jobs,
            key=lambda job: {
                "W": (0, job.stage, 0),
                "I": (1, job.stage, job.microbatch),
                "B": (1, job.stage, job.microbatch),
                "F": (2, -job.stage, -job.microbatch),
            }[job.kind],
        ):
            followers = [other for other in tails if job in self.needs(other)]
            hops = [self.travel(other) if other == self.user(job) else 0.0 for other in followers]
            after = (hop + tails[other] for hop, other in zip(hops, followers, strict=True))
            tails[job] = self.takes(job) + max([self.reduce[job.stage], *after])
        return tails

    def held(self, job: Job) -> tuple[float, float]:
        """How much more the rank holds while the action runs, and after it."""
        stage, unit, slices = job.stage, job.microbatch, self.problem.slices
        activation, stash = (self.costs[name][stage][unit] for name in ("activation", "weight_stash"))
        first, last = unit - unit % slices, unit - unit % slices + slices - 1
        kept, sums = self.costs["kept"][stage], self.costs["kept_gradients"][stage]
        opened = sum(sums[first:last]) if unit == last else 0.0
        freed = activation + (sums[unit] if unit != last else 0.0) + (sum(kept[first : last + 1]) if unit == first else 0.0)
        taken = activation + kept[unit]
        after = {"F": taken, "I": opened + stash - freed, "W": -stash, "B": opened - freed}[job.kind]
        return {"F": taken, "W": 0.0}.get(job.kind, opened) + self.received(job), after

    # The search -------------------------------------------------------------------------------------------------------

    def _descend(self, state: State, last: tuple[float, int]) -> None:
        self.nodes += 1
        if self.nodes > self.most_nodes:
            raise TooManyOrdersError
        if len(state.jobs) == len(self.jobs):
            if self._objective(state) < self.cutoff * (1 - ROUNDING):
                self.cutoff, self.best = self._objective(state), state.jobs
            return
        ready = sorted((self._start(state, job), self.rank_of(job), job) for job in self.jobs if self._is_ready(state, job))
        if self._least(state, ready) >= self.cutoff * (1 - ROUNDING):
            return
        for start, rank, job in ready:
            during, _ = self.change[job]
            fits = state.lanes[rank].held + during <= self.problem.limits[rank] * (1 + 1e-9)
            if fits and (start, rank) > last:
                self._descend(self._place(state, job, start), (start, rank))

    def _turn(self, job: Job) -> list[Job]:
        """The forward before this one, if equal microbatches start in their order."""
        before = job.microbatch - len(self.copies)
        first = self.alike and job.kind == "F" and job.stage == 0 and before >= 0
        return [job._replace(microbatch=before)] if first else []

    def _is_ready(self, state: State, job: Job) -> bool:
        ends = state.ends
        if job in ends:
            return False
        for other in self.before[job]:  # noqa: SIM110 - a loop is twice as fast
            if other not in ends:
                return False
        return True

    def _start(self, state: State, job: Job) -> float:
        start = max(state.lanes[self.rank_of(job)].free, state.arrivals.get(job, 0.0), 0.0)
        for other in self.before[job]:
            start = max(start, state.ends[other])
        return start

    def _place(self, state: State, job: Job, start: float) -> State:
        end, rank, user = start + self.taken[job], self.rank_of(job), self.reader[job]
        lane = state.lanes[rank]
        after = Lane(end, lane.held + self.change[job][1], lane.left - self.taken[job], start if lane.begun is None else lane.begun)
        arrivals, links = state.arrivals, state.links
        if user is not None:
            link = job.kind, min(job.stage, user.stage), job.microbatch % len(self.copies)
            arrival = max(end, links.get(link, 0.0)) + self.way[user]
            arrivals, links = {**arrivals, user: arrival}, {**links, link: arrival}
        lanes = (*state.lanes[:rank], after, *state.lanes[rank + 1 :])
        return State((*state.jobs, job), lanes, {**state.ends, job: end}, arrivals, links)

    def _least(self, state: State, ready: list[tuple[float, int, Job]]) -> float:
        """What an order that begins like this takes at least."""
        if not self.problem.barrier:
            return max(lane.left + (0.0 if lane.begun is None else lane.free - lane.begun) for lane in state.lanes)
        return max([lane.free + lane.left for lane in state.lanes] + [start + self.tails[job] for start, _, job in ready])

    def _objective(self, state: State) -> float:
        """The makespan, or without a barrier the longest time from a rank's first action to its last."""
        if not self.problem.barrier:
            return max(lane.free - (lane.begun or 0.0) for lane in state.lanes)
        return max(end + self.reduce[job.stage] for job, end in state.ends.items())
