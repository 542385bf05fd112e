"""The named schedules of the zoo: which of them a request can use, timing them on partitions that fit, and shifting the cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np

from penstock.errors import PenstockError
from penstock.ir import codes
from penstock.ir.kind import Kind
from penstock.ir.placement import Placement
from penstock.ir.rows import Ints, Rows
from penstock.ir.schedule import Schedule
from penstock.passes.vocabulary import MOST_PENDING, Vocabulary, spread_vocabulary
from penstock.planner.candidate import Candidate, Verdict
from penstock.planner.partition.assignment import Assignment, Orders
from penstock.planner.partition.cut import list_neighbours
from penstock.planner.partition.layer_runs import Cutting, LayerRuns
from penstock.planner.partition.slices import list_edges
from penstock.planner.partition.stage_costs import split_layers
from penstock.planner.problem import Problem
from penstock.planner.profile import Profile
from penstock.planner.request import NO_SLICES, SEARCHED, Request
from penstock.schedules.registry import Algorithm, algorithms, parse_name
from penstock.simulator.simulate import retime
from penstock.text.numbers import format_count
from penstock.text.options import format_options

CHUNKS = (1, 2, 3, 4, 6, 8)
"""Stages per rank to try if a schedule leaves the number open."""
_MOST_RANKS = 8
"""Ranks of the small pipelines that show whether a schedule trains."""
_COUNTS = 7
"""How many numbers of recomputed ranks are tried."""
_ROUNDS = 4
"""Partitions that are tried for the memory of one schedule."""
_MOST_BUILT = 4
"""Problems that a schedule which follows the costs is built for; others are only timed again."""
_FEWEST_PLACED, _MOST_PLACED, _PLACED_CELLS = 2, 24, 2_000
"""Problems that a spread vocabulary is placed for, and their cells all together."""
_MOST_CUTS = 80
"""Cuts that are timed for one schedule when they are shifted."""
_FEWEST_EXCHANGES, _MOST_EXCHANGES, _EXCHANGE_CELLS = 6, 40, 3_000
"""Exchanges of two devices that are timed for one schedule, and their cells all together, times the chunks per rank."""
_MOST_TRIED, _TRIED_CELLS = 300, 30_000
"""Settings that are timed for one schedule on a small cluster, and their cells all together."""
_NEAR, _FEW_CUTS = 0.1, 16
"""If an exchange is slower by at most this share, so many cuts are timed for it."""
_MOST_LENGTHS = 160
"""Lengths of slices that are timed for one schedule when they are shifted."""
_STEPS = (8, 4, 2, 1)
"""By how many steps of the granularity a slice is made longer or shorter, one after the other."""
_AHEAD = (0, 1, 2)
"""How many more activations a rank may hold while its vocabulary is spread over all ranks."""
_MOST_SHIFTS, _SHIFT_CELLS = 240, 60_000
"""Shares of the rows that are timed for one schedule when rows are shifted, and their cells all together."""
_ROW_STEPS = (0.08, 0.04, 0.02, 0.01)
"""How much of the rows is moved from one rank to another, one after the other."""
_FASTER = 1e-9
"""A smaller relative difference is rounding."""


@dataclass(frozen=True)
class NamedSchedule:
    """A named schedule with a number of chunks per rank and of slices per sequence."""

    algorithm: Algorithm
    placement: Placement
    slices: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    """Its own options, if they are not the default ones."""

    @property
    def name(self) -> str:
        chunks = {} if self.algorithm.layout.fixed else {"chunks": self.placement.chunks}
        return format_options(self.algorithm.name, chunks | dict(self.options))

    @property
    def is_fixed(self) -> bool:
        """Whether the order is independent of costs and limits."""
        return not {"costs", "memory_limit"} & set(self.algorithm.options)

    def build(self, problem: Problem) -> Iterator[Schedule]:
        """The schedule for a problem; several if it takes a memory limit, because only the simulator knows which of them fit."""
        options = self.algorithm.options
        chunks = None if self.algorithm.layout.fixed else self.placement.chunks
        fixed: dict[str, Any] = dict(self.options) | ({"costs": problem.costs} if "costs" in options else {})
        if options.get("slices", self.slices) != self.slices:
            fixed["slices"] = self.slices
        for limit in _list_limits(problem) if "memory_limit" in options else [{}]:
            try:
                yield self.algorithm.build(problem.ranks, problem.microbatches, chunks, **fixed, **limit)
            except PenstockError:  # the limit is too low for it
                if not limit:
                    raise


def _list_limits(problem: Problem) -> list[dict[str, Any]]:
    """Limits of activations and stashes per rank: the schedule's own default, all memory that is left, and that less two messages."""
    highest = max(problem.costs.per_stage("activation", problem.stages))
    left = min(limit - static for limit, static in zip(problem.limits, problem.static_memory, strict=True))
    left = min(left, 2 * problem.ranks * highest)
    messages = 2 * max(problem.costs.per_stage("output", problem.stages))
    return [{}, *({"memory_limit": size} for size in dict.fromkeys((left, left - messages)) if size > 0)]


def list_candidates(
    names: Sequence[str],
    ranks: int,
    layers: int,
    slices: Sequence[int] = (1,),
    no_slices: str = NO_SLICES,
) -> tuple[list[NamedSchedule], dict[str, str]]:
    """The schedules to try with these numbers of slices, whole sequences first and then the most slices; and the reasons against others.

    `no_slices` says why sequences are not cut, if they are not.
    """
    usable: list[NamedSchedule] = []
    refused: dict[str, str] = {}
    for name in names:
        if name == SEARCHED:
            continue
        listed, reason = _list_shapes(name, ranks, layers, slices, no_slices)
        usable += [named for named in listed if named not in usable]
        if not listed:
            refused[name] = reason
    return sorted(usable, key=lambda named: (named.slices > 1, -named.slices)), refused


def _list_shapes(name: str, ranks: int, layers: int, slices: Sequence[int], no_slices: str) -> tuple[list[NamedSchedule], str]:
    """One schedule with every number of chunks and slices to try, or the number in its name; or why there is none."""
    entry, options = parse_name(name)
    layout = entry.layout
    wanted = entry.take_chunks(options.pop("chunks", None), options)
    open_counts = [count for count in CHUNKS if count >= layout.chunks] if wanted is None else [wanted]
    counts = [count for count in slices if (entry.slices is not None if count > 1 else not entry.is_sliced)]
    listed: list[NamedSchedule] = []
    reason = ""
    for chunks in [layout.chunks] if layout.fixed else open_counts:
        try:
            placement = layout.place(entry.shape(ranks, 1, chunks))
            if not options:  # they may need more microbatches, and are checked when the schedule is timed
                entry.build(ranks, 1, None if layout.fixed else chunks)  # checks the shape without generating any row
        except PenstockError as error:
            reason = reason or str(error)
            continue
        if not is_training(entry):
            reason = reason or "it has no backward"
        elif not counts and entry.is_sliced:
            reason = reason or f"it cuts sequences into slices, and {no_slices}"
        elif not counts:
            reason = reason or f"its order is not made for slices, and slices={', '.join(map(str, slices))} asks for them"
        elif placement.stages > layers:
            reason = reason or f"{format_count(layers, 'layer')} are too few for its {format_count(placement.stages, 'stage')}"
        else:
            listed += [NamedSchedule(entry, placement, count, tuple(options.items())) for count in counts]
    return listed, reason


def can_be_spread(named: NamedSchedule) -> bool:
    """Whether the vocabulary can be spread over the ranks under a schedule: with one copy of the model, in whole sequences."""
    return named.slices == 1 and named.placement.stages > 1 and len(named.placement.copies) == 1


@cache
def is_training(entry: Algorithm) -> bool:
    """Whether the schedule has backwards, as seen on the smallest pipeline that it accepts: that does not depend on the ranks."""
    for ranks in range(1, _MOST_RANKS + 1):
        try:
            return entry.build(ranks, ranks).training
        except PenstockError:
            continue
    return True  # the schedule itself says what it needs when it is timed


def list_searchable_problems(request: Request) -> Iterator[Problem]:
    """The problems on which orders are searched: every microbatch size, placement and number of slices, whole sequences first.

    Each comes without and with recompute if that is allowed.
    """
    for profile, placement, recompute, slices in _list_searchable_shapes(request):
        yield from request.make_problems(profile, placement, recompute, slices)


def list_every_cut(request: Request) -> Iterator[Problem]:
    """On a cluster, every partition on the same placements, if there are few; of whole sequences."""
    for profile, placement, recompute, slices in _list_searchable_shapes(request):
        if slices == 1:
            yield from request.list_every_cut(profile, placement, recompute)


def _list_searchable_shapes(request: Request) -> Iterator[tuple[Profile, Placement, tuple[bool, ...], int]]:
    ranks = request.ranks
    placements = [Placement.linear(ranks)]
    if ranks > 1:
        placements += [Placement.v(ranks), *(Placement.looped(ranks, chunks) for chunks in CHUNKS[1:4]), Placement.wave(ranks, 2)]
    flags = (False, True) if request.recompute and request.limits is not None else (False,)
    for slices in (*(count for count in request.slices if count == 1), *(count for count in reversed(request.slices) if count > 1)):
        for profile in request.profiles:
            for placement in placements:
                for again in flags if placement.stages <= len(request.profile) else ():
                    yield profile, placement, (again,) * placement.stages, slices


# Starting orders ------------------------------------------------------------------------------------------------------


def list_named_schedules(problem: Problem) -> Iterator[Schedule]:
    """Every named schedule that has the problem's placement and slices and trains, built for its costs and limits if it takes them."""
    for entry in algorithms().values():
        if entry.is_sliced if problem.slices == 1 else entry.slices is None:
            continue
        chunks = entry.layout.chunks if entry.layout.fixed else problem.placement.chunks
        options: dict[str, Any] = {"costs": problem.costs} if "costs" in entry.options else {}
        options |= {"slices": problem.slices} if problem.slices > 1 else {}
        if "memory_limit" in entry.options and problem.memory_limit is not None:
            # These schedules take one limit for all ranks, without parameters.
            options["memory_limit"] = min(limit - static for limit, static in zip(problem.limits, problem.static_memory, strict=True))
        try:
            schedule = entry.build(problem.ranks, problem.microbatches, chunks, **options)
            if schedule.placement.copies != problem.placement.copies or not len(schedule.rows) or not schedule.training:
                continue
        except PenstockError:
            continue
        if problem.split or not schedule.rows.is_kind(Kind.I, Kind.W).any():
            yield schedule


def one_at_a_time(placement: Placement, microbatches: int, name: str = "one-at-a-time", slices: int = 1) -> Schedule:
    """Each microbatch forward through all stages and back before the next, with full backwards: no order holds less.

    The slices of a microbatch go forward one after the other, and back in reverse.
    """
    stages = np.arange(placement.stages)
    stage = np.tile(np.concatenate((np.tile(stages, slices), np.tile(stages[::-1], slices))), microbatches)
    kind = np.tile(np.repeat((int(Kind.F), int(Kind.B)), placement.stages * slices), microbatches)
    turns = np.concatenate((np.arange(slices), np.arange(slices)[::-1]))
    unit = np.repeat((np.arange(microbatches)[:, None] * slices + turns).ravel(), placement.stages)
    ranks = placement.ranks_of(stage, unit)
    by_rank = np.argsort(ranks, kind="stable")
    entries = codes.pack(stage, kind, unit)[by_rank]
    rows = Rows.sorted_by(entries, ranks[by_rank], placement.ranks)
    return Schedule.from_rows(rows, placement, microbatches, name=name, slices=slices)


# Timing ---------------------------------------------------------------------------------------------------------------


def time_named(
    named: NamedSchedule,
    profile: Profile,
    request: Request,
    is_slow: Callable[[Problem], bool],
    is_over: Callable[[], bool] = lambda: False,
) -> list[Candidate]:
    """Time one schedule and, if its memory holds it back and that is allowed, again with some and with all stages recomputed.

    Once `is_over()`, it is left with the partitions that were timed until then, at least one.
    """
    return list(_Fitting(named, profile, request, is_slow, is_over).run())


@dataclass
class _Fitting:
    """Cuts the model for one schedule and, if it does not fit, cuts it otherwise or recomputes."""

    named: NamedSchedule
    profile: Profile
    request: Request
    is_slow: Callable[[Problem], bool]
    is_over: Callable[[], bool]
    known: Candidate | None = None
    """The order on any problem, if it is the same on all."""

    def run(self) -> Iterator[Candidate]:
        placement = self.named.placement
        none, all_stages = (False,) * placement.stages, (True,) * placement.stages
        first = self._fit(none)
        yield first
        if not self.request.recompute or len(placement.copies) > 1 or first.verdict in (Verdict.SLOW, Verdict.REFUSED):
            return
        problems = self.request.make_problems(self.profile, placement, none, self.named.slices)
        if first.fits and any((first.sizes, first.devices) == (problem.sizes, problem.devices) for problem in problems):
            return  # the memory does not hold it back
        if self.is_over():
            return
        every = self._fit(all_stages)
        some = [candidate for candidate in self._recompute_some(first, every, problems) if candidate.fits]
        if some:
            yield _pick_best(some)
        yield every

    def _fit(self, recompute: tuple[bool, ...]) -> Candidate:
        """With these stages recomputed: the best of several partitions that fits, else the nearest after cutting for its memory."""
        request, named = self.request, self.named
        problems = request.make_problems(self.profile, named.placement, recompute, named.slices)
        if not problems:
            lengths, assignment = request.guess_lengths(self.profile, named.slices), self._first_assignment
            sizes = request.cut(self.profile, named.placement, recompute, lengths=lengths, assignment=assignment).sizes
            too_large = request.make_problem(self.profile, named.placement, sizes, recompute, lengths, assignment=assignment)
            return Candidate.untimed(named.name, too_large, Verdict.TOO_LARGE, self._explain_excess(recompute))
        fast = [problem for problem in problems if not self.is_slow(problem)]
        if not fast:
            least = min(problem.work for problem in problems)
            return Candidate.untimed(named.name, problems[0], Verdict.SLOW, request.units.time(least))
        try:
            timed = [share_again(candidate) for candidate in self._time_until_over(self._choose(fast))]
        except PenstockError as error:  # the schedule itself says what it does not take
            return Candidate.untimed(named.name, problems[0], Verdict.REFUSED, str(error))
        if not timed:
            return Candidate.untimed(named.name, problems[0], Verdict.REFUSED, "it splits the backward")
        best = _pick_best(timed)
        if best.fits or self.is_over():
            return best
        by_devices: dict[object, list[Candidate]] = {}
        for candidate in timed:
            by_devices.setdefault((candidate.devices, candidate.problem.rows), []).append(candidate)
        return _pick_best([self._cut_for_memory(_pick_best(same)) for same in by_devices.values()])

    @property
    def _first_assignment(self) -> Assignment | None:
        return self.request.list_assignments(self.profile, self.named.placement, self.named.slices)[0]

    def _explain_excess(self, recompute: tuple[bool, ...]) -> str:
        lengths, units = self.request.guess_lengths(self.profile, self.named.slices), self.request.units
        cut = self.request.cut(self.profile, self.named.placement, recompute, lengths=lengths, assignment=self._first_assignment)
        rank = max(range(len(cut.excesses)), key=cut.excesses.__getitem__)
        layers = split_layers(self.profile, cut.sizes)
        static = sum(layer.static for stage in self.named.placement.stages_of(rank) for layer in layers[stage])
        always = f"; it keeps {units.size(static)} for parameters, gradients and optimizer alone" if static else ""
        return f"rank {rank} is {units.size(cut.excesses[rank])} over{always}"

    def _time(self, problem: Problem) -> Iterator[Candidate]:
        if self.known is not None:
            yield self.known.retime(problem)
            return
        for schedule in self.named.build(problem):
            if not problem.split and schedule.rows.is_kind(Kind.I).any():
                continue
            if problem.is_spread:
                for ahead in _AHEAD:
                    spread = spread_vocabulary(schedule, problem.costs, Vocabulary(ahead=ahead))
                    yield Candidate.time(self.named.name, problem, spread)
                continue
            candidate = Candidate.time(self.named.name, problem, schedule)
            self.known = candidate if self.named.is_fixed else None
            yield candidate

    def _time_until_over(self, problems: Iterable[Problem]) -> Iterator[Candidate]:
        """The schedule on each of these problems, on the first in any case."""
        for place, problem in enumerate(problems):
            if place and self.is_over():
                return
            yield from self._time(problem)

    def _choose(self, problems: list[Problem]) -> list[Problem]:
        """The problems that the schedule is built for: all if its order is always the same, else some.

        A spread vocabulary takes longer to place than to time again, so that the first order is timed on all problems to find the most
        promising ones.
        """
        if not problems[0].is_spread:
            return problems if self.named.is_fixed else problems[:_MOST_BUILT]
        most = max(_FEWEST_PLACED, min(_MOST_PLACED, _PLACED_CELLS // problems[0].cells))
        if len(problems) <= most:
            return problems
        order = _pick_best(list(self._time(problems[0])))
        rated: list[tuple[tuple[bool, float | None, float | None], Problem]] = []
        for problem in problems:
            if rated and self.is_over():
                break
            rated.append((_rate(share_again(order.retime(problem))), problem))
        return [problem for _, problem in sorted(rated, key=lambda pair: pair[0])][:most]

    def _cut_for_memory(self, candidate: Candidate) -> Candidate:
        """Cut the model so that this schedule fits; the moments at which it did not are added one after the other."""
        best, last, moments = candidate, candidate, candidate.list_moments()
        for _ in range(_ROUNDS):
            problem = last.problem
            options: dict[str, Any] = {"lengths": problem.lengths, "assignment": problem.assignment}
            cut = self.request.cut(self.profile, problem.placement, problem.recompute, moments, **options)
            if not cut.fits or cut.sizes == problem.sizes:
                break
            last = _pick_best([share_again(other) for other in self._time(problem.recut(cut.sizes))])
            best = _pick_best([best, last])
            if last.fits:
                break
            moments += last.list_moments()
        return best

    def _recompute_some(self, first: Candidate, every: Candidate, problems: Sequence[Problem]) -> Iterator[Candidate]:
        """Recompute on some ranks only: those that are over their limits, and the ranks that hold most, so many at a time.

        `first` recomputes nothing and `every` everything; `problems` are cut without regard to this schedule's memory. Ranks are ordered
        by what they hold then. Which number of them is fastest depends on how evenly the layers can be cut within the limits, so several
        are tried.
        """
        if first.timed is not None:
            yield from self._recompute_where_over(first)
        even = next((candidate for problem in problems[:1] for candidate in self._time(problem)), every)
        if even.timed is None:
            return
        ranks, peaks = self.named.placement.copies[0], even.timeline.peak_memory
        neediest = sorted(set(ranks), key=lambda rank: (-peaks[rank], rank))
        for count in np.unique(np.linspace(1, max(len(neediest) - 1, 1), _COUNTS).astype(int)).tolist():
            if self.is_over():
                return
            chosen = set(neediest[:count])
            yield self._fit(tuple(rank in chosen for rank in ranks))

    def _recompute_where_over(self, last: Candidate) -> Iterator[Candidate]:
        """Recompute on the ranks that are over their limits, and on further ranks that then are."""
        ranks = self.named.placement.copies[0]
        for _ in range(_ROUNDS):
            over = {moment.rank for moment in last.list_moments()}
            flags = tuple(again or rank in over for again, rank in zip(last.problem.recompute, ranks, strict=True))
            if all(flags) or flags == last.problem.recompute:
                return
            last = self._fit(flags)
            yield last
            if last.timed is None or last.fits:
                return


def _pick_best(candidates: list[Candidate]) -> Candidate:
    """The fastest that fits, else the one that is least over its limit."""
    return min(candidates, key=_rate)


def _rate(option: Candidate) -> tuple[bool, float | None, float | None]:
    return not option.fits, option.objective if option.fits else option.excess, option.objective


def share_again(candidate: Candidate) -> Candidate:
    """The same order on the same stages, with the rows of a spread vocabulary shared out in a better way, if there is one.

    Within the memory that everything else leaves free on each device, so a candidate that is over its limits may fit then.
    """
    if candidate.problem.cluster is None or not candidate.problem.is_spread:
        return candidate
    ways = (True, False) if candidate.problem.memory_limit is not None else (True,)
    known: dict[tuple[float, ...], Candidate] = {}
    return _pick_best([candidate, *(trial for layers in ways for trial in _share_within_memory(candidate, layers, known))])


def _share_within_memory(last: Candidate, layers: bool, known: dict[tuple[float, ...], Candidate]) -> Iterator[Candidate]:
    """Rows that even out the layers, or that take as long on all ranks, in the memory that was free the time before.

    `known` are the trials by their rows: both ways often come to the same ones.
    """
    for _ in range(_ROUNDS):
        problem = last.problem
        assert problem.profile is not None
        held = problem.ranks * sum(layer.static + MOST_PENDING * layer.activation for layer in problem.profile.shares)
        equal = (1 / problem.ranks,) * problem.ranks
        rows = problem.rows or equal
        free = [limit - peak for limit, peak in zip(problem.limits, last.timeline.peak_memory, strict=True)]
        most = [max(part + room / held, 0.0) if held else 1.0 for part, room in zip(rows, free, strict=True)]
        again = problem.find_rows(most, layers)
        if again is None:
            return
        assert problem.assignment is not None
        parts = problem.assignment.take_rows(again).rows or equal
        if max(abs(one - other) for one, other in zip(parts, rows, strict=True)) < _FASTER:
            return
        if again not in known:
            known[again] = last.retime(problem.share_rows(again))
        last = known[again]
        yield last


def shift_rows(candidate: Candidate, stop: Callable[[], bool]) -> Candidate:
    """The same order with the fastest shares that fit and that moving rows between two ranks leads to, from a candidate that fits.

    With few microbatches, all ranks wait for the slowest S more often than for the rank with most work.
    """
    problem, best = candidate.problem, candidate
    if problem.cluster is None or not problem.is_spread:
        return best
    left, pairs = min(_MOST_SHIFTS, _SHIFT_CELLS // problem.cells), list(permutations(range(problem.ranks), 2))
    for step in _ROW_STEPS:
        improved = True
        while improved and left >= len(pairs) and not stop():
            rows = best.problem.rows or (1 / problem.ranks,) * problem.ranks
            left -= len(pairs)
            trials = (problem.share_rows(_move_rows(rows, *pair, step)) for pair in pairs if rows[pair[0]] >= step)
            fastest = min((best, *_list_faster(best, trials, stop)), key=lambda option: option.time_or_inf)
            improved, best = fastest is not best, fastest
    return best


def _move_rows(rows: tuple[float, ...], source: int, target: int, step: float) -> tuple[float, ...]:
    return tuple(part + step * ((rank == target) - (rank == source)) for rank, part in enumerate(rows))


# Shifting cuts: loads alone do not tell how long a schedule takes ------------------------------------------------------


def recut(candidate: Candidate, stop: Callable[[], bool], most: int = _MOST_CUTS) -> Candidate:
    """The same order on the fastest cuts that fit and that shifting leads to, from a candidate that fits."""
    problem = candidate.problem
    assert problem.profile is not None
    runs, shape = LayerRuns(problem.profile, problem.lengths), (problem.placement, problem.recompute, problem.memory_limit, ())
    cutting = Cutting(runs, *shape, cluster=problem.cluster)
    best, left, tried = candidate, most, {problem.sizes}
    while left > 0 and not stop():
        todo = [sizes for sizes in _list_promising_cuts(cutting, best) if sizes not in tried][:left]
        fastest = min((best, *_list_faster(best, map(best.problem.recut, todo), stop)), key=lambda option: option.time_or_inf)
        left -= len(todo)
        if fastest is best:
            break
        tried.update(todo)
        best = fastest
    return best


def reassign(candidate: Candidate, request: Request, stop: Callable[[], bool]) -> Candidate:
    """The same order on the fastest assignment that fits and that exchanging two devices leads to, from a candidate that fits.

    For each exchange the layers are cut anew, and cuts are shifted if it comes near the best. The bounds by which assignments were chosen
    do not know the schedule.
    """
    if request.cluster is None:
        return candidate
    problem = candidate.problem
    best, tried = candidate, set()
    left = max(_FEWEST_EXCHANGES, min(_MOST_EXCHANGES, _EXCHANGE_CELLS // (problem.cells * problem.placement.chunks)))
    orders = Orders(request.cluster, problem.placement, request.limits)
    improved = len(orders.groups) > 1
    while improved and left > 0 and not stop():
        improved = False
        for devices in orders.list_exchanges(best.devices):
            if devices in tried or left <= 0 or stop():
                continue
            tried.add(devices)
            left -= 1
            trial = _move(best, request, devices)
            if trial is not None and trial.fits and trial.time_or_inf < best.time_or_inf * (1 + _NEAR):
                trial = recut(trial, stop, _FEW_CUTS)
            if trial is not None and trial.fits and trial.time_or_inf < best.time_or_inf * (1 - _FASTER):
                best, improved = trial, True
                break
    return best


def try_settings(candidate: Candidate, request: Request, stop: Callable[[], bool], most: int = _MOST_TRIED) -> Candidate:
    """The same order on the fastest of the most promising settings of a small cluster; from a candidate that need not fit."""
    problem, best = candidate.problem, candidate
    assert problem.profile is not None
    left = min(most, _TRIED_CELLS // problem.cells)
    for setting in request.list_settings(problem.profile, problem.placement, problem.recompute):
        if best.fits and setting.bound >= best.time_or_inf * (1 - _FASTER):
            continue
        if left <= 0 or stop():
            break
        left -= 1
        shape = problem.profile, problem.placement, setting.sizes, problem.recompute
        trial = request.make_problem(*shape, assignment=setting.assignment)
        timeline = retime(candidate.timeline, trial.costs)
        if trial.fits(timeline) and (not best.fits or trial.objective(timeline) < best.time_or_inf * (1 - _FASTER)):
            best = Candidate.of_timeline(candidate.name, trial, candidate.schedule, timeline)
    return best


def _move(candidate: Candidate, request: Request, devices: tuple[int, ...]) -> Candidate | None:
    """The candidate's order with other devices, and the layers cut for them; None if they cannot be cut within the limits."""
    problem = candidate.problem
    assert problem.profile is not None
    assert request.cluster is not None
    parts = () if problem.assignment is None else problem.assignment.parts
    assignment, shape = Assignment(request.cluster, devices, parts), (problem.profile, problem.placement)
    cut = request.cut(*shape, problem.recompute, lengths=problem.lengths, assignment=assignment)
    if not cut.fits:
        return None
    moved = request.make_problem(*shape, cut.sizes, problem.recompute, problem.lengths, assignment=assignment)
    return candidate.retime(problem.move(moved, request.host_limits_of(assignment)))


def _list_promising_cuts(cutting: Cutting, candidate: Candidate) -> list[tuple[int, ...]]:
    """Neighbouring cuts on which the work alone takes less than the candidate, the least load first."""
    cuts: Ints = np.concatenate(([0], np.cumsum(candidate.problem.sizes)))
    near = list_neighbours(cuts)
    if not len(near):
        return []
    loads = cutting.loads(near).max(axis=1)
    good = (loads * candidate.microbatches < candidate.time_or_inf * (1 - _FASTER)) & ~cutting.excesses(near).any(axis=1)
    order = np.lexsort((cutting.squares(near), loads))
    return [tuple(np.diff(near[row]).tolist()) for row in order if good[row]]


def _list_faster(candidate: Candidate, problems: Iterable[Problem], stop: Callable[[], bool]) -> Iterator[Candidate]:
    """The candidate's order on those of these problems that it fits on and is faster on."""
    for problem in problems:
        if stop():
            return
        timeline = retime(candidate.timeline, problem.costs)
        if problem.objective(timeline) < candidate.time_or_inf * (1 - _FASTER) and problem.fits(timeline):
            yield Candidate.of_timeline(candidate.name, problem, candidate.schedule, timeline)


def shift_lengths(candidate: Candidate, granularity: int, stop: Callable[[], bool]) -> Candidate:
    """The same order with the fastest slices that fit and that moving tokens between neighbours leads to, from a candidate that fits.

    Lengths that suit the slowest rank alone need not be the best for all ranks together.
    """
    problem = candidate.problem
    assert problem.profile is not None
    assert problem.profile.tokens is not None
    step, best, left = int(list_edges(problem.profile.tokens, granularity)[1]), candidate, _MOST_LENGTHS
    for steps in _STEPS:
        improved = True
        while improved and left > 0 and not stop():
            lengths = list(_list_shifted(best.problem.lengths, steps * step, step))[:left]
            left -= len(lengths)
            trials = [problem.recut(problem.sizes, shifted) for shifted in lengths]
            faster = [trial for trial in map(best.retime, trials) if trial.fits and trial.time_or_inf < best.time_or_inf * (1 - _FASTER)]
            improved = bool(faster)
            best = min(faster, key=lambda trial: trial.time_or_inf) if faster else best
    return best


def _list_shifted(lengths: tuple[int, ...], by: int, least: int) -> Iterator[tuple[int, ...]]:
    """The lengths with so many tokens moved from one slice to the next or back; none gets shorter than the least."""
    for place in range(len(lengths) - 1):
        for moved in (by, -by):
            one, other = lengths[place] + moved, lengths[place + 1] - moved
            if min(one, other) >= least:
                yield (*lengths[:place], one, other, *lengths[place + 2 :])
