"""Reads the traces that `torch.profiler` writes on each rank into one measured `Timeline`.

The ranges are those of `torch.distributed.pipelining` (`PP:0F0`; `Forward 3` and `Backward 3` of its one-stage schedules) or ours
(`penstock::0F0`). A range of PyTorch's also covers the wait for its message, so a computation begins with the first operator inside it;
where the trace has the times of the GPU, those count. The ranks' clocks are aligned by what must have happened before what.
"""

from __future__ import annotations

import gzip
import re
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ActionError, FileFormatError, PenstockError
from penstock.ir.action import Action
from penstock.ir.formats.reading import check_fields, parse_json
from penstock.ir.kind import COMPUTE, Kind
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


@dataclass(frozen=True)
class Range:
    """One action of a rank: when it was entered, when its first operator began, and when it ended, in microseconds."""

    action: Action
    entered: float
    start: float
    end: float


@dataclass
class RankTrace:
    """The ranges of one rank, step by step."""

    file: str
    rank: int | None
    steps: list[list[Range]] = field(default_factory=list)


def read_traces(paths: Sequence[str | PathLike[str]], step: int | None = None) -> Timeline:
    """Read one trace per rank into the timeline of one step: by default the last, or the one of this number from 0."""
    traces = _order_by_rank([read_trace(path) for path in paths])
    counts = {len(trace.steps) for trace in traces}
    count = min(counts)
    if step is not None and not 0 <= step < count:
        raise FileFormatError(traces[0].file, f"there is no step {step}: the traces hold steps 0 to {count - 1}")
    ranges = [trace.steps[-1 if step is None else step] for trace in traces]
    return build_timeline(ranges, [trace.file for trace in traces])


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
    rank = document.get("distributedInfo", {}).get("rank") if isinstance(document.get("distributedInfo"), dict) else None
    base = document.get("baseTimeNanoseconds", 0)
    trace = RankTrace(name, rank if isinstance(rank, int) else _rank_in(name))
    trace.steps = _split_steps(_find_ranges(events, trace, base / 1e3 if isinstance(base, (int, float)) else 0.0))
    if not trace.steps:
        raise FileFormatError(
            name,
            "no range of a pipeline in it: profile a step of torch.distributed.pipelining (ranges PP:0F0 or Forward 0) or of Penstock",
        )
    return trace


def _rank_in(name: str) -> int | None:
    """The last number in a file's name."""
    numbers = re.findall(r"\d+", Path(name).name)
    return int(numbers[-1]) if numbers else None


def _order_by_rank(traces: list[RankTrace]) -> list[RankTrace]:
    if not traces:
        raise FileFormatError("the traces", "there are none: give one file per rank")
    known = [trace.rank for trace in traces]
    if None in known or sorted(known, key=lambda rank: -1 if rank is None else rank) != list(range(len(traces))):
        shown = ", ".join(f"{trace.file}: {'unknown' if trace.rank is None else trace.rank}" for trace in traces)
        raise FileFormatError("the traces", f"they must be of ranks 0 to {len(traces) - 1}, one file each, but are of ranks {shown}")
    return sorted(traces, key=lambda trace: trace.rank or 0)


def _find_ranges(events: Iterable[Any], trace: RankTrace, base: float) -> list[Range]:
    """The ranges of actions in the order in which they began; nested ones, as in an overlapped pair, count alone."""
    own: list[tuple[float, float, Action]] = []
    gpu: dict[tuple[str, int], tuple[float, float]] = {}
    seen: dict[str, int] = {}
    operators: list[float] = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name, category, start, length = event.get("name"), event.get("cat"), event.get("ts"), event.get("dur", 0)
        if not isinstance(name, str) or not isinstance(start, (int, float)) or not isinstance(length, (int, float)):
            continue
        action = _action_of(name, trace)
        if action is not None and category == "gpu_user_annotation":
            number = seen[name] = seen.get(name, -1) + 1
            gpu[name, number] = start, start + length
        elif action is not None:
            own.append((start, start + length, action))
        elif category == "cpu_op" and not _COMMUNICATION.match(name):
            operators.append(start)
    operators.sort()
    own.sort(key=lambda entry: (entry[0], -entry[1]))
    counts: dict[Action, int] = {}
    ranges: list[Range] = []
    for start, end, action in own:
        if action.kind not in COMPUTE and action.kind is not Kind.OVERLAP_F_B:
            continue
        if ranges and action in ranges[-1].action.parts and start + base < ranges[-1].end:
            continue  # a part of an overlapped pair
        number = counts[action] = counts.get(action, -1) + 1
        at = bisect_left(operators, start)
        begun = operators[at] if at < len(operators) and operators[at] < end else start
        names = f"PP:{action}", f"penstock::{action}", f"{'Forward' if action.kind is Kind.F else 'Backward'} {action.microbatch}"
        ran = next((gpu[name, number] for name in names if (name, number) in gpu), (begun, end))
        ranges.append(Range(action, start + base, ran[0] + base, ran[1] + base))
    return ranges


def _action_of(name: str, trace: RankTrace) -> Action | None:
    """The action that a range is of; ranges that only have a microbatch are of the rank's only stage."""
    match = _RANGE.fullmatch(name)
    if match is not None:
        try:
            return Action.parse(match["action"])
        except ActionError:
            return None
    match = _NUMBERED.fullmatch(name)
    if match is None or trace.rank is None:
        return None
    return Action(trace.rank, Kind.F if match["kind"] == "Forward" else Kind.B, int(match["microbatch"]))


def _split_steps(ranges: Iterable[Range]) -> list[list[Range]]:
    """A step ends where an action comes again."""
    steps: list[list[Range]] = []
    seen: set[Action] = set()
    for each in ranges:
        if not steps or each.action in seen:
            steps.append([])
            seen = set()
        steps[-1].append(each)
        seen.add(each.action)
    return steps


def build_timeline(ranges: Sequence[Sequence[Range]], files: Sequence[str] = ()) -> Timeline:
    """The timeline of one step, from the ranges of each rank."""
    files = files or [f"rank {rank}" for rank in range(len(ranges))]
    try:
        schedule = Schedule.from_actions([[each.action for each in row] for row in ranges], name="traced")
        program = lower(schedule)
    except PenstockError as error:
        raise FileFormatError(", ".join(files), f"the ranges of this step are not a whole schedule: {error}") from error
    ahead = align_clocks(program, ranges)
    times = {part: (each, ahead[rank]) for rank, row in enumerate(ranges) for each in row for part in each.action.parts}
    zero = min(each.start - offset for each, offset in times.values())
    start, end = _action_times(program, times, zero)
    depart, arrive = _message_times(program, times, zero)
    nothing = np.full(len(start), -1.0)
    costs = measure_costs(program, start, end, arrive - depart, nothing)
    return Timeline(program, costs, start, end, depart, arrive, nothing, nothing.copy(), source="measured", units=Units(time_unit="s"))


Times = dict[Action, tuple[Range, float]]
"""The range of each action, and how far its rank's clock is ahead."""


def _action_times(program: Program, times: Times, zero: float) -> tuple[Any, Any]:
    """Start and end of every action, in seconds; what is not in the trace takes no time, right after what came before it."""
    starts, ends = [], []
    for rank, _ in enumerate(pairwise(program.rows.group_offsets.tolist())):
        clock = 0.0
        for action in program[rank]:
            known = [times[part] for part in action.parts if part in times]
            begun = min((each.start - ahead - zero for each, ahead in known), default=clock)
            clock = max((each.end - ahead - zero for each, ahead in known), default=clock)
            starts.append(begun / 1e6)
            ends.append(clock / 1e6)
    return np.array(starts), np.array(ends)


def _message_times(program: Program, times: Times, zero: float) -> tuple[Any, Any]:
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
    times = {part: (rank, each) for rank, row in enumerate(ranges) for each in row for part in each.action.parts}
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


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes longer than the others do for the same amount of work."""

    rank: int
    busy: float
    usual: float

    def __str__(self) -> str:
        return f"rank {self.rank} is slow: it computes for {self.busy / self.usual:.2f} times as long as the other ranks' median"


def find_slow_rank(timeline: Timeline, factor: float = 1.15) -> SlowRank | None:
    """The rank that computes longest, if that is at least `factor` times the median of the others."""
    busy = timeline.busy.tolist()
    if len(busy) < 2:
        return None
    rank = int(np.argmax(busy))
    usual = statistics.median(busy[:rank] + busy[rank + 1 :])
    return SlowRank(rank, busy[rank], usual) if usual > 0 and busy[rank] >= factor * usual else None


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
