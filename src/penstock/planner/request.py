"""The checked arguments of a plan, and the problems that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, zip_longest
from typing import Any

import numpy as np

from penstock.errors import CostsError, ScheduleError, UnknownNameError, nearest
from penstock.ir.cluster import Cluster
from penstock.ir.codes import MAX_MICROBATCHES, MAX_STAGES
from penstock.ir.placement import Placement
from penstock.planner.bounds.lower_bound import lower_bound
from penstock.planner.partition.assignment import Assignment, OrderScores, find_orders, list_memory_orders
from penstock.planner.partition.cut import LayerCut, cut_layers
from penstock.planner.partition.layer_runs import PeakMoment
from penstock.planner.partition.settings import Setting, SettingScores
from penstock.planner.partition.slices import GRANULARITY, choose_lengths, list_edges, split_equal_time, split_equally
from penstock.planner.problem import Problem
from penstock.planner.profile import Profile, SliceCost
from penstock.planner.profile.vocabulary import list_rank_shares, list_row_parts, spread_ends
from penstock.schedules.registry import algorithms, parse_name
from penstock.text.checks import check_function
from penstock.text.options import format_options, split_options
from penstock.text.units import Units, check_count, has_byte_unit, parse_rate, parse_size

HEADROOM = 0.05
"""The share of a memory limit that stays free if sizes are estimated."""
SEARCHED = "searched"
"""The name of an order that was searched for, among the names of schedules."""
CHOSEN = ("costs", "memory_limit", "slices")
"""Options of schedules that the planner chooses itself."""
SLACKS = (0.0, 0.02)
"""Shares of the least load that a more even partition may cost."""

NO_SLICES = "a profile does not say what a slice takes"
"""Why sequences stay whole, if nothing is known of their slices."""
MOST_SLICES = 16
"""Slices per sequence that are tried by default: 2, 4 and so on up to this many."""
LEAST_TOKENS = 4096
"""Tokens per slice on average by default: with fewer, a device may be less busy than its profile says."""

_MOST_BOUNDED, _FEWEST_ORDERS = 24, 2
"""Orders of a cluster's devices that are bounded for one placement, and the fewest that schedules are timed on."""
_ORDER_CELLS = 3_000
"""Cells (stages times microbatches) of the orders that schedules are timed on, all together, times the chunks per rank."""
_MOST_SETTINGS = 400
"""Partitions times assignments of a small model that are all bounded before orders are searched."""
_MOST_LISTED = 1_000
"""Settings of a small cluster that schedules may be timed on."""
_BOUNDED_CELLS = 10_000
"""Orders with more cells are not bounded: their scores decide."""
_EVEN = 1e-9
"""Times that differ by less than this share are equal."""

Limit = float | str | Sequence[float | str] | None


@dataclass(frozen=True)
class Progress:
    """How far planning is: the current step, and the best candidate so far."""

    phase: str
    done: int
    total: int
    what: str = ""
    best: float | None = None
    best_name: str = ""


@dataclass(frozen=True)
class Request:
    """The checked arguments of a plan, and the partitions made for it."""

    profile: Profile
    ranks: int
    batch: int
    """Samples per step."""
    profiles: tuple[Profile, ...]
    """The model at each microbatch size to try."""
    limits: tuple[float, ...] | None
    names: tuple[str, ...]
    """The schedules to try, with SEARCHED if orders may be searched."""
    recompute: bool
    barrier: bool
    split: bool
    seconds: float
    seed: int
    jitter: float
    near: float
    rounds: float | None = None
    """How many orders the search times; by default as many as take about `seconds` of work."""
    in_bytes: bool = False
    """Whether sizes are bytes."""
    headroom: float = 0.0
    """The share of the user's limits that stays free; `limits` exclude it."""
    offload: bool = False
    """Whether activations may be moved to host memory."""
    host_limits: tuple[float, ...] | None = None
    """The limit of each rank's activations there."""
    slices: tuple[int, ...] = (1,)
    """Numbers of slices per sequence to try."""
    cluster: Cluster | None = None
    """The devices, if they differ; limits are then those of its devices, in its order."""
    no_slices: str = NO_SLICES
    """Why sequences are not cut, if they are not."""
    granularity: int = GRANULARITY
    """Tokens that the length of a slice is a multiple of."""
    vocabulary: bool = False
    """Whether the first and the last layer may be spread over the ranks."""
    tell: Callable[[Progress], None] = lambda progress: None
    stop: Callable[[], bool] = lambda: False
    found: Callable[[Any], None] = lambda candidate: None
    """Called with each `Candidate` as it is made."""
    _partitions: dict[object, LayerCut] = field(default_factory=dict, init=False, compare=False, repr=False)
    _problems: dict[object, Problem] = field(default_factory=dict, init=False, compare=False, repr=False)
    _assignments: dict[object, list[Assignment]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _settings: dict[object, list[Setting]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def searches(self) -> bool:
        return SEARCHED in self.names

    @property
    def least_slice(self) -> int:
        """The fewest tokens of a slice that is not the last."""
        return 0 if self.profile.tokens is None else int(list_edges(self.profile.tokens, self.granularity)[1])

    @property
    def units(self) -> Units:
        return Units(self.profile.time_unit, self.in_bytes)

    @property
    def spread_profiles(self) -> tuple[Profile, ...]:
        """The model at each microbatch size with its vocabulary spread over the ranks, if that may be."""
        return tuple(spread_ends(profile, self.ranks) for profile in self.profiles) if self.vocabulary and self.ranks > 1 else ()

    def count_microbatches(self, profile: Profile) -> int:
        return self.batch // profile.microbatch

    def cut(  # noqa: PLR0917
        self,
        profile: Profile,
        placement: Placement,
        recompute: tuple[bool, ...],
        moments: Sequence[PeakMoment] = (),
        slack: float = 0.0,
        lengths: tuple[int, ...] = (),
        moves: bool = False,
        assignment: Assignment | None = None,
    ) -> LayerCut:
        """The best partition of the layers, within the limits at these moments; with `moves`, if activations may be moved to the host."""
        where = _identify(assignment)
        key = (profile.microbatch, placement.copies, recompute, tuple(moments), slack, lengths, moves, where, bool(profile.shares))
        if key not in self._partitions:
            cluster, rows = (None, ()) if assignment is None else (assignment.cluster, assignment.rows)
            options: dict[str, Any] = {"moments": moments, "slack": slack, "lengths": lengths, "moves": moves, "cluster": cluster}
            options["limits"] = self._leave_room(profile, self.limits_of(assignment), cluster, rows)
            options["always"] = _list_differences(profile, placement.ranks, cluster, rows)
            self._partitions[key] = cut_layers(profile, placement, recompute=recompute, **options)
        return self._partitions[key]

    @staticmethod
    def _leave_room(
        profile: Profile, limits: tuple[float, ...] | None, cluster: Cluster | None, rows: tuple[float, ...]
    ) -> tuple[float, ...] | None:
        """What the shares of a spread vocabulary leave of these limits, one per rank."""
        if limits is None or not profile.shares:
            return limits
        shares = list_rank_shares(profile, len(limits), cluster, rows)
        return tuple(max(limit - sum(layer.static for layer in own), 0.0) for limit, own in zip(limits, shares, strict=True))

    def limits_of(self, assignment: Assignment | None) -> tuple[float, ...] | None:
        """The memory limit of each rank."""
        return self.limits if self.limits is None or assignment is None else assignment.arrange(self.limits)

    def host_limits_of(self, assignment: Assignment | None) -> tuple[float, ...] | None:
        """The limit of each rank's activations in host memory."""
        return self.host_limits if self.host_limits is None or assignment is None else assignment.arrange(self.host_limits)

    def list_assignments(self, profile: Profile, placement: Placement, slices: int = 1) -> Sequence[Assignment | None]:
        """The most promising orders of the cluster's devices, the best first; only None without a cluster.

        For a spread vocabulary, with each way to share its rows out. Their number depends on how long it takes to time them. Of devices
        with different memory, the largest first is among them.
        """
        if self.cluster is None:
            return [None]
        key = profile.microbatch, placement.copies, slices, bool(profile.shares)
        if key not in self._assignments:
            ways = list_row_parts(profile, self.cluster, self.limits) if profile.shares else [()]
            listed = [self._find_assignments(self.cluster, profile, placement, slices, parts) for parts in ways or [()]]
            self._assignments[key] = [one for turn in zip_longest(*listed) for one in turn if one is not None]
        return self._assignments[key]

    def _find_assignments(
        self, cluster: Cluster, profile: Profile, placement: Placement, slices: int, parts: tuple[float, ...]
    ) -> list[Assignment]:
        lengths, cells = self.guess_lengths(profile, slices), placement.stages * self.count_microbatches(profile) * slices
        limits = self._leave_room(profile, self.limits, cluster, parts)
        scores = OrderScores(profile, placement, cluster, self.count_microbatches(profile), limits, lengths)
        kept = max(_FEWEST_ORDERS, min(_MOST_BOUNDED, _ORDER_CELLS // (cells * placement.chunks)))  # cuts of many chunks take long too
        wanted = [Assignment(cluster, order, parts) for order in find_orders(scores, min(2 * kept, _MOST_BOUNDED))]
        if len(wanted) > kept and cells <= _BOUNDED_CELLS:
            whole = (False,) * placement.stages

            def bound(assignment: Assignment) -> float:
                cut = self.cut(profile, placement, whole, lengths=lengths, assignment=assignment)
                problem = self.make_problem(profile, placement, cut.sizes, whole, lengths, assignment=assignment)
                return lower_bound(problem).value if cut.fits else math.inf

            wanted.sort(key=bound)
        by_memory = [Assignment(cluster, order, parts) for order in list_memory_orders(scores)]
        return list(dict.fromkeys([*wanted[:kept], *by_memory]))

    def make_problem(
        self,
        profile: Profile,
        placement: Placement,
        sizes: tuple[int, ...],
        recompute: tuple[bool, ...],
        lengths: tuple[int, ...] = (),
        *,
        assignment: Assignment | None = None,
    ) -> Problem:
        key = (profile.microbatch, placement, sizes, recompute, lengths, _identify(assignment), bool(profile.shares))
        if key not in self._problems:
            count = self.count_microbatches(profile)
            shape = profile, placement, count, sizes, recompute
            self._problems[key] = Problem.cut(*shape, self.limits_of(assignment), self.barrier, self.split, lengths, assignment)
        return self._problems[key]

    def make_problems(
        self, profile: Profile, placement: Placement, recompute: tuple[bool, ...], slices: int = 1, moves: bool = False
    ) -> list[Problem]:
        """One problem with the least load, and one with more even stages if there is one; none if no partition fits.

        With slices, each with the lengths that suit its slowest rank, and with equal lengths. The loads do not depend on the lengths.
        With `moves`, partitions count as fitting if they do with activations on the host. On a cluster, all that for each of the
        assignments to try; a spread vocabulary has its rows shared out as the assignment says, and so that they even out the layers. If
        there are few partitions, it may have any of them: rows can make up for uneven layers.
        """
        first = self.guess_lengths(profile, slices)
        problems = []
        for assignment in self.list_assignments(profile, placement, slices):
            options: dict[str, Any] = {"lengths": first, "moves": moves, "assignment": assignment}
            cuts = [self.cut(profile, placement, recompute, slack=slack, **options) for slack in SLACKS]
            for sizes in dict.fromkeys(cut.sizes for cut in cuts if cut.fits):
                problems += [
                    self.make_problem(profile, placement, sizes, recompute, lengths, assignment=assignment)
                    for lengths in self._list_lengths(profile, placement, sizes, recompute, slices, assignment)
                ]
        if self.cluster is None or not profile.shares or not problems:
            return problems
        few = (problem for problem in self.list_every_cut(profile, placement, recompute) if min(problem.sizes[0], problem.sizes[-1]) > 1)
        pairs = [*((problem.balance_rows(), problem) for problem in problems), *((problem.balance_rows(),) for problem in few)]
        return list({problem.key: problem for pair in pairs for problem in pair if problem is not None}.values())

    def list_every_cut(self, profile: Profile, placement: Placement, recompute: tuple[bool, ...]) -> Iterator[Problem]:
        """On a cluster, every partition with each of the assignments to try; nothing if there are many.

        With few layers, the least load alone is a poor guide: how long the pipeline takes to fill depends on where its slow devices are.
        """
        assignments, layers = self.list_assignments(profile, placement), len(profile)
        if self.cluster is None or len(assignments) * math.comb(layers - 1, placement.stages - 1) > _MOST_SETTINGS:
            return
        for inner in combinations(range(1, layers), placement.stages - 1):
            sizes = tuple(last - first for first, last in pairwise((0, *inner, layers)))
            for assignment in assignments:
                yield self.make_problem(profile, placement, sizes, recompute, assignment=assignment)

    def list_settings(self, profile: Profile, placement: Placement, recompute: tuple[bool, ...]) -> list[Setting]:
        """On a cluster, the most promising of all orders of the devices with all partitions, if there are few enough to score them all."""
        if self.cluster is None:
            return []
        key = profile.microbatch, placement.copies, recompute
        if key not in self._settings:
            shape = profile, placement, self.cluster, self.count_microbatches(profile), recompute
            self._settings[key] = SettingScores(*shape, self.limits, self.barrier).list_best(_MOST_LISTED)
        return self._settings[key]

    def guess_lengths(self, profile: Profile, slices: int) -> tuple[int, ...]:
        """Slices of equal times for the model as a whole; nothing for whole sequences."""
        if slices == 1 or profile.tokens is None:
            return ()
        every = (True,) * len(profile)
        return split_equal_time(sum_slice_times(profile, every), profile.tokens, slices, self.granularity)

    def _list_lengths(  # noqa: PLR0917
        self,
        profile: Profile,
        placement: Placement,
        sizes: tuple[int, ...],
        recompute: tuple[bool, ...],
        slices: int,
        assignment: Assignment | None,
    ) -> list[tuple[int, ...]]:
        """The lengths to try with a partition: the best for its slowest rank, and equal ones."""
        if slices == 1 or profile.tokens is None:
            return [()]
        stage_of_layer = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        of_ranks = []
        for rank in range(placement.ranks):
            own = placement.stages_of(rank)
            chosen = tuple(stage in own for stage in stage_of_layer)
            own_profile = profile if assignment is None else profile.on(assignment.cluster.devices[rank])
            of_ranks.append(sum_slice_times(own_profile, chosen, tuple(recompute[stage] for stage in stage_of_layer)))
        slowest = max(of_ranks, key=lambda time: time.at(profile.tokens, 0))
        best = choose_lengths(slowest, profile.tokens, slices, placement.ranks, self.granularity)
        return list(dict.fromkeys((best, split_equally(profile.tokens, slices, self.granularity))))


def _identify(assignment: Assignment | None) -> object:
    """Equal for assignments of one cluster that are the same: its links need not be compared."""
    return None if assignment is None else (assignment.devices, assignment.parts)


def _list_differences(profile: Profile, ranks: int, cluster: Cluster | None, rows: tuple[float, ...]) -> tuple[float, ...]:
    """How much longer S and T of each rank take than those of the rank with the least; empty if they take as long on all."""
    times = [sum(layer.time for layer in own) for own in list_rank_shares(profile, ranks, cluster, rows)]
    return () if max(times) <= min(times) * (1 + _EVEN) else tuple(time - min(times) for time in times)


def check_ranks(profile: Profile, ranks: int | None, cluster: Cluster | None) -> int:
    """How many ranks there are, from one of the two; and whether the cluster is one for the profile."""
    if cluster is None:
        return check_count("ranks", ranks, most=MAX_STAGES, error=ScheduleError)
    if not isinstance(cluster, Cluster):
        raise CostsError(f"cluster must be a penstock.Cluster, got {type(cluster).__name__}")
    if ranks is not None:
        cluster.check_ranks(check_count("ranks", ranks, most=MAX_STAGES, error=ScheduleError))
    for device in cluster.devices:
        profile.check_speeds(device)
    for name, own, other in (("times", profile.time_unit, cluster.time_unit), ("sizes", profile.size_unit, cluster.size_unit)):
        if own and other and own != other:
            raise CostsError(f"the profile's {name} are in {own}, the cluster's in {other}: give both in one unit")
    return len(cluster)


def check_batch(
    profile: Profile, microbatches: int | None, batch: int | None, sizes: Sequence[int] | None
) -> tuple[int, tuple[Profile, ...]]:
    """Samples per step, and the profile at each microbatch size to try."""
    if (microbatches is None) == (batch is None):
        raise ScheduleError("give either microbatches= or batch=, the samples per step")
    if microbatches is not None:
        if sizes is not None:
            raise ScheduleError("microbatch_sizes= goes with batch=: with microbatches= the size is the profile's")
        count = check_count("microbatches", microbatches, most=MAX_MICROBATCHES, error=ScheduleError)
        return count * profile.microbatch, (profile.at(profile.microbatch),)
    total = check_count("batch", batch, error=ScheduleError)
    listed = profile.sizes if sizes is None else _check_list("microbatch_sizes= takes whole numbers", sizes)
    checked = [check_count("a microbatch size", size, error=ScheduleError) for size in listed]
    even = sorted({size for size in checked if total % size == 0 and total // size <= MAX_MICROBATCHES})
    if not even:
        raise ScheduleError(
            f"a batch of {total} is not a multiple of a microbatch size of {' or '.join(map(str, checked))}: choose another batch, or "
            "other sizes with microbatch_sizes="
        )
    return total, tuple(profile.at(size) for size in even)


def sum_slice_times(profile: Profile, chosen: Sequence[bool], recompute: Sequence[bool] = ()) -> SliceCost:
    """Time of a slice on the chosen layers together, forward and backward, with a second forward if it is recomputed."""
    total = SliceCost()
    for place, layer in enumerate(profile.layers):
        if chosen[place] and layer.slices is not None:
            total += layer.slices.f + layer.slices.i + layer.slices.w
            total += layer.slices.f.scaled(float(bool(recompute) and recompute[place]))
    return total


def check_slices(profile: Profile, slices: int | Sequence[int] | None, granularity: int) -> tuple[tuple[int, ...], str]:
    """The numbers of slices to try, and why there is only the whole sequence, if there is."""
    missing = profile.lacks_slices
    if slices is None:
        if missing or profile.tokens is None:
            return (1,), NO_SLICES
        most = min(MOST_SLICES, profile.tokens // LEAST_TOKENS, len(list_edges(profile.tokens, granularity)) - 1)
        counts = [count for count in (2**power for power in range(1, MOST_SLICES.bit_length())) if count <= most]
        short = f"a sequence of {profile.tokens} tokens is too short for slices of {LEAST_TOKENS}: ask for shorter ones with slices="
        return (1, *counts), "" if counts else short
    listed = [slices] if isinstance(slices, (int, np.integer)) else _check_list("slices= takes whole numbers", slices)
    asked = tuple(sorted({check_count("slices", count, most=MAX_MICROBATCHES, error=ScheduleError) for count in listed}))
    if not asked:
        raise ScheduleError("slices= is empty: name at least one number, or leave it out")
    if asked == (1,):
        return asked, "slices=1 asks for whole sequences"
    if missing or profile.tokens is None:
        raise CostsError(
            f"slices={asked[-1]}: the profile cannot time a slice, because {missing}. Measure it with slices=, or plan with slices=1"
        )
    places = len(list_edges(profile.tokens, granularity)) - 1
    if asked[-1] > places:
        raise ScheduleError(
            f"a sequence of {profile.tokens} tokens cannot be cut into {asked[-1]} slices of multiples of {granularity} tokens: take at "
            f"most {places} slices, or a finer slice_granularity"
        )
    return asked, ""


def forget_slices(profile: Profile) -> Profile:
    """The profile without what it knows of slices, for plans with whole sequences."""
    layers = [replace(layer, slices=None) for layer in profile.layers]
    return replace(profile, layers=layers, tokens=None, variants=[forget_slices(variant) for variant in profile.variants])


def check_limits(memory_limit: Limit, ranks: int, name: str = "memory_limit") -> tuple[float, ...] | None:
    """One limit per rank."""
    if memory_limit is None:
        return None
    one = isinstance(memory_limit, str) or not isinstance(memory_limit, Sequence | np.ndarray)
    sizes: Sequence[Any] = [memory_limit] * ranks if one else memory_limit  # type: ignore[assignment]
    if len(sizes) != ranks:
        raise CostsError(f"{name} has {len(sizes)} values for {ranks} ranks: give one size, or one per rank")
    return tuple(parse_size(size, name) for size in sizes)


def choose_headroom(profile: Profile, headroom: float | None) -> float:
    """The share of each memory limit that stays free: the given one, or by default 5 % if the sizes are estimated."""
    return (HEADROOM if profile.estimated else 0.0) if headroom is None else check_share("headroom", headroom, below=1.0)


def check_host(profile: Profile, offload: bool, host_memory: Limit, host_bandwidth: float | str | None) -> Profile:
    """The profile with the bandwidth to host memory, if one is given; refuse settings of the host if nothing may be moved there."""
    if not offload and (host_memory is not None or host_bandwidth is not None):
        raise CostsError("host_memory= and host_bandwidth= are for plans that may move activations there: add offload=True")
    if host_bandwidth is None:
        return profile
    rate = parse_rate(host_bandwidth, "host_bandwidth")
    return replace(profile, host_bandwidth=rate, variants=[replace(variant, host_bandwidth=rate) for variant in profile.variants])


def is_in_bytes(profile: Profile, memory_limit: Limit) -> bool:
    """Whether sizes are bytes: the profile says so, or the limit has a unit."""
    sizes = [memory_limit] if isinstance(memory_limit, str) or not isinstance(memory_limit, Sequence) else memory_limit
    return profile.size_unit == "B" or any(map(has_byte_unit, sizes))


def check_names(schedules: Sequence[str] | str | None) -> tuple[str, ...]:
    """The schedules to try: by default all registered ones and searched orders."""
    known = [*algorithms(), SEARCHED]
    if schedules is None:
        return tuple(known)
    listed = [schedules] if isinstance(schedules, str) else _check_list("schedules= takes names", schedules)
    names: list[str] = []
    for name in listed:
        if not isinstance(name, str):
            raise ScheduleError(f"schedules= takes names of schedules, got {name!r}")
        names.append(SEARCHED if name == SEARCHED else _check_name(name, known))
    if not listed:
        raise ScheduleError("schedules= is empty: name at least one, or leave it out for all")
    return tuple(dict.fromkeys(names))


def _check_name(text: str, known: Sequence[str]) -> str:
    """The registered name, with the options that were written after it."""
    name = split_options(text)[0]
    if name not in algorithms():
        raise UnknownNameError(f"there is no schedule {name!r}: {nearest(name, known)}")
    entry, options = parse_name(text)
    allowed = {key for key in (*entry.options, *entry.layout.counts) if key not in CHOSEN}
    for key in options:
        if key in CHOSEN:
            raise ScheduleError(f"{text}: leave out {key}, which the planner chooses")
        if key not in allowed:
            raise ScheduleError(f"{text}: {entry.name} has no option {key!r}; its options: {', '.join(sorted(allowed)) or 'none'}")
    return format_options(entry.name, options)


def _check_list(what: str, value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ScheduleError(f"{what}: give a list of them, got {value!r}")
    return list(value)


def check_callbacks(progress: Any, stop: Any) -> None:
    """Refuse callbacks of a search that cannot be called."""
    for name, value, call in (("progress", progress, "progress(done)"), ("stop", stop, "stop()")):
        if value is not None:
            check_function(name, value, call)


def check_share(name: str, value: Any, below: float = float("inf")) -> float:
    """A number from 0 up to, but not including, `below`."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)) or not 0 <= value < below:
        until = f" and below {below:g}" if below < 1e300 else ""
        raise ScheduleError(f"{name} must be a number of at least 0{until}, got {value!r}")
    return float(value)
