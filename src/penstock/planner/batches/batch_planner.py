"""Orders the microbatches of one batch and chooses the schedule, for the times that their lengths take."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from penstock.errors import CostsError, PlanError, ScheduleError, nearest
from penstock.ir.codes import MAX_MICROBATCHES
from penstock.ir.costs import Costs, check_costs
from penstock.ir.kind import Kind
from penstock.ir.rows import Floats
from penstock.ir.schedule import Schedule
from penstock.planner.batches.batch_costs import BatchCosts
from penstock.planner.batches.flat_schedule import TIMES, FlatSchedule
from penstock.planner.batches.lengths import LengthCosts, MicrobatchLengths, read_lengths
from penstock.planner.batches.packing import Packing, pack
from penstock.planner.bounds.lower_bound import Bound, check_bound, lower_bound
from penstock.planner.named_schedules import list_named_schedules, one_at_a_time
from penstock.planner.order_search.evaluator import Loops, get_loops
from penstock.planner.order_search.permutations import BatchColumns, Scratch, Steps
from penstock.planner.plan import Plan
from penstock.planner.problem import SLACK, Problem
from penstock.planner.request import Limit, check_limits
from penstock.schedules.registry import algorithm, algorithms, parse_name
from penstock.simulator.timeline import Timeline
from penstock.text.checks import check_flag, check_function
from penstock.text.numbers import format_count
from penstock.text.options import split_options
from penstock.text.units import Units, check_count

Batch = TypeVar("Batch")
Skips = Mapping[int, Collection[int]]
"""By microbatch, the stages that it skips."""

TRIES = 3200
"""The most changes of the order that are tried per batch by default."""
WORK = 3_000_000
"""How much is timed per batch by default, in the unit of `Scratch.spent`: up to about 12 ms."""
_LEAST_WORK = 600_000
"""How much of it at least goes into changes of the order: less is left if there are many actions, because every schedule is timed."""
_STARTS = 3
"""The best orders to begin with that are improved."""
_CHOSEN = 4
"""The same together with orders over a memory limit, which are changed until they fit, if that is possible."""
_ON_BEST = 0.4
"""Share of the tries for the best of them after all were improved; the others are shared evenly."""
_BETTER = 1e-9
"""An objective counts as better from this relative difference on."""
_SEED = 1
_ORDERS = {
    "fixed": "the batch's own order",
    "ascending": "the cheapest first",
    "descending": "the cheapest last",
    "pyramid": "the cheapest at both ends",
}
"""The orders to begin with, in words."""


@dataclass(frozen=True, eq=False)
class TimedOrder:
    """A schedule with the microbatches in some order, timed."""

    flat: FlatSchedule
    microbatches: tuple[int, ...]
    objective: float
    search: BatchSearch = field(repr=False)
    order: str = ""
    """`fixed`, `ascending`, `descending` or `pyramid`, see `BatchPlanner.order`; empty for an order that the search has improved."""

    @property
    def schedule(self) -> str:
        return self.flat.schedule.name

    @cached_property
    def excess(self) -> float:
        """How much memory it needs beyond the limits, on all ranks together."""
        return self.search.find_excess(self.flat, self.microbatches)

    @property
    def fits(self) -> bool:
        """Whether it stays within the memory limit."""
        return self.excess == 0.0


@dataclass(frozen=True, eq=False)
class BatchOrder:
    """The order in which a batch's microbatches run, and the schedule that they run under.

    Microbatch k of the schedule is microbatch `microbatches[k]` of the batch; `predicted` and `problem` are numbered as the schedule is.
    """

    microbatches: tuple[int, ...]
    objective: float
    """The minimised time: the makespan, or the longest rank span without a barrier."""
    tried: tuple[TimedOrder, ...] = field(repr=False)
    """The orders that the search began with: the result is not worse than any of them that fits."""
    costs: BatchCosts = field(repr=False)
    flat: FlatSchedule = field(repr=False)

    @property
    def schedule(self) -> Schedule:
        return self.flat.schedule

    @cached_property
    def problem(self) -> Problem:
        """The costs and limits of the batch."""
        return self.costs.place(self.microbatches)

    @cached_property
    def predicted(self) -> Timeline:
        """When every action runs, and what each rank holds."""
        return self.flat.time(self.problem.costs)

    @property
    def makespan(self) -> float:
        return self.objective if self.costs.problem.barrier else self.predicted.makespan

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
    - `tries`: how many changes of the order are tried per batch; by default up to 3200, and fewer the more actions there are, so that
      planning takes about as long for any size. The result depends on the arguments alone, never on a clock, so every rank gets the same.

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
        self.problem, self.schedule = _read_source(source, costs, check_flag("split", split))
        """The costs of the source, and its schedule."""
        limits = check_limits(memory_limit, self.problem.ranks)
        if limits is not None:
            self.problem = replace(self.problem, memory_limit=limits)
        if samples is None:
            samples = source.microbatch if isinstance(source, Plan) else 1
        self.samples = check_count("samples", samples, error=ScheduleError)
        self.tries = None if tries is None else check_count("tries", tries, 0, error=ScheduleError)
        self.lengths = self._read_shares(sequence, quadratic)
        self.names = None if schedules is None else tuple(map(self._check_name, _list_names(schedules)))
        self._loops = get_loops()
        self._schedules: dict[int, list[FlatSchedule]] = {}
        self._fallbacks: dict[int, FlatSchedule] = {}
        self._lock = threading.Lock()
        """Held while a batch is planned, because schedules are built only once."""
        unlimited = BatchCosts.read(replace(self.problem, memory_limit=None))
        self._search(unlimited, 1)  # compiles the loops

    def _read_shares(self, sequence: int, quadratic: Any) -> tuple[LengthCosts, ...]:
        """How the time of each stage depends on lengths."""
        stages = self.problem.stages
        shares = (
            list(quadratic) if isinstance(quadratic, Sequence | np.ndarray) and not isinstance(quadratic, str) else [quadratic] * stages
        )
        if len(shares) != stages:
            raise CostsError(f"quadratic has {len(shares)} values for {stages} stages: give one number or one per stage")
        return tuple(LengthCosts(sequence, share) for share in shares)

    def _check_name(self, text: str) -> str:
        """The registered name of a schedule that the placement can have."""
        if not isinstance(text, str):
            raise ScheduleError(f"schedules must be a list of names, with {text!r} in it")
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
        return self._tabulate(read_lengths(lengths), skips).build()

    def _tabulate(self, microbatches: list[tuple[int, ...]], skips: Skips | None) -> BatchCosts:
        base, stages = self.problem.costs, self.problem.stages
        runs = _read_skips(skips, stages, len(microbatches))
        rows = {model: [model.of(samples) / self.samples for samples in microbatches] for model in set(self.lengths)}
        time = np.array([rows[model] for model in self.lengths])
        size = np.array([sum(samples) / (self.samples * self.lengths[0].sequence) for samples in microbatches])
        factors = dict.fromkeys(TIMES, time * runs) | dict.fromkeys(("activation", "weight_stash", "kept"), size * runs)
        passed = np.vstack([np.maximum(runs[:-1], runs[1:]), runs[-1:]])
        with np.errstate(over="ignore"):  # refused below
            tables = {
                name: np.array(base.per_stage(name, stages))[:, None] * factor
                for name, factor in (factors | {"output": size * passed}).items()
                if getattr(base, name) is not None
            }
        return BatchCosts(replace(self.problem, microbatches=len(microbatches)), tables)

    def order(self, lengths: Sequence[MicrobatchLengths], *, skips: Skips | None = None) -> BatchOrder:
        """Order a batch's microbatches and choose the schedule.

        `lengths` are the tokens of each microbatch: a number for one sample, or the lengths of all its samples. The search begins with the
        batch's own order (`fixed`), the cheapest microbatch first (`ascending`) or last (`descending`), and the cheap ones at both ends
        (`pyramid`), under every schedule. The simulator times all of them; the best that fit the memory are improved by exchanging and
        moving microbatches. Raises `PlanError` if nothing fits.
        """
        return self._search(self._tabulate(read_lengths(lengths), skips), self.tries)

    def order_by_costs(self, costs: Costs, microbatches: int) -> BatchOrder:
        """The same for times and sizes that you know: `costs` with one value per stage and microbatch."""
        count = check_count("microbatches", microbatches, most=MAX_MICROBATCHES)
        return self._search(BatchCosts.read(replace(self.problem, costs=check_costs(costs), microbatches=count)), self.tries)

    def _search(self, costs: BatchCosts, tries: int | None) -> BatchOrder:
        with self._lock:
            schedules = self._list_schedules(costs.problem.microbatches)
            return BatchSearch(costs, schedules, self._build_slowest, tries, self._loops).run()

    def ahead(
        self, batches: Iterable[Batch], lengths: Callable[[Batch], Any], skips: Callable[[Batch], Skips | None] | None = None
    ) -> Iterator[tuple[Batch, BatchOrder]]:
        """Yield each batch with its order, planned in a thread while the caller works on the batch before.

        `lengths(batch)` and `skips(batch)` return what `order` takes. One batch more than the caller has seen is read from `batches`.
        """
        if not isinstance(batches, Iterable):
            raise CostsError(f"batches must be something to iterate over, such as a list or a data loader, got {type(batches).__name__}")
        check_function("lengths", lengths, "lengths(batch)", error=CostsError)
        if skips is not None:
            check_function("skips", skips, "skips(batch)", error=CostsError)
        return self._yield_orders(batches, lengths, skips)

    def _yield_orders(
        self, batches: Iterable[Batch], lengths: Callable[[Batch], Any], skips: Callable[[Batch], Skips | None] | None
    ) -> Iterator[tuple[Batch, BatchOrder]]:
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

    def _list_schedules(self, microbatches: int) -> list[FlatSchedule]:
        """The schedules for that many microbatches: the source's own first, and no order twice. They are built for the source's costs."""
        known = self._schedules.get(microbatches)
        if known is None:
            named = [] if self.names == () else self._list_named(microbatches)
            chosen = [schedule for schedule in named if self.names is None or schedule.name in self.names]
            known = []
            for schedule in (*self._remake(microbatches), *chosen):
                if all(schedule != other.schedule for other in known):
                    known.append(FlatSchedule.build(schedule))
            if not known:
                raise ScheduleError(
                    f"no schedule for {microbatches} microbatches: {self.schedule.name or 'the schedule'} is fixed to "
                    f"{self.schedule.microbatches}, and none of the named ones that may be chosen has its placement"
                )
            self._schedules[microbatches] = known
        return known

    def _build_slowest(self, microbatches: int) -> FlatSchedule:
        """One microbatch after the other, if nothing else fits: no schedule holds less."""
        if microbatches not in self._fallbacks:
            self._fallbacks[microbatches] = FlatSchedule.build(one_at_a_time(self.problem.placement, microbatches))
        return self._fallbacks[microbatches]

    def _remake(self, microbatches: int) -> list[Schedule]:
        """The source's schedule for that many microbatches, if it can be had."""
        if microbatches == self.schedule.microbatches:
            return [self.schedule]
        return [] if self.schedule.remake is None else [self.schedule.remake(microbatches)]


def _list_names(schedules: Any) -> list[Any]:
    if isinstance(schedules, str) or not isinstance(schedules, Iterable):
        hint = f": give [{schedules!r}]" if isinstance(schedules, str) else ""
        raise ScheduleError(f"schedules must be a list of names, got {schedules!r}{hint}")
    return list(schedules)


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
        problem = Problem(schedule.placement, schedule.microbatches, check_costs(costs), split=splits)
    else:
        raise CostsError(f"batches are planned from a Plan, or a Schedule with costs=, got {type(source).__name__}")
    if not schedule.training or schedule.slices > 1:
        reason = "cuts sequences into slices" if schedule.slices > 1 else "has no backward"
        raise ScheduleError(f"{schedule.name or 'the schedule'} {reason}: batches are planned for schedules that train whole microbatches")
    if schedule.spread_stages or problem.is_spread:
        raise ScheduleError(
            f"{schedule.name or 'the schedule'} spreads the vocabulary over the ranks, for which no batches are planned: give a plan "
            "made without vocabulary=True"
        )
    if problem.costs.differing and len(problem.placement.copies) > 1 and isinstance(source, Plan):
        raise ScheduleError(
            f"{schedule.name or 'the schedule'} runs copies of the model on devices of different speeds, for which no batches are planned: "
            "give a plan with one copy"
        )
    for name in problem.costs.differing:
        raise CostsError(f"{name} has one value per microbatch: give costs per stage, for microbatches of `sequence` tokens")
    return problem, schedule


def _read_skips(skips: Any, stages: int, microbatches: int) -> Floats:
    """1.0 for every stage and microbatch that runs, 0.0 for those that are skipped."""
    runs = np.ones((stages, microbatches))
    if skips is not None and not isinstance(skips, Mapping):
        raise CostsError(f"skips must be a dictionary with the stages that each microbatch skips, like {{0: (0, 1)}}, got {skips!r}")
    for microbatch, skipped in (skips or {}).items():
        if isinstance(skipped, str) or not isinstance(skipped, Iterable):
            raise CostsError(f"skips[{microbatch!r}] must be a list of stages, like (0, 1), got {skipped!r}")
        for stage in skipped:
            if microbatch not in range(microbatches) or stage not in range(stages):
                raise CostsError(
                    f"skips says that microbatch {microbatch} skips stage {stage}, but there are {microbatches} microbatches and "
                    f"{stages} stages, numbered from 0"
                )
            runs[int(stage), int(microbatch)] = 0.0
    return runs


class BatchSearch:
    """The best order of one batch."""

    def __init__(
        self,
        costs: BatchCosts,
        schedules: list[FlatSchedule],
        find_slowest: Callable[[int], FlatSchedule],
        tries: int | None,
        loops: Loops,
    ) -> None:
        self.costs, self.schedules, self.find_slowest = costs, schedules, find_slowest
        self.problem, self.limited = costs.problem, costs.problem.memory_limit is not None
        self.exact = self.problem.costs.contention == "independent"
        """Whether the loops know when messages travel; if senders share links, the simulator does."""
        self.tries = tries
        self.loops = loops
        self.random = self._as_column(np.array([1 + _SEED], dtype=np.int64))
        self.columns: dict[int, tuple[Steps, BatchColumns, Scratch]] = {}
        """What the loops read and write of each schedule, by its id."""
        self.built: dict[tuple[int, ...], Costs] = {}
        """The costs of each order that the simulator has timed."""
        limits, held = np.array(self.problem.limits), np.array(self.problem.static_memory)
        self.batch = BatchColumns(
            times=self._as_column(costs.times),
            travels=None,
            sizes=self._as_column(costs.sizes),
            limit=self._as_column(np.where(np.isinf(limits), limits, limits * (1 + SLACK)) - held),
            closing=self._as_column(self.problem.costs.per_rank("optimizer", self.problem.placement)),
            reduce=self._as_column(np.array(self.problem.costs.per_stage("reduce", self.problem.stages))),
            is_span=not self.problem.barrier,
        )

    def _as_column(self, values: Any) -> Any:
        """An array, or a list for the plain loops."""
        return values if self.loops.compiled else values.tolist()

    def _find_columns(self, flat: FlatSchedule) -> tuple[Steps, BatchColumns, Scratch]:
        if id(flat) not in self.columns:
            steps, scratch = flat.make_columns(self.loops.compiled)
            batch = self.batch._replace(travels=self._as_column(self.costs.find_travels(flat.messages)))
            self.columns[id(flat)] = steps, batch, scratch
        return self.columns[id(flat)]

    def find_excess(self, flat: FlatSchedule, order: tuple[int, ...]) -> float:
        """How much memory an order needs beyond the limits, on all ranks together."""
        if not self.limited:
            return 0.0
        steps, batch, scratch = self._find_columns(flat)
        return float(self.loops.find_excess(steps, batch, self._as_column(np.array(order)), scratch, math.inf))

    def count_work(self) -> int:
        """The work done so far, in the unit of `Scratch.spent`."""
        return sum(int(scratch.spent[0]) for _, _, scratch in self.columns.values())

    # Search -----------------------------------------------------------------------------------------------------------

    def run(self) -> BatchOrder:
        orders = self._list_orders()
        starts = self.time_all(self.schedules, orders)
        best = self._improve(starts)
        if best is None:
            starts += self.time_all([self.find_slowest(self.problem.microbatches)], orders)
            best = self._improve(starts[-len(orders) :])
        if best is None:
            raise self._make_excess_error(starts)
        return BatchOrder(best.microbatches, best.objective, tuple(starts), self.costs, best.flat)

    def _list_orders(self) -> dict[str, tuple[int, ...]]:
        """The orders to begin with, by the time that each microbatch takes on all stages."""
        times = self.costs.times.reshape(-1, self.problem.microbatches)
        f, _, _, b, *_ = np.split(times[: 4 * self.problem.stages], 4)
        totals = [math.fsum(column) for column in (f + b).T.tolist()]
        ascending = sorted(range(len(totals)), key=totals.__getitem__)
        pyramid = ascending[::2] + ascending[1::2][::-1]
        orders = {"fixed": range(len(totals)), "ascending": ascending, "descending": ascending[::-1], "pyramid": pyramid}
        return {name: tuple(order) for name, order in orders.items()}

    def time_all(self, schedules: list[FlatSchedule], orders: dict[str, tuple[int, ...]]) -> list[TimedOrder]:
        """Time every schedule with every order."""
        columns = self._as_column(np.array(list(orders.values())))
        times = {id(flat): self._time_orders(flat, orders, columns) for flat in schedules}
        named = enumerate(orders.items())
        return [TimedOrder(flat, order, times[id(flat)][k], self, name) for k, (name, order) in named for flat in schedules]

    def _time_orders(self, flat: FlatSchedule, orders: dict[str, tuple[int, ...]], columns: Any) -> list[float]:
        if not self.exact:
            return [self._simulate(flat, order) for order in orders.values()]
        steps, batch, scratch = self._find_columns(flat)
        objectives = self._as_column(np.zeros(len(orders)))
        self.loops.time_permutations(steps, batch, columns, scratch, objectives)
        return list(map(float, objectives))

    def _simulate(self, flat: FlatSchedule, order: tuple[int, ...]) -> float:
        if order not in self.built:
            self.built[order] = self.costs.build(order)
        return self.problem.objective(flat.time(self.built[order]))

    def _improve(self, starts: list[TimedOrder]) -> TimedOrder | None:
        """Improve the best starts, then the best of the results again; None if nothing fits."""
        fitting, over = self._pick(starts)
        best = fitting[0] if fitting else None
        chosen = [*fitting, *over][:_CHOSEN]
        if self.tries is None:
            tries, work = TRIES, max(WORK - self.count_work(), _LEAST_WORK)
        else:
            tries, work = self.tries, sys.maxsize
        share = (1 - _ON_BEST) / max(len(chosen), 1)
        for start in chosen:
            best = _choose(best, self.climb(start, int(share * tries), int(share * work)))
        return best and _choose(best, self.climb(best, int(_ON_BEST * tries), int(_ON_BEST * work)))

    def _pick(self, starts: list[TimedOrder]) -> tuple[list[TimedOrder], list[TimedOrder]]:
        """The fastest that fit, and all that are over the memory limits and faster, those least over first: in another order they may fit.

        Among equals the fixed order and the source's own schedule are first.
        """
        fitting: list[TimedOrder] = []
        over: list[TimedOrder] = []
        for start in sorted(starts, key=lambda start: start.objective):
            if start.fits:
                fitting.append(start)
            elif not fitting:
                over.append(start)
            if len(fitting) == _STARTS:
                break
        return fitting, sorted(over, key=lambda start: start.excess)

    def climb(self, start: TimedOrder, tries: int, work: int) -> TimedOrder:
        """Improve one order by so many changes, or as many as this work allows."""
        steps, batch, scratch = self._find_columns(start.flat)
        at = self._as_column(np.array(start.microbatches))
        objective, _ = self.loops.search_permutations(steps, batch, at, scratch, self.random, tries, work, self.limited)
        order = tuple(map(int, at))
        return TimedOrder(start.flat, order, float(objective) if self.exact else self._simulate(start.flat, order), self)

    def _make_excess_error(self, starts: list[TimedOrder]) -> PlanError:
        """Of all orders, the one that is least over a limit."""
        limits = np.array(self.problem.limits)
        peaks = [np.array(start.flat.time(self.costs.build(start.microbatches)).peak_memory) for start in starts]
        held, nearest_fit = min(zip(peaks, starts, strict=True), key=lambda pair: float((pair[0] - limits).max()))
        rank = int(np.argmax(held - limits))
        profile = self.problem.profile
        units = Units(in_bytes=profile is not None and profile.size_unit == "B")
        has, most, over = (units.size(size) for size in (held[rank], limits[rank], held[rank] - limits[rank]))
        return PlanError(
            f"no order of these {self.problem.microbatches} microbatches fits the memory limit. With the nearest, "
            f"{_ORDERS[nearest_fit.order]} under {nearest_fit.schedule}, rank {rank} holds {has} of at most {most}, {over} too much: make "
            "the largest microbatches smaller (a lower capacity when packing), or raise the limit"
        )


def _choose(best: TimedOrder | None, other: TimedOrder) -> TimedOrder | None:
    """The other order if it fits and is better."""
    return other if other.fits and (best is None or other.objective < best.objective * (1 - _BETTER)) else best
