"""From a model and a memory limit to the best schedule found, with proof."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import CostsError, FileFormatError, PlacementError, PlanError
from penstock.ir.costs import Costs
from penstock.ir.placement import Placement
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.advice import check_static, refusal
from penstock.planner.bounds import check_bound
from penstock.planner.candidate import Candidate
from penstock.planner.choose import choose
from penstock.planner.explore import Explorer
from penstock.planner.named import Attempt, Verdict
from penstock.planner.profile import Layer, Profile
from penstock.planner.request import (
    Limit,
    Progress,
    Request,
    check_count,
    check_seed,
    check_share,
    checked_cases,
    checked_limits,
    checked_names,
    is_in_bytes,
    left_out,
)
from penstock.planner.setting import Setting
from penstock.planner.stage_costs import runs
from penstock.planner.units import Units
from penstock.simulator.simulate import simulate
from penstock.simulator.timeline import Timeline
from penstock.verifier.proof import Proof
from penstock.verifier.verify import verify

HEADROOM = 0.05
"""The share of a memory limit that stays free where sizes are estimated."""


@dataclass(frozen=True)
class Plan:
    """A partition, a placement, a schedule, the costs it was chosen on, its predicted timeline, its proof and its bound."""

    name: str
    """The schedule's: one of the zoo's, or `searched`."""
    profile: Profile
    """The model at the plan's microbatch size."""
    schedule: Schedule
    partition: tuple[int, ...]
    """How many layers each stage has."""
    recompute: tuple[bool, ...]
    """For each stage whether its forward is run again before its backward, so that it keeps its input alone."""
    memory_limit: tuple[float, ...] | None
    """Each rank's, where there is one."""
    barrier: bool
    """Whether the makespan was minimised; else the longest rank span."""
    split: bool
    bounds: dict[str, float]
    """What no schedule of this placement and partition can be quicker than within the limit, by what shows it."""
    overall_bound: float
    """What no plan can be quicker than within the limit, however the layers are cut into contiguous stages, placed on the ranks and
    ordered, for all microbatch sizes that were asked for."""
    p95: float | None = None
    """What 95 in 100 runs stay under when every time varies by `jitter`: of the makespan, or without a barrier of the longest span."""
    jitter: float = 0.0
    alternatives: tuple[Candidate, ...] = ()
    """Everything that was considered, this plan included."""
    chosen: int = 0
    """Which of the alternatives this is."""
    in_bytes: bool = False
    """Whether sizes are bytes."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse bounds above what the schedule takes: they would be false."""
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
        """Samples a microbatch."""
        return self.profile.microbatch

    @cached_property
    def setting(self) -> Setting:
        return Setting(
            self.profile,
            self.placement,
            self.microbatches,
            self.partition,
            self.recompute,
            self.memory_limit,
            self.barrier,
            self.split,
        )

    @property
    def costs(self) -> Costs:
        """Those of the stages."""
        return self.setting.costs

    @cached_property
    def program(self) -> Program:
        """The schedule lowered, as it was timed."""
        return lower(self.schedule)

    @cached_property
    def predicted(self) -> Timeline:
        """When everything runs, and what each rank holds."""
        return simulate(self.program, self.costs)

    @cached_property
    def proof(self) -> Proof:
        """That the program neither hangs, drops work nor holds more than the limit."""
        return verify(self.program, memory_limit=self.memory_limit, costs=self.costs)

    @cached_property
    def objective(self) -> float:
        """What was minimised: the makespan, or the longest rank span where there is no barrier."""
        return self.setting.problem.objective(self.predicted)

    @property
    def bound_name(self) -> str:
        """What shows the best bound."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def bound(self) -> float:
        """The best lower bound known for this placement and partition within the limit; other placements have their own."""
        return self.bounds[self.bound_name]

    @property
    def gap(self) -> float:
        """How much more than the bound the plan takes, as a share of the bound."""
        return self.objective / self.bound - 1 if self.bound else 0.0

    @property
    def overall_gap(self) -> float:
        """The same against every other way to cut, place and order the layers."""
        return self.objective / self.overall_bound - 1 if self.overall_bound else 0.0

    @property
    def units(self) -> Units:
        return Units(self.profile.time_unit, self.in_bytes)

    def layers(self, stage: int) -> tuple[Layer, ...]:
        """The layers of a stage."""
        return runs(self.profile, self.partition)[stage]

    def report(self) -> str:
        """Everything in words: candidates, why this one, memory a rank against the limit."""
        from penstock.planner.report import report

        return report(self)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"<Plan {self.name!r}, {self.placement.describe()}, {self.microbatches} microbatches, takes {self.objective:.6g}>"

    # Files ------------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data."""
        from penstock.planner.plan_file import encode

        return encode(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write by suffix: `.json` the plan itself, `.svg` and `.png` the candidates' time against their memory."""
        suffix = Path(path).suffix.lower()
        if suffix == ".json":
            from penstock.planner.plan_file import write

            write(self, path)
        elif suffix in (".svg", ".png"):
            from penstock.draw.figures.tradeoff import save_tradeoff

            save_tradeoff(self, path)
        else:
            raise FileFormatError(os.fspath(path), f"the suffix {suffix!r} is not one of .json, .svg, .png")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """Read a plan that was saved as `.json`; it is proved and timed anew."""
        from penstock.planner.plan_file import read

        return read(path)


def plan(
    profile: Profile,
    *,
    ranks: int,
    microbatches: int | None = None,
    batch: int | None = None,
    memory_limit: Limit = None,
    headroom: float | None = None,
    schedules: Sequence[str] | str | None = None,
    recompute: bool = False,
    barrier: bool = True,
    split: bool = True,
    microbatch_sizes: Sequence[int] | None = None,
    seconds: float = 7.0,
    rounds: float | None = None,
    jitter: float = 0.05,
    near: float = 0.001,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    found: Callable[[Attempt], None] | None = None,
) -> Plan:
    """The best schedule found for a model on so many ranks, within a memory limit; `PlanError` where nothing fits.

    - `microbatches` of the profile's size, or a `batch` to be cut into microbatches of the sizes that the profile was measured
      for, or of `microbatch_sizes`, the profile's numbers in proportion;
    - `memory_limit`: one size or one a rank, in the profile's unit or like "40GiB", parameters, gradients and optimizer included;
    - `headroom`: the share of each limit that stays free; 5 % by default if the profile is an estimate, else nothing;
    - `schedules`: names of the zoo to try, and "searched" for orders that are searched for; all unless given;
    - `recompute`: whether stages may run their forward again to hold less, where something fits only so;
    - `barrier`: whether all ranks wait for each other before the optimizer's step (the makespan counts) or not (the span does);
    - `split`: whether the backward may be split;
    - `seconds`: how long to plan; 0 for the named schedules alone, however long timing them takes;
    - `rounds`: how many orders the search times, by default as many as usually take less than `seconds`. Equal arguments and seeds
      give equal plans, unless `seconds` are over first: the report then says so;
    - `jitter`: how much times vary when robustness is measured; of candidates within `near` the quickest is taken, or one
      that is more robust by more than it is slower;
    - `progress` is called with a `Progress`; once `stop()` is true, the best plan so far is returned;
    - `found` is called with each `Attempt` as it is made.
    """
    if not isinstance(profile, Profile):
        raise CostsError(f"a plan needs a penstock.Profile, got {type(profile).__name__}")
    if len(profile) < check_count("ranks", ranks):
        raise PlacementError(f"{len(profile)} layers are too few for {ranks} ranks: each needs at least one")
    free = (HEADROOM if profile.estimated else 0.0) if headroom is None else check_share("headroom", headroom, below=1.0)
    limits = checked_limits(memory_limit, ranks)
    if limits is not None:
        limits = tuple(limit * (1 - free) for limit in limits)
    request = Request(
        profile,
        ranks,
        checked_cases(profile, microbatches, batch, microbatch_sizes),
        limits,
        checked_names(schedules),
        recompute,
        barrier,
        split,
        check_share("seconds", seconds),
        check_seed(seed),
        check_share("jitter", jitter, below=1.0),
        check_share("near", near),
        rounds=None if rounds is None else check_share("rounds", rounds),
        in_bytes=is_in_bytes(profile, memory_limit),
        headroom=0.0 if limits is None else free,
        tell=progress or (lambda progress: None),
        stop=stop or (lambda: False),
        found=found or (lambda attempt: None),
    )
    check_static(request)
    explorer = Explorer(request)
    explorer.notes += left_out(request.cases, batch, microbatch_sizes or profile.sizes)
    if limits is not None and free:
        explorer.notes.append(f"{free:.3g} of each memory limit is kept free: limits below are without it")
    explorer.run()
    return _made(explorer)


def _made(explorer: Explorer) -> Plan:
    """The plan, from all that was tried."""
    request, fitting = explorer.request, explorer.fitting
    if not fitting:
        if request.stop():
            raise PlanError(f"stopped before anything was found that fits: {len(explorer.attempts)} candidates were tried")
        raise refusal(explorer)
    winner, p95 = choose(fitting, request, explorer.is_too_late_for)
    trial = winner.trial
    assert trial is not None
    setting, bounds = trial.setting, explorer.bounds_of(trial.setting)
    by_attempt = {id(fitting[place]): value for place, value in p95.items()}
    alternatives = tuple(_candidates(explorer, by_attempt))
    explorer.note_what_was_cut_short()
    made = Plan(
        name=trial.name,
        profile=setting.profile,
        schedule=trial.schedule,
        partition=setting.sizes,
        recompute=setting.recompute,
        memory_limit=request.limits,
        barrier=request.barrier,
        split=request.split,
        bounds=dict(bounds.all),
        overall_bound=explorer.overall_bound(),
        p95=by_attempt.get(id(winner)),
        jitter=request.jitter,
        alternatives=alternatives,
        chosen=next(place for place, each in enumerate(explorer.attempts) if each is winner),
        in_bytes=request.in_bytes,
        notes=tuple(explorer.notes),
    )
    made.__dict__["proof"] = made.proof  # raises where anything is wrong with it
    return made


def _candidates(explorer: Explorer, p95: dict[int, float]) -> list[Candidate]:
    def bound(attempt: Attempt) -> float | None:
        if attempt.trial is None:
            return None
        found = explorer.known_bounds(attempt.trial.setting)
        if found is None:
            return None
        if attempt.trial.fits:
            check_bound(found.value, attempt.trial.objective, found.name)
        return found.value if found.value < float("inf") else None

    made = [Candidate.of(each, bound(each), p95.get(id(each))) for each in explorer.attempts]
    return made + [Candidate(name, "", 0, 0, 0, 0, Verdict.REFUSED.value, reason) for name, reason in explorer.refused.items()]
