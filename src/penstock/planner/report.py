"""A plan in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from textwrap import wrap
from typing import TYPE_CHECKING

from penstock.planner.candidate import Candidate
from penstock.planner.named import Verdict
from penstock.planner.request import SEARCHED
from penstock.planner.stage_costs import reserves, shares
from penstock.planner.units import table

if TYPE_CHECKING:
    from penstock.planner.plan import Plan

_SHOWN = 12
"""Candidates that fit, of all that do."""
_WIDTH = 140
_IN_WORDS = {
    Verdict.TOO_LARGE: "too large for one microbatch at a time",
    Verdict.SLOW: "not timed, for their work alone takes longer than the best",
}
_BAR = 20
"""Letters of a full bar."""


def report(plan: Plan) -> str:
    """What the plan is, why it was taken, what each rank holds, and what else was considered."""
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
        yield f"  {'recompute':<12} {_listed([stage for stage, again in enumerate(plan.recompute) if again], 'stage')}"
    yield from (f"  {'note':<12} {note}" for note in plan.notes)


def _per_sample(plan: Plan) -> str:
    if plan.profile.time_unit != "s" or not plan.objective:
        return ""
    return f", {plan.microbatches * plan.microbatch / plan.objective:.4g} samples a second"


def _gap(gap: float) -> str:
    return "nothing to gain" if gap <= 1e-9 else f"at most {gap:.2%} to gain"


def _why(plan: Plan) -> Iterator[str]:
    """Against the next best, the best named one, and those that were quicker and did not fit."""
    yield "why this one"
    others = [each for place, each in enumerate(plan.alternatives) if place != plan.chosen and each.objective is not None]
    fitting = sorted((each for each in others if each.fits), key=_time)
    named = [each for each in fitting if each.name != SEARCHED]
    if plan.name == SEARCHED and named:
        yield f"  {_versus(plan, named[0])} the best named schedule that fits, {_label(named[0])}"
    elif fitting:
        yield f"  {_versus(plan, fitting[0])} the next that fits, {_label(fitting[0])}"
    close = [each for each in fitting if each.p95 is not None]
    if close and plan.p95 is not None:
        least = min(each.p95 for each in close if each.p95 is not None)
        how = "the most robust of" if plan.p95 <= least else "the quickest, and robust enough, of"
        yield f"  {how} {len(close) + 1} nearly as quick: {plan.units.time(plan.p95)} against {plan.units.time(least)} or more"
    quicker = sorted((each for each in others if not each.fits and _time(each) < plan.objective), key=_time)
    for each in quicker[:3]:
        over = "" if each.excess is None else f": rank {each.peak_rank} would hold {plan.units.size(each.excess)} more than its limit"
        yield f"  {_label(each)} would take {plan.units.time(_time(each))}, but does not fit{over}"
    if not fitting and not quicker:
        yield "  nothing else was timed that fits"


def _versus(plan: Plan, other: Candidate) -> str:
    gained = 1 - plan.objective / _time(other) if _time(other) else 0.0
    return f"{gained:.2%} quicker than" if gained > 5e-5 else "as quick as"


def _time(candidate: Candidate) -> float:
    return float("inf") if candidate.objective is None else candidate.objective


def _label(candidate: Candidate) -> str:
    again = f", {candidate.recompute} stages recomputed" if candidate.recompute else ""
    return f"{candidate.name} ({candidate.microbatches} microbatches of {candidate.microbatch}{again})"


def _stages(plan: Plan) -> Iterator[str]:
    """One line per stage, or per run of stages that have as many layers and take the same: their ranks, layers and times."""
    rows: list[tuple[str, ...]] = [("stage", "rank", "layers", "F", "I", "W")]
    first = [0, *accumulate(plan.partition)]

    def looks(stage: int) -> tuple[object, ...]:
        times = (plan.units.time(plan.costs.of_stage(name, stage)) for name in ("f", "i", "w"))
        return plan.partition[stage], plan.recompute[stage], *times

    for (size, _, *times), group in groupby(range(len(plan.partition)), key=looks):
        stages = list(group)
        names = [_layer_name(plan, first[stages[0]]), _layer_name(plan, first[stages[-1] + 1] - 1)]
        each = f"{size} each" if len(stages) > 1 else str(size)
        layers = names[0] if names[0] == names[1] else f"{names[0]} .. {names[1]} ({each})"
        ranks = "/".join(_range([copy[stage] for stage in stages]) for copy in plan.placement.copies)
        rows.append((_range(stages), ranks, layers, *map(str, times)))
    yield from table(rows, left=(2,))


def _layer_name(plan: Plan, place: int) -> str:
    return plan.profile.layers[place].name or str(place)


def _range(numbers: Sequence[int]) -> str:
    """Numbers with each run up or down by its first and its last.

    >>> _range([0, 1, 2, 3, 3, 2, 1, 0]), _range([5]), _range([4, 5])
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
    """One line per rank, or per run of ranks that hold the same: what they keep, what they hold at their peak, and the limit."""
    units, limits = plan.units, plan.memory_limit
    kept, spare = shares(plan.profile, plan.partition), reserves(plan.profile, plan.partition, plan.placement, plan.recompute)
    rows: list[tuple[str, ...]] = []
    titles: tuple[str, ...] = ("rank", "parameters", "gradients", "optimizer", "reserve", "microbatches", "peak", "limit", "")
    for rank, peak in enumerate(plan.predicted.peak_memory):
        own = [kept[stage] for stage in plan.placement.stages_of(rank)]
        static = [sum(getattr(share, name) for share in own) for name in ("parameters", "gradients", "optimizer")] + [spare[rank]]
        limit = "none" if limits is None else units.size(limits[rank])
        used = "" if limits is None or not limits[rank] else _bar(peak / limits[rank])
        rows.append((str(rank), *map(units.size, static), units.size(peak - sum(static)), units.size(peak), limit, used))
    unused = [column for column in range(1, 5) if all(row[column] in ("0", "0B") for row in rows)]
    grouped = [(_range([int(row[0]) for row in group]), *same) for same, group in _runs_of(rows)]
    shown = [tuple(cell for place, cell in enumerate(row) if place not in unused) for row in (titles, *grouped)]
    yield from table(shown, left=(len(shown[0]) - 1,))


def _runs_of(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Rows that follow each other and differ only in their first cell."""
    for same, group in groupby(rows, key=lambda row: row[1:]):
        yield same, list(group)


def _bar(share: float) -> str:
    return f"{'#' * round(min(share, 1.0) * _BAR):<{_BAR}} {share:.0%}"


def _candidates(plan: Plan) -> Iterator[str]:
    """The ones that fit, the quickest first; then the others with the reason."""
    units = plan.units
    places = sorted(range(len(plan.alternatives)), key=lambda place: _time(plan.alternatives[place]))
    fitting = [place for place in places if plan.alternatives[place].fits]
    rows = [("", "candidate", "placement", "microbatches", "recomputed", "takes", "bubble", "bound", "peak", "p95")]
    for place in dict.fromkeys([*fitting[:_SHOWN], plan.chosen]):
        each = plan.alternatives[place]
        rows.append(
            (
                "->" if place == plan.chosen else "",
                each.name,
                each.placement,
                f"{each.microbatches} x {each.microbatch}",
                str(each.recompute or "-"),
                units.time(_time(each)),
                "-" if each.bubble is None else f"{each.bubble:.1%}",
                "-" if each.bound is None else units.time(each.bound),
                "-" if each.peak is None else units.size(each.peak),
                "-" if each.p95 is None else units.time(each.p95),
            )
        )
    yield f"{len(fitting)} of {len(plan.alternatives)} candidates fit" + (f", the best {_SHOWN}:" if len(fitting) > _SHOWN else ":")
    yield from table(rows, left=(1, 2))
    yield from _unfit(plan)


def _unfit(plan: Plan) -> Iterator[str]:
    """Those over their limit, the quickest first, and the others by what came of them."""
    over = sorted((each for each in plan.alternatives if each.verdict == Verdict.OVER), key=_time)
    if over:
        yield ""
        yield f"{len(over)} are over their memory limit" + (f", the quickest {_SHOWN}:" if len(over) > _SHOWN else ":")
        rows: list[tuple[str, ...]] = [("candidate", "microbatches", "recomputed", "would take", "over by", "on rank")]
        for each in over[:_SHOWN]:
            shape = (f"{each.microbatches} x {each.microbatch}", str(each.recompute or "-"))
            rows.append((each.name, *shape, plan.units.time(_time(each)), plan.units.size(each.excess or 0.0), str(each.peak_rank)))
        yield from table(rows, left=(0,))
    further = [("more over their memory limit", over[_SHOWN:])]
    further += [(what, [each for each in plan.alternatives if each.verdict == verdict]) for verdict, what in _IN_WORDS.items()]
    for what, those in further:
        if those:
            yield ""
            names = ", ".join(dict.fromkeys(each.name for each in those))
            yield from wrap(f"{len(those)} {what}: {names}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    left_out = [each for each in plan.alternatives if each.verdict == Verdict.REFUSED]
    if left_out:
        yield ""
        yield from (f"left out: {each.name}: {each.reason}" for each in left_out)


def _listed(numbers: Sequence[int], word: str) -> str:
    return f"{word}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
