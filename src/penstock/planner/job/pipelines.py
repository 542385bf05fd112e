"""The pipeline of one configuration: a named schedule, blocks shared out among its stages, and as many recomputed as memory asks for.

Blocks are equal, so the shares follow from what each rank of the schedule holds at its peak: the slowest rank is made as fast as possible,
a rank with little room taking fewer blocks or recomputing some. Time and memory of the result come from the simulator.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from penstock.errors import PenstockError
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.planner.candidate import Candidate
from penstock.planner.job.configuration import SPREAD
from penstock.planner.job.layer_costs import LayerCosts
from penstock.planner.named_schedules import NamedSchedule, list_candidates
from penstock.planner.partition.layer_runs import PeakMoment
from penstock.planner.problem import Problem
from penstock.planner.profile import Layer

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "v-half")
"""The schedules that are tried by default."""
_ROUNDS = 4
"""How often blocks are shared out for the memory of one schedule."""
_USUAL = Costs(f=1.0, i=1.15, w=0.75, weight_stash=0.6)
"""About the proportions of a transformer's block: they show where a schedule peaks and what its critical path is."""
_MOST_SHARE = 3
"""A rank takes at most so many times its even share of the blocks."""
_ROUNDING = 1e-12


@dataclass(frozen=True)
class ScheduleTrial:
    """One schedule on the stages of a configuration: timed, or ruled out by its bound or its memory."""

    name: str
    timed: Candidate | None = None
    """If it fits and was timed."""
    recomputed: tuple[bool, ...] = ()
    """For each block of the model, whether its forward runs again."""
    bound: float = 0.0
    """Seconds that it takes at least."""
    excess: float = 0.0
    """Bytes over the limit on the fullest GPU, if it does not fit."""

    @property
    def candidate(self) -> Candidate:
        assert self.timed is not None
        return self.timed

    @property
    def seconds(self) -> float:
        return math.inf if self.timed is None else self.timed.time_or_inf


@dataclass(frozen=True)
class ScheduleTemplate:
    """A schedule that was lowered and timed once, so that other costs only retime it, and what each rank holds at its peak."""

    candidate: Candidate
    moments: tuple[PeakMoment, ...]
    path: Mapping[tuple[int, Kind], int]
    """How often each stage computes what along one chain of actions that wait for each other: no costs make it faster than that."""

    @classmethod
    def of(cls, candidate: Candidate) -> ScheduleTemplate:
        moments = candidate.list_moments(range(candidate.problem.ranks))
        actions = [step.action for step in candidate.timeline.critical_path if step.what == "action" and step.action is not None]
        path = Counter((action.stage, action.kind) for action in actions)
        return cls(candidate, tuple(replace(moment, other=0.0) for moment in moments), path)


@dataclass
class ScheduleTemplates:
    """Templates by schedule, ranks and microbatches."""

    names: Sequence[str]
    _usable: dict[tuple[int, int], list[NamedSchedule]] = field(default_factory=dict)
    _timed: dict[tuple[str, int, int], ScheduleTemplate | None] = field(default_factory=dict)

    def list_usable(self, ranks: int, layers: int) -> list[NamedSchedule]:
        """The schedules for so many ranks; on one rank all are the same, so that the first does."""
        if (ranks, layers) not in self._usable:
            usable = list_candidates(self.names, ranks, layers)[0]
            self._usable[ranks, layers] = usable if ranks > 1 else usable[:1]
        return self._usable[ranks, layers]

    def time(self, named: NamedSchedule, microbatches: int) -> ScheduleTemplate | None:
        """The schedule under plain costs; None if the schedule does not take so many microbatches."""
        key = named.name, named.placement.ranks, microbatches
        if key not in self._timed:
            plain = Problem(named.placement, microbatches, _USUAL)
            try:
                self._timed[key] = ScheduleTemplate.of(Candidate.time(named.name, plain, next(iter(named.build(plain)))))
            except PenstockError:
                self._timed[key] = None
        return self._timed[key]


@dataclass(frozen=True)
class PipelineTrials:
    """Tries the schedules of one configuration."""

    costs: LayerCosts
    templates: ScheduleTemplates
    recompute: bool = True
    limit: float | None = None
    """Bytes of a GPU that may be used; by default those of the job."""

    @property
    def _limit(self) -> float:
        return self.costs.job.limit if self.limit is None else self.limit

    @property
    def microbatches(self) -> int:
        chosen = self.costs.configuration
        return self.costs.job.batch // (chosen.data * chosen.microbatch)

    def run(self, best: float = math.inf) -> list[ScheduleTrial]:
        """Try every schedule; one whose bound is not below the best time is not timed. The fastest that fits comes first."""
        trials = list(self._try_all(best))
        return sorted(trials, key=lambda trial: (trial.timed is None, trial.seconds, trial.excess, trial.bound))

    def _try_all(self, best: float) -> Iterator[ScheduleTrial]:
        ranks, layers = self.costs.configuration.pipeline, self.costs.job.transformer.layers + sum(self.costs.ends)
        for named in self.templates.list_usable(ranks, layers):
            template = self.templates.time(named, self.microbatches)
            if template is not None:
                trial = self._try(template, best)
                best = min(best, trial.seconds)
                yield trial

    def _try(self, template: ScheduleTemplate, best: float) -> ScheduleTrial:
        order, moments = template.candidate, template.moments
        placement, limit = order.problem.placement, self._limit
        limits = [limit] * placement.ranks
        bound = excess = 0.0
        for _ in range(_ROUNDS):
            shares = _BlockShares(self.costs, order, moments, tuple(limits), self.recompute)
            counts, least = shares.share()
            if counts is None:
                return ScheduleTrial(order.name, excess=max(least, excess))
            sizes, recomputed = shares.lay_out(counts)
            lower = max(self.microbatches * least, self._bound_path(template, sizes, recomputed))
            if lower >= best:
                return ScheduleTrial(order.name, bound=max(bound, lower))
            bound = bound or lower
            problem = self._make_problem(order, sizes, recomputed)
            candidate = order.retime(problem)
            if candidate.fits:
                flags = (True,) * len(recomputed) if self.costs.recompute_all else recomputed
                return ScheduleTrial(order.name, candidate, flags, bound)
            excess = candidate.excess or 0.0
            moments, peaks = candidate.list_moments(range(placement.ranks)), candidate.timeline.peak_memory
            limits = [low - max(peak - limit, 0.0) for low, peak in zip(limits, peaks, strict=True)]
        return ScheduleTrial(order.name, excess=excess)

    def _bound_path(self, template: ScheduleTemplate, sizes: tuple[int, ...], recomputed: tuple[bool, ...]) -> float:
        """Seconds of the order's chain of actions on these stages."""
        first, last = self.costs.ends
        again = self.costs.recomputed_block
        layers = [*[self.costs.embedding] * first, *(again if flag else self.costs.block for flag in recomputed), *[self.costs.head] * last]
        ends = [0, *accumulate(sizes)]
        total = 0.0
        for (stage, kind), count in template.path.items():
            names = {Kind.F: "f", Kind.I: "i", Kind.W: "w", Kind.B: "i w"}[kind].split()
            total += count * sum(getattr(layer, name) for layer in layers[ends[stage] : ends[stage + 1]] for name in names)
        return total

    def _make_problem(self, order: Candidate, sizes: tuple[int, ...], recomputed: tuple[bool, ...]) -> Problem:
        placement = order.problem.placement
        limits, never = (self._limit,) * placement.ranks, (False,) * placement.stages
        return Problem.cut(self.costs.profile(recomputed), placement, self.microbatches, sizes, never, limits)


@dataclass(frozen=True)
class _BlockShares:
    """Shares blocks and recomputed blocks out among the ranks of an order."""

    costs: LayerCosts
    order: Candidate
    moments: Sequence[PeakMoment]
    """The memory of each rank at its peak."""
    limits: tuple[float, ...]
    recompute: bool

    @property
    def _blocks(self) -> int:
        return self.costs.job.transformer.layers

    @cached_property
    def _stages(self) -> list[tuple[int, ...]]:
        placement = self.order.problem.placement
        return [tuple(placement.stages_of(rank)) for rank in range(placement.ranks)]

    def share(self) -> tuple[list[int] | None, float]:
        """Blocks per rank with the fastest slowest rank, and its seconds per microbatch; else None and the bytes over the limit."""
        rows = [self._rows[rank] for rank in range(len(self._stages))]
        lowest = [sum(not self._name_ends(stage) for stage in stages) for stages in self._stages]
        short = [rank for rank, row in enumerate(rows) if len(row) <= lowest[rank]]
        if short or sum(len(row) - 1 for row in rows) < self._blocks:
            return None, self._find_excess()
        times = [[time for time, _ in row] for row in rows]
        loads = sorted({time for of_rank in times for time in of_rank})
        low, high = 0, len(loads) - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_enough(self._count(times, loads[middle]), lowest):
                high = middle
            else:
                low = middle + 1
        counts = self._count(times, loads[low])
        while sum(counts) > self._blocks:
            spare = [rank for rank, count in enumerate(counts) if count > lowest[rank]]  # not empty: there are more layers than stages
            counts[max(spare, key=lambda rank: (times[rank][counts[rank]], rank))] -= 1
        return counts, max(of_rank[count] for of_rank, count in zip(times, counts, strict=True))

    def _count(self, times: Sequence[Sequence[float]], load: float) -> list[int]:
        """The most blocks of each rank that take no longer."""
        return [bisect_right(of_rank, load * (1 + _ROUNDING)) - 1 for of_rank in times]

    def _is_enough(self, counts: Sequence[int], lowest: Sequence[int]) -> bool:
        return sum(counts) >= self._blocks and all(count >= low for count, low in zip(counts, lowest, strict=True))

    @cached_property
    def _rows(self) -> list[list[tuple[float, tuple[int, ...]]]]:
        """Per rank, for 0, 1, 2, ... blocks as far as they fit: its seconds per microbatch, and its recomputed blocks per stage."""
        known: dict[object, list[tuple[float, tuple[int, ...]]]] = {}
        rows = []
        for rank, stages in enumerate(self._stages):
            moment = self.moments[rank]
            ends = tuple(self._name_ends(stage) for stage in stages)
            key = moment.activations, moment.stashes, moment.other, ends, self.limits[rank]
            if key not in known:
                known[key] = self._list_rows(rank)
            rows.append(known[key])
        return rows

    def _list_rows(self, rank: int) -> list[tuple[float, tuple[int, ...]]]:
        moment, block, again = self.moments[rank], self.costs.block, self.costs.recomputed_block
        ends = [layer for stage in self._stages[rank] for layer in self._end_layers(stage)]
        memory, spare = self._sum_memory_of_ends(rank)
        time, rows, sizes = sum(layer.time for layer in ends), [], [0] * len(self._stages[rank])
        saved = block.activation - again.activation
        neediest = sorted(range(len(sizes)), key=lambda place: -moment.activations[place])
        for place in [None, *self._order_of_blocks(rank)]:
            if place is not None:
                sizes[place] += 1
                time += block.time
                memory += block.static + moment.activations[place] * block.activation + moment.stashes[place] * block.weight_stash
            flags, over = [0] * len(sizes), memory + max(spare, block.workspace if any(sizes) else 0.0) - self.limits[rank]
            if over > 0 and self.recompute:
                over += max(spare, again.workspace) - max(spare, block.workspace)
                for stage in neediest:
                    saving = moment.activations[stage] * saved + block.static - again.static
                    flags[stage] = min(sizes[stage], math.ceil(over / saving)) if over > 0 and saving > 0 else 0
                    over -= flags[stage] * saving
            if over > 0:
                break
            rows.append((time + sum(flags) * (again.time - block.time), tuple(flags)))
        return rows

    def _sum_memory_of_ends(self, rank: int) -> tuple[float, float]:
        """Bytes of a rank without any block, and the largest workspace of its embedding and head."""
        moment, spare, memory = self.moments[rank], 0.0, self.moments[rank].other
        for place, stage in enumerate(self._stages[rank]):
            for layer in self._end_layers(stage):
                memory += layer.static + moment.activations[place] * layer.activation + moment.stashes[place] * layer.weight_stash
                spare = max(spare, layer.workspace)
        return memory, spare

    def _order_of_blocks(self, rank: int) -> list[int]:
        """The place of the stage that each further block of a rank goes to: one per empty stage, then the stage with the least time."""
        stages, most = self._stages[rank], min(_MOST_SHARE * math.ceil(self._blocks / len(self._stages)) + 1, self._blocks)
        loads = [sum(layer.time for layer in self._end_layers(stage)) for stage in stages]
        empty = [place for place, stage in enumerate(stages) if not self._name_ends(stage)]
        order: list[int] = []
        for number in range(most):
            place = empty[number] if number < len(empty) else min(range(len(stages)), key=loads.__getitem__)
            loads[place] += self.costs.block.time
            order.append(place)
        return order

    def _find_excess(self) -> float:
        """Bytes over the limit on the fullest rank if the blocks are shared out evenly and all recomputed that may be."""
        share, layer = self._blocks / len(self._stages), self.costs.recomputed_block if self.recompute else self.costs.block
        over = []
        for rank, moment in enumerate(self.moments):
            memory, spare = self._sum_memory_of_ends(rank)
            held, stashed = (sum(counts) / len(counts) for counts in (moment.activations, moment.stashes))
            memory += share * (layer.static + held * layer.activation + stashed * layer.weight_stash) + max(spare, layer.workspace)
            over.append(memory - self.limits[rank])
        return max(*over, 1.0)

    def _name_ends(self, stage: int) -> str:
        """The layer of a stage that is not a block, if there is one; both on a single stage."""
        if self.costs.configuration.vocabulary == SPREAD:
            return ""
        return "embedding " * (stage == 0) + "head" * (stage == self.order.problem.stages - 1)

    def _end_layers(self, stage: int) -> list[Layer]:
        return [getattr(self.costs, name) for name in self._name_ends(stage).split()]

    def lay_out(self, counts: Sequence[int]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Layers per stage and recomputed blocks, from the number of blocks of each rank."""
        sizes, again = [0] * self.order.problem.stages, [0] * self.order.problem.stages
        for rank, (stages, count) in enumerate(zip(self._stages, counts, strict=True)):
            for place in self._order_of_blocks(rank)[:count]:
                sizes[stages[place]] += 1
            for stage, recomputed in zip(stages, self._rows[rank][count][1], strict=True):
                again[stage] = recomputed
        flags = [number < again[stage] for stage, size in enumerate(sizes) for number in range(size)]
        return tuple(size + len(self._end_layers(stage)) for stage, size in enumerate(sizes)), tuple(flags)
