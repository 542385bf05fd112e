"""A plan in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from textwrap import wrap
from typing import TYPE_CHECKING

from penstock.ir.kind import COMPUTE, Kind
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.candidate import IN_WORDS, Candidate, Verdict, count_moves
from penstock.planner.partition.stage_costs import reserves, split_layers
from penstock.planner.profile import Layer
from penstock.planner.profile.vocabulary import list_rank_shares
from penstock.planner.request import SEARCHED
from penstock.simulator.simulate import simulate
from penstock.text.numbers import format_count
from penstock.text.table import format_table
from penstock.verifier.rules.offload import peak_host_memory

if TYPE_CHECKING:
    from penstock.planner.plan import Plan

_SHOWN = 12
"""Candidates that are listed."""
_WIDTH = 140
_BUSY, _SHOWN_LANES = 0.1, 4
"""Shared links that are listed: those that are busy for more than this share of the time, and how many of them."""
_BAR = 20
"""Characters of a full bar."""


def write_report(plan: Plan) -> str:
    """The plan, why it was chosen, what each rank holds, and which other candidates there were."""
    parts = [
        _write_summary(plan),
        _explain_choice(plan),
        _write_devices(plan),
        _write_stages(plan),
        _write_memory(plan),
        _write_candidates(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _write_summary(plan: Plan) -> Iterator[str]:
    units, timeline = plan.units, plan.predicted
    placement = plan.placement
    yield (
        f"plan: {plan.name} on {format_count(placement.ranks, 'rank')} "
        f"({placement.kind} placement, {format_count(placement.stages, 'stage')}), "
        f"{format_count(plan.microbatches, 'microbatch')} of {plan.microbatch}" + (f" in {plan.slices} slices" if plan.slices > 1 else "")
    )
    what = "makespan" if plan.barrier else "longest span"
    yield f"  {what:<12} {units.time(plan.objective)}, bubble {timeline.bubble:.1%}" + _describe_rate(plan)
    yield f"  {'bound':<12} {units.time(plan.bound)} by {plan.bound_name}: {_write_gap(plan.gap)} with this placement and partition"
    every = "contiguous partition, placement, slices and order" if is_sliced(plan) else "contiguous partition, placement and order"
    yield f"  {'':<12} {units.time(plan.overall_bound)} for every {every}: {_write_gap(plan.overall_gap)}"
    if plan.p95 is not None:
        yield f"  {'robustness':<12} 95 in 100 runs stay under {units.time(plan.p95)} when every time varies by {plan.jitter:.0%}"
    yield f"  {'proof':<12} {len(plan.proof.rules)} rules hold over {plan.proof.actions} actions and {plan.proof.messages} messages"
    yield from _describe_slices(plan)
    if any(plan.recompute):
        yield f"  {'recompute':<12} {_name_all([stage for stage, again in enumerate(plan.recompute) if again], 'stage')}"
    if plan.vocabulary:
        times = [sum(layer.time for layer in own) for own in _list_shares(plan)]
        taken = " to ".join(dict.fromkeys((units.time(min(times)), units.time(max(times)))))
        yield f"  {'vocabulary':<12} embedding and head on all ranks, {taken} per rank and microbatch"
    yield from _write_offload(plan)
    for note in plan.notes:
        yield from wrap(f"  {'note':<12} {note}", _WIDTH, subsequent_indent=" " * 15, break_on_hyphens=False)


def _write_offload(plan: Plan) -> Iterator[str]:
    """How many activations are moved to the host, what they take there, and what the copies cost."""
    moved, units = count_moves(plan.schedule), plan.units
    if not moved:
        return
    held = peak_host_memory(plan.program, plan.costs)
    total = int(plan.schedule.rows.is_kind(Kind.F).sum())
    yield f"  {'offload':<12} {moved} of {total} activations move to host memory, at most {units.size(max(held))} there per rank"
    compute = plan.schedule.rows.keep(plan.schedule.rows.is_kind(*COMPUTE))
    bare = Schedule.from_rows(compute, plan.placement, plan.microbatches, graph=plan.schedule.graph, slices=plan.slices)
    exposed = plan.objective / plan.problem.objective(simulate(lower(bare), plan.costs)) - 1
    yield f"  {'':<12} " + (
        "the copies are hidden behind the computation" if exposed <= 1e-9 else f"the copies cost {exposed:.2%} of the time"
    )


def _describe_slices(plan: Plan) -> Iterator[str]:
    """The length of each slice, and how well the profile knows their times."""
    if plan.slices > 1:
        lengths = ", ".join(f"{length:,}" for length in plan.slice_lengths)
        yield from wrap(f"  {'slices':<12} {lengths} tokens", _WIDTH, subsequent_indent=" " * 15)
        if plan.profile.fit_error:
            yield f"  {'':<12} their times are fitted to measured ones, with an error of {plan.profile.fit_error:.1%}"


def _describe_rate(plan: Plan) -> str:
    if plan.profile.time_unit != "s" or not plan.objective:
        return ""
    rate = plan.microbatches * plan.microbatch / plan.objective
    return f", {rate:,.0f} samples per second" if rate >= 1000 else f", {rate:.4g} samples per second"


def _write_gap(gap: float) -> str:
    return "nothing to gain" if gap <= 1e-9 else f"at most {gap:.2%} to gain"


def _explain_choice(plan: Plan) -> Iterator[str]:
    """The reason for the choice, the runners-up with their trade-offs, and faster candidates that do not fit."""
    yield "why this one"
    if not plan.alternatives:
        return
    units, chosen, runners_up = plan.units, plan.alternatives[plan.chosen], plan.runners_up
    faster = [other for other in runners_up if other.time_or_inf < plan.objective * (1 - 1e-9)]
    if not runners_up:
        yield "  nothing else that was timed fits"
    elif not faster:
        yield f"  no other candidate that fits is faster; next is {runners_up[0].name}: {runners_up[0].compare(chosen)}"
    elif plan.name != SEARCHED and faster[0].name == SEARCHED:
        yield f"  preferred, as a named schedule, to a searched order: {faster[0].compare(chosen)}"
    else:
        yield f"  preferred, as more robust, to {faster[0].name}: {faster[0].compare(chosen)}"
    titles = ("placement", "microbatches", *(["slices"] if is_sliced(plan) else []), "takes", "p95", "peak")
    rows: list[tuple[str, ...]] = [("", "candidate", *titles, "compared with this plan")]
    for candidate in (chosen, *runners_up):
        figures = _format_figures(plan, candidate)
        shown = [figures[name] for name in titles]
        is_chosen = candidate is chosen
        rows.append(("->" if is_chosen else "", candidate.name, *shown, "" if is_chosen else candidate.compare(chosen)))
    yield from format_table(rows, left=(1, 2, len(rows[0]) - 1), indent="  ")
    quicker = [other for other in plan.candidates if not other.fits and other.time_or_inf < plan.objective]
    for other in sorted(quicker, key=lambda other: other.time_or_inf)[:3]:
        over = "" if other.excess is None else f": rank {other.peak_rank} would hold {units.size(other.excess)} more than its limit"
        yield f"  {_label(other)} would take {units.time(other.time_or_inf)}, but does not fit{over}"


def _label(candidate: Candidate) -> str:
    again = f", {candidate.recompute} stages recomputed" if candidate.recompute else ""
    sliced = f" in {candidate.slices} slices" if candidate.slices > 1 else ""
    return f"{candidate.name} ({format_count(candidate.microbatches, 'microbatch')} of {candidate.microbatch}{sliced}{again})"


def is_sliced(plan: Plan) -> bool:
    """Whether any candidate cuts sequences into slices."""
    return any(candidate.slices > 1 for candidate in plan.alternatives)


def _write_devices(plan: Plan) -> Iterator[str]:
    """On a cluster, one line per rank: its device, how fast it is, and its links to the ranks that its outputs go to."""
    cluster = plan.cluster
    if cluster is None:
        return
    yield f"devices: {cluster.describe()}"
    has_nodes = len(cluster.nodes) > 1
    titles = ("rank", "device", "name", *(["node"] if has_nodes else []), "speed", "layers", *(["rows"] if plan.vocabulary else []))
    rows: list[tuple[str, ...]] = [(*titles, "sends to")]
    receivers: dict[int, dict[int, None]] = {rank: {} for rank in range(plan.placement.ranks)}
    for copy in plan.placement.copies:
        for source, target in pairwise(copy):
            if source != target:
                receivers[source][target] = None
    layers = [sum(plan.partition[stage] for stage in plan.placement.stages_of(rank)) for rank in range(plan.placement.ranks)]
    for rank, number in enumerate(plan.devices):
        device, links = cluster.devices[number], [_describe_link(plan, rank, other) for other in receivers[rank]]
        node = [device.node or "-"] if has_nodes else []
        part = plan.row_shares[rank] if plan.row_shares else 1 / plan.placement.ranks
        cells = (device.name or "-", *node, device.speeds.describe(), str(layers[rank]), *([f"{part:.1%}"] if plan.vocabulary else []))
        rows.append((str(rank), str(number), *cells, ", ".join(links) or "-"))
    yield from format_table(rows, left=(2, len(rows[0]) - 1), indent="  ")
    yield from (f"  {line}" for line in _describe_busy_lanes(plan))


def _describe_link(plan: Plan, source: int, target: int) -> str:
    """`rank 1 (10 us, 50GiB per s)`: the latency and bandwidth of a link."""
    latency, bandwidth = plan.costs.latency, plan.costs.bandwidth
    time = latency[source][target] if isinstance(latency, tuple) else latency
    rate = bandwidth[source][target] if isinstance(bandwidth, tuple) else bandwidth
    carries = "" if rate is None else f", {plan.units.size(rate)} per {plan.units.time_unit or 'unit of time'}"
    return f"rank {target} ({plan.units.time(time)}{carries})"


def _describe_busy_lanes(plan: Plan) -> Iterator[str]:
    """The links that several pairs of ranks share and that are busy for more than a tenth of the time, the busiest first."""
    timeline, lanes = plan.predicted, plan.costs.lanes
    if lanes is None or not timeline.makespan:
        return
    busy: dict[int, float] = defaultdict(float)
    users: dict[int, set[tuple[int, int]]] = defaultdict(set)
    for transfer in timeline.transfers():
        for lane in set(lanes[transfer.source][transfer.target]):
            busy[lane] += (transfer.end - transfer.start) / timeline.makespan
            users[lane].add((transfer.source, transfer.target))
    # A card's way out and another's way in may carry the same messages.
    shares = {tuple(sorted(users[lane])): share for lane, share in busy.items() if len(users[lane]) > 1 and share > _BUSY}
    for pairs, share in sorted(shares.items(), key=lambda item: -item[1])[:_SHOWN_LANES]:
        listed = ", ".join(f"{source} to {target}" for source, target in pairs)
        yield f"the link shared by messages from rank {listed} is busy {share:.0%} of the time"


def _write_stages(plan: Plan) -> Iterator[str]:
    """One line per stage, or per run of stages with as many layers and equal times: their ranks, layers and times."""
    rows: list[tuple[str, ...]] = [("stage", "rank", "layers", "F", "I", "W")]
    first = [0, *accumulate(plan.partition)]

    def group_key(stage: int) -> tuple[object, ...]:
        times = ("/".join(map(str, map(plan.units.time, list_stage_times(plan, name, stage)))) for name in ("f", "i", "w"))
        return plan.partition[stage], plan.recompute[stage], *times

    for (size, _, *times), group in groupby(range(len(plan.partition)), key=group_key):
        stages = list(group)
        names = [_name_layers(plan, first[stages[0]]), _name_layers(plan, first[stages[-1] + 1] - 1)]
        count = f"{size} each" if len(stages) > 1 else str(size)
        layers = names[0] if names[0] == names[1] else f"{names[0]} .. {names[1]} ({count})"
        ranks = "/".join(_format_runs([copy[stage] for stage in stages]) for copy in plan.placement.copies)
        rows.append((_format_runs(stages), ranks, layers, *map(str, times)))
    yield from format_table(rows, left=(2,), indent="  ")


def list_stage_times(plan: Plan, name: str, stage: int) -> list[float]:
    """The time of a stage per microbatch: one, or if it differs between copies of the model, that of each copy."""
    if plan.slices > 1:
        return [sum(plan.costs.of_stage(name, stage, part) for part in range(plan.slices))]
    copies = min(len(plan.placement.copies), plan.microbatches)
    times = [plan.costs.of_stage(name, stage, copy) for copy in range(copies)]
    return times if len(set(times)) > 1 else times[:1]


def _name_layers(plan: Plan, place: int) -> str:
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


def _write_memory(plan: Plan) -> Iterator[str]:
    """One line per rank, or per run of ranks that hold the same: static memory, peak and limit."""
    units, limits = plan.units, plan.memory_limit
    layers, spare, shares = split_layers(plan.profile, plan.partition), _list_reserves(plan), _list_shares(plan)
    rows: list[tuple[str, ...]] = []
    titles: tuple[str, ...] = ("rank", "parameters", "gradients", "optimizer", "reserve", "microbatches", "peak", "limit", "")
    for rank, peak in enumerate(plan.predicted.peak_memory):
        own = [*(layer for stage in plan.placement.stages_of(rank) for layer in layers[stage]), *shares[rank]]
        static = [sum(getattr(layer, name) for layer in own) for name in ("parameters", "gradients", "optimizer")] + [spare[rank]]
        limit = "none" if limits is None else units.size(limits[rank])
        used = "" if limits is None or not limits[rank] else _draw_bar(peak / limits[rank])
        rows.append((str(rank), *map(units.size, static), units.size(peak - sum(static)), units.size(peak), limit, used))
    unused = [column for column in range(1, 5) if all(row[column] in ("0", "0B") for row in rows)]
    grouped = [(_format_runs([int(row[0]) for row in group]), *same) for same, group in groupby(rows, key=lambda row: row[1:])]
    shown = [tuple(cell for place, cell in enumerate(row) if place not in unused) for row in (titles, *grouped)]
    yield from format_table(shown, left=(len(shown[0]) - 1,), indent="  ")


def _list_reserves(plan: Plan) -> list[float]:
    """Memory that each rank keeps free for running actions, on a layer or on its share of a vocabulary."""
    kept = reserves(plan.profile, plan.partition, plan.placement, plan.recompute, plan.slice_lengths)
    return [size + max((layer.workspace for layer in own), default=0.0) for size, own in zip(kept, _list_shares(plan), strict=True)]


def _list_shares(plan: Plan) -> list[Sequence[Layer]]:
    """Each rank's share of a spread embedding and head, on its device."""
    return list_rank_shares(plan.profile, plan.placement.ranks, plan.problem.cluster, plan.row_shares)


def _draw_bar(share: float) -> str:
    return f"{'#' * round(min(share, 1.0) * _BAR):<{_BAR}} {share:.0%}"


def _write_candidates(plan: Plan) -> Iterator[str]:
    """The candidates that fit, the fastest first; then the others with the reason."""
    if not plan.alternatives:
        return
    chosen = plan.alternatives[plan.chosen]
    fitting = sorted((candidate for candidate in plan.candidates if candidate.fits), key=lambda candidate: candidate.time_or_inf)
    shown = fitting[:_SHOWN] + [chosen] * (chosen not in fitting[:_SHOWN])
    cells = [_format_figures(plan, candidate) for candidate in shown]
    marks = ["->" if candidate is chosen else "" for candidate in shown]
    rows = [("", *cells[0]), *((mark, *figures.values()) for mark, figures in zip(marks, cells, strict=True))]
    yield plan.tally
    yield ""
    yield f"the fastest {_SHOWN} that fit" if len(fitting) > _SHOWN else "those that fit"
    yield from format_table(rows, left=(1, 2), indent="  ")
    yield from _list_unfit(plan)


def _format_figures(plan: Plan, candidate: Candidate) -> dict[str, str]:
    """The cells of a candidate in a table, by their titles."""
    time, size = plan.units.time, plan.units.size
    return {
        "candidate": candidate.name,
        "placement": candidate.describe_placement(),
        "microbatches": f"{candidate.microbatches} x {candidate.microbatch}",
        **({"slices": str(candidate.slices) if candidate.slices > 1 else "-"} if is_sliced(plan) else {}),
        "recomputed": str(candidate.recompute or "-"),
        **({"offloaded": str(candidate.offloaded or "-")} if any(other.offloaded for other in plan.alternatives) else {}),
        **({"vocabulary": "all ranks" if candidate.vocabulary else "-"} if any(o.vocabulary for o in plan.alternatives) else {}),
        "takes": time(candidate.time_or_inf),
        "bubble": "-" if candidate.bubble is None else f"{candidate.bubble:.1%}",
        "bound": "-" if candidate.bound is None else time(candidate.bound),
        "peak": "-" if candidate.peak is None else size(candidate.peak),
        "p95": "-" if candidate.p95 is None else time(candidate.p95),
    }


def _list_unfit(plan: Plan) -> Iterator[str]:
    """The candidates over their limit, the fastest first, and the others by verdict."""
    over = sorted((line for line in plan.candidates if line.verdict == Verdict.OVER), key=lambda line: line.time_or_inf)
    if over:
        yield ""
        yield f"over the memory limit ({len(over)}" + (f", the quickest {_SHOWN} of them):" if len(over) > _SHOWN else "):")
        titles = ("microbatches", *(["slices"] if is_sliced(plan) else []), "recomputed")
        rows: list[tuple[str, ...]] = [("candidate", *titles, "would take", "over by", "on rank")]
        for line in over[:_SHOWN]:
            figures = _format_figures(plan, line)
            shape = (figures[title] for title in titles)
            rows.append((line.name, *shape, plan.units.time(line.time_or_inf), plan.units.size(line.excess or 0.0), str(line.peak_rank)))
        yield from format_table(rows, left=(0,), indent="  ")
    further = [(f"more {IN_WORDS[Verdict.OVER]}", over[_SHOWN:])]
    untimed = (Verdict.TOO_LARGE, Verdict.SLOW)
    further += [(IN_WORDS[verdict], [line for line in plan.candidates if line.verdict == verdict]) for verdict in untimed]
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
