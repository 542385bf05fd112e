"""Reads the traces that `torch.profiler` writes on each rank into one measured `Timeline`.

The ranges are those of `torch.distributed.pipelining` (`PP:0F0`; `Forward 3` and `Backward 3` of its `ScheduleGPipe`; its `Schedule1F1B`
writes none) or ours (`penstock::0F0`). A range of PyTorch's also covers the wait for its message, so a computation begins with the first
operator inside it; if the trace has the times of the GPU, those count. The ranks' clocks are aligned by what must have happened before
what.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from penstock.errors import ActionError, FileFormatError, PenstockError
from penstock.ir.action import Action
from penstock.ir.formats.reading import check_fields, parse_json
from penstock.ir.kind import Kind
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.passes.lower import lower
from penstock.planner.profile.profile import Layer, Profile
from penstock.simulator.event_loops.flat import Flat
from penstock.simulator.measured import measure_costs
from penstock.simulator.timeline import Timeline
from penstock.text.units import Units

_FORM = "trace of torch.profiler"
_RANGE = re.compile(r"(?:PP:|penstock::)(?P<action>.+)")
_NUMBERED = re.compile(r"(?P<kind>Forward|Backward) (?P<microbatch>\d+)")
_COMMUNICATION = re.compile(r"c10d|gloo|nccl|record_param_comms|ProfilerStep")
"""Operators that do not compute."""
_SENDS = re.compile(r"nccl", re.IGNORECASE)
"""Kernels that do not compute."""

Work = frozenset[tuple[str, str, int]]
"""The operators of a range: name, sizes of the inputs if the profiler has recorded them, and how often. Equal for the same work."""


@dataclass(frozen=True)
class Range:
    """One action of a rank: when it was entered, when its first operator began, and when it ended, in microseconds."""

    action: Action
    entered: float
    start: float
    end: float
    work: Work = frozenset()


@dataclass
class RankTrace:
    """The ranges of one rank, step by step."""

    file: str
    process: int | None
    """The rank among all processes of the run, if the file says it."""
    steps: list[list[Range]] = field(default_factory=list)
    numbered: bool = False
    """Whether ranges are of the rank's only stage and do not name it."""

    def __str__(self) -> str:
        return f"{self.file} (rank {'unknown' if self.process is None else self.process})"


@dataclass(frozen=True, eq=False)
class TracedStep:
    """One step as it was traced."""

    timeline: Timeline
    ranges: tuple[tuple[Range, ...], ...]
    """The ranges of each rank of the pipeline, with their operators."""
    processes: tuple[int | None, ...]
    """The rank of each of them among all processes of the run."""


def read_traces(paths: Sequence[str | PathLike[str]], step: int | None = None) -> Timeline:
    """Read one trace per rank into the timeline of one step: by default the last, or the one of this number from 0."""
    return read_step(paths, step).timeline


def read_step(paths: Sequence[str | PathLike[str]], step: int | None = None) -> TracedStep:
    """Read one trace per rank of a pipeline: its timeline, and which operators ran. The order of the files is of no importance."""
    traces = _order_by_stage([read_trace(path) for path in paths])
    counts = [len(trace.steps) for trace in traces]
    if len(set(counts)) > 1:
        held = ", ".join(f"{count} in {trace}" for count, trace in zip(counts, traces, strict=True))
        raise FileFormatError("the traces", f"they hold different numbers of steps: {held}. Profile the same steps on every rank")
    if step is not None and not 0 <= step < counts[0]:
        raise FileFormatError(traces[0].file, f"there is no step {step}: the traces hold steps 0 to {counts[0] - 1}")
    ranges = tuple(tuple(trace.steps[-1 if step is None else step]) for trace in traces)
    _refuse_copies(traces, ranges)
    timeline = build_timeline(ranges, [trace.file for trace in traces])
    return TracedStep(timeline, ranges, tuple(trace.process for trace in traces))


def read_trace(path: str | PathLike[str]) -> RankTrace:
    """Read the trace of one rank, `.json` or `.json.gz`."""
    name = str(path)
    try:
        data = Path(path).read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError) as error:
        raise FileFormatError(name, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    document = parse_json(text, name, _FORM)
    events = check_fields(document, {"traceEvents": (list,)}, error=lambda reason: FileFormatError(name, f"not a {_FORM}: {reason}"))[
        "traceEvents"
    ]
    process = document.get("distributedInfo", {}).get("rank") if isinstance(document.get("distributedInfo"), dict) else None
    trace = RankTrace(name, process if isinstance(process, int) else _find_rank(name))
    base = document.get("baseTimeNanoseconds", 0)
    rank_events = _sort_events(events, name)
    trace.steps = _split_steps(_find_ranges(rank_events, _finite(base, name, "baseTimeNanoseconds") / 1e3 if _is_number(base) else 0.0))
    trace.numbered = any(entry.numbered for entry in rank_events.host)
    if not trace.steps:
        raise FileFormatError(
            name,
            "no range of a pipeline in it: profile a step of Penstock, or of torch.distributed.pipelining (ranges PP:0F0, or Forward 0 of "
            "ScheduleGPipe). torch's Schedule1F1B writes no ranges: import Schedule1F1B and PipelineStage from penstock.compat.torch "
            "instead, which run the same order and write them",
        )
    return trace


def _find_rank(name: str) -> int | None:
    """The last number in a file's name."""
    numbers = re.findall(r"\d+", Path(name).name)
    return int(numbers[-1]) if numbers else None


# Which file is which rank -------------------------------------------------------------------------------------------------


def _order_by_stage(traces: list[RankTrace]) -> list[RankTrace]:
    """Order the traces as the ranks of their pipeline: by the first stage of span, or by process if the ranges do not name their stage."""
    if not traces:
        raise FileFormatError("the traces", "there are none: give one file per rank")
    numbered = [trace for trace in traces if trace.numbered]
    if numbered and len(numbered) < len(traces):
        other = next(trace for trace in traces if not trace.numbered)
        raise FileFormatError("the traces", f"they are of different runs: {numbered[0]} has ranges like 'Forward 0', and {other} has not")
    if numbered:
        return _number_stages(traces)
    first = [min(part.stage for span in trace.steps[-1] for part in span.action.parts) for trace in traces]
    if len(set(first)) < len(first) and _are_distinct(traces):  # copies of stages, as in bidirectional schedules
        first = [trace.process or 0 for trace in traces]
    return [trace for _, trace in sorted(zip(first, traces, strict=True), key=lambda pair: pair[0])]


def _are_distinct(traces: Sequence[RankTrace]) -> bool:
    processes = [trace.process for trace in traces]
    return None not in processes and len(set(processes)) == len(processes)


def _number_stages(traces: list[RankTrace]) -> list[RankTrace]:
    """Give ranges the stages that their processes have, in the order of the processes: one stage per rank."""
    if not _are_distinct(traces):
        shown = ", ".join(map(str, traces))
        raise FileFormatError("the traces", f"ranges like 'Forward 0' are ordered by rank, so give one file for each: they are {shown}")
    traces = sorted(traces, key=lambda trace: trace.process or 0)
    for stage, trace in enumerate(traces):
        trace.steps = [[replace(span, action=replace(span.action, stage=stage)) for span in step] for step in trace.steps]
    return traces


def _refuse_copies(traces: Sequence[RankTrace], ranges: Iterable[Iterable[Range]]) -> None:
    """Refuse traces of several pipelines with the same stages, as in data parallelism."""
    owners: dict[Action, RankTrace] = {}
    for trace, row in zip(traces, ranges, strict=True):
        for span in row:
            other = owners.setdefault(span.action, trace)
            if other is not trace:
                raise FileFormatError(
                    "the traces",
                    f"{other} and {trace} both ran {span.action}: give the files of one pipeline, without its data-parallel copies",
                )


# Events of a file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Annotation:
    """A range as one event, on the host or on a stream of a GPU."""

    name: str
    start: float
    end: float
    action: Action
    numbered: bool
    ident: Any
    stream: Any


@dataclass
class _Events:
    """What a trace says about a rank's ranges, in any order."""

    host: list[_Annotation] = field(default_factory=list)
    gpu: list[_Annotation] = field(default_factory=list)
    operators: list[tuple[float, str, str]] = field(default_factory=list)
    """Start, name and sizes of each operator that computes."""
    computing: set[Any] = field(default_factory=set)
    """The streams that run kernels that compute."""


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _finite(value: float, file: str, name: str) -> float:
    if not math.isfinite(value):
        raise FileFormatError(file, f"{name} has the time {value}: the trace is damaged, so profile the step again")
    return value


def _sort_events(events: Iterable[Any], file: str) -> _Events:
    result = _Events()
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name, category, start, length = event.get("name"), event.get("cat"), event.get("ts"), event.get("dur", 0)
        if not isinstance(name, str) or not _is_number(start) or not _is_number(length):
            continue
        details = event.get("args")
        details = details if isinstance(details, Mapping) else {}
        stream = event.get("pid"), event.get("tid")
        named = _read_action(name)
        if category == "kernel":
            if not _SENDS.search(name):
                result.computing.add(stream)
        elif named is not None:
            begin = _finite(start, file, repr(name))
            end = _finite(begin + length, file, repr(name))
            annotation = _Annotation(name, begin, end, *named, details.get("External id"), stream)
            (result.gpu if category == "gpu_user_annotation" else result.host).append(annotation)
        elif category == "cpu_op" and not _COMMUNICATION.match(name):
            sizes = details.get("Input Dims")
            result.operators.append((_finite(start, file, repr(name)), name, "" if sizes is None else json.dumps(sizes)))
    result.operators.sort()
    result.host.sort(key=lambda entry: (entry.start, -entry.end))
    return result


def _read_action(name: str) -> tuple[Action, bool] | None:
    """The action that a range is of, and whether only its microbatch is known: then its stage is 0 for now."""
    match = _RANGE.fullmatch(name)
    if match is not None:
        try:
            action = Action.parse(match["action"])
        except ActionError:
            return None
        return (action, False) if action.is_compute else None
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    return Action(0, Kind.F if match["kind"] == "Forward" else Kind.B, int(match["microbatch"])), True


def _find_ranges(events: _Events, base: float) -> list[Range]:
    """The ranges of actions in the order in which they began; an overlapped pair counts, and not its two parts."""
    starts = [start for start, *_ in events.operators]
    gpu_times = _match_gpu(events)
    ranges: list[Range] = []
    works: dict[Work, Work] = {}
    inside: tuple[tuple[Action, ...], float] = (), 0.0
    for index, entry in enumerate(events.host):
        if entry.action in inside[0] and entry.start < inside[1]:
            continue  # a part of an overlapped pair
        inside = entry.action.parts, entry.end
        low, high = bisect_left(starts, entry.start), bisect_left(starts, entry.end)
        counts = Counter((name, sizes) for _, name, sizes in events.operators[low:high])
        work = frozenset((*operator, count) for operator, count in counts.items())
        entered, start, end = entry.start, starts[low] if low < high else entry.start, entry.end
        if index in gpu_times:
            start, end = gpu_times[index]
            entered = max(entered, ranges[-1].end - base) if ranges else entered  # a GPU runs one range after the other
        ranges.append(Range(entry.action, min(entered, start) + base, start + base, end + base, works.setdefault(work, work)))
    return ranges


def _match_gpu(events: _Events) -> dict[int, tuple[float, float]]:
    """When the GPU ran each range of the host, by its index: from the first to the last of the streams that compute.

    A range has one event per stream that it launched kernels on. They belong together by the profiler's own number, or if the file has
    none, because they are the same in a row of ranges with this name on their stream.
    """
    annotations = [entry for entry in events.gpu if not events.computing or entry.stream in events.computing]
    by_ident = {(entry.name, entry.ident): index for index, entry in enumerate(events.host) if entry.ident is not None}
    in_turn: dict[str, list[int]] = {}
    for index, entry in enumerate(events.host):
        in_turn.setdefault(entry.name, []).append(index)
    seen: Counter[tuple[str, Any]] = Counter()
    times: dict[int, tuple[float, float]] = {}
    for entry in sorted(annotations, key=lambda entry: entry.start):
        turn = seen[entry.name, entry.stream]
        seen[entry.name, entry.stream] += 1
        same_name = in_turn.get(entry.name, [])
        owner = by_ident.get((entry.name, entry.ident), same_name[turn] if turn < len(same_name) else None)
        if owner is not None:
            start, end = times.get(owner, (entry.start, entry.end))
            times[owner] = min(start, entry.start), max(end, entry.end)
    return times


def _split_steps(ranges: Iterable[Range]) -> list[list[Range]]:
    """A step ends where an action comes again."""
    steps: list[list[Range]] = []
    seen: set[Action] = set()
    for span in ranges:
        if not steps or span.action in seen:
            steps.append([])
            seen = set()
        steps[-1].append(span)
        seen.add(span.action)
    return steps


# The timeline -------------------------------------------------------------------------------------------------------------


def build_timeline(ranges: Sequence[Sequence[Range]], files: Sequence[str] = ()) -> Timeline:
    """The timeline of one step, from the ranges of each rank."""
    files = files or [f"rank {rank}" for rank in range(len(ranges))]
    try:
        schedule = Schedule.from_actions([[span.action for span in row] for row in ranges], name="traced")
        program = lower(schedule)
    except PenstockError as error:
        raise FileFormatError(", ".join(files), f"the ranges of this step are not a whole schedule: {error}") from error
    ahead = align_clocks(program, ranges)
    times = {part: (span, ahead[rank]) for rank, row in enumerate(ranges) for span in row for part in span.action.parts}
    zero = min(span.start - offset for span, offset in times.values())
    start, end = _collect_action_times(program, times, zero)
    depart, arrive = _collect_message_times(program, times, zero)
    nothing = np.full(len(start), -1.0)
    costs = measure_costs(program, start, end, arrive - depart, nothing)
    return Timeline(program, costs, start, end, depart, arrive, nothing, nothing.copy(), source="measured", units=Units(time_unit="s"))


Times = dict[Action, tuple[Range, float]]
"""The range of each action, and how far its rank's clock is ahead."""


def _collect_action_times(program: Program, times: Times, zero: float) -> tuple[Any, Any]:
    """Start and end of every action, in seconds; what is not in the trace takes no time, right after what came before it."""
    starts, ends = [], []
    for rank, _ in enumerate(pairwise(program.rows.group_offsets.tolist())):
        clock = 0.0
        for action in program[rank]:
            known = [times[part] for part in action.parts if part in times]
            begun = min((span.start - ahead - zero for span, ahead in known), default=clock)
            clock = max((span.end - ahead - zero for span, ahead in known), default=clock)
            starts.append(begun / 1e6)
            ends.append(clock / 1e6)
    return np.array(starts), np.array(ends)


def _collect_message_times(program: Program, times: Times, zero: float) -> tuple[Any, Any]:
    """When each message departed and arrived: a message that was waited for arrived when its use began.

    One that was there already is assumed to have taken as long as the quickest of its channel, because its arrival was not seen.
    """
    rows, messages = program.rows, Flat(program).messages
    sent, asked, used = (np.zeros(len(messages.before)) for _ in range(3))
    for index, (maker, after) in enumerate(zip(messages.maker.tolist(), messages.after.tolist(), strict=True)):
        before, ahead = times[rows.part_at(maker)]
        use, other = times[rows.part_at(after)]
        sent[index], asked[index], used[index] = before.end - ahead - zero, use.entered - other - zero, use.start - other - zero
    used = np.maximum(used, sent)
    arrive = used.copy()
    for number in range(len(messages.channels)):
        at = messages.channel == number
        quickest = float((used - sent)[at].min(initial=np.inf))
        there = asked[at] >= sent[at] + quickest
        arrive[at] = np.where(there, np.minimum(used[at], sent[at] + quickest), used[at])
    return sent / 1e6, arrive / 1e6


def align_clocks(program: Program, ranges: Sequence[Sequence[Range]]) -> list[float]:
    """Find how far each rank's clock is ahead of rank 0's, in microseconds, as far as the messages show.

    A computation cannot begin before the one that made its input has ended. Messages in both directions bound the difference of two
    clocks from both sides. A difference of 0 stays if it is possible, because ranks of one machine share a clock.
    """
    times = {part: (rank, span) for rank, row in enumerate(ranges) for span in row for part in span.action.parts}
    rows, messages = program.rows, Flat(program).messages
    least: dict[tuple[int, int], float] = {}
    for maker, after in zip(messages.maker.tolist(), messages.after.tolist(), strict=True):
        source, before = times[rows.part_at(maker)]
        target, use = times[rows.part_at(after)]
        pair = source, target
        least[pair] = max(least.get(pair, -np.inf), before.end - use.start)  # the source's clock is at least this far ahead
    ahead: dict[int, float] = {0: 0.0}
    queue = [0]
    while queue:
        rank = queue.pop(0)
        for other in range(len(ranges)):
            if other in ahead or ((rank, other) not in least and (other, rank) not in least):
                continue
            low, high = least.get((other, rank), -np.inf), -least.get((rank, other), -np.inf)
            ahead[other] = ahead[rank] + _choose_difference(low, high)
            queue.append(other)
    return [ahead.get(rank, 0.0) for rank in range(len(ranges))]


def _choose_difference(low: float, high: float) -> float:
    """A difference of two clocks between its bounds: 0 if that is possible, else their middle, or the one that there is."""
    if low <= 0 <= high:
        return 0.0
    if np.isfinite(low) and np.isfinite(high):
        return (low + high) / 2
    return low if np.isfinite(low) else high


# Who is slow --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes longer than others for the same operators."""

    rank: int
    factor: float

    def __str__(self) -> str:
        return f"rank {self.rank} is slow: it takes {self.factor:.2f} times as long as other ranks for the same operators"


@dataclass(frozen=True)
class BusiestRank:
    """A rank that computes longer than the others, whatever the reason."""

    rank: int
    factor: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is the busiest: it computes for {self.factor:.2f} times as long as the other ranks' median, and nothing "
            "shows that it is slower for the same work"
        )


def find_slow_rank(step: TracedStep, factor: float = 1.15) -> SlowRank | None:
    """The rank that takes longest for work that other ranks have too, if that is at least `factor` times as long.

    Ranges of the same kind with the same operators are the same work, also in sizes if the profiler ran with `record_shapes=True`. Such
    work must be at least half of what the rank computes.
    """
    durations: dict[tuple[Kind, Work], dict[int, list[float]]] = {}
    busy = [0.0] * len(step.ranges)
    for rank, row in enumerate(step.ranges):
        for span in row:
            busy[rank] += span.end - span.start
            if span.work:
                durations.setdefault((span.action.kind, span.work), {}).setdefault(rank, []).append(span.end - span.start)
    own, usual = [0.0] * len(busy), [0.0] * len(busy)
    for by_rank in durations.values():
        medians = {rank: statistics.median(times) for rank, times in by_rank.items()}
        for rank, times in by_rank.items():
            others = [median for other, median in medians.items() if other != rank]
            if others:
                own[rank] += sum(times)
                usual[rank] += len(times) * statistics.median(others)
    ratios = {rank: own[rank] / usual[rank] for rank in range(len(busy)) if usual[rank] > 0 and own[rank] >= busy[rank] / 2}
    slowest = max(ratios, key=lambda rank: ratios[rank], default=None)
    return None if slowest is None or ratios[slowest] < factor else SlowRank(slowest, ratios[slowest])


def find_busiest_rank(timeline: Timeline, factor: float = 1.15) -> BusiestRank | None:
    """The rank that computes longest, if that is at least `factor` times the median of the others. It may have more to do."""
    busy = timeline.busy.tolist()
    if len(busy) < 2:
        return None
    rank = int(np.argmax(busy))
    usual = statistics.median(busy[:rank] + busy[rank + 1 :])
    return BusiestRank(rank, busy[rank] / usual) if usual > 0 and busy[rank] >= factor * usual else None


def waits_between_ranks(timeline: Timeline) -> list[list[float]]:
    """How long each rank waited for each other: for it to compute, or for its message."""
    waits = [[0.0] * timeline.ranks for _ in range(timeline.ranks)]
    for rank in range(timeline.ranks):
        for gap in timeline.gaps(rank):
            if gap.rank is not None and gap.rank != rank:
                waits[rank][gap.rank] += gap.end - gap.start
    return waits


def stage_profile(timeline: Timeline) -> Profile:
    """A profile with one layer per stage, for the planner. It has times only: a trace holds no sizes."""
    costs = timeline.costs
    times = zip(*(np.broadcast_to(getattr(costs, name), timeline.table.stages).tolist() for name in ("f", "i", "w")), strict=True)
    layers = [Layer(name=f"stage {stage}", f=f, i=i, w=w) for stage, (f, i, w) in enumerate(times)]
    return Profile(layers=layers, latency=float(np.median(costs.latency)), time_unit="s", source="profiler traces")
