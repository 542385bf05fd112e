"""Go through the configurations of a job: bound each, time the promising ones, and keep what became of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from penstock.errors import PlanError
from penstock.ir.codes import MAX_MICROBATCHES
from penstock.planner.candidate import Verdict
from penstock.planner.job.configuration import DEGREES, DIMENSIONS, ENDS, VOCABULARIES, Configuration
from penstock.planner.job.costs import JobCosts, make_costs
from penstock.planner.job.job import Job
from penstock.planner.job.pipelines import PipelineTrials, ScheduleTemplates, ScheduleTrial, gains_enough, sort_trials
from penstock.planner.request import Progress
from penstock.text.units import Units

FEWEST_TOKENS = 4096
"""Tokens of a sequence that each context rank keeps at least, unless the degree is given."""
MOST_SAMPLES = 16
"""Samples per microbatch at most, unless the size is given."""
MOST_MICROBATCHES = 4096
"""Microbatches of a replica at most, unless their size is given: timing one configuration takes as long as it has microbatches."""
MOST_NEIGHBOURS = 8
"""Configurations that are timed at most to find the best with another value of one dimension."""
_MOST_SHARED = 4096
"""Ranks times microbatches of the longest pipeline with a shared vocabulary that is timed as a neighbour, if there are others."""
_SHOWN = 2
"""Reasons that an error lists."""
_SPLIT_BACKWARD, _MOST_CHUNKS = 3, 8
"""By what a guess of the bubble is divided: with a backward in two halves by so much, with stages in chunks by their number."""
_UNITS = Units("s", True)


@dataclass(frozen=True)
class Trial:
    """One configuration: its bounds, and its schedules if they were tried."""

    configuration: Configuration
    bound: float
    """Seconds that no schedule, partition or recompute of this configuration can beat."""
    verdict: Verdict
    """`FITS`, `OVER`, `SLOW` if its bound is above the best, or `REFUSED` if only its long orders may be faster, by too little."""
    schedules: tuple[ScheduleTrial, ...] = field(default=(), repr=False)
    """The fastest that fits first."""
    excess: float = 0.0
    """Bytes over the limit on the fullest GPU, if nothing fits."""

    def keep_figures(self) -> Trial:
        """The same without the orders and timelines of its schedules."""
        return replace(self, schedules=tuple(tried.keep_figures() for tried in self.schedules))

    @property
    def at_least(self) -> float:
        """Seconds that the schedules which were tried take at least on their partitions, or else the bound."""
        return max(self.bound, min((tried.bound for tried in self.schedules if not tried.excess), default=0.0))

    @property
    def seconds(self) -> float:
        """The time of the fastest schedule that fits, infinite without one."""
        return self.schedules[0].seconds if self.schedules else math.inf


# The space ------------------------------------------------------------------------------------------------------------


def list_configurations(job: Job, wanted: Mapping[str, Sequence[Any]]) -> list[Configuration]:
    """Every configuration with the wanted values of some dimensions, and all sensible values of the others."""
    reasons = _Reasons()
    configurations = [] if _cannot_multiply(job.machines.gpus, wanted, reasons) else list(_enumerate(job, wanted, reasons))
    if not configurations:
        raise PlanError(f"no configuration of {job.machines.gpus} GPUs with a batch of {job.batch} is possible: {reasons.describe()}")
    return configurations


class _Reasons:
    """Why configurations are not possible: those that failed at the last of the checks are the nearest to one that is."""

    def __init__(self) -> None:
        self._by_check: dict[int, dict[str, None]] = {}

    def add(self, check: int, reason: str) -> None:
        """Add a reason that was found by the check with this number."""
        self._by_check.setdefault(check, {})[reason] = None

    def describe(self) -> str:
        if not self._by_check:
            return "the degrees leave no choice"
        last = [*self._by_check[max(self._by_check)]]
        more = f"; and {len(last) - _SHOWN} more like these" if len(last) > _SHOWN else ""
        return "; ".join(last[-_SHOWN:]) + more  # the last have the fewest data ranks


def _cannot_multiply(gpus: int, wanted: Mapping[str, Sequence[Any]], reasons: _Reasons) -> bool:
    """Whether the wanted degrees alone cannot multiply to the GPUs, whatever the others are."""
    names = [name for name in DEGREES if name in wanted]
    for degrees in product(*(wanted[name] for name in names)):
        taken, written = math.prod(degrees), " x ".join(f"{name}={degree}" for name, degree in zip(names, degrees, strict=True))
        if gpus % taken == 0 and (taken == gpus or len(names) < len(DEGREES)):
            return False
        of = f" = {taken}" if len(names) > 1 else ""
        reasons.add(0, f"{written}{of} {'does not divide' if gpus % taken else 'is less than'} gpus={gpus}")
    return True


def _enumerate(job: Job, wanted: Mapping[str, Sequence[Any]], reasons: _Reasons) -> Iterator[Configuration]:
    if job.profile is not None:
        yield from _enumerate_for_profile(job, wanted, reasons)
        return
    gpus, model = job.machines.gpus, job.transformer

    def choose(name: str, usual: Sequence[Any]) -> Sequence[Any]:
        return wanted.get(name, usual)

    tensors = [
        degree for degree in choose("tensor", _list_divisors(min(gpus, job.machines.gpus_per_node))) if _is_tensor(job, degree, reasons)
    ]
    contexts = choose("context", [degree for degree in _list_divisors(gpus) if degree == 1 or model.sequence // degree >= FEWEST_TOKENS])
    pipelines = choose("pipeline", [degree for degree in _list_divisors(gpus) if degree <= model.layers])
    for tensor, context, pipeline in product(tensors, contexts, pipelines):
        if model.sequence % (tensor * context):
            reasons.add(2, f"sequence={model.sequence} cannot be shared among tensor={tensor} x context={context}")
        else:
            yield from _add_data(job, Configuration(tensor=tensor, context=context, pipeline=pipeline), wanted, reasons)


def _enumerate_for_profile(job: Job, wanted: Mapping[str, Sequence[Any]], reasons: _Reasons) -> Iterator[Configuration]:
    """Layers that are known by their times cannot be divided: every GPU of a stage has whole layers."""
    for name, only in (("tensor", 1), ("context", 1), ("vocabulary", ENDS), ("selective", False)):
        other = [value for value in wanted.get(name, ()) if value != only]
        for value in other:
            reasons.add(1, f"{name}={value} needs the sizes of the model: a profile has whole layers, so {name} is {only}")
        if other:
            return
    for pipeline in wanted.get("pipeline", [degree for degree in _list_divisors(job.machines.gpus) if degree <= job.layers]):
        yield from _add_data(job, Configuration(pipeline=pipeline), wanted, reasons)


def _add_data(job: Job, degrees: Configuration, wanted: Mapping[str, Sequence[Any]], reasons: _Reasons) -> Iterator[Configuration]:
    """The configurations with these degrees, and as many data ranks as there are GPUs for."""
    gpus, taken = job.machines.gpus, f"tensor={degrees.tensor} x context={degrees.context} x pipeline={degrees.pipeline}"
    if degrees.pipeline > job.layers:
        reasons.add(3, f"pipeline={degrees.pipeline} is more than layers={job.layers}")
    elif gpus % degrees.gpus:
        reasons.add(3, f"{taken} does not divide gpus={gpus}")
    else:
        data = gpus // degrees.gpus
        if data not in wanted.get("data", [data]):
            reasons.add(4, f"{taken} leaves data={data} of {gpus} GPUs, not {' or '.join(map(str, wanted['data']))}")
        elif job.batch % data:
            reasons.add(5, f"batch={job.batch} cannot be shared among data={data}")
        else:
            yield from _complete(job, replace(degrees, data=data), wanted, reasons)


def _complete(job: Job, degrees: Configuration, wanted: Mapping[str, Sequence[Any]], reasons: _Reasons) -> Iterator[Configuration]:
    """The configurations with these degrees."""
    per_replica = job.batch // degrees.data
    even = [size for size in _list_sizes(job) if per_replica % size == 0]
    samples = wanted.get("microbatch", [size for size in even if per_replica // size <= MOST_MICROBATCHES])
    if not even:
        reasons.add(6, f"none of the profile's microbatch sizes divides the {per_replica} samples of each of {degrees.data} data ranks")
    elif not samples:
        fewest = f"{per_replica // max(even)} microbatches of {max(even)}"
        reasons.add(6, f"{fewest} on each of {degrees.data} data ranks are more than {MOST_MICROBATCHES}: batch counts samples, not tokens")
    sharding = wanted.get("sharding", (1, 2, 3) if degrees.replicas > 1 else (0,))
    can_spread, flash = job.profile is None and degrees.pipeline > 1, job.profile is not None or job.transformer.flash
    vocabulary = wanted.get("vocabulary", VOCABULARIES if can_spread else (ENDS,))
    selective = wanted.get("selective", (False,) if flash else (False, True))
    for size, stage, split, again in product(samples, sharding, vocabulary, selective):
        if per_replica % size:
            reasons.add(6, f"microbatch={size} does not divide the {per_replica} samples of each of {degrees.data} data ranks")
        elif per_replica // size > MAX_MICROBATCHES:
            reasons.add(7, f"microbatch={size} makes {per_replica // size} microbatches, more than {MAX_MICROBATCHES}")
        elif split != ENDS and degrees.pipeline == 1:
            reasons.add(7, f"vocabulary={split!r} needs more than one pipeline rank")
        elif again and flash:
            reasons.add(7, "selective=True is for attention without flash: flash keeps no scores")
        else:
            yield replace(degrees, microbatch=size, sharding=stage, vocabulary=split, selective=again)


def _is_tensor(job: Job, degree: int, reasons: _Reasons) -> bool:
    model = job.transformer
    keys = model.kv_heads or model.heads
    checked = {"heads": model.heads, "hidden": model.hidden, "ffn": model.feed_forward}
    for name, value in checked.items():
        if value % degree:
            reasons.add(1, f"tensor={degree} does not divide {name}={value}")
            return False
    if keys % degree and degree % keys:
        reasons.add(1, f"tensor={degree} and kv_heads={keys}: one must divide the other")
        return False
    return True


def _list_sizes(job: Job) -> Sequence[int]:
    """Samples per microbatch to choose from: those that were measured, or powers of two."""
    return _list_powers(MOST_SAMPLES) if job.profile is None else sorted(job.profile.sizes)


def _list_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _list_powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


# Bounds ---------------------------------------------------------------------------------------------------------------


def bound_seconds(costs: JobCosts, microbatches: int) -> float:
    """Seconds that no pipeline of these layers beats: work and updates of the mean rank, or of the rank with the most layers of a kind."""
    ranks = costs.configuration.pipeline
    run = microbatches * costs.job.overlap
    steps = [(run * layer.time + layer.update, count) for layer, _, count in costs.count_layers()]
    shares = sum(microbatches * share.time + share.update for share in costs.shares)
    return shares + max(sum(step * count for step, count in steps) / ranks, *(math.ceil(count / ranks) * step for step, count in steps))


def bound_memory(costs: JobCosts) -> float:
    """Bytes that the fullest GPU holds at least: the mean of what ranks keep, and one microbatch with all recomputed that can be."""
    held = sum(count * min(one.static + one.activation for one in (layer, again)) for layer, again, count in costs.count_layers())
    return held / costs.configuration.pipeline + sum(share.static for share in costs.shares)


# The search -----------------------------------------------------------------------------------------------------------


@dataclass
class ConfigurationSearch:
    """Times configurations in the order of a guess of their times, except those whose bound is not below the best."""

    job: Job
    configurations: Sequence[Configuration]
    templates: ScheduleTemplates
    recompute: bool = True
    tell: Callable[[Progress], None] = lambda progress: None
    stop: Callable[[], bool] = lambda: False
    trials: dict[Configuration, Trial] = field(default_factory=dict)
    best: Trial | None = None

    def run(self) -> Trial:
        """The best configuration; raises `PlanError` if none fits.

        Which long orders are timed, and what is placed anew, is decided when all times before that are known: it does not depend on the
        order in which configurations were tried.
        """
        self._time_all()
        self._time_long()
        self._place_anew()
        if self.best is None:
            raise PlanError(self._explain_refusal())
        for trial in self.trials.values():
            if trial.verdict == Verdict.REFUSED and trial.at_least >= self.best.seconds:
                self.trials[trial.configuration] = replace(trial, verdict=Verdict.SLOW)
        self._time_neighbours()
        return self.best

    def _time_all(self) -> None:
        """Time configurations until no bound is below the best, with long orders set aside."""
        order = sorted(map(self._bound, self._list_possible()), key=self._guess)
        for done, trial in enumerate(order):
            if trial.verdict == Verdict.OVER or (self.best is not None and trial.bound >= self.best.seconds):
                continue
            if self.stop():
                break
            self._tell("timing", done, len(order), trial.configuration)
            self._time(trial, self._best_seconds)

    def _time_long(self) -> None:
        """Time the long orders that were set aside and may be much faster than the best, the most promising first."""
        waiting = [(trial.configuration, tried) for trial in self.trials.values() for tried in trial.schedules if tried.guess]
        for done, (configuration, tried) in enumerate(sorted(waiting, key=lambda pair: pair[1].guess)):
            if not gains_enough(tried, self._best_seconds):
                continue
            if self.stop():
                break
            self._tell("placing", done, len(waiting), configuration)
            trial = self.trials[configuration]
            self._replace_schedule(trial, self._make_pipelines(trial).time_long(tried, self._best_seconds))

    def _place_anew(self) -> None:
        """Place the shared vocabularies of the orders that are near the best for their own costs, the fastest first."""
        fitting = [trial for trial in self.trials.values() if trial.verdict == Verdict.FITS and any(trial.configuration.shared_ends)]
        timed = [(trial.configuration, tried) for trial in fitting for tried in trial.schedules if tried.timed is not None]
        for done, (configuration, tried) in enumerate(sorted(timed, key=lambda pair: pair[1].seconds)):
            trial = self.trials[configuration]
            pipelines = self._make_pipelines(trial)
            if not pipelines.is_near(tried, self._best_seconds):
                continue
            if self.stop():
                break
            self._tell("placing", done, len(timed), configuration)
            self._replace_schedule(trial, pipelines.place_anew(tried))

    @property
    def _best_seconds(self) -> float:
        return math.inf if self.best is None else self.best.seconds

    def _tell(self, phase: str, done: int, total: int, configuration: Configuration) -> None:
        best = (None, "") if self.best is None else (self.best.seconds, self.best.schedules[0].name)
        self.tell(Progress(phase, done, total, configuration.describe(), *best))

    def _make_pipelines(self, trial: Trial) -> PipelineTrials:
        return PipelineTrials(make_costs(self.job, trial.configuration), self.templates, self.recompute)

    def _list_possible(self) -> list[Configuration]:
        """The configurations that any of the schedules is possible for; raises `PlanError` if there is none."""
        reasons: dict[str, str] = {}
        possible: dict[tuple[int, str], bool] = {}  # what decides it
        for one in self.configurations:
            if (one.pipeline, one.vocabulary) not in possible:
                usable, refused = PipelineTrials(make_costs(self.job, one), self.templates).list_usable()
                possible[one.pipeline, one.vocabulary] = bool(usable)
                reasons |= refused
        if not any(possible.values()):
            listed = "; ".join(f"{name}: {reason}" for name, reason in [*reasons.items()][:_SHOWN])
            raise PlanError(f"none of the schedules is possible for any of {len(self.configurations)} configurations: {listed}")
        return [one for one in self.configurations if possible[one.pipeline, one.vocabulary]]

    def _bound(self, configuration: Configuration) -> Trial:
        """The configuration with its bounds, not timed."""
        costs = make_costs(self.job, configuration)
        microbatches = self._count_microbatches(configuration)
        excess = bound_memory(costs) - self.job.limit
        verdict = Verdict.OVER if excess > 0 else Verdict.SLOW
        trial = Trial(configuration, bound_seconds(costs, microbatches), verdict, excess=max(excess, 0.0))
        self.trials[configuration] = trial
        return trial

    def _guess(self, trial: Trial) -> float:
        """About the seconds of a configuration: its bound, and the bubble of a good schedule."""
        chosen, layers = trial.configuration, self.job.layers
        microbatches = self._count_microbatches(chosen)
        parts = min(max(layers // chosen.pipeline, _SPLIT_BACKWARD), _MOST_CHUNKS)
        return trial.bound * (1 + (chosen.pipeline - 1) / (parts * microbatches))

    def _time(self, trial: Trial, best: float) -> Trial:
        """Try the schedules of a configuration that may take less than the best time."""
        schedules = self._make_pipelines(trial).time(best)
        if not schedules:
            return self.trials.pop(trial.configuration)  # none of the schedules takes so many microbatches
        return self._keep(trial, schedules)

    def _replace_schedule(self, trial: Trial, changed: ScheduleTrial) -> None:
        self._keep(trial, sort_trials([changed, *(tried for tried in trial.schedules if tried.name != changed.name)]))

    def _keep(self, trial: Trial, schedules: Sequence[ScheduleTrial]) -> Trial:
        """Keep what became of the schedules of a configuration, with the orders and timelines of the best configuration only."""
        open_bounds = [tried.bound for tried in schedules if not tried.excess]
        if schedules[0].timed is not None:
            verdict = Verdict.FITS
        elif not open_bounds:
            verdict = Verdict.OVER
        else:
            verdict = Verdict.REFUSED if min(open_bounds) < self._best_seconds else Verdict.SLOW
        excess = min(tried.excess for tried in schedules) if verdict == Verdict.OVER else 0.0
        kept = replace(trial, verdict=verdict, schedules=tuple(schedules), excess=excess)
        is_best = self.best is not None and trial.configuration == self.best.configuration
        if is_best or kept.seconds < self._best_seconds:
            if self.best is not None:
                self.trials[self.best.configuration] = self.best.keep_figures()
            self.best = self.trials[trial.configuration] = kept
        else:
            self.trials[trial.configuration] = kept.keep_figures()
        return kept

    def _time_neighbours(self) -> None:
        """Find the best configuration of each other value of each dimension, or stop looking after a few."""
        for name in DIMENSIONS:
            for trials in self.group(name).values():
                best = min(trial.seconds for trial in trials)
                untimed = [(self._is_long(trial.configuration), trial) for trial in trials if trial.verdict == Verdict.SLOW]
                for is_long, trial in sorted(untimed, key=lambda pair: (pair[0], pair[1].at_least))[:MOST_NEIGHBOURS]:
                    if self.stop() or (is_long and best < math.inf):
                        break
                    if trial.at_least < best:
                        best = min(best, self._time(trial, best).seconds)

    def _is_long(self, configuration: Configuration) -> bool:
        """Whether placing its shared vocabulary takes seconds."""
        return any(configuration.shared_ends) and configuration.pipeline * self._count_microbatches(configuration) > _MOST_SHARED

    def _count_microbatches(self, configuration: Configuration) -> int:
        return self.job.batch // (configuration.data * configuration.microbatch)

    def group(self, name: str) -> dict[Any, list[Trial]]:
        """The trials by their value of a dimension."""
        groups: dict[Any, list[Trial]] = {}
        for trial in self.trials.values():
            groups.setdefault(getattr(trial.configuration, name), []).append(trial)
        return groups

    def _explain_refusal(self) -> str:
        trials = [trial for trial in self.trials.values() if trial.verdict == Verdict.OVER]
        if not trials:
            return f"stopped before anything was found that fits: {len(self.trials)} configurations were bounded"
        nearest = min(trials, key=lambda trial: trial.excess)
        memory, limit, free = (_UNITS.size(size) for size in (self.job.machines.memory, self.job.limit, nearest.excess))
        kept = f" ({limit} without the {100 * self.job.headroom:.3g}% that is kept free)" if self.job.headroom else ""
        needed = (self.job.limit + nearest.excess) / (1 - self.job.headroom)
        return (
            f"no configuration fits: {len(trials)} were tried on {self.job.machines.gpus} GPUs with {memory} each{kept}. Nearest is "
            f"{nearest.configuration.describe()}, with everything recomputed that helps: at least {free} over on the fullest GPU. Take "
            f"GPUs with at least {_UNITS.size(needed, up=True)}, or more of them"
        )
