"""Orders the microbatches of one batch and chooses the schedule, for the times that their lengths take."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from penstock.errors import CostsError, PlanError, ScheduleError, nearest
from penstock.ir.costs import Costs
from penstock.ir.kind import Kind
from penstock.ir.rows import Floats, Ints
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.batches.lengths import LengthCosts, MicrobatchLengths, read_lengths
from penstock.planner.batches.packing import Packing, pack
from penstock.planner.bounds.lower_bound import Bound, check_bound, lower_bound
from penstock.planner.named_schedules import list_named_schedules, one_at_a_time
from penstock.planner.order_search.evaluator import Evaluator
from penstock.planner.order_search.flat_problem import Flags, FlatProblem, flatten, read_order, replace_full_backwards
from penstock.planner.order_search.permutations import PermutationState
from penstock.planner.plan import Plan
from penstock.planner.problem import Problem
from penstock.planner.request import Limit, check_limits
from penstock.schedules.registry import algorithm, algorithms, parse_name
from penstock.simulator.simulate import retime, simulate
from penstock.simulator.timeline import Timeline
from penstock.text.numbers import format_count
from penstock.text.options import split_options
from penstock.text.units import check_count

Batch = TypeVar("Batch")
Skips = Mapping[int, Collection[int]]
"""By microbatch, the stages that it skips."""

TRIES = 800
"""Changes of the order that are tried per batch by default, up to `CELLS`."""
CELLS = 512
"""Stages times microbatches, such as 8 x 64; for more of them, so many fewer changes are tried that the search takes as long."""
_STARTS = 3
"""The best orders to begin with that are improved."""
_CHOSEN = 4
"""The same together with orders over a memory limit, which are changed until they fit, if that is possible."""
_ON_BEST = 0.4
"""Share of the tries for the best of them after all were improved; the others are shared evenly."""
_ROUNDS = 2
"""How often more memory is reserved for received messages when an improved order exceeds a limit."""
_BETTER = 1e-9
"""An objective counts as better from this relative difference on."""
_SEED = 1


@dataclass(frozen=True, eq=False)
class _LoweredSchedule:
    """A schedule that a batch may run under, lowered and laid flat once."""

    schedule: Schedule
    timeline: Timeline
    nodes: Ints
    full: Flags
    """Its order as `flat_problem` has it, and which cells have a full backward."""

    @classmethod
    def build(cls, schedule: Schedule, problem: Problem) -> _LoweredSchedule:
        return cls(schedule, simulate(lower(schedule), problem.costs), *read_order(flatten(problem), schedule))


@dataclass(frozen=True, eq=False)
class TimedOrder:
    """A schedule with the microbatches in some order, timed."""

    lowered: _LoweredSchedule
    microbatches: tuple[int, ...]
    timeline: Timeline
    problem: Problem
    order: str = ""
    """`fixed`, `ascending`, `descending` or `pyramid`, see `BatchPlanner.order`; empty for an order that the search has improved."""

    @property
    def schedule(self) -> str:
        return self.lowered.schedule.name

    @cached_property
    def objective(self) -> float:
        return self.problem.objective(self.timeline)

    @cached_property
    def fits(self) -> bool:
        """Whether it stays within the memory limit."""
        return self.problem.fits(self.timeline)


@dataclass(frozen=True, eq=False)
class BatchOrder:
    """The order in which a batch's microbatches run, and the schedule that they run under.

    Microbatch k of the schedule is microbatch `microbatches[k]` of the batch; `predicted` and `problem` are numbered as the schedule is.
    """

    microbatches: tuple[int, ...]
    schedule: Schedule
    predicted: Timeline
    """When every action runs, and what each rank holds."""
    problem: Problem
    """The costs and limits of the batch."""
    tried: tuple[TimedOrder, ...] = field(repr=False)
    """The orders that the search began with: the result is not worse than any of them that fits."""

    @property
    def makespan(self) -> float:
        return self.predicted.makespan

    @cached_property
    def objective(self) -> float:
        """The minimised time: the makespan, or the longest rank span without a barrier."""
        return self.problem.objective(self.predicted)

    @cached_property
    def _bound(self) -> Bound:
        bound = lower_bound(self.problem)
        check_bound(bound.value, self.objective, bound.name)
        return bound

    @property
    def bound(self) -> float:
        """No order of these microbatches takes less under any schedule of the placement; computed when first asked for."""
        return self._bound.value

    @property
    def gap(self) -> float:
        """How much longer the batch takes than the bound, as a share of the bound."""
        return self.objective / self.bound - 1 if self.bound else 0.0

    def best_of(self, order: str) -> float:
        """The least objective of an order to begin with (`fixed`, `ascending`, ...) that fits; infinite if none does."""
        return min((tried.objective for tried in self.tried if tried.order == order and tried.fits), default=math.inf)

    @property
    def unplanned(self) -> float:
        """The objective without planning: the batch's own order under the source's own schedule, whether it fits or not."""
        return self.tried[0].objective

    def __repr__(self) -> str:
        gain = self.unplanned / self.objective if self.objective else 1.0
        figures = f"{self.objective:g}, {gain:.2f}x as fast as unplanned"
        return f"<BatchOrder {self.schedule.name!r}, {format_count(len(self.microbatches), 'microbatch')}, {figures}>"


class BatchPlanner:
    """Plans each batch by the lengths of its microbatches: their order, and the schedule.

    - `source`: a plan; or a schedule, with the `costs` of its stages;
    - `sequence`, `samples`: tokens per sample and samples per microbatch that these costs are for; `samples` defaults to the plan's;
    - `quadratic`: the share of a stage's time at that length that grows with the square of the length; one number, or one per stage;
    - `schedules`: names of schedules with the same placement to choose from, besides the source's own; all by default, none for `()`;
    - `memory_limit`: one size, or one per rank, parameters included; defaults to the plan's;
    - `split`: whether backwards may be split, for a schedule that splits none itself; a plan says so itself;
    - `tries`: how many changes of the order are tried per batch; by default 800, and fewer for more than 512 stages times microbatches.
      The result depends on the arguments alone, never on a clock, so every rank gets the same.

    Building one compiles the search if numba is installed, and times every schedule once.
    """

    def __init__(
        self,
        source: Plan | Schedule,
        costs: Costs | None = None,
        *,
        sequence: int,
        samples: int | None = None,
        quadratic: float | Sequence[float] = 0.0,
        schedules: Sequence[str] | None = None,
        memory_limit: Limit = None,
        split: bool = True,
        tries: int | None = None,
    ) -> None:
        self.problem, self.schedule = _read_source(source, costs, split)
        """The costs of the source, and its schedule."""
        limits = check_limits(memory_limit, self.problem.ranks)
        if limits is not None:
            self.problem = replace(self.problem, memory_limit=limits)
        if samples is None:
            samples = source.microbatch if isinstance(source, Plan) else 1
        self.samples = check_count("samples", samples, error=ScheduleError)
        self.tries = None if tries is None else check_count("tries", tries, 0, error=ScheduleError)
        self.lengths = self._read_shares(sequence, quadratic)
        self.names = None if schedules is None else tuple(map(self._check_name, schedules))
        self._lowered: dict[int, list[_LoweredSchedule]] = {}
        self._fallbacks: dict[int, _LoweredSchedule] = {}
        self._lock = threading.Lock()
        """Held while a batch is planned, because the scratch columns of the loops are shared."""
        count = self.schedule.microbatches
        _BatchSearch(
            replace(self.problem, memory_limit=None), self._list_lowered(count), self._build_slowest, 1
        ).run()  # compiles the loops

    def _read_shares(self, sequence: int, quadratic: float | Sequence[float]) -> tuple[LengthCosts, ...]:
        """How the time of each stage depends on lengths."""
        stages = self.problem.stages
        shares = list(quadratic) if isinstance(quadratic, Sequence | np.ndarray) else [quadratic] * stages
        if len(shares) != stages:
            raise CostsError(f"quadratic has {len(shares)} values for {stages} stages: give one number or one per stage")
        return tuple(LengthCosts(sequence, share) for share in shares)

    def _check_name(self, text: str) -> str:
        """The registered name of a schedule that the placement can have."""
        placement, count = self.problem.placement, self.schedule.microbatches
        known = [schedule.name for schedule in self._list_named(count)]
        registered = algorithms().find(split_options(text)[0])
        if registered not in known:
            raise ScheduleError(
                f"schedule {text!r} is not available on a placement of {placement.describe()} with {count} microbatches: "
                f"{nearest(text, known)}"
            )
        for key, value in parse_name(text)[1].items():
            if (key, value) != ("chunks", placement.chunks):
                raise ScheduleError(f"schedule {text!r}: {key}={value} differs from the placement, {placement.describe()}")
        return registered

    # Packing ----------------------------------------------------------------------------------------------------------

    def pack(self, lengths: Sequence[int], microbatches: int | None = None, *, capacity: int | None = None) -> Packing:
        """Pack samples into microbatches (by default as many as the source has) by the time that they take on all stages together."""
        times = [sum(float(self.problem.costs.of_stage(name, stage)) for name in ("f", "i", "w")) for stage in range(self.problem.stages)]
        squares = math.fsum(time * model.quadratic for time, model in zip(times, self.lengths, strict=True))
        quadratic = squares / math.fsum(times) if any(times) else 0.0
        count = self.schedule.microbatches if microbatches is None else microbatches
        return pack(lengths, count, capacity=capacity, sequence=self.lengths[0].sequence, quadratic=min(quadratic, 1.0))

    # Ordering ---------------------------------------------------------------------------------------------------------

    def costs(self, lengths: Sequence[MicrobatchLengths], skips: Skips | None = None) -> Costs:
        """The costs of a batch per stage and microbatch.

        Times follow `LengthCosts`; activations, stashes and messages grow with the number of tokens. A stage that a microbatch skips takes
        no time and holds nothing, and a message between two such stages is empty; only its latency remains.
        """
        microbatches, base, stages = read_lengths(lengths), self.problem.costs, self.problem.stages
        runs = np.ones((stages, len(microbatches)))
        for microbatch, skipped in (skips or {}).items():
            for stage in skipped:
                if microbatch not in range(len(microbatches)) or stage not in range(stages):
                    raise CostsError(
                        f"skips says that microbatch {microbatch} skips stage {stage}, but there are {len(microbatches)} microbatches and "
                        f"{stages} stages, numbered from 0"
                    )
                runs[stage, microbatch] = 0.0
        rows = {model: [model.of(samples) / self.samples for samples in microbatches] for model in set(self.lengths)}
        time = np.array([rows[model] for model in self.lengths])
        size = np.array([sum(samples) / (self.samples * self.lengths[0].sequence) for samples in microbatches])
        factors = dict.fromkeys(("f", "i", "w", "b"), time * runs) | dict.fromkeys(("activation", "weight_stash"), size * runs)
        passed = np.vstack([np.maximum(runs[:-1], runs[1:]), runs[-1:]])
        tables = {
            name: np.array(base.per_stage(name, stages))[:, None] * factor
            for name, factor in (factors | {"output": size * passed}).items()
            if getattr(base, name) is not None
        }
        return replace(base, **tables)

    def order(self, lengths: Sequence[MicrobatchLengths], *, skips: Skips | None = None) -> BatchOrder:
        """Order a batch's microbatches and choose the schedule.

        `lengths` are the tokens of each microbatch: a number for one sample, or the lengths of all its samples. The search begins with the
        batch's own order (`fixed`), the cheapest microbatch first (`ascending`) or last (`descending`), and the cheap ones at both ends
        (`pyramid`), under every schedule. The simulator times all of them; the best that fit the memory are improved by exchanging and
        moving microbatches. Raises `PlanError` if nothing fits.
        """
        microbatches = read_lengths(lengths)
        return self.order_by_costs(self.costs(microbatches, skips), len(microbatches))

    def order_by_costs(self, costs: Costs, microbatches: int) -> BatchOrder:
        """The same for times and sizes that you know: `costs` with one value per stage and microbatch."""
        with self._lock:
            problem = replace(self.problem, costs=costs, microbatches=microbatches)
            tries = min(TRIES, TRIES * CELLS // problem.cells) if self.tries is None else self.tries
            return _BatchSearch(problem, self._list_lowered(microbatches), self._build_slowest, tries).run()

    def ahead(
        self, batches: Iterable[Batch], lengths: Callable[[Batch], Any], skips: Callable[[Batch], Skips | None] | None = None
    ) -> Iterator[tuple[Batch, BatchOrder]]:
        """Yield each batch with its order, planned in a thread while the caller works on the batch before.

        `lengths(batch)` and `skips(batch)` return what `order` takes. One batch more than the caller has seen is read from `batches`.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-batches") as pool:
            waiting: tuple[Batch, Future[BatchOrder]] | None = None
            for batch in batches:
                planned = batch, pool.submit(self.order, lengths(batch), skips=None if skips is None else skips(batch))
                if waiting is not None:
                    yield waiting[0], waiting[1].result()
                waiting = planned
            if waiting is not None:
                yield waiting[0], waiting[1].result()

    # Schedules --------------------------------------------------------------------------------------------------------

    def _list_named(self, microbatches: int) -> list[Schedule]:
        """The named schedules of the placement; those without chunks or other options first, because others may be the same order."""

        def has_options(schedule: Schedule) -> bool:
            entry = algorithm(schedule.name)
            return bool(entry.options) or not entry.layout.fixed

        return sorted(list_named_schedules(replace(self.problem, microbatches=microbatches)), key=has_options)

    def _list_lowered(self, microbatches: int) -> list[_LoweredSchedule]:
        """The schedules for that many microbatches: the source's own first, and no order twice. They are built for the source's costs."""
        known = self._lowered.get(microbatches)
        if known is None:
            problem = replace(self.problem, microbatches=microbatches)
            named = [] if self.names == () else self._list_named(microbatches)
            chosen = [schedule for schedule in named if self.names is None or schedule.name in self.names]
            known = []
            for schedule in (*self._remake(microbatches), *chosen):
                if all(schedule != other.schedule for other in known):
                    known.append(_LoweredSchedule.build(schedule, problem))
            if not known:
                raise ScheduleError(
                    f"no schedule for {microbatches} microbatches: {self.schedule.name or 'the schedule'} is fixed to "
                    f"{self.schedule.microbatches}, and none of the named ones that may be chosen has its placement"
                )
            self._lowered[microbatches] = known
        return known

    def _build_slowest(self, microbatches: int) -> _LoweredSchedule:
        """One microbatch after the other, if nothing else fits: no schedule holds less."""
        if microbatches not in self._fallbacks:
            problem = replace(self.problem, microbatches=microbatches)
            self._fallbacks[microbatches] = _LoweredSchedule.build(one_at_a_time(problem.placement, microbatches), problem)
        return self._fallbacks[microbatches]

    def _remake(self, microbatches: int) -> list[Schedule]:
        """The source's schedule for that many microbatches, if it can be had."""
        if microbatches == self.schedule.microbatches:
            return [self.schedule]
        return [] if self.schedule.remake is None else [self.schedule.remake(microbatches)]


def _read_source(source: Any, costs: Costs | None, split: bool) -> tuple[Problem, Schedule]:
    if isinstance(source, Plan):
        if costs is not None:
            raise CostsError("costs= is for a schedule: a plan has costs of its own")
        problem, schedule = source.problem, source.schedule
    elif isinstance(source, Schedule):
        if costs is None:
            raise CostsError("a schedule does not say what its stages take: give costs=, or a plan")
        schedule = source
        splits = split or bool(schedule.rows.is_kind(Kind.I).any())
        problem = Problem(schedule.placement, schedule.microbatches, costs, split=splits)
    else:
        raise CostsError(f"batches are planned from a Plan, or a Schedule with costs=, got {type(source).__name__}")
    if not schedule.training or schedule.slices > 1:
        reason = "cuts sequences into slices" if schedule.slices > 1 else "has no backward"
        raise ScheduleError(f"{schedule.name or 'the schedule'} {reason}: batches are planned for schedules that train whole microbatches")
    for name in problem.costs.differing:
        raise CostsError(f"{name} has one value per microbatch: give costs per stage, for microbatches of `sequence` tokens")
    return problem, schedule


class _BatchSearch:
    """The best order of one batch."""

    def __init__(
        self, problem: Problem, schedules: list[_LoweredSchedule], find_slowest: Callable[[int], _LoweredSchedule], tries: int
    ) -> None:
        self.problem, self.schedules, self.find_slowest, self.tries = problem, schedules, find_slowest, tries
        self.reserve = np.zeros(problem.ranks)
        """Memory to leave free on each rank for received messages."""
        self.evaluator = Evaluator(flatten(problem))
        self.random = self.evaluator.seed(_SEED)
        self.flats: dict[int, FlatProblem] = {}
        """The problem with each schedule's full backwards, by its id."""

    def run(self) -> BatchOrder:
        orders = self._list_orders()
        starts = self._time_all(self.schedules, orders)
        best = self._improve(starts)
        if best is None:
            starts += self._time_all([self.find_slowest(self.problem.microbatches)], orders)
            best = self._improve(starts[-len(orders) :])
        if best is None:
            raise self._make_excess_error(starts)
        problem = replace(self.problem, costs=best.timeline.costs)
        return BatchOrder(best.microbatches, best.lowered.schedule, best.timeline, problem, tuple(starts))

    def _time_all(self, schedules: list[_LoweredSchedule], orders: dict[str, tuple[int, ...]]) -> list[TimedOrder]:
        """Time every schedule with every order."""
        starts: list[TimedOrder] = []
        for name, order in orders.items():
            costs = self.problem.costs.permuted(order)
            starts += [TimedOrder(lowered, order, retime(lowered.timeline, costs), self.problem, name) for lowered in schedules]
        return starts

    def _pick_fitting(self, starts: list[TimedOrder], excesses: Mapping[int, float]) -> list[TimedOrder]:
        """The fastest that fit; among equals the fixed order and the source's own schedule are first."""
        ranked = sorted(starts, key=lambda start: start.objective)
        fitting = (start for start in ranked if not excesses.get(id(start)) and self._find_excess_per_rank(start) is None)
        return list(islice(fitting, _STARTS))

    def _pick_repairable(self, starts: list[TimedOrder], excesses: Mapping[int, float], best: float) -> list[TimedOrder]:
        """The starts that are faster than the best, those least over the memory limits first: with another order they may fit."""
        over = [start for start in starts if excesses.get(id(start)) and start.objective < best]
        return sorted(over, key=lambda start: excesses[id(start)])

    def _find_excess(self, start: TimedOrder) -> float:
        """How much activations and stashes alone exceed the limits, which is quicker than all memory of a timeline."""
        over = self._find_peaks(start) - self.evaluator.flat.limit
        return float(over[over > _BETTER * np.abs(self.problem.limits)].sum())

    def _find_peaks(self, start: TimedOrder) -> Floats:
        """The most activations and stashes on each rank."""
        lowered = start.lowered
        if id(lowered) not in self.flats:
            self.flats[id(lowered)] = replace_full_backwards(self.evaluator.flat, lowered.full)
        flat, nodes = self.flats[id(lowered)], lowered.nodes
        takes, keeps = (table.reshape(-1, flat.microbatches)[:, start.microbatches].ravel()[nodes] for table in (flat.takes, flat.keeps))
        after = np.cumsum(takes + keeps)  # over all ranks: each ends with nothing
        return np.asarray(np.maximum.reduceat(np.maximum(after, after - keeps), flat.bounds[:-1]))

    def _list_orders(self) -> dict[str, tuple[int, ...]]:
        """The orders to begin with, by the time that each microbatch takes on all stages."""
        shape = self.problem.stages, self.problem.microbatches
        time = sum(self.problem.costs.table(name, *shape) for name in ("f", "b"))
        totals = [math.fsum(column) for column in np.asarray(time).T.tolist()]
        ascending = sorted(range(len(totals)), key=totals.__getitem__)
        pyramid = ascending[::2] + ascending[1::2][::-1]
        orders = {"fixed": range(len(totals)), "ascending": ascending, "descending": ascending[::-1], "pyramid": pyramid}
        return {name: tuple(order) for name, order in orders.items()}

    def _find_excess_per_rank(self, timed: TimedOrder) -> Any:
        """The memory of each rank over its limit; None if it fits."""
        if timed.fits:
            return None
        return np.maximum(0.0, np.array(timed.timeline.peak_memory) - np.array(self.problem.limits))

    def _improve(self, starts: list[TimedOrder]) -> TimedOrder | None:
        """Improve the best starts, then the best of the results again; None if nothing fits."""
        excesses = {id(start): self._find_excess(start) for start in starts} if self.problem.memory_limit is not None else {}
        fitting = self._pick_fitting(starts, excesses)
        best = fitting[0] if fitting else None
        if best is not None and excesses:
            held = np.array(best.timeline.peak_memory) - np.array(self.problem.static_memory)
            self.reserve = np.maximum(0.0, held - self._find_peaks(best))
        chosen = [*fitting, *self._pick_repairable(starts, excesses, math.inf if best is None else best.objective)][:_CHOSEN]
        tries = int(self.tries * (1 - _ON_BEST)) // max(len(chosen), 1)
        for start in chosen:
            best = self._climb(start, tries, best)
        return best and self._climb(best, self.tries - tries * len(chosen), best)

    def _climb(self, start: TimedOrder, tries: int, best: TimedOrder | None) -> TimedOrder | None:
        """Improve one order; returns the best so far if the result is not better or does not fit."""
        limited = self.problem.memory_limit is not None
        evaluator, lowered, order = self.evaluator, start.lowered, start.microbatches
        base = evaluator.copy_flat(lowered.full)
        columns = base.duration, base.travel, base.takes, base.keeps
        for count in (tries, *([tries // _ROUNDS] * _ROUNDS if limited else ())):
            limit, travel = evaluator.flat.limit - self.reserve, evaluator.flat.travel.copy()
            flat = evaluator.copy_flat(lowered.full)._replace(limit=evaluator.as_column(limit), travel=evaluator.as_column(travel))
            at = evaluator.as_column(np.array(order, dtype=np.int64))
            state = PermutationState(evaluator.as_column(lowered.nodes), at, *columns, self.random)
            _, over = evaluator.loops.search_permutations(flat, state, evaluator.clock, count, limited)
            if over > self.reserve.sum():
                return best
            order = tuple(int(microbatch) for microbatch in at)
            improved = TimedOrder(lowered, order, retime(lowered.timeline, self.problem.costs.permuted(order)), self.problem)
            if best is not None and improved.objective >= best.objective * (1 - _BETTER):
                return best
            excess = self._find_excess_per_rank(improved)
            if excess is None:
                return improved
            self.reserve = self.reserve + excess
        return best

    def _make_excess_error(self, starts: list[TimedOrder]) -> PlanError:
        """Of all orders, the one that is least over a limit."""
        peaks = [(max(self._find_excess_per_rank(start)), start) for start in starts]
        over, nearest_fit = min(peaks, key=lambda pair: pair[0])
        held, limits = nearest_fit.timeline.peak_memory, self.problem.limits
        rank = max(range(len(held)), key=lambda rank: held[rank] - limits[rank])
        where = f"rank {rank} holds {held[rank]:g} of at most {limits[rank]:g}, {over:g} too much"
        return PlanError(
            f"no order of these {self.problem.microbatches} microbatches fits the memory limit. With the nearest, "
            f"{nearest_fit.order} under {nearest_fit.schedule}, {where}: make the largest microbatches smaller (a "
            "lower capacity when packing), or raise the limit"
        )
