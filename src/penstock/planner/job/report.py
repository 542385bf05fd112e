"""A job's plan in words: what was chosen, what each GPU holds, and why the other values of each dimension lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.planner.candidate import Verdict
from penstock.planner.job.configuration import DIMENSIONS, HEAD, SPREAD
from penstock.planner.job.pipelines import LONG_GAIN, ScheduleTrial
from penstock.planner.job.search import Trial
from penstock.planner.partition.stage_costs import split_layers
from penstock.text.numbers import format_count
from penstock.text.table import format_table

if TYPE_CHECKING:
    from penstock.planner.job.plan import JobPlan

_NAMES = {"microbatch": "microbatch size", "sharding": "ZeRO stage", "selective": "selective recompute"}
_SHOWN = 6
"""Values that are shown of each dimension, besides the chosen one."""


@dataclass(frozen=True)
class Alternative:
    """The best configuration with another value of one dimension, or why there is none."""

    dimension: str
    value: Any
    seconds: float | None
    """The fastest that was timed with this value and fits."""
    bound: float
    """No configuration with this value that fits takes less."""
    excess: float | None
    """Bytes over the limit of the nearest, if none fits."""
    words: str

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class TriedSchedule:
    """One schedule with the degrees of the plan; its figures are None if it was not timed."""

    name: str
    seconds: float | None = None
    bubble: float | None = None
    peak: float | None = None
    recomputed: int = 0
    bound: float = 0.0
    """Seconds that it takes at least."""
    excess: float = 0.0
    """Bytes over the limit on the fullest GPU, if it does not fit."""

    @classmethod
    def of(cls, tried: ScheduleTrial) -> TriedSchedule:
        if tried.timed is None:
            return cls(tried.name, recomputed=sum(tried.recomputed), bound=tried.bound, excess=tried.excess)
        figures = tried.seconds, tried.timed.bubble, tried.timed.peak
        return cls(tried.name, *figures, sum(tried.recomputed), tried.bound, tried.excess)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class SearchSummary:
    """What a plan was chosen from."""

    bound: float
    """Seconds that no configuration of the search beats."""
    schedules: tuple[TriedSchedule, ...]
    """The schedules with the plan's degrees, the fastest that fits first."""
    alternatives: tuple[Alternative, ...]
    """The other values of each dimension."""
    verdicts: Mapping[str, int]
    """How many configurations had which verdict."""

    @classmethod
    def of(cls, plan: JobPlan) -> SearchSummary:
        own = next(trial for trial in plan.trials if trial.configuration == plan.configuration)
        counts = Counter(trial.verdict.value for trial in plan.trials)
        tried = tuple(map(TriedSchedule.of, own.schedules))
        return cls(min(trial.bound for trial in plan.trials), tried, tuple(_list_alternatives(plan)), counts)


def _list_alternatives(plan: JobPlan) -> list[Alternative]:
    """For each dimension with a choice, the other values: the fastest first, then those that do not fit."""
    alternatives: list[Alternative] = []
    for name in DIMENSIONS:
        groups: dict[Any, list[Trial]] = {}
        for trial in plan.trials:
            groups.setdefault(getattr(trial.configuration, name), []).append(trial)
        others = [_compare(plan, name, value, trials) for value, trials in groups.items() if value != getattr(plan.configuration, name)]
        alternatives += sorted(others, key=lambda other: (other.seconds is None, other.seconds or other.excess or 0.0))
    return alternatives


def _compare(plan: JobPlan, name: str, value: Any, trials: list[Trial]) -> Alternative:
    fastest = min(trials, key=lambda trial: trial.seconds)
    waiting = [trial.at_least for trial in trials if trial.verdict in {Verdict.SLOW, Verdict.REFUSED}]
    bound = min([fastest.seconds, *waiting])
    if fastest.seconds < math.inf:
        slower = fastest.seconds / plan.seconds - 1
        words = "as fast" if slower < 5e-5 else f"{slower:.1%} slower"
        return Alternative(name, value, fastest.seconds, bound, None, f"{words}: {_describe_rest(plan, fastest)}")
    if waiting and bound < plan.seconds:
        return Alternative(name, value, None, bound, None, f"not timed: long orders, {1 - bound / plan.seconds:.1%} faster at most")
    if waiting:
        return Alternative(name, value, None, bound, None, f"at least {bound / plan.seconds - 1:.1%} slower by its bound")
    nearest = min(trials, key=lambda trial: trial.excess)
    return Alternative(name, value, None, nearest.bound, nearest.excess, f"does not fit: {plan.units.size(nearest.excess)} over at least")


def _describe_rest(plan: JobPlan, trial: Trial) -> str:
    """Where a configuration differs from the plan's."""
    own, other = plan.configuration, trial.configuration
    changed = [f"{_NAMES.get(name, name)} {getattr(other, name)}" for name in DIMENSIONS if getattr(own, name) != getattr(other, name)]
    again = sum(trial.schedules[0].recomputed)
    recomputed = [f"{format_count(again, _name_layer(plan))} recomputed"] if again else []
    return ", ".join([*changed, trial.schedules[0].name, *recomputed])


def write_report(plan: JobPlan) -> str:
    """The plan, what each GPU holds, and the other values of each dimension."""
    parts = [_write_summary(plan), _write_schedules(plan), _write_memory(plan), _list_others(plan)]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _write_summary(plan: JobPlan) -> Iterator[str]:
    chosen, units, machines = plan.configuration, plan.units, plan.job.machines
    degrees = f"pipeline {chosen.pipeline} x data {chosen.data} x tensor {chosen.tensor} x context {chosen.context}"
    yield f"job: {plan.job.describe()} on {format_count(machines.gpus, 'GPU')}: {degrees}"
    speed = f"{plan.samples_per_second:,.4g} samples" if plan.tokens_per_second is None else f"{plan.tokens_per_second:,.0f} tokens"
    yield f"  {'step':<12} {units.time(plan.seconds)}, {speed} per second, bubble {plan.predicted.bubble:.1%}"
    if plan.flops_per_gpu is not None:
        yield f"  {'per GPU':<12} {plan.flops_per_gpu / 1e12:.0f} Tflop/s useful, {plan.utilization:.1%} of the peak"
    yield (
        f"  {'pipeline':<12} {plan.name}, {format_count(plan.microbatches, 'microbatch')} of {chosen.microbatch}; "
        f"{_format_range(plan.partition)} layer{'s' * (max(plan.partition) > 1)} per stage"
    )
    blocks, noun = sum(plan.recomputed), _name_layer(plan)
    per_stage = f": {_format_counts(plan.recomputed)}" if blocks else ""
    yield f"  {'recompute':<12} {blocks} of {plan.job.layers} {noun}s{per_stage}" + (
        ", and the scores of attention" if chosen.selective else ""
    )
    optimizer = plan.job.optimizer if plan.job.profile is None else "the optimizer of the profile"
    sharding = f"ZeRO-{chosen.sharding} over {format_count(chosen.replicas, 'GPU')}" if chosen.sharding else "none"
    yield f"  {'sharding':<12} {sharding}, {optimizer}"
    if plan.job.profile is None:
        yield f"  {'vocabulary':<12} {_describe_vocabulary(plan)}"
    else:
        yield f"  {'whole layers':<12} tensor and context degrees are 1: a profile has the times of whole layers"
    gain = plan.seconds / plan.bound - 1
    most = "nothing" if gain < 5e-4 else f"at most {gain:.1%}"
    yield f"  {'bound':<12} {units.time(plan.bound)} for every configuration: {most} to gain"
    yield f"  {'proof':<12} {len(plan.proof.rules)} rules hold over {plan.proof.actions} actions and {plan.proof.messages} messages"


def _describe_vocabulary(plan: JobPlan) -> str:
    shares, chosen = plan.profile.shares, plan.configuration
    if not shares:
        return "on the first and last stage"
    shared = {HEAD: "embedding on the first stage, head shared", SPREAD: "embedding and head shared"}[chosen.vocabulary]
    time = sum(share.time for share in shares)
    return f"{shared} among the pipeline ranks: {plan.units.time(time)} per rank and microbatch"


def _name_layer(plan: JobPlan) -> str:
    return "block" if plan.job.profile is None else "layer"


def _format_range(numbers: Sequence[int]) -> str:
    """
    >>> _format_range((5, 6, 5)), _format_range((4, 4))
    ('5 to 6', '4')
    """
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _format_counts(counts: tuple[int, ...]) -> str:
    """Blocks per stage, with equal ones joined.

    >>> _format_counts((2, 2, 1, 0))
    '2 on stages 0..1, 1 on stage 2'
    """
    words, first = [], 0
    for count, group in groupby(counts):
        last = first + len(list(group)) - 1
        if count:
            words.append(f"{count} on stage{'' if first == last else 's'} {first if first == last else f'{first}..{last}'}")
        first = last + 1
    return ", ".join(words)


def _write_schedules(plan: JobPlan) -> Iterator[str]:
    """The schedules on the chosen configuration."""
    schedules = plan.search.schedules
    if len(schedules) < 2:
        return
    yield "schedules with these degrees"
    rows: list[tuple[str, ...]] = [("", "schedule", "takes", "bubble", "peak", f"recomputed {_name_layer(plan)}s", "")]
    for tried in schedules:
        if tried.seconds is None:
            lost = (
                f"{plan.units.size(tried.excess)} over the limit" if tried.excess else f"at least {plan.units.time(tried.bound)}: not timed"
            )
            rows.append(("", tried.name, "-", "-", "-", "-", lost))
            continue
        figures = plan.units.time(tried.seconds), f"{tried.bubble or 0.0:.1%}", plan.units.size(tried.peak or 0.0)
        rows.append(("->" if tried.name == plan.name else "", tried.name, *figures, str(tried.recomputed or "-"), ""))
    yield from format_table(rows, left=(1, 6), indent="  ")


def _write_memory(plan: JobPlan) -> Iterator[str]:
    """The memory of the GPUs of each pipeline rank, with equal ranks joined."""
    placement, units = plan.schedule.placement, plan.units
    layers = split_layers(plan.profile, plan.partition)
    rows: list[tuple[str, ...]] = []
    for rank, peak in enumerate(plan.predicted.peak_memory):
        own = [*(layer for stage in placement.stages_of(rank) for layer in layers[stage]), *plan.profile.shares]
        static = [sum(getattr(layer, name) for layer in own) for name in ("parameters", "gradients", "optimizer")]
        rows.append((str(rank), *map(units.size, static), units.size(peak - sum(static)), units.size(peak), units.size(plan.job.limit)))
    grouped = []
    for same, group in groupby(rows, key=lambda row: row[1:]):
        ranks = [row[0] for row in group]
        grouped.append((ranks[0] if len(ranks) == 1 else f"{ranks[0]}..{ranks[-1]}", *same))
    titles = ("pipeline rank", "parameters", "gradients", "optimizer", "activations", "peak", "limit")
    yield from format_table([titles, *grouped], indent="  ")


def _list_others(plan: JobPlan) -> Iterator[str]:
    """The best of the other values of each dimension, and what became of all configurations."""
    rows: list[tuple[str, ...]] = [("dimension", "chosen", "instead", "takes", "compared with this plan")]
    alternatives, counts = plan.search.alternatives, plan.search.verdicts
    for name in DIMENSIONS:
        others = [alternative for alternative in alternatives if alternative.dimension == name]
        for place, other in enumerate(others[:_SHOWN]):
            title, own = (_NAMES.get(name, name), str(getattr(plan.configuration, name))) if not place else ("", "")
            rows.append((title, own, str(other.value), "-" if other.seconds is None else plan.units.time(other.seconds), other.words))
    fit, over, slow, long = (counts.get(verdict.value, 0) for verdict in (Verdict.FITS, Verdict.OVER, Verdict.SLOW, Verdict.REFUSED))
    tally = f"{fit} timed and fit; {over} do not fit; {slow} not timed, because the bound is above the best"
    tally += f"; {long} not timed, because their orders are long and at most {LONG_GAIN:.1%} faster" * bool(long)
    yield f"{sum(counts.values())} configurations: {tally}"
    if len(rows) > 1:
        yield ""
        yield "the best with another value of one dimension"
        yield from format_table(rows, left=(0, 4), indent="  ")
