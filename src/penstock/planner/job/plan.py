"""From a job to the best configuration found, with the pipeline that it was timed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from os import PathLike
from typing import Any

from penstock.errors import CostsError, PlanError, ScheduleError
from penstock.ir.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.candidate import Verdict
from penstock.planner.job.configuration import Configuration, check_number_of, check_vocabulary
from penstock.planner.job.costs import make_costs
from penstock.planner.job.job import Job
from penstock.planner.job.pipelines import SCHEDULES, PipelineTrials, ScheduleTemplates, ScheduleTrial
from penstock.planner.job.report import SearchSummary, write_report
from penstock.planner.job.search import ConfigurationSearch, Trial, bound_seconds, list_configurations
from penstock.planner.profile import Profile
from penstock.planner.request import SEARCHED, Progress, check_callbacks, check_names
from penstock.simulator.timeline import Timeline
from penstock.text.checks import check_flag
from penstock.text.units import Units
from penstock.verifier.proof import Proof
from penstock.verifier.verify import verify

One = int | Sequence[int] | None


@dataclass(frozen=True)
class JobPlan:
    """A configuration of a job, the pipeline that each of its replicas runs, and every configuration that it was chosen from."""

    job: Job
    configuration: Configuration
    pipeline: ScheduleTrial
    trials: tuple[Trial, ...] = field(default=(), repr=False)
    """Every configuration of the search; a plan that was loaded has none, but the summary of them."""
    loaded: SearchSummary | None = field(default=None, repr=False)
    """The summary of the search, if the plan was loaded."""

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.pipeline.candidate.name

    @property
    def schedule(self) -> Schedule:
        return self.pipeline.candidate.schedule

    @property
    def profile(self) -> Profile:
        """The layers on one GPU, recomputed ones with their second forward."""
        profile = self.pipeline.candidate.problem.profile
        assert profile is not None
        return profile

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers per stage."""
        return self.pipeline.candidate.problem.sizes

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Recomputed blocks per stage, or layers of a profile."""
        return tuple(sum(self.recomputed_layers[begin:end]) for begin, end in pairwise([0, *accumulate(self.partition)]))

    @cached_property
    def recomputed_layers(self) -> tuple[bool, ...]:
        """For each layer of the model, from its first to its last, whether its forward runs again."""
        first, last = make_costs(self.job, self.configuration).ends
        return (*[False] * first, *self.pipeline.recomputed, *[False] * last)

    @property
    def costs(self) -> Costs:
        """Costs of the stages."""
        return self.pipeline.candidate.problem.costs

    @property
    def microbatches(self) -> int:
        """Microbatches per step of each replica."""
        return self.pipeline.candidate.microbatches

    @cached_property
    def predicted(self) -> Timeline:
        """The pipeline of one replica, with reduction and update."""
        return self.pipeline.candidate.timeline.in_units(self.units)

    @cached_property
    def proof(self) -> Proof:
        """The proof that the pipeline neither hangs, drops work nor exceeds the memory limit."""
        limits = (self.job.limit,) * self.configuration.pipeline
        return replace(verify(lower(self.schedule), memory_limit=limits, costs=self.costs), in_bytes=True)

    @property
    def seconds(self) -> float:
        """Predicted seconds per step."""
        return self.pipeline.seconds

    @property
    def excess(self) -> float:
        """Bytes of the fullest GPU over the limit; 0 if everything fits."""
        return max(max(self.predicted.peak_memory) - self.job.limit, 0.0)

    @property
    def samples_per_second(self) -> float:
        """Of the whole job."""
        return self.job.batch / self.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole job; None if a profile does not say how many tokens a sample has."""
        return None if self.job.tokens is None else self.job.tokens / self.seconds

    @property
    def flops_per_gpu(self) -> float | None:
        """Useful operations per second of each GPU: without recompute, and without the masked half of causal attention.

        None for a profile, which has times only.
        """
        return None if self.job.operations is None else self.job.operations / self.seconds / self.job.machines.gpus

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization: useful operations per second as a share of the peak; None for a profile."""
        return None if self.flops_per_gpu is None else self.flops_per_gpu / self.job.machines.flops

    @cached_property
    def search(self) -> SearchSummary:
        """What the plan was chosen from."""
        return SearchSummary.of(self) if self.loaded is None else self.loaded

    @property
    def bound(self) -> float:
        """Seconds that no configuration of the search beats."""
        return self.search.bound

    @property
    def units(self) -> Units:
        return Units("s", True)

    def report(self) -> str:
        """The plan in words: degrees, memory, and the next best value of every dimension."""
        return write_report(self)

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        share = "" if self.utilization is None else f", {self.utilization:.1%} of the peak"
        return f"<JobPlan {self.configuration.describe()}, {self.name}: {self.units.time(self.seconds)}{share}>"

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        from penstock.planner.job.plan_file import encode

        return encode(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a `.json` file."""
        from penstock.planner.job.plan_file import write

        write(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> JobPlan:
        """Read a plan that was saved; it is proved and timed again."""
        from penstock.planner.job.plan_file import read

        return read(path)


def plan_job(
    job: Job,
    *,
    pipeline: One = None,
    data: One = None,
    tensor: One = None,
    context: One = None,
    microbatch: One = None,
    sharding: One = None,
    vocabulary: str | Sequence[str] | None = None,
    selective: bool | None = None,
    recompute: bool = True,
    schedules: Sequence[str] | str | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> JobPlan:
    """Find the fastest configuration of a job that fits; raises `PlanError` if none does, or if none is possible.

    - `pipeline`, `data`, `tensor`, `context`, `microbatch`, `sharding` (the ZeRO stage): one value or several to choose from; by default
      all that divide the GPUs, the batch and the model: tensor degrees within a node, at least 4096 tokens per context rank, and up to 16
      samples per microbatch. For a profile, tensor and context degrees are 1, because nobody knows what half of a measured layer takes,
      and the microbatch sizes are those that were measured; others are scaled from the nearest;
    - `vocabulary`: "ends" (embedding and head on the first and last stage), "head" (the head shared among the pipeline ranks), "spread"
      (both shared), or several of them; all by default;
    - `selective`: whether attention without flash runs its scores again; both by default;
    - `recompute`: whether blocks may run their forward again, as many per stage as the memory asks for;
    - `schedules`: names of the zoo; by default those of `penstock.planner.job.pipelines.SCHEDULES`;
    - `progress` is called with a `Progress`; once `stop()` returns True, the best so far is returned.
    """
    _check_job("plan_job", job)
    check_callbacks(progress, stop)
    check_flag("recompute", recompute)
    numbers = {"pipeline": pipeline, "data": data, "tensor": tensor, "context": context, "microbatch": microbatch, "sharding": sharding}
    wanted: dict[str, Sequence[Any]] = {
        name: tuple(check_number_of(name, number) for number in _list_values(name, value))
        for name, value in numbers.items()
        if value is not None
    }
    if vocabulary is not None:
        wanted["vocabulary"] = tuple(map(check_vocabulary, _list_values("vocabulary", vocabulary)))
    if selective is not None:
        wanted["selective"] = (Configuration(selective=selective).selective,)
    names = SCHEDULES if schedules is None else _check_schedules(schedules)
    search = ConfigurationSearch(
        job, list_configurations(job, wanted), ScheduleTemplates(names), recompute, progress or _ignore, stop or _never
    )
    best = search.run()
    return JobPlan(job, best.configuration, best.schedules[0], tuple(search.trials.values()))


def predict_job(job: Job, configuration: Configuration, *, schedule: str = "1f1b", recompute: bool | None = None) -> JobPlan:
    """Predict what a job takes in one configuration, whether it fits or not: `JobPlan.excess` says how much memory is missing.

    - `schedule`: a name of the zoo, as reports print it: "interleaved-1f1b{chunks=3}", or without chunks for the fastest number of them;
    - `recompute`: whether every block runs its forward again, or none; by default as many as the memory asks for.
    """
    _check_job("predict_job", job)
    if not isinstance(configuration, Configuration):
        raise CostsError(f"predict_job needs a penstock.Configuration, got {type(configuration).__name__}")
    if not isinstance(schedule, str):
        raise ScheduleError(f"schedule must be the name of a schedule, like '1f1b', got {schedule!r}")
    if recompute is not None:
        check_flag("recompute", recompute)
    fields = {name: (value,) for name, value in configuration.to_json().items()}
    chosen = list_configurations(job, fields)[0]
    templates, limit = ScheduleTemplates(_check_schedules(schedule)), None if recompute is None else math.inf
    costs = make_costs(job, chosen, bool(recompute))
    trials = PipelineTrials(costs, templates, recompute is None, limit).run()
    if not trials:
        _, refused = PipelineTrials(costs, templates).list_usable()
        reason = next(iter(refused.values()), "it does not take this number of microbatches")
        raise PlanError(f"{schedule!r} does not go with {chosen.describe()}: {reason}")
    best = trials[0]
    if best.timed is None:
        raise PlanError(
            f"{chosen.describe()} does not fit with {schedule}: {Units('s', True).size(best.excess)} over the limit of a GPU; "
            "with recompute=False or recompute=True it is predicted all the same"
        )
    bound = bound_seconds(make_costs(job, chosen), best.timed.microbatches)
    trial = Trial(chosen, bound, Verdict.FITS, tuple(trials))
    return JobPlan(job, chosen, best, (trial,))


def _ignore(progress: Progress) -> None:
    pass


def _never() -> bool:
    return False


def _check_job(what: str, job: Any) -> None:
    if not isinstance(job, Job):
        raise CostsError(f"{what} needs a penstock.Job, got {type(job).__name__}")


def _check_schedules(schedules: Sequence[str] | str) -> tuple[str, ...]:
    names = check_names(schedules)
    if SEARCHED in names:
        raise PlanError(
            "jobs are planned with named schedules: leave out 'searched', and search the order of the result with penstock.plan"
        )
    return names


def _list_values(name: str, value: Any) -> list[Any]:
    """One value or several as a list."""
    values = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    if not values:
        raise PlanError(f"{name} is empty: give at least one value, or leave it out")
    return values
