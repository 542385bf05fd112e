"""From a model and a memory limit to the best schedule found, with proof."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import CostsError, FileFormatError, PlacementError, PlanError, ScheduleError
from penstock.ir.cluster import Cluster
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.advice import check_static_memory, make_refusal
from penstock.planner.bounds.lower_bound import check_bound
from penstock.planner.candidate import Candidate, Verdict, summarize_verdicts
from penstock.planner.explore import Explorer
from penstock.planner.partition.assignment import Assignment
from penstock.planner.partition.slices import GRANULARITY
from penstock.planner.partition.stage_costs import split_layers
from penstock.planner.problem import Problem
from penstock.planner.profile import Layer, Profile
from penstock.planner.request import (
    SEARCHED,
    Limit,
    Progress,
    Request,
    check_batch,
    check_callbacks,
    check_host,
    check_limits,
    check_names,
    check_ranks,
    check_share,
    check_slices,
    choose_headroom,
    forget_slices,
    is_in_bytes,
)
from penstock.simulator.simulate import simulate, simulate_many
from penstock.simulator.timeline import Timeline
from penstock.text.checks import check_flag, check_function
from penstock.text.numbers import format_count
from penstock.text.units import Units, check_count
from penstock.verifier.proof import Proof
from penstock.verifier.verify import verify

SCENARIOS = 100
"""Simulated runs with jitter per candidate."""
NOISE = 0.01
"""Differences of a p95 below this share may be due to the random scenarios: about two standard errors of a hundred of them."""
SIMPLER = 0.01
"""A named schedule that is slower by at most this share, and whose p95 is not worse, is preferred to a searched order."""
_MOST_JITTERED = 6
"""Candidates of each kind that are measured under jitter: the fastest, named ones nearly as fast, and runners-up."""
RUNNERS_UP = 4
"""Other candidates that a plan is compared with."""
_SCENARIO_COST = 0.05
"""Cost of a scenario, as a share of timing the same order for the first time."""
_EVEN, _SAME = 1e-12, 1e-9


@dataclass(frozen=True)
class Plan:
    """A partition, a placement, a schedule, the costs it was chosen on, its predicted timeline, its proof and its bound."""

    name: str
    """Name of the schedule: one of the zoo, or `searched`."""
    profile: Profile
    """The model at the plan's microbatch size."""
    schedule: Schedule
    partition: tuple[int, ...]
    """Layers per stage."""
    recompute: tuple[bool, ...]
    """Per stage, whether its forward runs again before its backward, so that it keeps only its input."""
    memory_limit: tuple[float, ...] | None
    """Memory limit per rank of the pipeline, if there is one."""
    barrier: bool
    """Whether the makespan was minimised; else the longest rank span was."""
    split: bool
    bounds: dict[str, float]
    """Lower bounds of every schedule of this placement and partition within the limit, by argument."""
    overall_bound: float
    """Lower bound of every plan within the limit, however the layers are cut into contiguous stages, placed and ordered, for all requested
    microbatch sizes."""
    p95: float | None = None
    """95 of 100 runs stay below this if every time varies by `jitter`: the makespan, or without a barrier the longest span."""
    jitter: float = 0.0
    alternatives: tuple[Candidate, ...] = ()
    """Everything that was tried, this plan included, and then the schedules that were left out, which have no placement."""
    chosen: int = 0
    """The index of this plan among the alternatives."""
    in_bytes: bool = False
    """Whether sizes are bytes."""
    notes: tuple[str, ...] = ()
    host_memory_limit: tuple[float, ...] | None = None
    """The limit of each rank's activations in host memory, if there is one."""
    slice_lengths: tuple[int, ...] = ()
    """Tokens of each slice, if sequences are cut into slices."""
    cluster: Cluster | None = None
    """The cluster that it was made for, as it was described."""
    devices: tuple[int, ...] = ()
    """The device of the cluster that each rank of the pipeline is; limits, costs and timelines are in the order of the ranks."""
    row_shares: tuple[float, ...] = ()
    """The part of a spread vocabulary's rows that each rank takes; empty if these are equal."""

    def __post_init__(self) -> None:
        """Refuse bounds above the objective: they would be false."""
        for name, bound in {**self.bounds, "overall": self.overall_bound}.items():
            check_bound(bound, self.objective, name)

    # Figures ----------------------------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement:
        return self.schedule.placement

    @property
    def microbatches(self) -> int:
        return self.schedule.microbatches

    @property
    def microbatch(self) -> int:
        """Samples per microbatch."""
        return self.profile.microbatch

    @property
    def vocabulary(self) -> bool:
        """Whether embedding and head are spread over all ranks."""
        return bool(self.profile.shares)

    @property
    def slices(self) -> int:
        """Slices that each sequence is cut into."""
        return self.schedule.slices

    @cached_property
    def problem(self) -> Problem:
        """The problem that the schedule solves."""
        shape = self.profile, self.placement, self.microbatches, self.partition, self.recompute
        assignment = None if self.cluster is None else Assignment(self.cluster, self.devices)
        if assignment is not None and self.row_shares:
            assignment = assignment.take_rows(self.row_shares)
        return Problem.cut(*shape, self.memory_limit, self.barrier, self.split, self.slice_lengths, assignment)

    @property
    def costs(self) -> Costs:
        """Costs of the stages."""
        return self.problem.costs

    @cached_property
    def program(self) -> Program:
        """The schedule lowered, as it was timed."""
        return lower(self.schedule)

    @cached_property
    def predicted(self) -> Timeline:
        """When every action runs, and what each rank holds."""
        return simulate(self.program, self.costs).in_units(self.units)

    @cached_property
    def proof(self) -> Proof:
        """The proof that the program neither hangs, drops work nor exceeds the limit."""
        proof = verify(self.program, memory_limit=self.memory_limit, host_memory_limit=self.host_memory_limit, costs=self.costs)
        return replace(proof, in_bytes=self.in_bytes)

    @cached_property
    def objective(self) -> float:
        """The minimised time: the makespan, or the longest rank span without a barrier."""
        return self.problem.objective(self.predicted)

    @property
    def bound_name(self) -> str:
        """The argument of the best bound."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def bound(self) -> float:
        """The best known lower bound of this placement and partition within the limit; other placements have their own."""
        return self.bounds[self.bound_name]

    @property
    def gap(self) -> float:
        """How much longer the plan takes than the bound, as a share of the bound."""
        return self.objective / self.bound - 1 if self.bound else 0.0

    @property
    def overall_gap(self) -> float:
        """The gap to the bound of every way to cut, place and order the layers."""
        return self.objective / self.overall_bound - 1 if self.overall_bound else 0.0

    @property
    def units(self) -> Units:
        return Units(self.profile.time_unit, self.in_bytes)

    @property
    def runners_up(self) -> list[Candidate]:
        """The fastest other candidates that fit, one per schedule; see `Candidate.compare`."""
        chosen = self.alternatives[self.chosen] if self.alternatives else None
        others = [candidate for candidate in list_distinct(self.candidates) if candidate is not chosen]
        return [candidate for candidate in others if chosen is None or candidate.shape != chosen.shape][:RUNNERS_UP]

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates that were tried, in the order of `alternatives`: reports, figures and counts show these.

        Alternatives that are no candidates: schedules that were left out for good, and searched orders that did not get better than the
        named schedule that they began with.
        """
        chosen = self.alternatives[self.chosen] if self.alternatives else None
        tried = [candidate for candidate in self.alternatives if candidate.placement]
        named = [candidate for candidate in tried if candidate.name != SEARCHED]
        return [
            candidate for candidate in tried if candidate is chosen or candidate.name != SEARCHED or not any(map(candidate.is_like, named))
        ]

    @property
    def tally(self) -> str:
        """How many candidates were tried, and what became of them."""
        return summarize_verdicts(self.candidates)

    def layers(self, stage: int) -> tuple[Layer, ...]:
        """The layers of a stage."""
        return split_layers(self.profile, self.partition)[stage]

    def report(self) -> str:
        """The plan in words: why this one, stages, memory per rank against the limit, candidates."""
        from penstock.planner.report import write_report

        return write_report(self)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        figures = f"{self.units.time(self.objective)}, {self.units.size(max(self.predicted.peak_memory))} per rank at most"
        sliced = f" in {self.slices} slices" if self.slices > 1 else ""
        shape = f"{self.placement.describe()}, {format_count(self.microbatches, 'microbatch')} of {self.microbatch}{sliced}"
        return f"<Plan {self.name!r}: {shape}, {figures}, {max(self.gap, 0.0):.2%} above the bound>"

    # Files ------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        from penstock.planner.plan_file import encode

        return encode(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write by suffix: `.json` the plan itself, `.svg`, `.pdf` and `.png` the candidates' time against their memory."""
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            from penstock.planner.plan_file import write

            write(self, path)
        elif suffix in (".svg", ".pdf", ".png"):
            from penstock.draw.figures.plots import save_tradeoff

            save_tradeoff(self, path)
        else:
            raise FileFormatError(os.fspath(path), f"the suffix {suffix!r} is not one of .json, .svg, .pdf, .png")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Read a plan that was saved as `.json`; it is proved and timed again."""
        from penstock.planner.plan_file import read

        return read(path)


def plan(
    profile: Profile,
    *,
    ranks: int | None = None,
    cluster: Cluster | None = None,
    microbatches: int | None = None,
    batch: int | None = None,
    memory_limit: Limit = None,
    headroom: float | None = None,
    schedules: Sequence[str] | str | None = None,
    recompute: bool = False,
    offload: bool = False,
    host_memory: Limit = None,
    host_bandwidth: float | str | None = None,
    barrier: bool = True,
    split: bool = True,
    microbatch_sizes: Sequence[int] | None = None,
    slices: int | Sequence[int] | None = None,
    slice_granularity: int = GRANULARITY,
    vocabulary: bool = False,
    seconds: float = 7.0,
    rounds: float | None = None,
    jitter: float = 0.05,
    near: float = 0.001,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    found: Callable[[Candidate], None] | None = None,
) -> Plan:
    """Find the best schedule for a model on that many ranks, within a memory limit; raises `PlanError` if nothing fits.

    - `ranks`, or a `cluster` of devices of different speeds, memory and links, each of which becomes one rank: `Plan.devices` says which;
    - `microbatches` of the profile's size, or a `batch` to be cut into microbatches of the sizes that the profile was measured at, or of
      `microbatch_sizes`, scaled from the profile's numbers;
    - `memory_limit`: one size, or one per rank or device, in the profile's unit or like "40GiB"; parameters, gradients and optimizer count;
      by default the memory of the cluster's devices;
    - `headroom`: the share of each limit that stays free; by default 5 % if the profile is an estimate, else nothing;
    - `schedules`: names of the zoo to try, and "searched" for searched orders; all by default;
    - `recompute`: whether stages may run their forward again to hold less, if the memory limit holds a schedule back;
    - `offload`: whether activations may be moved to host memory if the memory limit holds a schedule back, `host_memory` the most that
      each rank may have there, and `host_bandwidth` what its link carries per unit of time, instead of the profile's;
    - `barrier`: whether all ranks wait for each other before the optimizer step (the makespan counts) or not (the longest span counts);
    - `split`: whether the backward may be split;
    - `slices`: into how many slices sequences may be cut, one number or several to choose from; by default 1, 2, 4 and so on up to 16 with
      at least 4096 tokens each, if the profile has `tokens` and knows what a slice takes. Their lengths are chosen too, as multiples of
      `slice_granularity` tokens;
    - `vocabulary`: whether the first layer, the embedding, and the last, the head with the loss, may be spread over all ranks; such plans
      compete with those that have them on the first and last stage. On a cluster, each device takes as many of their rows as it is fast,
      within its memory: `Plan.row_shares`;
    - `seconds`: how long to plan; with 0 only the named schedules are timed, however long that takes. Up to half of it is for the named
      schedules if orders are searched too (three quarters with `vocabulary`), but at least 5 s if their orders are small. What is left out
      then is in the notes. Not counted is what takes up to half a minute once per machine, compiling the simulator and the search; and
      the order that is being timed, the schedules until a first one fits, and the proof are not interrupted;
    - `rounds`: how many orders the search times; the default usually takes less than `seconds`. Equal arguments and seeds give equal plans,
      unless `seconds` run out first: the report then says so;
    - `jitter`: how much times vary when robustness is measured; among candidates within `near` of the fastest, one that is more robust by
      more than it is slower is preferred, and to a searched order a named schedule within 1 % whose p95 is not worse;
    - `progress` is called with a `Progress`; once `stop()` returns True, the best plan so far is returned;
    - `found` is called with each `Candidate` as it is made; one with the `place` of an earlier one replaces it, and `Plan.chosen` is the
      place of the plan itself.
    """
    if not isinstance(profile, Profile):
        raise CostsError(f"a plan needs a penstock.Profile, got {type(profile).__name__}")
    for name, flag in (("recompute", recompute), ("offload", offload), ("barrier", barrier), ("split", split), ("vocabulary", vocabulary)):
        check_flag(name, flag)
    check_callbacks(progress, stop)
    if found is not None:
        check_function("found", found, "found(candidate)")
    if profile.shares:
        raise CostsError("a plan chooses itself whether the vocabulary is spread: give the whole profile, and vocabulary=True")
    if vocabulary and len(profile) < 3:
        raise CostsError(
            f"vocabulary=True spreads an embedding and a head, the first and last of at least 3 layers; there are {len(profile)}"
        )
    ranks = check_ranks(profile, ranks, cluster)
    if len(profile) < ranks:
        raise PlacementError(
            f"{format_count(len(profile), 'layer')} are too few for {format_count(ranks, 'rank')}: each needs at least one"
        )
    profile = check_host(profile, offload, host_memory, host_bandwidth)
    free = choose_headroom(profile, headroom)
    if memory_limit is None and cluster is not None:
        memory_limit = cluster.memory_limit
    limits = check_limits(memory_limit, ranks)
    if limits is not None:
        limits = tuple(limit * (1 - free) for limit in limits)
    counts, no_slices = check_slices(profile, slices, check_count("slice_granularity", slice_granularity, error=ScheduleError))
    known = profile if counts != (1,) else forget_slices(profile)
    request = Request(
        known,
        ranks,
        *check_batch(known, microbatches, batch, microbatch_sizes),
        limits,
        check_names(schedules),
        recompute,
        barrier,
        split,
        check_share("seconds", seconds),
        check_count("seed", seed, 0, error=ScheduleError),
        check_share("jitter", jitter, below=1.0),
        check_share("near", near),
        rounds=None if rounds is None else check_share("rounds", rounds),
        in_bytes=is_in_bytes(profile, memory_limit) or (cluster is not None and cluster.size_unit == "B"),
        headroom=0.0 if limits is None else free,
        offload=offload,
        host_limits=check_limits(host_memory, ranks, "host_memory"),
        slices=counts,
        cluster=cluster,
        no_slices=no_slices,
        granularity=int(slice_granularity),
        vocabulary=vocabulary,
        tell=progress or (lambda progress: None),
        stop=stop or (lambda: False),
        found=found or (lambda candidate: None),
    )
    check_static_memory(request)
    explorer = Explorer(request)
    if batch is not None:
        missing = sorted(set(microbatch_sizes or profile.sizes) - {tried.microbatch for tried in request.profiles})
        explorer.notes += [f"microbatches of {size} are left out: a batch of {batch} cannot be cut into them" for size in missing]
    if limits is not None and free:
        explorer.notes.append(f"{100 * free:.3g}% of each memory limit is kept free: the limits below exclude it")
    if cluster is not None and cluster.ignores_nodes:
        explorer.notes.append(
            f"the devices are in {len(cluster.nodes)} nodes, and links are the same within a node as between nodes: if they are faster "
            "within, give node_latency or node_bandwidth"
        )
    if offload and profile.host_bandwidth is None:
        explorer.notes.append("the bandwidth to host memory is not known: copies are taken to take no time but their latency")
    explorer.run()
    return _build_plan(explorer)


def _build_plan(explorer: Explorer) -> Plan:
    """The plan, from everything that was tried."""
    request, fitting = explorer.request, explorer.fitting
    if not fitting:
        if request.stop():
            raise PlanError(
                f"stopped before anything was found that fits: {format_count(len(explorer.candidates), 'candidate')} were tried"
            )
        raise make_refusal(explorer)
    winner, p95 = choose(fitting, request, explorer.is_too_late_for)
    problem, bound = winner.problem, explorer.bound_of(winner.problem)
    assert problem.profile is not None
    alternatives = tuple(_list_alternatives(explorer, p95))
    explorer.note_what_was_cut_short()
    plan = Plan(
        name=winner.name,
        profile=problem.profile,
        schedule=winner.schedule,
        partition=problem.sizes,
        recompute=problem.recompute,
        memory_limit=request.limits_of(problem.assignment),
        barrier=request.barrier,
        split=request.split,
        bounds=dict(bound.all),
        overall_bound=explorer.bound_overall(),
        p95=p95.get(winner.place),
        jitter=request.jitter,
        alternatives=alternatives,
        chosen=winner.place,
        in_bytes=request.in_bytes,
        notes=tuple(explorer.notes),
        host_memory_limit=request.host_limits_of(problem.assignment),
        slice_lengths=problem.lengths,
        cluster=request.cluster,
        devices=problem.devices,
        row_shares=problem.rows,
    )
    plan.proof  # noqa: B018 - raises if anything is wrong with the plan, and is kept
    return plan


def _list_alternatives(explorer: Explorer, p95: dict[int, float]) -> list[Candidate]:
    """Every candidate as a plan keeps it: with its bound and p95, and without its timeline."""

    def find_bound(candidate: Candidate) -> float | None:
        bound = None if candidate.timed is None else explorer.bound_if_in_time(candidate.problem)
        if bound is None:
            return None
        if candidate.fits:
            check_bound(bound.value, candidate.time_or_inf, bound.name)
        return bound.value if bound.value < float("inf") else None

    tried = [replace(other, bound=find_bound(other), p95=p95.get(other.place), timed=None) for other in explorer.candidates]
    return tried + [Candidate(name, "", 0, 0, 0, 0, Verdict.REFUSED.value, reason) for name, reason in explorer.refused.items()]


def choose(
    fitting: Sequence[Candidate], request: Request, is_too_late_for: Callable[[str, float], bool] = lambda what, cells: False
) -> tuple[Candidate, dict[int, float]]:
    """The best candidate, and the measured p95 of candidates by their place.

    The best is the fastest, or one within `near` of it that is more robust by more than it is slower, and never slower than the fastest
    named schedule. Of equally fast ones, the first has the fewest stages. If it is a searched order, the fastest named schedule within
    `SIMPLER` whose p95 is not worse is preferred. `is_too_late_for` tells whether no time is left to time so many cells.
    """
    order = sorted(fitting, key=lambda candidate: candidate.time_or_inf)
    named = [candidate for candidate in order if candidate.name != SEARCHED]
    fastest = order[0].time_or_inf
    most = min([fastest * (1 + request.near), *(candidate.time_or_inf for candidate in named[:1])]) * (1 + _EVEN)
    close = [candidate for candidate in order if candidate.time_or_inf <= most][:_MOST_JITTERED]
    first = min((other for other in close if other.time_or_inf <= fastest * (1 + _SAME)), key=lambda other: other.problem.stages)
    simple = [candidate for candidate in named if candidate.time_or_inf <= fastest * (1 + SIMPLER)][:_MOST_JITTERED]
    measured = {candidate.place: candidate for candidate in (*close, *simple, *list_distinct(fitting)[: RUNNERS_UP + 1])}
    cells = sum(candidate.problem.cells for candidate in measured.values())
    if request.stop() or is_too_late_for("robustness not measured", _SCENARIO_COST * SCENARIOS * cells):
        return first, {}
    p95 = {place: measure_p95(candidate, request) for place, candidate in measured.items()}
    steady = min(close, key=lambda candidate: p95[candidate.place])
    gained, lost = p95[first.place] - p95[steady.place], steady.time_or_inf - first.time_or_inf
    best = steady if gained > max(lost, NOISE * p95[first.place]) else first
    if best.name == SEARCHED:
        best = next((candidate for candidate in simple if p95[candidate.place] <= p95[best.place] * (1 + _SAME)), best)
    return best, p95


def list_distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that fit, the fastest first: the fastest of each schedule and placement, and no searched order that is a named one."""
    distinct: dict[object, Candidate] = {}
    for candidate in sorted(candidates, key=lambda candidate: (candidate.time_or_inf, candidate.name == SEARCHED)):
        is_copy = candidate.name == SEARCHED and any(map(candidate.is_like, distinct.values()))
        if candidate.fits and not is_copy:
            distinct.setdefault(candidate.shape, candidate)
    return list(distinct.values())


def measure_p95(candidate: Candidate, request: Request) -> float:
    """The makespan, or without a barrier the longest rank span, that 95 of 100 runs stay below if each time varies."""
    table, costs = candidate.timeline.table, candidate.problem.costs
    scenarios = simulate_many(table, costs, scenarios=SCENARIOS, jitter=request.jitter, seed=request.seed)
    return scenarios.p95 if request.barrier else float(np.quantile(scenarios.spans, 0.95))
