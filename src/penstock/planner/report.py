"""A plan in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from textwrap import wrap
from typing import TYPE_CHECKING

from penstock.planner.candidate import Candidate, Verdict
from penstock.planner.partition.stage_costs import reserves, static_memory
from penstock.planner.request import SEARCHED
from penstock.text.table import format_table

if TYPE_CHECKING:
    from penstock.planner.plan import Plan

_SHOWN = 12
"""Candidates that are listed."""
_WIDTH = 140
_IN_WORDS = {
    Verdict.TOO_LARGE: "too large for one microbatch at a time",
    Verdict.SLOW: "not timed, because their work alone takes longer than the best",
}
_BAR = 20
"""Characters of a full bar."""


def write_report(plan: Plan) -> str:
    """The plan, why it was chosen, what each rank holds, and which other candidates there were."""
    parts = [_summary(plan), _why(plan), _stages(plan), _memory(plan), _candidates(plan)]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _summary(plan: Plan) -> Iterator[str]:
    units, timeline = plan.units, plan.predicted
    placement = plan.placement
    yield (
        f"plan: {plan.name} on {placement.ranks} ranks ({placement.kind} placement, {placement.stages} stages), "
        f"{plan.microbatches} microbatches of {plan.microbatch}"
    )
    what = "makespan" if plan.barrier else "longest span"
    yield f"  {what:<12} {units.time(plan.objective)}, bubble {timeline.bubble:.1%}" + _per_sample(plan)
    yield f"  {'bound':<12} {units.time(plan.bound)} by {plan.bound_name}: {_gap(plan.gap)} with this placement and partition"
    yield f"  {'':<12} {units.time(plan.overall_bound)} for every contiguous partition, placement and order: {_gap(plan.overall_gap)}"
    if plan.p95 is not None:
        yield f"  {'robustness':<12} 95 in 100 runs stay under {units.time(plan.p95)} when every time varies by {plan.jitter:.0%}"
    yield f"  {'proof':<12} {len(plan.proof.rules)} rules hold over {plan.proof.actions} actions and {plan.proof.messages} messages"
    if any(plan.recompute):
        yield f"  {'recompute':<12} {_name_all([stage for stage, again in enumerate(plan.recompute) if again], 'stage')}"
    yield from (f"  {'note':<12} {note}" for note in plan.notes)


def _per_sample(plan: Plan) -> str:
    if plan.profile.time_unit != "s" or not plan.objective:
        return ""
    return f", {plan.microbatches * plan.microbatch / plan.objective:.4g} samples per second"


def _gap(gap: float) -> str:
    return "nothing to gain" if gap <= 1e-9 else f"at most {gap:.2%} to gain"


def _why(plan: Plan) -> Iterator[str]:
    """Compared with the next best, the best named one, and faster candidates that do not fit."""
    yield "why this one"
    others = [other for place, other in enumerate(plan.alternatives) if place != plan.chosen and other.objective is not None]
    fitting = sorted((other for other in others if other.fits), key=lambda line: line.time_or_inf)
    named = [other for other in fitting if other.name != SEARCHED]
    if plan.name == SEARCHED and named:
        yield f"  {_versus(plan, named[0])} the best named schedule that fits, {_label(named[0])}"
    elif fitting:
        yield f"  {_versus(plan, fitting[0])} the next that fits, {_label(fitting[0])}"
    close = [other.p95 for other in fitting if other.p95 is not None]
    if close and plan.p95 is not None:
        least = min(close)
        how = "the most robust of" if plan.p95 <= least else "the quickest, and robust enough, of"
        yield f"  {how} {len(close) + 1} nearly as quick: {plan.units.time(plan.p95)} against {plan.units.time(least)} or more"
    quicker = sorted(
        (other for other in others if not other.fits and other.time_or_inf < plan.objective), key=lambda line: line.time_or_inf
    )
    for other in quicker[:3]:
        over = "" if other.excess is None else f": rank {other.peak_rank} would hold {plan.units.size(other.excess)} more than its limit"
        yield f"  {_label(other)} would take {plan.units.time(other.time_or_inf)}, but does not fit{over}"
    if not fitting and not quicker:
        yield "  nothing else that was timed fits"


def _versus(plan: Plan, other: Candidate) -> str:
    gained = 1 - plan.objective / other.time_or_inf if other.time_or_inf else 0.0
    return f"{gained:.2%} quicker than" if gained > 5e-5 else "as quick as"


def _label(candidate: Candidate) -> str:
    again = f", {candidate.recompute} stages recomputed" if candidate.recompute else ""
    return f"{candidate.name} ({candidate.microbatches} microbatches of {candidate.microbatch}{again})"


def _stages(plan: Plan) -> Iterator[str]:
    """One line per stage, or per run of stages with as many layers and equal times: their ranks, layers and times."""
    rows: list[tuple[str, ...]] = [("stage", "rank", "layers", "F", "I", "W")]
    first = [0, *accumulate(plan.partition)]

    def group_key(stage: int) -> tuple[object, ...]:
        times = (plan.units.time(plan.costs.of_stage(name, stage)) for name in ("f", "i", "w"))
        return plan.partition[stage], plan.recompute[stage], *times

    for (size, _, *times), group in groupby(range(len(plan.partition)), key=group_key):
        stages = list(group)
        names = [_layer_name(plan, first[stages[0]]), _layer_name(plan, first[stages[-1] + 1] - 1)]
        count = f"{size} each" if len(stages) > 1 else str(size)
        layers = names[0] if names[0] == names[1] else f"{names[0]} .. {names[1]} ({count})"
        ranks = "/".join(_format_runs([copy[stage] for stage in stages]) for copy in plan.placement.copies)
        rows.append((_format_runs(stages), ranks, layers, *map(str, times)))
    yield from format_table(rows, left=(2,), indent="  ")


def _layer_name(plan: Plan, place: int) -> str:
    return plan.profile.layers[place].name or str(place)


def _format_runs(numbers: Sequence[int]) -> str:
    """Numbers, with each run up or down written as its first and last.

    >>> _format_runs([0, 1, 2, 3, 3, 2, 1, 0]), _format_runs([5]), _format_runs([4, 5])
    ('0..3,3..0', '5', '4,5')
    """
    runs: list[list[int]] = []
    for number in numbers:
        last = runs[-1] if runs else []
        step = number - last[-1] if last else 0
        if last and abs(step) == 1 and (len(last) == 1 or last[-1] - last[-2] == step):
            last.append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _memory(plan: Plan) -> Iterator[str]:
    """One line per rank, or per run of ranks that hold the same: static memory, peak and limit."""
    units, limits = plan.units, plan.memory_limit
    kept, spare = static_memory(plan.profile, plan.partition), reserves(plan.profile, plan.partition, plan.placement, plan.recompute)
    rows: list[tuple[str, ...]] = []
    titles: tuple[str, ...] = ("rank", "parameters", "gradients", "optimizer", "reserve", "microbatches", "peak", "limit", "")
    for rank, peak in enumerate(plan.predicted.peak_memory):
        own = [kept[stage] for stage in plan.placement.stages_of(rank)]
        static = [sum(getattr(stage, name) for stage in own) for name in ("parameters", "gradients", "optimizer")] + [spare[rank]]
        limit = "none" if limits is None else units.size(limits[rank])
        used = "" if limits is None or not limits[rank] else _bar(peak / limits[rank])
        rows.append((str(rank), *map(units.size, static), units.size(peak - sum(static)), units.size(peak), limit, used))
    unused = [column for column in range(1, 5) if all(row[column] in ("0", "0B") for row in rows)]
    grouped = [(_format_runs([int(row[0]) for row in group]), *same) for same, group in groupby(rows, key=lambda row: row[1:])]
    shown = [tuple(cell for place, cell in enumerate(row) if place not in unused) for row in (titles, *grouped)]
    yield from format_table(shown, left=(len(shown[0]) - 1,), indent="  ")


def _bar(share: float) -> str:
    return f"{'#' * round(min(share, 1.0) * _BAR):<{_BAR}} {share:.0%}"


def _candidates(plan: Plan) -> Iterator[str]:
    """The candidates that fit, the fastest first; then the others with the reason."""
    units = plan.units
    places = sorted(range(len(plan.alternatives)), key=lambda place: plan.alternatives[place].time_or_inf)
    fitting = [place for place in places if plan.alternatives[place].fits]
    rows = [("", "candidate", "placement", "microbatches", "recomputed", "takes", "bubble", "bound", "peak", "p95")]
    for place in dict.fromkeys([*fitting[:_SHOWN], plan.chosen]):
        line = plan.alternatives[place]
        rows.append(
            (
                "->" if place == plan.chosen else "",
                line.name,
                line.placement,
                f"{line.microbatches} x {line.microbatch}",
                str(line.recompute or "-"),
                units.time(line.time_or_inf),
                "-" if line.bubble is None else f"{line.bubble:.1%}",
                "-" if line.bound is None else units.time(line.bound),
                "-" if line.peak is None else units.size(line.peak),
                "-" if line.p95 is None else units.time(line.p95),
            )
        )
    yield f"{len(fitting)} of {len(plan.alternatives)} candidates fit" + (f", the best {_SHOWN}:" if len(fitting) > _SHOWN else ":")
    yield from format_table(rows, left=(1, 2), indent="  ")
    yield from _unfit(plan)


def _unfit(plan: Plan) -> Iterator[str]:
    """The candidates over their limit, the fastest first, and the others by verdict."""
    over = sorted((line for line in plan.alternatives if line.verdict == Verdict.OVER), key=lambda line: line.time_or_inf)
    if over:
        yield ""
        yield f"{len(over)} are over their memory limit" + (f", the quickest {_SHOWN}:" if len(over) > _SHOWN else ":")
        rows: list[tuple[str, ...]] = [("candidate", "microbatches", "recomputed", "would take", "over by", "on rank")]
        for line in over[:_SHOWN]:
            shape = (f"{line.microbatches} x {line.microbatch}", str(line.recompute or "-"))
            rows.append((line.name, *shape, plan.units.time(line.time_or_inf), plan.units.size(line.excess or 0.0), str(line.peak_rank)))
        yield from format_table(rows, left=(0,), indent="  ")
    further = [("more over their memory limit", over[_SHOWN:])]
    further += [(what, [line for line in plan.alternatives if line.verdict == verdict]) for verdict, what in _IN_WORDS.items()]
    for what, lines in further:
        if lines:
            yield ""
            names = ", ".join(dict.fromkeys(line.name for line in lines))
            yield from wrap(f"{len(lines)} {what}: {names}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    left_out = [line for line in plan.alternatives if line.verdict == Verdict.REFUSED]
    if left_out:
        yield ""
        yield from (f"left out: {line.name}: {line.reason}" for line in left_out)


def _name_all(numbers: Sequence[int], word: str) -> str:
    return f"{word}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
